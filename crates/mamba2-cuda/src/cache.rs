//! Cubins on disk. One file holds the whole key and the cubin, so that one rename publishes both.
//!
//! File: the line `mamba2-cubin 1`, one line of JSON ([`KernelKey`], resources, log, length and SHA-256 of the cubin), the cubin.
//! Name: `<kernel>-<half of the identity's digest>-<NVRTC version>.cubin`. A lost race is normal: both writers publish the same
//! thing. A file that cannot be read, is damaged or has another key is a miss; the next compile replaces it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use mamba2_spec::Arch;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::key::hex;
use crate::{Compiled, CudaError, KernelIdentity, KernelKey, NvrtcVersion, Resources};

const MAGIC: &[u8] = b"mamba2-cubin 1\n";
/// A whole forward pass is a few hundred KiB; nothing honest is near these.
const MAX_HEADER_BYTES: usize = 4 << 20;
const MAX_CUBIN_BYTES: usize = 64 << 20;
/// Default bound of the directory.
pub const DEFAULT_CACHE_BYTES: u64 = 512 << 20;
/// The directory is measured at the first and then at every so many publications.
const PRUNE_EVERY: usize = 64;
/// Files of writers that died are removed when this old.
const ABANDONED: Duration = Duration::from_secs(3600);
/// A hit renews a file's date only if it is older than this: reading should not write.
const RENEW_AFTER: Duration = Duration::from_secs(24 * 3600);

/// One cached kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// What it is.
    pub key: KernelKey,
    /// The code and the compiler's report.
    pub compiled: Compiled,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    key: KernelKey,
    target: Arch,
    resources: Option<Resources>,
    log: String,
    cubin_bytes: usize,
    cubin_sha256: String,
}

impl Cubin {
    /// The file's content.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = Header {
            key: self.key.clone(),
            target: self.compiled.target,
            resources: self.compiled.resources,
            log: self.compiled.log.clone(),
            cubin_bytes: self.compiled.cubin.len(),
            cubin_sha256: hex(&Sha256::digest(&self.compiled.cubin)),
        };
        let header =
            serde_json::to_vec(&header).expect("a header of strings and numbers should serialise");
        [MAGIC, &header, b"\n", &self.compiled.cubin].concat()
    }

    /// Reads a file's content, which may be anything.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn from_bytes(bytes: &[u8]) -> Result<Cubin, String> {
        let rest = bytes
            .strip_prefix(MAGIC)
            .ok_or("not a cubin file of this version")?;
        let end = rest
            .iter()
            .take(MAX_HEADER_BYTES)
            .position(|b| *b == b'\n')
            .ok_or("no end of the header")?;
        let header: Header =
            serde_json::from_slice(&rest[..end]).map_err(|e| format!("header: {e}"))?;
        let cubin = &rest[end + 1..];
        if cubin.len() != header.cubin_bytes {
            return Err(format!(
                "expected {} bytes of code, got {}",
                header.cubin_bytes,
                cubin.len()
            ));
        }
        if hex(&Sha256::digest(cubin)) != header.cubin_sha256 {
            return Err("the code does not have its digest".into());
        }
        let compiled = Compiled {
            cubin: cubin.to_vec(),
            log: header.log,
            resources: header.resources,
            target: header.target,
        };
        Ok(Cubin {
            key: header.key,
            compiled,
        })
    }
}

/// What a look-up asks of the compiler's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Exactly this one.
    Exactly(NvrtcVersion),
    /// The newest there is: for hosts without NVRTC, which run from what was shipped.
    Newest,
}

/// What a call of [`CubinCache::prune`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Files before.
    pub files_before: usize,
    /// Bytes before.
    pub bytes_before: u64,
    /// Files removed.
    pub files_removed: usize,
    /// Bytes removed.
    pub bytes_removed: u64,
}

#[derive(Debug, Default)]
struct Shared {
    published: AtomicUsize,
    warned: AtomicBool,
}

