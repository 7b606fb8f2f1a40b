use mamba2_spec::SpecError;
use thiserror::Error;

/// Why tuning could not go on. A candidate that fails is never such an error: it is recorded and the search continues.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TunerError {
    /// The problem itself is refused, or no kernel fits the device.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Nothing could be chosen, because every candidate failed.
    #[error(
        "{target}: all {failed} candidates failed, nothing was stored as tuned; the first reason: {first}"
    )]
    NothingWorks {
        /// The shape.
        target: String,
        /// How many failed.
        failed: usize,
        /// Reason of the first.
        first: String,
    },
    /// Timings or records could not be read or written. What was stored before is kept.
    #[error("tuning store: {0}")]
    Store(String),
    /// The device, or the process that drives it, cannot be used at all.
    #[error("tuning device: {0}")]
    Device(String),
    /// The tensors of a shape do not fit this device, or cannot be made for it. Other shapes may.
    #[error("{target}: cannot be tuned on this device: {reason}")]
    Unfit {
        /// The shape.
        target: String,
        /// Why.
        reason: String,
    },
    /// A list of shapes cannot be read.
    #[error("shape list: {entry}: expected {expected}, got {got}")]
    ShapeList {
        /// The entry at fault.
        entry: String,
        /// What is accepted.
        expected: String,
        /// What came.
        got: String,
    },
}
