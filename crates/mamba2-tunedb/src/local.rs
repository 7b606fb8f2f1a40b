use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::compact;
use crate::error::{Result, TuneDbError};
use crate::files;
use crate::key::TuneKey;
use crate::lock::Lock;
use crate::parts;
use crate::paths::CacheDir;
use crate::record::{Record, Timing};
use crate::seal;
use crate::snapshot::Snapshot;
use crate::store::Store;

/// Name of the database's directory below the cache directory. A new format takes a new name, so versions live side by side.
const DIRECTORY: &str = "tunedb-1";

/// How long a writer waits for another process to close the store.
pub const DEFAULT_WAIT: Duration = Duration::from_secs(5);

/// Where a commit went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Committed {
    /// Into the store; the snapshot is published.
    Store,
    /// Into a part file, because the store was held by another process or lies on a network file system. Readers see
    /// it at once; whoever opens the store next takes it in.
    Part(PathBuf),
}

/// The files of the local database: `store/` (sled), `snapshot`, `parts/`, `bundles/`. Making one touches no file.
#[derive(Clone, Debug)]
pub struct LocalDb {
    root: PathBuf,
    /// Of the cache directory: it decides whether there can be a store.
    network_file_system: Option<String>,
}

impl LocalDb {
    /// The database in a cache directory.
    ///
    /// # Errors
    /// [`TuneDbError::NoDirectory`] with the reason, if there is none.
    pub fn in_cache(cache: &CacheDir) -> Result<LocalDb> {
        let path = cache
            .path
            .as_ref()
            .ok_or_else(|| TuneDbError::NoDirectory(cache.reason.clone()))?;
        Ok(LocalDb {
            root: path.join(DIRECTORY),
            network_file_system: cache.network_file_system.clone(),
        })
    }

