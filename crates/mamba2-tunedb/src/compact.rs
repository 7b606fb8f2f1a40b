//! The three renames of writing a store anew. Whatever moment a process dies at, [`finish`] ends with one whole store.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Result, TuneDbError};
use crate::files;
use crate::seal;

/// The copy while it is made.
pub(crate) fn new_path(store: &Path) -> PathBuf {
    store.with_extension("new")
}

/// The copy once it is whole.
fn ready_path(store: &Path) -> PathBuf {
    store.with_extension("ready")
}

fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if !files::is_absent(&e) => Err(TuneDbError::io("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Makes room for a copy.
pub(crate) fn start(store: &Path) -> Result<()> {
    let new = new_path(store);
    remove_dir(&new)?;
    fs::create_dir_all(&new).map_err(TuneDbError::io("create directory", &new))
}

/// Puts the finished copy in the store's place.
pub(crate) fn swap(store: &Path) -> Result<()> {
    let (new, ready) = (new_path(store), ready_path(store));
    fs::rename(&new, &ready).map_err(TuneDbError::io("rename", &new))?;
    finish(store)
}

/// Ends what a killed process began: a whole copy replaces the store, half a copy is thrown away.
pub(crate) fn finish(store: &Path) -> Result<()> {
    remove_dir(&new_path(store))?;
    let ready = ready_path(store);
    if ready.is_dir() {
        seal::remove(store)?;
        remove_dir(store)?;
        fs::rename(&ready, store).map_err(TuneDbError::io("rename", &ready))?;
    }
    Ok(())
}
