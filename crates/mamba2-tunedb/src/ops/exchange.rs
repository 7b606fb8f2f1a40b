use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::{list, note};
use crate::bundle::Bundle;
use crate::error::{Result, TuneDbError};
use crate::files;
use crate::local::LocalDb;
use crate::paths::CacheDir;
use crate::record::Record;
use crate::snapshot::Snapshot;
use crate::store::Store;
use crate::text::{MAX_TEXT_BYTES, TextRecords};
use crate::validate;

/// What an import or merge did.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Records filed.
    pub added: usize,
    /// Records passed over because the one here is preferred or equal.
    pub kept: usize,
    /// Timings filed.
    pub timings: usize,
    /// Where a bundle was put.
    pub bundle: Option<PathBuf>,
    /// Records that were refused, and why.
    pub refused: Vec<String>,
}

/// Imports a text of records, a snapshot or a bundle; which one it is, is read from its first bytes. Each record is checked
/// against today's rules. A bundle is kept whole, as a tier of its own.
///
/// # Errors
/// [`TuneDbError::Damaged`], [`TuneDbError::Refused`] and the like if the file as a whole cannot be used; nothing was
/// written then. As [`LocalDb::open_store`] if the store cannot be had.
pub fn import(db: &LocalDb, path: &Path, wait: Duration) -> Result<ImportReport> {
    let mut report = ImportReport::default();
    if first_bytes(path)? == *b"mamba2bn" {
        report.bundle = Some(Bundle::import(path, &db.bundles_path())?);
        return Ok(report);
    }
    let records = read_records(path, &mut report.refused)?;
    let store = db.open_store(wait)?;
    add_records(&store, records, &mut report)?;
    store.commit()?;
    Ok(report)
}

fn first_bytes(path: &Path) -> Result<[u8; 8]> {
    use std::io::Read;
    let mut first = [0; 8];
    let mut file = files::open_existing(path)?
        .ok_or_else(|| TuneDbError::damaged(path.display().to_string(), "no such file"))?;
    // A shorter file is no format of ours; its reader will say so.
    let _ = file.read_exact(&mut first);
    Ok(first)
}

/// Records of a text, snapshot or bundle file; entries that cannot be read are added to `faults`.
///
/// # Errors
/// As [`import`].
pub fn read_records(path: &Path, faults: &mut Vec<String>) -> Result<Vec<Record>> {
    let what = path.display().to_string();
    let read: Vec<Result<Record>> = match &first_bytes(path)? {
        b"mamba2bn" => Bundle::open(path)?.records()?,
        b"mamba2sn" => match Snapshot::open(path)? {
            Some(snapshot) => snapshot.records().collect(),
            None => Vec::new(),
        },
        _ => {
            let bytes = files::read_bounded(path, MAX_TEXT_BYTES as u64)?.unwrap_or_default();
            let text = String::from_utf8(bytes).map_err(|_| {
                TuneDbError::damaged(&what, "expected text, a snapshot or a bundle")
            })?;
            TextRecords::new(what, text)?.records().collect()
        }
    };
    let mut records = Vec::new();
    for record in read {
        match record {
            Ok(record) => records.push(record),
            Err(e) => note(faults, e.to_string()),
        }
    }
    Ok(records)
}

fn add_records(store: &Store, records: Vec<Record>, report: &mut ImportReport) -> Result<()> {
    for record in records {
        match validate::check_record(&record) {
            Err(e) => note(&mut report.refused, e.to_string()),
            Ok(()) if store.merge(&record)? => report.added += 1,
            Ok(()) => report.kept += 1,
        }
    }
    Ok(())
}

/// Merges the databases of other cache directories (the shards of a job, the hosts of a cluster) into this one: records by
/// [`Record::preferred`], and all their timings where their store can be opened. The order does not matter.
///
/// # Errors
/// As [`LocalDb::open_store`] for this database; a source that cannot be read is listed as refused.
pub fn merge(db: &LocalDb, sources: &[PathBuf], wait: Duration) -> Result<ImportReport> {
    let mut report = ImportReport::default();
    let store = db.open_store(wait)?;
    for source in sources {
        let other = LocalDb::in_cache(&CacheDir::fixed(source))?;
        if !other.root().is_dir() {
            note(
                &mut report.refused,
                format!(
                    "{}: expected a cache directory with a tuning database",
                    source.display()
                ),
            );
            continue;
        }
        if fs::canonicalize(other.root()).ok() == fs::canonicalize(db.root()).ok() {
            note(
                &mut report.refused,
                format!("{}: is this database itself", source.display()),
            );
            continue;
        }
        match list(&other) {
            Ok(records) => add_records(&store, records, &mut report)?,
            Err(e) => note(&mut report.refused, e.to_string()),
        }
        match other.all_timings(wait) {
            Ok(timings) => report.timings += store.merge_timings(&timings)?,
            Err(e) => note(
                &mut report.refused,
                format!("timings of {}: {e}", source.display()),
            ),
        }
    }
    store.commit()?;
    Ok(report)
}
