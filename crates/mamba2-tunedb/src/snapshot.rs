use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Result, TuneDbError};
use crate::files;
use crate::frames::{self, Format, FrameFile};
use crate::key::{MAX_KEY_BYTES, TuneKey};
use crate::record::{MAX_RECORD_BYTES, Record};

pub(crate) const FORMAT: Format = Format {
    magic: *b"mamba2sn",
    version: 1,
    max_entries: 1 << 22,
    max_file_bytes: 4 << 30,
    max_key_bytes: MAX_KEY_BYTES as u32,
    max_value_bytes: MAX_RECORD_BYTES as u32,
};

/// Records frozen at one commit: an immutable file that any number of processes read, from read-only media too.
///
/// Opening reads 32 bytes an entry; a look-up reads the few entries it compares. A newer snapshot is another file under
/// the same name, so an open one never changes.
#[derive(Debug)]
pub struct Snapshot {
    frames: FrameFile,
}

impl Snapshot {
    /// Opens a snapshot. `None` if there is no file.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`], [`TuneDbError::TooLarge`] or [`TuneDbError::Newer`] if it cannot be used,
    /// [`TuneDbError::Io`] if the system refuses. Nothing was written.
    pub fn open(path: &Path) -> Result<Option<Snapshot>> {
        let Some(file) = files::open_existing(path)? else {
            return Ok(None);
        };
        FrameFile::from_file(file, path.display().to_string(), &FORMAT)
            .map(|frames| Some(Snapshot { frames }))
    }

    /// Reads a snapshot held in memory, from an untrusted source. `what` names it in errors.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn from_bytes(bytes: Vec<u8>, what: &str) -> Result<Snapshot> {
        FrameFile::from_bytes(bytes, what.into(), &FORMAT).map(|frames| Snapshot { frames })
    }

    /// Publishes records as a snapshot: written beside, fsynced, renamed.
    ///
    /// # Errors
    /// [`TuneDbError::Io`], or what [`Record::to_json`] refuses. An older snapshot stays as it was.
    pub fn publish(
        path: &Path,
        generation: u64,
        records: impl IntoIterator<Item = Record>,
    ) -> Result<()> {
        let mut entries = BTreeMap::new();
        for record in records {
            entries.insert(
                record.key.to_string().into_bytes(),
                record.to_json()?.into_bytes(),
            );
        }
        Snapshot::publish_entries(path, generation, &entries)
    }

    pub(crate) fn publish_entries(
        path: &Path,
        generation: u64,
        entries: &BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> Result<()> {
        files::publish(path, |out| {
            frames::write_frames(out, &FORMAT, generation, entries)
        })
    }

    /// Good records of a file that [`Snapshot::open`] refused.
    ///
    /// # Errors
    /// [`TuneDbError::Io`] or [`TuneDbError::TooLarge`] if the file cannot be read at all.
    pub fn salvage(path: &Path) -> Result<Vec<Record>> {
        // Smaller than the format's bound: a salvage holds the file in memory.
        const LIMIT: u64 = 256 << 20;
        let bytes = files::read_bounded(path, LIMIT)?.unwrap_or_default();
        Ok(Snapshot::salvage_bytes(&bytes))
    }

    /// As [`Snapshot::salvage`], from memory.
    pub fn salvage_bytes(bytes: &[u8]) -> Vec<Record> {
        frames::salvage(bytes, &FORMAT)
            .into_iter()
            .filter_map(|(key, value)| read_entry(&key, &value).ok())
            .collect()
    }

    /// The record of `key`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the entry is there and broken.
    pub fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        let key = key.to_string();
        let value = self.frames.get(key.as_bytes())?;
        value
            .map(|value| read_entry(key.as_bytes(), &value))
            .transpose()
    }

    /// Keys with this prefix; keys that cannot be read are left out.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the file cannot be read.
    pub fn keys_with_prefix(&self, prefix: &str) -> Result<Vec<TuneKey>> {
        let keys = self.frames.keys_with_prefix(prefix.as_bytes())?;
        Ok(keys
            .iter()
            .filter_map(|key| std::str::from_utf8(key).ok()?.parse().ok())
            .collect())
    }

    /// Keys of the same family as `key`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the file cannot be read.
    pub fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        let prefix = key.family_prefix();
        let keys = self.frames.keys_with_prefix(prefix.as_bytes())?;
        Ok(keys
            .iter()
            .filter_map(|found| key.relative(&prefix, std::str::from_utf8(found).ok()?))
            .collect())
    }

    /// Every record in order of its key, or why it cannot be read.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> + '_ {
        (0..self.frames.len()).map(|i| {
            self.frames
                .entry(i)
                .and_then(|(key, value)| read_entry(&key, &value))
        })
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Commit of the store that wrote the snapshot.
    pub fn generation(&self) -> u64 {
        self.frames.generation()
    }

    /// SHA-256 of the contents in hex. Ranks with the same digest make the same choices.
    pub fn digest(&self) -> String {
        self.frames.content_digest()
    }
}

pub(crate) fn read_entry(key: &[u8], value: &[u8]) -> Result<Record> {
    let record = Record::from_json(value)?;
    if record.key.to_string().as_bytes() != key {
        return Err(TuneDbError::damaged(
            "record",
            format!("expected the key it is filed under, got {}", record.key),
        ));
    }
    Ok(record)
}
