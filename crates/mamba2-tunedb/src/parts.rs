//! Part files: what a writer leaves when it cannot have the store. One line of JSON an entry, published by rename, taken in
//! by the next process that opens the store. Their names hold host, process and a digest, so writers never meet.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Result, TuneDbError};
use crate::files;
use crate::frames::{hex, short_digest};
use crate::record::{Record, Timing};

const EXTENSION: &str = "part";
/// A part is one commit of one process; more is not ours.
const MAX_PART_BYTES: u64 = 256 << 20;
/// More parts than this are left for the next time.
const MAX_PARTS: usize = 4096;
const MARK: &str = "mamba2-tunedb part ";
const VERSION: u32 = 1;

/// Contents of a part file.
#[derive(Debug, Default, PartialEq)]
pub struct Part {
    /// Records that were committed.
    pub records: Vec<Record>,
    /// Timings that were committed.
    pub timings: Vec<Timing>,
}

pub(crate) fn write(dir: &Path, records: &[Record], timings: &[Timing]) -> Result<PathBuf> {
    let mut body = String::new();
    for record in records {
        body += &format!("record {}\n", record.to_json()?);
    }
    for timing in timings {
        body += &format!("timing {}\n", timing.to_json()?);
    }
    let digest = hex(&short_digest(&[body.as_bytes()]));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(32)
        .collect();
    let path = dir.join(format!(
        "{host}-{}-{digest}.{EXTENSION}",
        std::process::id()
    ));
    files::publish(&path, |out| write!(out, "{MARK}{VERSION} {digest}\n{body}"))?;
    Ok(path)
}

/// Part files in order of their names.
pub(crate) fn list(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let is_part = |path: &PathBuf| path.extension().is_some_and(|e| e == EXTENSION);
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .map(|e| e.path())
        .filter(is_part)
        .take(MAX_PARTS)
        .collect();
    paths.sort();
    paths
}

pub(crate) fn read(path: &Path) -> Result<Part> {
    let bytes = files::read_bounded(path, MAX_PART_BYTES)?.unwrap_or_default();
    Part::from_bytes(&bytes, &path.display().to_string())
}

impl Part {
    /// Reads a part from an untrusted source; its digest makes it all or nothing. `what` names it in errors.
    ///
    /// # Errors
    /// [`TuneDbError::Newer`], or [`TuneDbError::Damaged`] with the reason.
    pub fn from_bytes(bytes: &[u8], what: &str) -> Result<Part> {
        let bad = |detail: String| TuneDbError::damaged(what, detail);
        let text = std::str::from_utf8(bytes).map_err(|e| bad(e.to_string()))?;
        let (first, body) = text
            .split_once('\n')
            .ok_or_else(|| bad("expected a first line".into()))?;
        let (version, digest) = first
            .strip_prefix(MARK)
            .and_then(|rest| rest.split_once(' '))
            .ok_or_else(|| bad("expected the mark of a part file".into()))?;
        match version.parse::<u32>() {
            Ok(VERSION) => {}
            Ok(newer) if newer > VERSION => {
                return Err(TuneDbError::Newer {
                    what: what.into(),
                    expected: VERSION,
                    got: newer,
                });
            }
            _ => return Err(bad(format!("expected version {VERSION}, got {version:?}"))),
        }
        if digest != hex(&short_digest(&[body.as_bytes()])) {
            return Err(bad("it does not have its digest".into()));
        }
        let mut part = Part::default();
        for line in body.lines() {
            match line.split_once(' ') {
                Some(("record", json)) => part
                    .records
                    .push(Record::from_json(json.as_bytes()).map_err(|e| bad(e.to_string()))?),
                Some(("timing", json)) => part
                    .timings
                    .push(Timing::from_json(json.as_bytes()).map_err(|e| bad(e.to_string()))?),
                // A line of a newer program's kind.
                _ => {}
            }
        }
        Ok(part)
    }
}
