use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::compact;
use crate::error::{Result, TuneDbError};
use crate::frames::{self, ShortDigest, short_digest};
use crate::key::TuneKey;
use crate::lock::{self, Lock};
use crate::record::{Record, Timing};
use crate::seal::{self, Seal};
use crate::snapshot::{Snapshot, read_entry};

/// Mark that a sled directory is ours, and its format.
const MARKER_KEY: &[u8] = b"mamba2-tunedb";
const MARKER_VERSION: u32 = 1;
const GENERATION_KEY: &[u8] = b"generation";

/// The store's pages are small and few; sled would take a gigabyte.
const CACHE_BYTES: u64 = 16 << 20;

/// A log below this is not worth writing anew.
const BLOATED_BYTES: u64 = 32 << 20;
/// Longest a store may take to open and be read through; sled can spin for ever on a flipped bit.
const RECOVERY_LIMIT: Duration = Duration::from_secs(30);
/// Longest to wait for sled's own lock, which its background threads hold a moment after the last handle is gone.
const SLED_LOCK_WAIT: Duration = Duration::from_secs(2);

/// The open local store: sled, one process at a time. Open it late, drop it early, and never hold it while tuning.
///
/// Each value is filed with its own digest. A commit flushes and then publishes the snapshot that everybody else reads.
/// [`crate::LocalDb::open_store`] opens it.
#[derive(Debug)]
pub struct Store {
    db: sled::Db,
    records: sled::Tree,
    timings: sled::Tree,
    path: PathBuf,
    snapshot_path: PathBuf,
    // Dropped last: it seals and unlocks when sled is gone.
    closer: Closer,
}

/// Waits until sled has let go, seals its files, and lets the next process in.
#[derive(Debug)]
struct Closer {
    path: PathBuf,
    clean: AtomicBool,
    lock: Arc<Lock>,
}

impl Drop for Closer {
    fn drop(&mut self) {
        // Without a seal the next process only reads everything through, so failing here costs time.
        if self.clean.load(Ordering::Relaxed)
            && lock::wait_until_free(&self.path.join("db"), SLED_LOCK_WAIT)
        {
            let _ = seal::write(&self.path);
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.closer
            .clean
            .store(self.flush().is_ok(), Ordering::Relaxed);
    }
}

/// What sled gives.
struct Opened {
    db: sled::Db,
    records: sled::Tree,
    timings: sled::Tree,
}

impl Store {
    /// Opens or makes the store in `path` under the lock. Damage is an error here; `LocalDb` recovers from it.
    pub(crate) fn open(path: &Path, snapshot_path: &Path, lock: Arc<Lock>) -> Result<Store> {
        std::fs::create_dir_all(path).map_err(TuneDbError::io("create directory", path))?;
        let sealed = match seal::check(path)? {
            Seal::Good => true,
            Seal::Absent => false,
            // sled makes its own snapshots again from its log.
            Seal::Broken(files) if files.iter().all(|name| is_sled_snapshot(name)) => {
                tracing::warn!(
                    "{}: damaged {files:?}; reading the log instead",
                    path.display()
                );
                remove_sled_snapshots(path)?;
                false
            }
            Seal::Broken(files) => {
                return Err(TuneDbError::damaged(
                    path.display().to_string(),
                    format!("changed since it was closed: {files:?}"),
                ));
            }
        };
        seal::remove(path)?;
        let opened = match open_guarded(path, !sealed) {
            Err(TuneDbError::Store { detail, .. }) if !sealed && remove_sled_snapshots(path)? => {
                tracing::warn!("{}: {detail}; reading the log instead", path.display());
                open_guarded(path, true)?
            }
            other => other?,
        };
        let Opened {
            db,
            records,
            timings,
        } = opened;
        let closer = Closer {
            path: path.into(),
            clean: AtomicBool::new(false),
            lock,
        };
        let store = Store {
            db,
            records,
            timings,
            path: path.into(),
            snapshot_path: snapshot_path.into(),
            closer,
        };
        store.check_marker()?;
        Ok(store)
    }