/// The cubins of one directory. Clones share their state; any number of processes may use a directory at once.
#[derive(Clone, Debug)]
pub struct CubinCache {
    directory: Option<PathBuf>,
    limit_bytes: u64,
    shared: Arc<Shared>,
}

impl CubinCache {
    /// A cache in `directory`, which is made at the first publication. Nothing is touched before it is needed.
    pub fn new(directory: impl Into<PathBuf>) -> CubinCache {
        CubinCache {
            directory: Some(directory.into()),
            limit_bytes: DEFAULT_CACHE_BYTES,
            shared: Arc::default(),
        }
    }

    /// No cache: every look-up is a miss, every publication is forgotten.
    pub fn disabled() -> CubinCache {
        CubinCache {
            directory: None,
            limit_bytes: 0,
            shared: Arc::default(),
        }
    }

    /// The same cache, kept below `limit_bytes`.
    pub fn with_limit(mut self, limit_bytes: u64) -> CubinCache {
        self.limit_bytes = limit_bytes;
        self
    }

    /// Where the files are; `None` if disabled.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// True if there is no cubin in it.
    pub fn is_empty(&self) -> bool {
        let is_cubin = |e: &fs::DirEntry| e.path().extension().is_some_and(|e| e == "cubin");
        self.directory
            .as_deref()
            .is_none_or(|d| !entries(d).iter().any(is_cubin))
    }

    /// The cubin of `identity`, if a sound one is there. Never fails: what cannot be used is a miss.
    pub fn get(&self, identity: &KernelIdentity, wanted: Wanted) -> Option<Cubin> {
        let directory = self.directory.as_deref()?;
        let prefix = file_prefix(identity);
        let path = match wanted {
            Wanted::Exactly(version) => directory.join(file_name(&prefix, version)),
            Wanted::Newest => {
                let names = entries(directory)
                    .into_iter()
                    .filter_map(|e| e.file_name().into_string().ok());
                let newest = names
                    .filter_map(|n| Some((version_in(n.strip_prefix(&prefix)?)?, n)))
                    .max()?;
                directory.join(newest.1)
            }
        };
        let bytes = read_bounded(&path)?;
        match Cubin::from_bytes(&bytes) {
            Ok(cubin)
                if cubin.key.identity == *identity && wanted_allows(wanted, cubin.key.nvrtc) =>
            {
                renew(&path);
                Some(cubin)
            }
            // Half a digest in common, or a file put there by hand: not ours to use, nor to remove.
            Ok(_) => None,
            Err(reason) => {
                tracing::warn!(path = %path.display(), %reason, "damaged file in the cubin cache, removed");
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// Publishes a cubin by writing beside and renaming. If the directory cannot be written the process goes on without and
    /// says so once.
    pub fn put(&self, cubin: &Cubin) {
        let Some(directory) = self.directory.as_deref() else {
            return;
        };
        match publish(
            directory,
            &file_name(&file_prefix(&cubin.key.identity), cubin.key.nvrtc),
            &cubin.to_bytes(),
        ) {
            Ok(()) => {
                if self
                    .shared
                    .published
                    .fetch_add(1, Ordering::Relaxed)
                    .is_multiple_of(PRUNE_EVERY)
                {
                    // A directory that cannot be listed was just written to; the next publication tries again.
                    let _ = self.prune(self.limit_bytes);
                }
            }
            Err(error) => self.warn_once(directory, &error),
        }
    }

    fn warn_once(&self, directory: &Path, error: &io::Error) {
        if !self.shared.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                path = %directory.display(), %error,
                "cannot write the cubin cache: kernels are compiled again in the next process"
            );
        }
    }

    /// Every sound cubin, sorted by file name; what is damaged is left out. For bundles.
    pub fn export(&self) -> Vec<Cubin> {
        let Some(directory) = self.directory.as_deref() else {
            return Vec::new();
        };
        let mut paths: Vec<PathBuf> = entries(directory)
            .into_iter()
            .map(|e| e.path())
            .filter(|p| p.extension().is_some_and(|e| e == "cubin"))
            .collect();
        paths.sort();
        paths
            .iter()
            .filter_map(|path| Cubin::from_bytes(&read_bounded(path)?).ok())
            .collect()
    }

    /// Removes the files longest unused until at most `limit_bytes` are left, and what dead writers left behind.
    ///
    /// # Errors
    /// [`CudaError::Cache`] if the directory is there but cannot be listed.
    pub fn prune(&self, limit_bytes: u64) -> Result<Pruned, CudaError> {
        let Some(directory) = self.directory.as_deref() else {
            return Ok(Pruned::default());
        };
        match fs::read_dir(directory) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Pruned::default()),
            Err(e) => {
                return Err(CudaError::Cache {
                    path: directory.into(),
                    reason: e.to_string(),
                });
            }
            Ok(_) => {}
        }
        let now = SystemTime::now();
        let mut files = Vec::new();
        let mut pruned = Pruned::default();
        for entry in entries(directory) {
            let (path, Ok(meta)) = (entry.path(), entry.metadata()) else {
                continue;
            };
            let date = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if path.extension().is_some_and(|e| e == "cubin") {
                pruned.files_before += 1;
                pruned.bytes_before += meta.len();
                files.push((date, path, meta.len()));
            } else if is_temporary(&path)
                && now.duration_since(date).is_ok_and(|age| age > ABANDONED)
            {
                let _ = fs::remove_file(path);
            }
        }
        files.sort();
        let mut left = pruned.bytes_before;
        for (_, path, bytes) in files {
            if left <= limit_bytes {
                break;
            }
            if fs::remove_file(path).is_ok() {
                left -= bytes;
                pruned.files_removed += 1;
                pruned.bytes_removed += bytes;
            }
        }
        Ok(pruned)
    }
}

