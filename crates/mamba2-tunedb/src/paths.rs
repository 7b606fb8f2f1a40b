//! Where the cache is: one decision, in one place, with its reason.

use std::fs;
use std::path::{Path, PathBuf};

use crate::env::Environment;

/// The one cache directory of this process, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDir {
    /// The directory; it need not exist yet. `None`: work uncached.
    pub path: Option<PathBuf>,
    /// Which variable decided, and what was passed over.
    pub reason: String,
    /// Name of the file system if it is a network one, as in `nfs4`.
    pub network_file_system: Option<String>,
}

impl CacheDir {
    /// Decides. Creates and writes nothing.
    ///
    /// `MAMBA2_CACHE_DIR`, else `$XDG_CACHE_HOME/mamba2`, else `$HOME/.cache/mamba2`, else none. The last two are passed
    /// over if they are relative, if their parent cannot exist, or if they belong to another user: who could write there
    /// could choose what runs here.
    pub fn decide(environment: &Environment) -> CacheDir {
        let mut passed_over = Vec::new();
        if let Some(path) = environment.path("MAMBA2_CACHE_DIR") {
            if path.is_absolute() {
                return CacheDir::found(path, "MAMBA2_CACHE_DIR", &passed_over);
            }
            passed_over.push(format!(
                "MAMBA2_CACHE_DIR={} is not absolute",
                path.display()
            ));
        }
        let candidates = [
            (
                "XDG_CACHE_HOME",
                environment.path("XDG_CACHE_HOME"),
                "mamba2",
            ),
            ("HOME", environment.path("HOME"), ".cache/mamba2"),
        ];
        for (name, base, below) in candidates {
            match base {
                None => passed_over.push(format!("{name} is not set")),
                Some(base) if !base.is_absolute() => {
                    passed_over.push(format!("{name}={} is not absolute", base.display()))
                }
                Some(base) => match unusable(&base, &base.join(below)) {
                    None => return CacheDir::found(base.join(below), name, &passed_over),
                    Some(why) => passed_over.push(format!("{name}: {why}")),
                },
            }
        }
        CacheDir {
            path: None,
            reason: format!("no cache: {}", passed_over.join("; ")),
            network_file_system: None,
        }
    }

    /// A directory named by the caller.
    pub fn fixed(path: impl Into<PathBuf>) -> CacheDir {
        CacheDir::found(path.into(), "the caller", &[])
    }

    /// No directory, by the caller's wish.
    pub fn none(reason: impl Into<String>) -> CacheDir {
        CacheDir {
            path: None,
            reason: reason.into(),
            network_file_system: None,
        }
    }

    fn found(path: PathBuf, by: &str, passed_over: &[String]) -> CacheDir {
        let mut reason = format!("named by {by}");
        if !passed_over.is_empty() {
            reason = format!("{reason} ({})", passed_over.join("; "));
        }
        let network_file_system = network_file_system(&path);
        CacheDir {
            path: Some(path),
            reason,
            network_file_system,
        }
    }
}

/// Why `path`, below the directory `base` of a user, cannot be the cache.
fn unusable(base: &Path, path: &Path) -> Option<String> {
    match fs::metadata(base) {
        Ok(meta) if !meta.is_dir() => {
            return Some(format!("{} is not a directory", base.display()));
        }
        Ok(_) => {}
        // XDG_CACHE_HOME may be made on first use, below a parent that is there.
        Err(_)
            if base
                .parent()
                .is_some_and(|p| p.is_dir() && p != Path::new("/")) => {}
        Err(e) => return Some(format!("{}: {e}", base.display())),
    }
    match fs::symlink_metadata(path) {
        Ok(meta) if !path.is_dir() && !meta.is_dir() => {
            Some(format!("{} is not a directory", path.display()))
        }
        Ok(_) => foreign_owner(path),
        Err(_) => None,
    }
}

#[cfg(unix)]
fn foreign_owner(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let owner = fs::metadata(path).ok()?.uid();
    // The owner of our own entry in /proc is our effective user; std has no other safe way to ask.
    let me = fs::metadata("/proc/self").ok()?.uid();
    (owner != me && owner != 0).then(|| {
        format!(
            "{} belongs to another user (id {owner}, we are {me})",
            path.display()
        )
    })
}

#[cfg(not(unix))]
fn foreign_owner(_path: &Path) -> Option<String> {
    None
}

/// File systems whose advisory locks or fsync do not hold between hosts. Unsupported for the store; snapshots, parts and
/// bundles, which only need rename, work on them.
const NETWORK: [&str; 15] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "glusterfs",
    "fuse.glusterfs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
];

/// Name of the network file system that `path`, or its nearest existing parent, is on.
pub fn network_file_system(path: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let existing = path.ancestors().find_map(|p| fs::canonicalize(p).ok())?;
    file_system_of(&existing, &mounts).filter(|name| NETWORK.contains(&name.as_str()))
}

/// File system of `path` by the text of `/proc/self/mountinfo`: the longest mount point above it, the last if mounted twice.
fn file_system_of(path: &Path, mounts: &str) -> Option<String> {
    let mut best: Option<(usize, &str)> = None;
    for line in mounts.lines() {
        // ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS... - TYPE SOURCE SUPER
        let Some((front, back)) = line.split_once(" - ") else {
            continue;
        };
        let (Some(point), Some(kind)) = (front.split(' ').nth(4), back.split(' ').next()) else {
            continue;
        };
        let point = point.replace("\\040", " ");
        if path.starts_with(&point) && best.is_none_or(|(length, _)| point.len() >= length) {
            best = Some((point.len(), kind));
        }
    }
    best.map(|(_, kind)| kind.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_mount_point_names_the_file_system() {
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda rw\n\
                      30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw\n\
                      31 30 8:2 / /home/me/my\\040disk rw - xfs /dev/sdb rw\n";
        let of = |path: &str| file_system_of(Path::new(path), mounts);
        assert_eq!(of("/home/me/.cache").as_deref(), Some("nfs4"));
        assert_eq!(of("/home/me/my disk/cache").as_deref(), Some("xfs"));
        assert_eq!(of("/homeless").as_deref(), Some("ext4"));
    }
}