    fn check_marker(&self) -> Result<()> {
        match self.sled(self.db.get(MARKER_KEY))? {
            Some(found) => {
                let version = std::str::from_utf8(&found)
                    .ok()
                    .and_then(|text| text.parse::<u32>().ok());
                match version {
                    Some(MARKER_VERSION) => Ok(()),
                    Some(newer) if newer > MARKER_VERSION => Err(TuneDbError::Newer {
                        what: self.path.display().to_string(),
                        expected: MARKER_VERSION,
                        got: newer,
                    }),
                    _ => {
                        Err(self.damaged("expected the version in its marker, got something else"))
                    }
                }
            }
            None if self.db.is_empty() && self.records.is_empty() && self.timings.is_empty() => {
                self.sled(
                    self.db
                        .insert(MARKER_KEY, MARKER_VERSION.to_string().as_bytes()),
                )?;
                self.flush()
            }
            None => Err(self.damaged("a sled database without our marker: not a tuning store")),
        }
    }

    fn damaged(&self, detail: &str) -> TuneDbError {
        TuneDbError::damaged(self.path.display().to_string(), detail)
    }

    fn sled<T>(&self, result: sled::Result<T>) -> Result<T> {
        result.map_err(|e| sled_error(&self.path, e))
    }

    fn flush(&self) -> Result<()> {
        self.sled(self.db.flush()).map(drop)
    }

    /// Files a record under its key, replacing an older one whatever the clock says: the date never goes back.
    /// Durable and visible to others after [`Store::commit`].
    ///
    /// # Errors
    /// What [`Record::to_json`] refuses, or sled's.
    pub fn put(&self, record: &Record) -> Result<()> {
        let mut record = record.clone();
        if let Ok(Some(old)) = self.get(&record.key) {
            record.evidence.date_unix_s = record.evidence.date_unix_s.max(old.evidence.date_unix_s);
        }
        let (key, value) = (record.key.to_string(), record.to_json()?);
        self.sled(
            self.records
                .insert(key.as_bytes(), seal(key.as_bytes(), value.as_bytes())),
        )
        .map(drop)
    }

    /// Files a record from elsewhere unless the one here is preferred ([`Record::preferred`]). True if it was filed.
    ///
    /// # Errors
    /// As [`Store::put`].
    pub fn merge(&self, record: &Record) -> Result<bool> {
        if let Ok(Some(old)) = self.get(&record.key)
            && std::ptr::eq(old.preferred(record), &old)
        {
            return Ok(false);
        }
        self.put(record).map(|()| true)
    }

    /// The record of `key`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the entry is broken, or sled's.
    pub fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        let key = key.to_string();
        let Some(sealed) = self.sled(self.records.get(key.as_bytes()))? else {
            return Ok(None);
        };
        read_entry(key.as_bytes(), unseal(key.as_bytes(), &sealed)?).map(Some)
    }

    /// Takes a record out. True if there was one.
    ///
    /// # Errors
    /// sled's.
    pub fn remove(&self, key: &TuneKey) -> Result<bool> {
        self.sled(self.records.remove(key.to_string().as_bytes()))
            .map(|old| old.is_some())
    }

