//! What `mamba2 db` does, as functions. Reports serialise to JSON; none of them prints.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::bundle::Bundle;
use crate::error::{Result, TuneDbError};
use crate::files;
use crate::key::TuneKey;
use crate::local::LocalDb;
use crate::parts;
use crate::paths::CacheDir;
use crate::record::{Record, Timing};
use crate::shipped::Shipped;
use crate::snapshot::Snapshot;
use crate::store::{Store, directory_bytes};
use crate::text::{MAX_TEXT_BYTES, TextRecords, write_text};
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

fn note(faults: &mut Vec<String>, fault: String) {
    if faults.len() < MAX_FAULTS {
        faults.push(fault);
    }
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
        match other_timings(&other, wait) {
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

fn other_timings(other: &LocalDb, wait: Duration) -> Result<Vec<Timing>> {
    if !other.store_path().is_dir() {
        return Ok(Vec::new());
    }
    other.open_store(wait)?.all_timings()
}

/// How two sets of records differ at one key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
pub enum Difference {
    /// Only the left set has a record.
    OnlyLeft {
        /// The key.
        key: TuneKey,
    },
    /// Only the right set has a record.
    OnlyRight {
        /// The key.
        key: TuneKey,
    },
    /// Both have one, with other configs.
    Config {
        /// The key.
        key: TuneKey,
        /// Median of the left config, in microseconds.
        left_us: f64,
        /// Median of the right config, in microseconds.
        right_us: f64,
        /// Parameters that differ: dotted name to (left, right).
        parameters: BTreeMap<String, (serde_json::Value, serde_json::Value)>,
    },
}

/// Differences in configs, in order of the keys. Evidence alone is no difference.
pub fn diff(left: &[Record], right: &[Record]) -> Vec<Difference> {
    let index = |records: &[Record]| {
        records
            .iter()
            .map(|r| (r.key.to_string(), r.clone()))
            .collect::<BTreeMap<_, _>>()
    };
    let (left, right) = (index(left), index(right));
    let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    let compare = |key: &String| match (left.get(key), right.get(key)) {
        (Some(l), None) => Some(Difference::OnlyLeft { key: l.key }),
        (None, Some(r)) => Some(Difference::OnlyRight { key: r.key }),
        (Some(l), Some(r)) => {
            let parameters = differing_parameters(&l.config, &r.config);
            let (left_us, right_us) = (l.evidence.median_us, r.evidence.median_us);
            (!parameters.is_empty()).then_some(Difference::Config {
                key: l.key,
                left_us,
                right_us,
                parameters,
            })
        }
        (None, None) => None,
    };
    keys.into_iter().filter_map(compare).collect()
}

fn differing_parameters(
    left: &serde_json::Value,
    right: &serde_json::Value,
) -> BTreeMap<String, (serde_json::Value, serde_json::Value)> {
    let (mut l, mut r) = (BTreeMap::new(), BTreeMap::new());
    flatten("", left, &mut l);
    flatten("", right, &mut r);
    let names: std::collections::BTreeSet<String> = l.keys().chain(r.keys()).cloned().collect();
    let pair = |name: String| {
        let of = |map: &BTreeMap<String, serde_json::Value>| {
            map.get(&name).cloned().unwrap_or(serde_json::Value::Null)
        };
        let (a, b) = (of(&l), of(&r));
        (a != b).then_some((name, (a, b)))
    };
    names.into_iter().filter_map(pair).collect()
}

fn flatten(prefix: &str, value: &serde_json::Value, out: &mut BTreeMap<String, serde_json::Value>) {
    match value {
        serde_json::Value::Object(map) => map.iter().for_each(|(name, inner)| {
            let dotted = if prefix.is_empty() {
                name.clone()
            } else {
                format!("{prefix}.{name}")
            };
            flatten(&dotted, inner, out);
        }),
        other => drop(out.insert(prefix.to_string(), other.clone())),
    }
}

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
/// [`TuneDbError::Io`] if the directory cannot be listed.
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
