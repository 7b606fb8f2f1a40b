use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mamba2_spec::SpecError;
use thiserror::Error;

/// Why a command stopped. Each message is one line that says what to do; no output file was written.
#[derive(Debug, Error)]
pub enum CliError {
    /// A result is outside the accuracy bounds.
    #[error("check failed: {0}")]
    CheckFailed(String),
    /// A file cannot be read or written.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// `read`, `write`, ...
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what the command reads.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Expected and found.
        reason: String,
    },
    /// A problem, tensor or option was refused.
    #[error("{context}{source}")]
    Spec {
        /// `file: `, or empty when the command line is at fault.
        context: String,
        /// The refusal.
        source: SpecError,
    },
    /// A command-line value cannot be used.
    #[error("{0}")]
    Usage(String),
    /// No usable device, driver or compiler.
    #[error("{0}")]
    NoDevice(String),
    /// Anything else a command ran into.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    /// Exit code: 1 check failed, 2 bad input or usage, 3 no device.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            CliError::CheckFailed(_) => ExitCode::from(1),
            CliError::NoDevice(_) => ExitCode::from(3),
            _ => ExitCode::from(2),
        }
    }

    /// A refusal of something in a file.
    pub fn in_file(path: &Path) -> impl Fn(SpecError) -> CliError {
        let context = format!("{}: ", path.display());
        move |source| CliError::Spec {
            context: context.clone(),
            source,
        }
    }

    /// A file that cannot be read or written.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> CliError {
        let path = path.to_path_buf();
        move |source| CliError::Io {
            path,
            action,
            source,
        }
    }
}

impl From<SpecError> for CliError {
    fn from(source: SpecError) -> CliError {
        CliError::Spec {
            context: String::new(),
            source,
        }
    }
}
