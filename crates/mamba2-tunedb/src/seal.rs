//! The seal of a closed store: length and digest of every file of sled's, kept beside its directory.
//!
//! sled trusts its files: some flipped bits make it loop for ever. A store that was closed in order is therefore compared
//! with its seal before sled sees it. No seal means that the writer was killed; what it left is torn at worst, which sled
//! is made for.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Result, TuneDbError};
use crate::files;
use crate::frames::hex;

const MAX_SEAL_BYTES: u64 = 1 << 20;

/// State of a store's files.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seal {
    /// Exactly as they were when the store was closed.
    Good,
    /// Not closed in order, or never opened.
    Absent,
    /// These files changed since, or are gone or new; or the seal itself is.
    Broken(Vec<String>),
}

fn seal_path(store: &Path) -> PathBuf {
    store.with_extension("seal")
}

fn describe(store: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let entries = fs::read_dir(store).map_err(TuneDbError::io("list", store))?;
    for entry in entries {
        let entry = entry.map_err(TuneDbError::io("list", store))?;
        let path = entry.path();
        if path.is_dir() {
            continue;
        }
        let digest = digest_of(&path).map_err(TuneDbError::io("read", &path))?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), digest);
    }
    Ok(files)
}

fn digest_of(path: &Path) -> std::io::Result<String> {
    let mut file = fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&piece[..n]),
        }
    }
}

pub(crate) fn write(store: &Path) -> Result<()> {
    let files = describe(store)?;
    let text = serde_json::to_string(&files).expect("a map of texts should be JSON");
    files::publish(&seal_path(store), |out| out.write_all(text.as_bytes()))
}

pub(crate) fn remove(store: &Path) -> Result<()> {
    match fs::remove_file(seal_path(store)) {
        Err(e) if !files::is_absent(&e) => Err(TuneDbError::io("remove", seal_path(store))(e)),
        _ => Ok(()),
    }
}

pub(crate) fn check(store: &Path) -> Result<Seal> {
    let text = match files::read_bounded(&seal_path(store), MAX_SEAL_BYTES) {
        Ok(Some(text)) => text,
        Ok(None) => return Ok(Seal::Absent),
        Err(TuneDbError::Io {
            action,
            path,
            source,
        }) => {
            return Err(TuneDbError::Io {
                action,
                path,
                source,
            });
        }
        // A seal that is not ours says nothing about the store.
        Err(_) => return Ok(Seal::Absent),
    };
    let Ok(sealed) = serde_json::from_slice::<BTreeMap<String, String>>(&text) else {
        return Ok(Seal::Absent);
    };
    let found = describe(store)?;
    let names: std::collections::BTreeSet<&String> = sealed.keys().chain(found.keys()).collect();
    let broken: Vec<String> = names
        .into_iter()
        .filter(|n| sealed.get(*n) != found.get(*n))
        .cloned()
        .collect();
    Ok(if broken.is_empty() {
        Seal::Good
    } else {
        Seal::Broken(broken)
    })
}
