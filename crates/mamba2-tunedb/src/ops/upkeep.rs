use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::note;
use crate::bundle::Bundle;
use crate::error::Result;
use crate::files;
use crate::local::LocalDb;
use crate::parts;
use crate::record::Record;
use crate::store::directory_bytes;
use crate::validate;

/// State of a database.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct VerifyReport {
    /// Records of the snapshot that are whole and legal today.
    pub records: usize,
    /// Digest of the snapshot.
    pub snapshot_digest: Option<String>,
    /// Timings of the store; `None` if it could not be opened.
    pub timings: Option<usize>,
    /// Imported bundles that are whole.
    pub bundles: usize,
    /// Files set aside or left by killed writers; `prune` removes them.
    pub leftovers: usize,
    /// Everything that is wrong. Empty: the database is clean.
    pub faults: Vec<String>,
}

/// Reads everything there is and checks it. Opening the store takes in waiting parts; nothing else is written.
///
/// # Errors
/// [`crate::TuneDbError::Io`] if the directory cannot be listed.
pub fn verify(db: &LocalDb, wait: Duration) -> Result<VerifyReport> {
    let mut report = VerifyReport::default();
    if !db.root().is_dir() {
        return Ok(report);
    }
    for path in parts::list(&db.parts_path()) {
        if let Err(e) = parts::read(&path) {
            note(&mut report.faults, e.to_string());
        }
    }
    // Before the store is opened, which would repair it.
    if let Err(e) = db.snapshot() {
        note(&mut report.faults, e.to_string());
    }
    if db.store_path().is_dir() {
        match db.open_store(wait) {
            Ok(store) => {
                report.timings = Some(store.timings_len());
                for e in store.records().filter_map(Result::err) {
                    note(&mut report.faults, format!("store: {e}"));
                }
            }
            Err(e) => note(&mut report.faults, e.to_string()),
        }
    }
    if let Ok(Some(snapshot)) = db.snapshot() {
        report.snapshot_digest = Some(snapshot.digest());
        for record in snapshot.records() {
            match record.and_then(|record| validate::check_record(&record)) {
                Ok(()) => report.records += 1,
                Err(e) => note(&mut report.faults, e.to_string()),
            }
        }
    }
    for path in bundle_files(db) {
        match Bundle::open(&path).map(|bundle| bundle.verify()) {
            Ok(faults) if faults.is_empty() => report.bundles += 1,
            Ok(faults) => faults
                .into_iter()
                .for_each(|f| note(&mut report.faults, format!("{}: {f}", path.display()))),
            Err(e) => note(&mut report.faults, e.to_string()),
        }
    }
    report.leftovers = leftovers(db).len();
    Ok(report)
}

fn bundle_files(db: &LocalDb) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(db.bundles_path()) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == Bundle::EXTENSION));
    paths.sort();
    paths
}

fn leftovers(db: &LocalDb) -> Vec<PathBuf> {
    let dirs = [db.root().to_path_buf(), db.parts_path(), db.bundles_path()];
    let names = |dir: &PathBuf| {
        fs::read_dir(dir)
            .map(|entries| entries.flatten().collect::<Vec<_>>())
            .unwrap_or_default()
    };
    let all = dirs.iter().flat_map(names);
    all.filter(|entry| files::is_leftover(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
        .collect()
}

/// What `prune` takes out besides leftovers and broken entries.
#[derive(Clone, Debug)]
pub struct PrunePolicy {
    /// Most timings that stay; the oldest go first.
    pub max_timings: usize,
    /// Takes out records that today's rules refuse.
    pub illegal_records: bool,
}

impl Default for PrunePolicy {
    fn default() -> PrunePolicy {
        PrunePolicy {
            max_timings: 200_000,
            illegal_records: true,
        }
    }
}

/// What `prune` did.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct PruneReport {
    /// Records taken out.
    pub records: usize,
    /// Timings taken out.
    pub timings: usize,
    /// Leftover files and directories removed.
    pub leftovers: usize,
    /// Bytes of the database before.
    pub bytes_before: u64,
    /// Bytes of the database after.
    pub bytes_after: u64,
}

/// Takes out what no longer helps, removes leftovers, and writes the store anew.
///
/// # Errors
/// As [`LocalDb::open_store`].
pub fn prune(db: &LocalDb, policy: &PrunePolicy, wait: Duration) -> Result<PruneReport> {
    let mut report = PruneReport {
        bytes_before: directory_bytes(db.root()),
        ..PruneReport::default()
    };
    let store = db.open_store(wait)?;
    if policy.illegal_records {
        let records: Vec<Record> = store.records().flatten().collect();
        for record in records
            .iter()
            .filter(|record| validate::check_record(record).is_err())
        {
            report.records += usize::from(store.remove(&record.key)?);
        }
    }
    report.records += store.remove_broken_records()?;
    let mut dates: Vec<u64> = store.all_timings()?.iter().map(|t| t.date_unix_s).collect();
    let excess = dates.len().saturating_sub(policy.max_timings);
    dates.sort_unstable();
    // Ties at the cut go too: the bound is a bound.
    let cut = if excess == 0 {
        None
    } else {
        dates.get(excess - 1).copied()
    };
    report.timings =
        store.retain_timings(|timing| cut.is_none_or(|cut| timing.date_unix_s > cut))?;
    store.commit()?;
    store.compact()?;
    for path in leftovers(db) {
        let removed = if path.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        report.leftovers += usize::from(removed.is_ok());
    }
    report.bytes_after = directory_bytes(db.root());
    Ok(report)
}