    /// Takes out the records that cannot be read. Returns how many.
    ///
    /// # Errors
    /// sled's.
    pub fn remove_broken_records(&self) -> Result<usize> {
        let mut removed = 0;
        for item in self.records.iter() {
            let (key, sealed) = self.sled(item)?;
            if unseal(&key, &sealed)
                .and_then(|value| read_entry(&key, value))
                .is_err()
            {
                self.sled(self.records.remove(key))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Keys with this prefix.
    ///
    /// # Errors
    /// sled's.
    pub fn keys_with_prefix(&self, prefix: &str) -> Result<Vec<TuneKey>> {
        let mut keys = Vec::new();
        for item in self.records.scan_prefix(prefix.as_bytes()).keys() {
            let key = self.sled(item)?;
            keys.extend(
                std::str::from_utf8(&key)
                    .ok()
                    .and_then(|text| text.parse::<TuneKey>().ok()),
            );
        }
        Ok(keys)
    }

    /// Keys of the same family as `key`.
    ///
    /// # Errors
    /// sled's.
    pub fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        let prefix = key.family_prefix();
        let mut keys = Vec::new();
        for item in self.records.scan_prefix(prefix.as_bytes()).keys() {
            let found = self.sled(item)?;
            keys.extend(
                std::str::from_utf8(&found)
                    .ok()
                    .and_then(|text| key.relative(&prefix, text)),
            );
        }
        Ok(keys)
    }

    /// Every record in order of its key, or why it cannot be read.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> + '_ {
        self.records.iter().map(|item| {
            let (key, sealed) = self.sled(item)?;
            read_entry(&key, unseal(&key, &sealed)?)
        })
    }

    /// Files timings and makes them durable.
    ///
    /// # Errors
    /// [`TuneDbError::TooLarge`], or sled's.
    pub fn put_timings(&self, timings: &[Timing]) -> Result<()> {
        for timing in timings {
            let (key, value) = (
                timing_key(&timing.key, &timing.config_text()),
                timing.to_json()?,
            );
            let sealed = seal(&key, value.as_bytes());
            self.sled(self.timings.insert(key, sealed))?;
        }
        self.flush()
    }

    /// Files timings from elsewhere; of two for one candidate the later one stays. Returns how many were filed.
    ///
    /// # Errors
    /// As [`Store::put_timings`].
    pub fn merge_timings(&self, timings: &[Timing]) -> Result<usize> {
        let mut newer = Vec::new();
        for timing in timings {
            let key = timing_key(&timing.key, &timing.config_text());
            let old = self.sled(self.timings.get(&key))?;
            let old = old.and_then(|sealed| unseal(&key, &sealed).and_then(Timing::from_json).ok());
            if old.is_none_or(|old| timing.date_unix_s > old.date_unix_s) {
                newer.push(timing.clone());
            }
        }
        self.put_timings(&newer)?;
        Ok(newer.len())
    }

    /// Every timing of `key`, in order of the candidates' text; broken ones are left out and so measured again.
    ///
    /// # Errors
    /// sled's.
    pub fn timings(&self, key: &TuneKey) -> Result<Vec<Timing>> {
        self.read_timings(self.timings.scan_prefix(timing_prefix(key)), |timing| {
            timing.key == *key
        })
    }

    /// Every timing of every key, in an order of its own.
    ///
    /// # Errors
    /// sled's.
    pub fn all_timings(&self) -> Result<Vec<Timing>> {
        self.read_timings(self.timings.iter(), |_| true)
    }

    fn read_timings(
        &self,
        iter: sled::Iter,
        wanted: impl Fn(&Timing) -> bool,
    ) -> Result<Vec<Timing>> {
        let mut timings = Vec::new();
        for item in iter {
            let (key, sealed) = self.sled(item)?;
            let timing = unseal(&key, &sealed).and_then(Timing::from_json);
            timings.extend(timing.ok().filter(&wanted));
        }
        Ok(timings)
    }

    /// Takes out the timings that `keep` does not want. Returns how many.
    ///
    /// # Errors
    /// sled's.
    pub fn retain_timings(&self, keep: impl Fn(&Timing) -> bool) -> Result<usize> {
        let mut removed = 0;
        for item in self.timings.iter() {
            let (key, sealed) = self.sled(item)?;
            let timing = unseal(&key, &sealed).and_then(Timing::from_json);
            if !timing.is_ok_and(|t| keep(&t)) {
                self.sled(self.timings.remove(key))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// Number of timings.
    pub fn timings_len(&self) -> usize {
        self.timings.len()
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True without records.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Number of the last commit.
    ///
    /// # Errors
    /// sled's.
    pub fn generation(&self) -> Result<u64> {
        let found = self.sled(self.db.get(GENERATION_KEY))?;
        Ok(found
            .and_then(|bytes| std::str::from_utf8(&bytes).ok()?.parse().ok())
            .unwrap_or(0))
    }

    pub(crate) fn set_generation(&self, generation: u64) -> Result<()> {
        self.sled(
            self.db
                .insert(GENERATION_KEY, generation.to_string().as_bytes()),
        )
        .map(drop)
    }

    /// Makes everything durable and publishes the snapshot. Broken records are left out of it.
    ///
    /// # Errors
    /// sled's, or [`TuneDbError::Io`] if the snapshot cannot be written; the older one then stays.
    pub fn commit(&self) -> Result<()> {
        let generation = self.generation()?.saturating_add(1);
        self.set_generation(generation)?;
        self.flush()?;
        self.publish(generation)
    }

    fn publish(&self, generation: u64) -> Result<()> {
        let mut entries = BTreeMap::new();
        for item in self.records.iter() {
            let (key, sealed) = self.sled(item)?;
            match unseal(&key, &sealed) {
                Ok(value) => drop(entries.insert(key.to_vec(), value.to_vec())),
                Err(e) => tracing::warn!("left out of the snapshot: {e}"),
            }
        }
        Snapshot::publish_entries(&self.snapshot_path, generation, &entries)
    }

    /// Publishes again if a writer died between its commit and its snapshot, or the snapshot was lost or damaged.
    ///
    /// # Errors
    /// As [`Store::commit`].
    pub fn refresh_snapshot(&self) -> Result<()> {
        let generation = self.generation()?;
        match Snapshot::open(&self.snapshot_path) {
            Ok(Some(snapshot)) if snapshot.generation() == generation => Ok(()),
            Ok(None) if self.is_empty() => Ok(()),
            Err(e @ TuneDbError::Newer { .. }) => Err(e),
            _ => self.publish(generation),
        }
    }

    /// True if the log is large and mostly of values since replaced: sled does not shrink it by itself.
    pub fn is_bloated(&self) -> bool {
        let size = self.size_bytes();
        size > BLOATED_BYTES && size > 4 * self.live_bytes()
    }

    fn live_bytes(&self) -> u64 {
        let entries = self.records.iter().chain(self.timings.iter()).flatten();
        entries
            .map(|(key, value)| (key.len() + value.len()) as u64)
            .sum()
    }

    /// Writes the store anew with only what is live, and closes it.
    ///
    /// # Errors
    /// sled's or [`TuneDbError::Io`]; the store is then as it was.
    pub fn compact(self) -> Result<()> {
        compact::start(&self.path)?;
        let copy = open_guarded(&compact::new_path(&self.path), false)?;
        let copy_error = |e| sled_error(&self.path, e);
        for (from, to) in [
            (&self.records, &copy.records),
            (&self.timings, &copy.timings),
        ] {
            for item in from.iter() {
                let (key, value) = self.sled(item)?;
                to.insert(key, value).map_err(copy_error)?;
            }
        }
        for key in [MARKER_KEY, GENERATION_KEY] {
            if let Some(value) = self.sled(self.db.get(key))? {
                copy.db.insert(key, value).map_err(copy_error)?;
            }
        }
        copy.db.flush().map_err(copy_error)?;
        drop(copy);
        let (path, lock) = (self.path.clone(), self.closer.lock.clone());
        lock::wait_until_free(&compact::new_path(&path).join("db"), SLED_LOCK_WAIT);
        // Still under our lock, which `lock` holds on to.
        drop(self);
        compact::swap(&path)?;
        seal::write(&path)?;
        drop(lock);
        Ok(())
    }

    /// Bytes of the store's files.
    pub fn size_bytes(&self) -> u64 {
        directory_bytes(&self.path)
    }
}

/// Bytes of all files below a directory.
pub(crate) fn directory_bytes(path: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else {
        return 0;
    };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => directory_bytes(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.flatten().map(size).sum()
}

fn is_sled_snapshot(name: &str) -> bool {
    name.starts_with("snap.")
}

/// Removes sled's snapshots; its log holds the same. True if there were any.
fn remove_sled_snapshots(path: &Path) -> Result<bool> {
    let mut removed = false;
    for entry in std::fs::read_dir(path)
        .map_err(TuneDbError::io("list", path))?
        .flatten()
    {
        if is_sled_snapshot(&entry.file_name().to_string_lossy()) {
            std::fs::remove_file(entry.path()).map_err(TuneDbError::io("remove", entry.path()))?;
            removed = true;
        }
    }
    Ok(removed)
}

/// Opens sled in a thread of its own with a time limit, and reads everything through if `scan`: a writer that was killed
/// leaves files whose state nobody vouches for. If sled hangs or panics, the thread is given up and the store is damaged.
fn open_guarded(path: &Path, scan: bool) -> Result<Opened> {
    let (sender, receiver) = mpsc::channel();
    let dir = path.to_path_buf();
    let work = move || {
        // The receiver is gone if the time is over.
        let _ = sender.send(open_and_scan(&dir, scan));
    };
    std::thread::Builder::new()
        .name("mamba2-tunedb-open".into())
        .spawn(work)
        .map_err(TuneDbError::io("start a thread for", path))?;
    receiver
        .recv_timeout(RECOVERY_LIMIT + SLED_LOCK_WAIT)
        .unwrap_or_else(|_| {
            Err(TuneDbError::Store {
                path: path.into(),
                detail: format!("no answer in {} s", RECOVERY_LIMIT.as_secs()),
            })
        })
}

fn open_and_scan(path: &Path, scan: bool) -> Result<Opened> {
    let db = open_sled(path)?;
    let tree = |name: &str| db.open_tree(name).map_err(|e| sled_error(path, e));
    let (records, timings) = (tree("records")?, tree("timings")?);
    if scan {
        for item in records.iter().chain(timings.iter()) {
            item.map_err(|e| sled_error(path, e))?;
        }
    }
    Ok(Opened {
        db,
        records,
        timings,
    })
}

fn sled_error(path: &Path, error: sled::Error) -> TuneDbError {
    match error {
        sled::Error::Io(source) => TuneDbError::Io {
            action: "store",
            path: path.into(),
            source,
        },
        other => TuneDbError::Store {
            path: path.into(),
            detail: other.to_string(),
        },
    }
}

fn open_sled(path: &Path) -> Result<sled::Db> {
    let config = sled::Config::new()
        .path(path)
        .mode(sled::Mode::LowSpace)
        .cache_capacity(CACHE_BYTES)
        .flush_every_ms(None);
    // Our own lock is held, so only threads of a handle just dropped, or a process just killed, can be in the way.
    let opened = lock::retry(SLED_LOCK_WAIT, || match config.open() {
        Err(e) if is_locked(&e) => None,
        other => Some(other),
    });
    match opened {
        Some(opened) => opened.map_err(|e| sled_error(path, e)),
        None => Err(TuneDbError::Busy {
            path: path.into(),
            waited_ms: SLED_LOCK_WAIT.as_millis() as u64,
        }),
    }
}

/// sled wraps the lock's error in one of its own, so only the words tell.
fn is_locked(error: &sled::Error) -> bool {
    matches!(error, sled::Error::Io(e) if e.kind() == std::io::ErrorKind::WouldBlock || e.to_string().contains("could not acquire lock"))
}

fn seal(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut sealed = short_digest(&[key, value]).to_vec();
    sealed.extend_from_slice(value);
    sealed
}

fn unseal<'a>(key: &[u8], sealed: &'a [u8]) -> Result<&'a [u8]> {
    let (digest, value) = sealed
        .split_at_checked(size_of::<ShortDigest>())
        .unwrap_or_default();
    if short_digest(&[key, value]) == *digest {
        return Ok(value);
    }
    Err(TuneDbError::damaged(
        format!("store entry {}", frames::hex(&short_digest(&[key]))),
        "it does not have its digest",
    ))
}

/// Timings are filed by digest of the key: they are many, and the key's text is long.
fn timing_prefix(key: &TuneKey) -> ShortDigest {
    short_digest(&[key.to_string().as_bytes()])
}

fn timing_key(key: &TuneKey, config_text: &str) -> Vec<u8> {
    let mut bytes = timing_prefix(key).to_vec();
    bytes.extend_from_slice(&short_digest(&[config_text.as_bytes()]));
    bytes
}