    /// The database's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// sled's directory.
    pub fn store_path(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The published snapshot.
    pub fn snapshot_path(&self) -> PathBuf {
        self.root.join("snapshot")
    }

    /// Part files of writers that could not have the store.
    pub fn parts_path(&self) -> PathBuf {
        self.root.join("parts")
    }

    /// Imported bundles.
    pub fn bundles_path(&self) -> PathBuf {
        self.root.join("bundles")
    }

    /// Opens the store for writing, takes in waiting parts and repairs the snapshot. A damaged or foreign store is set
    /// aside with one warning, and a new one starts from the records of the snapshot.
    ///
    /// # Errors
    /// [`TuneDbError::NetworkFileSystem`], [`TuneDbError::Busy`], [`TuneDbError::Newer`] or [`TuneDbError::Io`].
    pub fn open_store(&self, wait: Duration) -> Result<Store> {
        if let Some(file_system) = &self.network_file_system {
            return Err(TuneDbError::NetworkFileSystem {
                path: self.store_path(),
                file_system: file_system.clone(),
            });
        }
        let lock = Arc::new(Lock::acquire(
            &self.root.join("lock"),
            &self.store_path(),
            wait,
        )?);
        compact::finish(&self.store_path())?;
        let store = match Store::open(&self.store_path(), &self.snapshot_path(), lock.clone()) {
            Ok(store) => store,
            Err(e @ (TuneDbError::Damaged { .. } | TuneDbError::Store { .. })) => {
                self.replace_store(&e, lock)?
            }
            Err(e) => return Err(e),
        };
        self.recover_published(&store)?;
        self.absorb_parts(&store)?;
        store.refresh_snapshot()?;
        Ok(store)
    }

    fn replace_store(&self, why: &TuneDbError, lock: Arc<Lock>) -> Result<Store> {
        let aside = files::set_aside(&self.store_path())?;
        seal::remove(&self.store_path())?;
        tracing::warn!(
            "{why}; set aside as {}, starting anew from the snapshot",
            aside.display()
        );
        Store::open(&self.store_path(), &self.snapshot_path(), lock)
    }

    /// Takes back what the snapshot has and a new or recovered store has not. A store that is ahead, or equal, is left alone.
    fn recover_published(&self, store: &Store) -> Result<()> {
        let generation = match self.snapshot() {
            Ok(Some(snapshot)) => snapshot.generation(),
            // A damaged snapshot beside a good store is simply published again.
            Err(TuneDbError::Damaged { .. }) if store.is_empty() => u64::MAX,
            _ => return Ok(()),
        };
        if generation <= store.generation()? {
            return Ok(());
        }
        let records = self.readable_records();
        for record in &records {
            store.merge(record)?;
        }
        tracing::warn!(
            "{}: took {} records back from the snapshot",
            self.store_path().display(),
            records.len()
        );
        if generation < u64::MAX {
            store.set_generation(generation)?;
        }
        store.commit()
    }

    /// Good records of the snapshot, even of a damaged one.
    fn readable_records(&self) -> Vec<Record> {
        match Snapshot::open(&self.snapshot_path()) {
            Ok(Some(snapshot)) => snapshot.records().filter_map(Result::ok).collect(),
            Ok(None) => Vec::new(),
            Err(_) => Snapshot::salvage(&self.snapshot_path()).unwrap_or_default(),
        }
    }

    fn absorb_parts(&self, store: &Store) -> Result<()> {
        let parts = parts::list(&self.parts_path());
        if parts.is_empty() {
            return Ok(());
        }
        let mut taken = Vec::new();
        for path in &parts {
            match parts::read(path) {
                Ok(part) => {
                    for record in &part.records {
                        store.merge(record)?;
                    }
                    store.merge_timings(&part.timings)?;
                    taken.push(path);
                }
                // Whole, and for a newer program to take in.
                Err(TuneDbError::Newer { .. }) => {}
                Err(e) => {
                    tracing::warn!("{e}; set aside");
                    files::set_aside(path)?;
                }
            }
        }
        if taken.is_empty() {
            return Ok(());
        }
        store.commit()?;
        // Only now are their contents safe elsewhere.
        for path in taken {
            let _ = fs::remove_file(path);
        }
        Ok(())
    }

    /// Files records and timings: opens the store, commits, closes. If the store cannot be had, leaves a part file.
    ///
    /// # Errors
    /// [`TuneDbError::Io`] and the like if neither can be written. Computing can go on without.
    pub fn commit(
        &self,
        records: &[Record],
        timings: &[Timing],
        wait: Duration,
    ) -> Result<Committed> {
        match self.open_store(wait) {
            Ok(store) => {
                store.put_timings(timings)?;
                for record in records {
                    store.put(record)?;
                }
                if !records.is_empty() {
                    store.commit()?;
                }
                if store.is_bloated() {
                    store.compact()?;
                }
                Ok(Committed::Store)
            }
            Err(TuneDbError::Busy { .. } | TuneDbError::NetworkFileSystem { .. }) => parts::write(
                &self.parts_path(),
                &self.newer_than_published(records),
                timings,
            )
            .map(Committed::Part),
            Err(e) => Err(e),
        }
    }

    /// Records of a fresh tuning win over what is published even if the clock went back meanwhile.
    fn newer_than_published(&self, records: &[Record]) -> Vec<Record> {
        let published = self.snapshot().ok().flatten();
        let mut records = records.to_vec();
        for record in &mut records {
            if let Some(Ok(Some(old))) =
                published.as_ref().map(|snapshot| snapshot.get(&record.key))
            {
                record.evidence.date_unix_s = record
                    .evidence
                    .date_unix_s
                    .max(old.evidence.date_unix_s.saturating_add(1));
            }
        }
        records
    }

    /// Every stored timing of `keys`, parts included.
    ///
    /// # Errors
    /// As [`LocalDb::open_store`], but a store on a network file system is only passed over.
    pub fn timings(&self, keys: &[TuneKey], wait: Duration) -> Result<Vec<Timing>> {
        if !self.store_path().is_dir() && !self.parts_path().is_dir() {
            return Ok(Vec::new());
        }
        match self.open_store(wait) {
            Ok(store) => {
                let mut timings = Vec::new();
                for key in keys {
                    timings.extend(store.timings(key)?);
                }
                Ok(timings)
            }
            Err(TuneDbError::NetworkFileSystem { .. }) => {
                let mut timings = self.part_timings();
                timings.retain(|timing| keys.contains(&timing.key));
                Ok(timings)
            }
            Err(e) => Err(e),
        }
    }

    /// Every stored timing of every key, parts included.
    ///
    /// # Errors
    /// As [`LocalDb::timings`].
    pub(crate) fn all_timings(&self, wait: Duration) -> Result<Vec<Timing>> {
        if !self.store_path().is_dir() && !self.parts_path().is_dir() {
            return Ok(Vec::new());
        }
        match self.open_store(wait) {
            Ok(store) => store.all_timings(),
            Err(TuneDbError::NetworkFileSystem { .. }) => Ok(self.part_timings()),
            Err(e) => Err(e),
        }
    }

    /// Timings of the parts, oldest first: of several for one candidate the last one counts.
    fn part_timings(&self) -> Vec<Timing> {
        let mut timings: Vec<Timing> = parts::list(&self.parts_path())
            .into_iter()
            .filter_map(|path| parts::read(&path).ok())
            .flat_map(|part| part.timings)
            .collect();
        timings.sort_by_key(|timing| timing.date_unix_s);
        timings
    }

    /// The published snapshot. Writes nothing.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn snapshot(&self) -> Result<Option<Snapshot>> {
        Snapshot::open(&self.snapshot_path())
    }
}