fn wanted_allows(wanted: Wanted, version: NvrtcVersion) -> bool {
    match wanted {
        Wanted::Exactly(v) => v == version,
        Wanted::Newest => true,
    }
}

fn file_prefix(identity: &KernelIdentity) -> String {
    // The kernel's name is for people; a key from a foreign file must not become a path.
    let kernel: String = identity
        .kernel
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '_')
        .take(64)
        .collect();
    format!("{kernel}-{}-", &identity.digest()[..32])
}

fn file_name(prefix: &str, version: NvrtcVersion) -> String {
    format!("{prefix}{}.{}.cubin", version.major, version.minor)
}

fn version_in(rest: &str) -> Option<NvrtcVersion> {
    let (major, minor) = rest.strip_suffix(".cubin")?.split_once('.')?;
    Some(NvrtcVersion {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

fn is_temporary(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|n| n.to_string_lossy().starts_with(".tmp"))
}

fn entries(directory: &Path) -> Vec<fs::DirEntry> {
    fs::read_dir(directory)
        .map(|d| d.filter_map(Result::ok).collect())
        .unwrap_or_default()
}

fn read_bounded(path: &Path) -> Option<Vec<u8>> {
    let meta = fs::metadata(path).ok()?;
    if !meta.is_file() || meta.len() > (MAX_HEADER_BYTES + MAX_CUBIN_BYTES) as u64 {
        return None;
    }
    fs::read(path).ok()
}

fn renew(path: &Path) {
    let age = fs::metadata(path)
        .and_then(|m| m.modified())
        .ok()
        .and_then(|d| SystemTime::now().duration_since(d).ok());
    if age.is_some_and(|age| age > RENEW_AFTER) {
        // Only the order of pruning depends on it; read-only media keep their dates.
        let _ = File::options()
            .write(true)
            .open(path)
            .and_then(|f| f.set_modified(SystemTime::now()));
    }
}

/// Writes `bytes` to `directory/name` so that a reader sees all of it or nothing.
pub(crate) fn publish(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut file = tempfile::Builder::new()
        .prefix(".tmp")
        .tempfile_in(directory)?;
    file.write_all(bytes)?;
    // No fsync: after a crash a file cut short fails its digest and is compiled again.
    file.persist(directory.join(name)).map_err(|e| e.error)?;
    Ok(())
}
