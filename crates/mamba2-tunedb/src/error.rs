use std::path::PathBuf;

use thiserror::Error;

/// Why an operation on the tuning database was refused or failed. Nothing was half written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TuneDbError {
    /// The operating system refused.
    #[error("{}: {action}: {source}", path.display())]
    Io {
        /// What was tried, as in `open`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// Another process holds the store and kept it for the whole wait. Readers use the snapshot, writers leave a part.
    #[error("{}: another process holds the store; waited {waited_ms} ms", path.display())]
    Busy {
        /// The store's directory.
        path: PathBuf,
        /// How long was waited, in milliseconds.
        waited_ms: u64,
    },
    /// sled reports a fault other than a held lock.
    #[error("{}: sled: {detail}", path.display())]
    Store {
        /// The store's directory.
        path: PathBuf,
        /// sled's words.
        detail: String,
    },
    /// The store lies on a network file system, whose locks and fsync sled cannot rely on.
    #[error("{}: the store cannot live on {file_system}; set MAMBA2_CACHE_DIR to a local directory, or use parts, bundles and `db merge`", path.display())]
    NetworkFileSystem {
        /// The store's directory.
        path: PathBuf,
        /// Name of the file system, as in `nfs4`.
        file_system: String,
    },
    /// There is no directory to write to.
    #[error("no cache directory: {0}")]
    NoDirectory(String),
    /// The file was written by a newer version of this program.
    #[error("{what}: expected format version {expected}, got {got}; a newer mamba2 wrote it")]
    Newer {
        /// The file or directory.
        what: String,
        /// The newest version that this program reads.
        expected: u32,
        /// The version found.
        got: u32,
    },
    /// The bytes are not what they should be.
    #[error("{what}: {detail}")]
    Damaged {
        /// The file, record or entry.
        what: String,
        /// What is wrong, with expected and found values.
        detail: String,
    },
    /// A size is beyond what this program accepts from outside.
    #[error("{what}: expected at most {limit} {unit}, got {got}")]
    TooLarge {
        /// What is too large.
        what: String,
        /// The bound.
        limit: u64,
        /// The value found.
        got: u64,
        /// Unit of both.
        unit: &'static str,
    },
    /// A record or bundle is well formed but may not be used.
    #[error("{what}: refused: {reason}")]
    Refused {
        /// The record or bundle entry.
        what: String,
        /// Which rule it breaks.
        reason: String,
    },
    /// The problem itself is not legal, or nothing fits the device.
    #[error(transparent)]
    Spec(#[from] mamba2_spec::SpecError),
    /// An environment variable cannot be read.
    #[error("{name}: expected {expected}, got {got:?}")]
    Environment {
        /// Name of the variable.
        name: &'static str,
        /// What is accepted.
        expected: &'static str,
        /// What came.
        got: String,
    },
    /// A share of a list cannot be read.
    #[error("shard: expected I/N with I from 0 and less than N, got {0:?}")]
    Shard(String),
}

impl TuneDbError {
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> TuneDbError {
        let path = path.into();
        move |source| TuneDbError::Io {
            action,
            path,
            source,
        }
    }

    pub(crate) fn damaged(what: impl Into<String>, detail: impl Into<String>) -> TuneDbError {
        TuneDbError::Damaged {
            what: what.into(),
            detail: detail.into(),
        }
    }
}

/// Result of this crate.
pub type Result<T, E = TuneDbError> = std::result::Result<T, E>;
