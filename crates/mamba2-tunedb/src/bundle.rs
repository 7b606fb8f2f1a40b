use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mamba2_spec::Arch;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TuneDbError};
use crate::files;
use crate::frames::{self, Format, FrameFile};
use crate::key::TuneKey;
use crate::record::{MAX_RECORD_BYTES, Record};
use crate::snapshot::read_entry;
use crate::validate;

const FORMAT: Format = Format {
    magic: *b"mamba2bn",
    version: 1,
    max_entries: 1 << 20,
    max_file_bytes: 4 << 30,
    // Kernel keys hold the rendered config text.
    max_key_bytes: 64 * 1024,
    max_value_bytes: 64 << 20,
};

const MANIFEST_KEY: &[u8] = b"manifest";
const RECORD_PREFIX: &str = "record/";
const CUBIN_PREFIX: &str = "cubin/";
const MAX_MANIFEST_BYTES: usize = 1 << 20;

/// What a bundle says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Manifest {
    /// Architectures that the bundle has cubins for; every cubin must be of one of them.
    pub archs: Vec<u32>,
    /// Number of cubins.
    pub cubins: u64,
    /// Who made it, when, on what. Display only.
    pub note: String,
    /// Number of records.
    pub records: u64,
}

/// One file with records and the cubins they need: a host with a driver but no NVRTC runs from it.
///
/// A bundle is untrusted. Its index is checked when opened, each entry when read, and everything at once by
/// [`Bundle::verify`], which import requires. Entries are named by keys, never by paths: nothing in a bundle can choose
/// where something is written.
#[derive(Debug)]
pub struct Bundle {
    frames: FrameFile,
    manifest: Manifest,
}

impl Bundle {
    /// Extension of bundle files.
    pub const EXTENSION: &str = "mamba2bundle";

    /// Opens a bundle and checks its index and manifest.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`], [`TuneDbError::TooLarge`], [`TuneDbError::Newer`] or [`TuneDbError::Io`].
    pub fn open(path: &Path) -> Result<Bundle> {
        let what = path.display().to_string();
        let file = files::open_existing(path)?
            .ok_or_else(|| TuneDbError::damaged(&what, "no such file"))?;
        Bundle::new(FrameFile::from_file(file, what, &FORMAT)?)
    }

    /// Reads a bundle held in memory. `what` names it in errors.
    ///
    /// # Errors
    /// As [`Bundle::open`].
    pub fn from_bytes(bytes: Vec<u8>, what: &str) -> Result<Bundle> {
        Bundle::new(FrameFile::from_bytes(bytes, what.into(), &FORMAT)?)
    }

    fn new(frames: FrameFile) -> Result<Bundle> {
        let bad = |detail: String| TuneDbError::damaged("bundle manifest", detail);
        let text = frames
            .get(MANIFEST_KEY)?
            .ok_or_else(|| bad("expected one, got none".into()))?;
        if text.len() > MAX_MANIFEST_BYTES {
            return Err(TuneDbError::TooLarge {
                what: "bundle manifest".into(),
                limit: MAX_MANIFEST_BYTES as u64,
                got: text.len() as u64,
                unit: "bytes",
            });
        }
        let manifest = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        Ok(Bundle { frames, manifest })
    }

    /// Writes a bundle, whole or not at all. `cubins` are keyed by the kernel key's text.
    ///
    /// # Errors
    /// [`TuneDbError::Refused`] for what [`Bundle::verify`] would refuse, or [`TuneDbError::Io`].
    pub fn write(
        path: &Path,
        note: &str,
        records: impl IntoIterator<Item = Record>,
        cubins: impl IntoIterator<Item = (String, Vec<u8>)>,
    ) -> Result<Manifest> {
        let mut entries = BTreeMap::new();
        let mut manifest = Manifest {
            note: note.into(),
            ..Manifest::default()
        };
        for record in records {
            validate::check_record(&record)?;
            entries.insert(
                format!("{RECORD_PREFIX}{}", record.key).into_bytes(),
                record.to_json()?.into_bytes(),
            );
        }
        manifest.records = entries.len() as u64;
        let mut archs = std::collections::BTreeSet::new();
        for (key, cubin) in cubins {
            archs.insert(
                cubin_arch(&cubin)
                    .map_err(|reason| TuneDbError::Refused {
                        what: format!("cubin {key}"),
                        reason,
                    })?
                    .0,
            );
            entries.insert(format!("{CUBIN_PREFIX}{key}").into_bytes(), cubin);
        }
        manifest.archs = archs.into_iter().collect();
        manifest.cubins = entries.len() as u64 - manifest.records;
        let text = serde_json::to_vec(&manifest)
            .map_err(|e| TuneDbError::damaged("bundle manifest", e.to_string()))?;
        entries.insert(MANIFEST_KEY.to_vec(), text);
        files::publish(path, |out| frames::write_frames(out, &FORMAT, 0, &entries))?;
        Ok(manifest)
    }

