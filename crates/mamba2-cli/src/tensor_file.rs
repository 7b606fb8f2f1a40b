//! Reading and writing safetensors files. A file is written whole or not at all.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

use mamba2_spec::Dtype;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::error::CliError;
use crate::host::OwnedTensor;

/// The tensors and the metadata of a file.
pub struct TensorFile {
    /// Where it came from, for messages.
    pub path: PathBuf,
    tensors: BTreeMap<String, OwnedTensor>,
    metadata: BTreeMap<String, String>,
}

impl TensorFile {
    /// Reads a file's bytes, taking only tensors named in `known` and metadata keys named in `known_keys`. Anything else is
    /// refused: a misspelt optional tensor would otherwise be ignored in silence. `path` is for messages.
    pub fn parse(
        path: &Path,
        bytes: &[u8],
        known: &[&str],
        known_keys: &[&str],
    ) -> Result<TensorFile, CliError> {
        let refuse = |reason: String| CliError::File {
            path: path.into(),
            reason,
        };
        let damaged = |e| {
            refuse(format!(
                "expected a whole safetensors file, got {} bytes that are not one: {e}",
                bytes.len()
            ))
        };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(damaged)?;
        let views = SafeTensors::deserialize(bytes).map_err(damaged)?;
        let metadata: BTreeMap<String, String> = header
            .metadata()
            .iter()
            .flatten()
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        if let Some(key) = metadata.keys().find(|k| !known_keys.contains(&k.as_str())) {
            return Err(refuse(format!(
                "metadata: expected only the keys {}, got {key:?}",
                known_keys.join(" ")
            )));
        }
        let mut tensors = BTreeMap::new();
        for (name, view) in views.iter() {
            if !known.contains(&name) {
                return Err(refuse(format!(
                    "tensors: expected only the names {}, got {name:?}",
                    known.join(" ")
                )));
            }
            tensors.insert(name.to_string(), owned(name, &view).map_err(refuse)?);
        }
        Ok(TensorFile {
            path: path.into(),
            tensors,
            metadata,
        })
    }

    /// Takes an optional tensor out.
    pub fn take(&mut self, name: &str) -> Option<OwnedTensor> {
        self.tensors.remove(name)
    }

    /// Takes a required tensor out.
    pub fn require(&mut self, name: &str) -> Result<OwnedTensor, CliError> {
        self.take(name)
            .ok_or_else(|| self.refuse(format!("{name}: expected a tensor of this name, got none")))
    }

    /// An option of the metadata.
    pub fn option(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// An error about this file.
    pub fn refuse(&self, reason: String) -> CliError {
        CliError::File {
            path: self.path.clone(),
            reason,
        }
    }
}

fn owned(name: &str, view: &TensorView<'_>) -> Result<OwnedTensor, String> {
    let dtype = match view.dtype() {
        safetensors::Dtype::BF16 => Some(Dtype::Bf16),
        safetensors::Dtype::F16 => Some(Dtype::F16),
        safetensors::Dtype::F32 => Some(Dtype::F32),
        safetensors::Dtype::I32 => None,
        other => {
            return Err(format!(
                "{name}: expected dtype bf16, f16, f32 or i32, got {other:?}"
            ));
        }
    };
    if view.shape().len() > 4 {
        return Err(format!(
            "{name}: expected at most 4 axes, got shape {:?}",
            view.shape()
        ));
    }
    // An axis of 0 hides any size of the others from the reader, but not from strides and outputs.
    let mut sizes = view.shape().iter().map(|n| *n.max(&1));
    if sizes
        .try_fold(1isize, |all, n| all.checked_mul(n.try_into().ok()?))
        .is_none()
    {
        return Err(format!(
            "{name}: expected axes whose product can be counted, got shape {:?}",
            view.shape()
        ));
    }
    Ok(OwnedTensor::from_le_bytes(dtype, view.shape(), view.data()))
}

/// Writes `tensors` to `path` by writing a neighbour, syncing it and renaming it.
pub fn write(
    path: &Path,
    tensors: &[(&str, &OwnedTensor)],
    metadata: HashMap<String, String>,
) -> Result<(), CliError> {
    let failed = |e: safetensors::SafeTensorError| {
        CliError::Failed(format!("{}: cannot lay out tensors: {e}", path.display()))
    };
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, t)| t.to_le_bytes()).collect();
    let mut views = Vec::new();
    for ((name, tensor), bytes) in tensors.iter().zip(&bytes) {
        let dtype = match tensor.dtype() {
            Some(Dtype::Bf16) => safetensors::Dtype::BF16,
            Some(Dtype::F16) => safetensors::Dtype::F16,
            Some(Dtype::F32) => safetensors::Dtype::F32,
            None => safetensors::Dtype::I32,
        };
        views.push((
            *name,
            TensorView::new(dtype, tensor.shape().to_vec(), bytes).map_err(failed)?,
        ));
    }
    let whole = safetensors::serialize(views, Some(metadata)).map_err(failed)?;
    write_whole(path, &whole)
}

/// Publishes `bytes` at `path` by write, sync and rename, so that no reader ever sees half a file.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let folder = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    let publish = || -> std::io::Result<()> {
        let mut file = tempfile::Builder::new()
            .prefix(".mamba2-")
            .permissions_of_new_file()
            .tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    publish().map_err(CliError::io(path, "write"))
}

/// tempfile makes private files; results are ordinary files.
trait PermissionsOfNewFile {
    fn permissions_of_new_file(&mut self) -> &mut Self;
}

impl PermissionsOfNewFile for tempfile::Builder<'_, '_> {
    #[cfg(unix)]
    fn permissions_of_new_file(&mut self) -> &mut Self {
        use std::os::unix::fs::PermissionsExt;
        // The umask still applies.
        self.permissions(std::fs::Permissions::from_mode(0o666))
    }

    #[cfg(not(unix))]
    fn permissions_of_new_file(&mut self) -> &mut Self {
        self
    }
}
