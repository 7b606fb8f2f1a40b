//! The environment variables this crate reads, all in this file.
//!
//! | variable | effect |
//! |---|---|
//! | `MAMBA2_NVRTC_PATH` | the NVRTC library, or its directory; nothing else is then tried |
//! | `MAMBA2_RACECHECK` | if `1`, kernels are compiled so that compute-sanitizer's racecheck can follow their barriers; slower |
//! | `CUDA_HOME`, `CUDA_PATH` | roots of CUDA toolkits |
//! | `VIRTUAL_ENV`, `CONDA_PREFIX`, `HOME` | where Python packages live |
//! | `LD_LIBRARY_PATH` | read by the system loader; recorded to notice that the answer may have changed |

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Values of the variables, read once per search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Environment {
    pub nvrtc_path: Option<PathBuf>,
    pub cuda_roots: Vec<PathBuf>,
    pub python_roots: Vec<PathBuf>,
    pub home: Option<PathBuf>,
    pub loader_path: Option<OsString>,
    /// The Cargo target directory this program runs from.
    pub cargo_target: Option<PathBuf>,
}

impl Environment {
    pub fn read() -> Environment {
        let path = |name: &str| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        Environment {
            nvrtc_path: path("MAMBA2_NVRTC_PATH"),
            cuda_roots: ["CUDA_HOME", "CUDA_PATH"]
                .into_iter()
                .filter_map(path)
                .collect(),
            python_roots: ["VIRTUAL_ENV", "CONDA_PREFIX"]
                .into_iter()
                .filter_map(path)
                .collect(),
            home: path("HOME"),
            loader_path: std::env::var_os("LD_LIBRARY_PATH"),
            cargo_target: std::env::current_exe()
                .ok()
                .as_deref()
                .and_then(target_directory),
        }
    }

    /// One text that changes whenever a search could end elsewhere.
    pub fn fingerprint(&self) -> String {
        format!("{self:?}")
    }
}

/// Whether kernels are to be compiled for compute-sanitizer's racecheck.
pub(crate) fn racecheck() -> bool {
    std::env::var_os("MAMBA2_RACECHECK").is_some_and(|v| v == "1")
}

/// The Cargo target directory above `executable`, told by the tag file that Cargo puts there. Without that test an
/// installed program would look for libraries in whatever directories are above it.
pub(crate) fn target_directory(executable: &Path) -> Option<PathBuf> {
    executable
        .ancestors()
        .skip(1)
        .take(4)
        .find(|d| d.join("CACHEDIR.TAG").is_file())
        .map(Path::to_path_buf)
}