    /// What the bundle says about itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// SHA-256 of the contents in hex.
    pub fn digest(&self) -> String {
        self.frames.content_digest()
    }

    /// The record of `key`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if its entry is broken.
    pub fn record(&self, key: &TuneKey) -> Result<Option<Record>> {
        let key = key.to_string();
        let value = self
            .frames
            .get(format!("{RECORD_PREFIX}{key}").as_bytes())?;
        value
            .map(|value| read_entry(key.as_bytes(), &value))
            .transpose()
    }

    /// Keys of records with this prefix; keys that cannot be read are left out.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the file cannot be read.
    pub fn keys_with_prefix(&self, prefix: &str) -> Result<Vec<TuneKey>> {
        let keys = self
            .frames
            .keys_with_prefix(format!("{RECORD_PREFIX}{prefix}").as_bytes())?;
        Ok(keys
            .iter()
            .filter_map(|key| {
                std::str::from_utf8(key)
                    .ok()?
                    .strip_prefix(RECORD_PREFIX)?
                    .parse()
                    .ok()
            })
            .collect())
    }

    /// Keys of the same family as `key`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the file cannot be read.
    pub fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        let prefix = format!("{RECORD_PREFIX}{}", key.family_prefix());
        let keys = self.frames.keys_with_prefix(prefix.as_bytes())?;
        Ok(keys
            .iter()
            .filter_map(|found| key.relative(&prefix, std::str::from_utf8(found).ok()?))
            .collect())
    }

    /// Every record in order of its key, or why it cannot be read.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the file cannot be read.
    pub fn records(&self) -> Result<Vec<Result<Record>>> {
        let keys = self.frames.keys_with_prefix(RECORD_PREFIX.as_bytes())?;
        let read = |key: &Vec<u8>| {
            let value = self
                .frames
                .get(key)?
                .ok_or_else(|| TuneDbError::damaged("bundle", "a record's entry is gone"))?;
            read_entry(&key[RECORD_PREFIX.len()..], &value)
        };
        Ok(keys.iter().map(read).collect())
    }

    /// The cubin of a kernel key's text, if it is there and for `arch`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if its entry is broken, [`TuneDbError::Refused`] if it is not a cubin for `arch`.
    pub fn cubin(&self, kernel_key: &str, arch: Arch) -> Result<Option<Vec<u8>>> {
        let Some(cubin) = self
            .frames
            .get(format!("{CUBIN_PREFIX}{kernel_key}").as_bytes())?
        else {
            return Ok(None);
        };
        let refused = |reason| TuneDbError::Refused {
            what: format!("bundle cubin {kernel_key:?}"),
            reason,
        };
        let found = cubin_arch(&cubin).map_err(refused)?;
        if found != arch {
            return Err(refused(format!(
                "expected a cubin for {arch}, got one for {found}"
            )));
        }
        Ok(Some(cubin))
    }

    /// Texts of the kernel keys that there are cubins for.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] if the file cannot be read.
    pub fn cubin_keys(&self) -> Result<Vec<String>> {
        let keys = self.frames.keys_with_prefix(CUBIN_PREFIX.as_bytes())?;
        Ok(keys
            .iter()
            .filter_map(|key| {
                Some(
                    std::str::from_utf8(key)
                        .ok()?
                        .strip_prefix(CUBIN_PREFIX)?
                        .to_string(),
                )
            })
            .collect())
    }

    /// Reads and checks everything: digests, records against today's rules, cubins against the manifest's architectures,
    /// counts, and that there is nothing else in the file. Returns every fault.
    pub fn verify(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let (mut records, mut cubins) = (0, 0);
        let mut last: Option<Vec<u8>> = None;
        for i in 0..self.frames.len() {
            let (key, value) = match self.frames.entry(i) {
                Ok(entry) => entry,
                Err(e) => {
                    faults.push(e.to_string());
                    continue;
                }
            };
            if last.as_ref().is_some_and(|last| *last >= key) {
                faults.push(format!("entry {i}: expected sorted keys, each once"));
            }
            match self.check_entry(&key, &value) {
                Ok(Kind::Record) => records += 1,
                Ok(Kind::Cubin) => cubins += 1,
                Ok(Kind::Manifest) => {}
                Err(e) => faults.push(format!("entry {i}: {e}")),
            }
            last = Some(key);
        }
        if faults.is_empty() && (records, cubins) != (self.manifest.records, self.manifest.cubins) {
            faults.push(format!(
                "manifest: expected {} records and {} cubins, got {records} and {cubins}",
                self.manifest.records, self.manifest.cubins
            ));
        }
        faults
    }

    fn check_entry(&self, key: &[u8], value: &[u8]) -> Result<Kind> {
        if key == MANIFEST_KEY {
            return Ok(Kind::Manifest);
        }
        let refused = |reason: String| TuneDbError::Refused {
            what: "bundle entry".into(),
            reason,
        };
        let key = std::str::from_utf8(key).map_err(|_| refused("its name is not text".into()))?;
        if let Some(tune_key) = key.strip_prefix(RECORD_PREFIX) {
            if value.len() > MAX_RECORD_BYTES {
                return Err(refused(format!(
                    "expected a record of at most {MAX_RECORD_BYTES} bytes, got {}",
                    value.len()
                )));
            }
            validate::check_record(&read_entry(tune_key.as_bytes(), value)?)?;
            return Ok(Kind::Record);
        }
        if key.strip_prefix(CUBIN_PREFIX).is_none() {
            return Err(refused(format!(
                "expected a manifest, record or cubin, got {:?}",
                key.chars().take(80).collect::<String>()
            )));
        }
        let arch = cubin_arch(value).map_err(refused)?;
        if !self.manifest.archs.contains(&arch.0) {
            return Err(refused(format!(
                "expected a cubin for one of {:?}, got one for {arch}",
                self.manifest.archs
            )));
        }
        Ok(Kind::Cubin)
    }

    /// Copies a bundle into the database, under a name made of its digest, after verifying everything. Repeating is harmless.
    ///
    /// # Errors
    /// [`TuneDbError::Refused`] with the first faults; nothing was written.
    pub fn import(from: &Path, bundles: &Path) -> Result<PathBuf> {
        // Read once and kept in memory: the file cannot change between check and copy.
        let bytes = files::read_bounded(from, FORMAT.max_file_bytes)?
            .ok_or_else(|| TuneDbError::damaged(from.display().to_string(), "no such file"))?;
        let bundle = Bundle::from_bytes(bytes.clone(), &from.display().to_string())?;
        let faults = bundle.verify();
        if !faults.is_empty() {
            let more = if faults.len() > 5 {
                format!("; and {} more", faults.len() - 5)
            } else {
                String::new()
            };
            let reason = format!(
                "{}{more}",
                faults
                    .iter()
                    .take(5)
                    .cloned()
                    .collect::<Vec<_>>()
                    .join("; ")
            );
            return Err(TuneDbError::Refused {
                what: from.display().to_string(),
                reason,
            });
        }
        let path = bundles.join(format!("{}.{}", bundle.digest(), Bundle::EXTENSION));
        files::publish(&path, |out| out.write_all(&bytes))?;
        Ok(path)
    }
}

enum Kind {
    Manifest,
    Record,
    Cubin,
}

/// Architecture of a cubin, from its ELF header.
pub fn cubin_arch(cubin: &[u8]) -> std::result::Result<Arch, String> {
    const EM_CUDA: u16 = 190;
    if cubin.len() < 64 || cubin[..4] != *b"\x7fELF" || cubin[4] != 2 || cubin[5] != 1 {
        return Err("expected a 64-bit little-endian ELF file".into());
    }
    let machine = u16::from_le_bytes([cubin[18], cubin[19]]);
    if machine != EM_CUDA {
        return Err(format!(
            "expected an ELF file for CUDA (machine {EM_CUDA}), got machine {machine}"
        ));
    }
    // Up to ABI 7 the low byte of e_flags holds the architecture, since ABI 8 (CUDA 13) the byte above it.
    let abi = cubin[8];
    let arch = if abi >= 8 { cubin[49] } else { cubin[48] };
    Ok(Arch(arch.into()))
}
