//! What `mamba2 db` does, as functions. Reports serialise to JSON; none of them prints.

mod difference;
mod exchange;
mod upkeep;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

pub use self::difference::{Difference, diff};
pub use self::exchange::{ImportReport, import, merge, read_records};
pub use self::upkeep::{PrunePolicy, PruneReport, VerifyReport, prune, verify};
use crate::error::{Result, TuneDbError};
use crate::files;
use crate::key::TuneKey;
use crate::local::LocalDb;
use crate::parts;
use crate::paths::CacheDir;
use crate::record::{Record, Timing};
use crate::shipped::Shipped;
use crate::snapshot::Snapshot;
use crate::store::directory_bytes;
use crate::text::write_text;
use crate::validate;

/// Most faults that a report spells out.
const MAX_FAULTS: usize = 100;

/// Every readable record of the local database: snapshot and parts. Writes nothing.
///
/// # Errors
/// [`TuneDbError::Io`] if the snapshot is there and cannot be opened; damaged entries are left out.
pub fn list(db: &LocalDb) -> Result<Vec<Record>> {
    let mut records = BTreeMap::new();
    let mut add = |record: Record| match records.get(&record.key) {
        Some(old) if std::ptr::eq(record.preferred(old), old) => {}
        _ => drop(records.insert(record.key, record)),
    };
    match db.snapshot() {
        Ok(Some(snapshot)) => snapshot.records().flatten().for_each(&mut add),
        Ok(None) => {}
        Err(TuneDbError::Damaged { .. }) => Snapshot::salvage(&db.snapshot_path())?
            .into_iter()
            .for_each(&mut add),
        Err(e) => return Err(e),
    }
    for path in parts::list(&db.parts_path()) {
        if let Ok(part) = parts::read(&path) {
            part.records.into_iter().for_each(&mut add);
        }
    }
    let mut sorted: Vec<(String, Record)> = records
        .into_values()
        .map(|r| (r.key.to_string(), r))
        .collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(sorted.into_iter().map(|(_, record)| record).collect())
}

/// Records whose key contains every comma-separated `name=value` of `filter`; all for an empty one.
pub fn select(records: Vec<Record>, filter: &str) -> Vec<Record> {
    let wanted: Vec<&str> = filter
        .split(',')
        .map(str::trim)
        .filter(|pair| !pair.is_empty())
        .collect();
    let matches = |record: &Record| {
        let text = record.key.to_string();
        wanted
            .iter()
            .all(|pair| text.split(',').any(|have| have == *pair))
    };
    records.into_iter().filter(matches).collect()
}

/// A record with what was measured beside it.
#[derive(Debug, Serialize)]
pub struct Shown {
    /// The record, if the key has one.
    pub record: Option<Record>,
    /// Every candidate's timing, fastest first, failures last.
    pub timings: Vec<Timing>,
}

/// Record and timings of a key.
///
/// # Errors
/// As [`list`] and [`LocalDb::timings`].
pub fn show(db: &LocalDb, key: &TuneKey, wait: Duration) -> Result<Shown> {
    let record = list(db)?.into_iter().find(|record| record.key == *key);
    let mut timings = db.timings(&[*key], wait)?;
    let median = |t: &Timing| match t.outcome {
        crate::Outcome::Measured { median_us, .. } => median_us,
        crate::Outcome::Failed { .. } => f64::INFINITY,
    };
    timings.sort_by(|a, b| {
        median(a)
            .total_cmp(&median(b))
            .then_with(|| a.config_text().cmp(&b.config_text()))
    });
    Ok(Shown { record, timings })
}

/// Records as the text files of `tuning-db/`: file name to text, sorted. Records that break today's rules are left out and
/// returned as faults.
///
/// # Errors
/// What [`write_text`] refuses.
pub fn export(records: &[Record]) -> Result<(BTreeMap<String, String>, Vec<String>)> {
    let mut by_file = BTreeMap::<String, Vec<Record>>::new();
    let mut faults = Vec::new();
    for record in records {
        match validate::check_record(record) {
            Ok(()) => by_file
                .entry(Shipped::file_name(&record.key))
                .or_default()
                .push(record.clone()),
            Err(e) => faults.push(e.to_string()),
        }
    }
    let mut texts = BTreeMap::new();
    for (name, records) in by_file {
        texts.insert(name, write_text(records)?);
    }
    Ok((texts, faults))
}

/// Writes a text to a file, whole or not at all.
///
/// # Errors
/// [`TuneDbError::Io`].
pub fn write_file(path: &Path, text: &str) -> Result<()> {
    files::publish(path, |out| out.write_all(text.as_bytes()))
}

/// Where the database is and what is there, for `db path` and `doctor`.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct PathReport {
    /// The one cache directory, `None` if there is none.
    pub cache_dir: Option<PathBuf>,
    /// Why this one.
    pub reason: String,
    /// The database's directory below it.
    pub database: Option<PathBuf>,
    /// Bytes on disk.
    pub bytes: u64,
    /// Name of the network file system it is on; the store does not work there.
    pub network_file_system: Option<String>,
}

/// Describes the cache directory. Writes nothing.
pub fn path(cache: &CacheDir) -> PathReport {
    let database = LocalDb::in_cache(cache)
        .ok()
        .map(|db| db.root().to_path_buf());
    PathReport {
        cache_dir: cache.path.clone(),
        reason: cache.reason.clone(),
        bytes: database.as_deref().map_or(0, directory_bytes),
        database,
        network_file_system: cache.network_file_system.clone(),
    }
}

fn note(faults: &mut Vec<String>, fault: String) {
    if faults.len() < MAX_FAULTS {
        faults.push(fault);
    }
}
