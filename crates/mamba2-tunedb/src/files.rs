//! Small file operations that must never leave half a file: write beside, fsync, rename.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::{Result, TuneDbError};

/// Publishes `bytes` at `path` whole or not at all; readers see the old file or the new one.
pub(crate) fn publish(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(TuneDbError::io("create directory", dir))?;
    let mut file = tempfile::Builder::new()
        .prefix(".new-")
        .tempfile_in(dir)
        .map_err(TuneDbError::io("create temporary file in", dir))?;
    let mut buffered = std::io::BufWriter::with_capacity(1 << 16, file.as_file_mut());
    write(&mut buffered)
        .and_then(|()| buffered.flush())
        .map_err(TuneDbError::io("write", path))?;
    drop(buffered);
    // Readable by the group and others, as a normal file would be: tempfile makes it private.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.as_file()
            .set_permissions(fs::Permissions::from_mode(0o644))
            .map_err(TuneDbError::io("set mode of", path))?;
    }
    file.as_file()
        .sync_all()
        .map_err(TuneDbError::io("fsync", path))?;
    file.persist(path).map_err(|e| TuneDbError::Io {
        action: "rename to",
        path: path.into(),
        source: e.error,
    })?;
    // The rename itself survives a power cut only once the directory is on disk.
    if let Ok(dir) = File::open(dir) {
        let _ = dir.sync_all();
    }
    Ok(())
}

/// Reads a whole file of at most `limit` bytes. `None` if it does not exist.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = open_existing(path)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(TuneDbError::io("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(TuneDbError::TooLarge {
            what: path.display().to_string(),
            limit,
            got: bytes.len() as u64,
            unit: "bytes (or more)",
        });
    }
    Ok(Some(bytes))
}

/// Opens a regular file for reading. `None` if it does not exist.
pub(crate) fn open_existing(path: &Path) -> Result<Option<File>> {
    // Asked before opening: opening a pipe would wait for a writer.
    match fs::metadata(path) {
        Ok(meta) if !meta.is_file() => {
            return Err(TuneDbError::damaged(
                path.display().to_string(),
                "expected a regular file, got something else",
            ));
        }
        Ok(_) => {}
        Err(e) if is_absent(&e) => return Ok(None),
        Err(e) => return Err(TuneDbError::io("open", path)(e)),
    }
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if is_absent(&e) => Ok(None),
        Err(e) => Err(TuneDbError::io("open", path)(e)),
    }
}

pub(crate) fn is_absent(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
    )
}

/// Moves a file or directory that cannot be used to `<name>.damaged-<n>` beside it, the first free `n`.
pub(crate) fn set_aside(path: &Path) -> Result<std::path::PathBuf> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    for n in 1..10_000u32 {
        let target = path.with_file_name(format!("{name}.damaged-{n}"));
        if fs::symlink_metadata(&target).is_ok() {
            continue;
        }
        fs::rename(path, &target).map_err(TuneDbError::io("set aside", path))?;
        return Ok(target);
    }
    Err(TuneDbError::damaged(
        path.display().to_string(),
        "expected fewer than 10000 files set aside beside it",
    ))
}

/// True for names made by [`set_aside`] and for temporary files a killed writer left.
pub(crate) fn is_leftover(name: &str) -> bool {
    name.contains(".damaged-") || name.starts_with(".new-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_leaves_the_old_file_and_nothing_half_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        publish(&path, |out| out.write_all(b"old")).unwrap();
        let full = publish(&path, |out| {
            out.write_all(&[0; 100_000])?;
            Err(std::io::ErrorKind::StorageFull.into())
        });
        assert!(
            matches!(
                full,
                Err(TuneDbError::Io {
                    action: "write",
                    ..
                })
            ),
            "{full:?}"
        );
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_in_the_place_of_a_file_is_an_error_and_not_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            open_existing(dir.path()),
            Err(TuneDbError::Damaged { .. })
        ));
        assert!(open_existing(&dir.path().join("absent")).unwrap().is_none());
    }

    #[test]
    fn a_file_beyond_the_bound_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, [0; 11]).unwrap();
        assert!(matches!(
            read_bounded(&path, 10),
            Err(TuneDbError::TooLarge { .. })
        ));
        assert_eq!(read_bounded(&path, 11).unwrap().unwrap().len(), 11);
    }
}
