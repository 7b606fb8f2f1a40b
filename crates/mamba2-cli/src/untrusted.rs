//! Input files as bytes that may be anything: what a fuzzer feeds.

use std::path::Path;

use mamba2_spec::{Problem, StepProblem};

use crate::case::{ForwardCase, StepCase};
use crate::error::CliError;

/// The problem that the bytes of a safetensors file pose to `mamba2 run`: every tensor, shape and option was checked.
///
/// # Errors
/// [`CliError::File`] or [`CliError::Spec`], naming the tensor or option at fault.
pub fn forward_problem(bytes: &[u8]) -> Result<Problem, CliError> {
    ForwardCase::parse(Path::new("bytes"), bytes).map(|case| case.problem)
}

/// The problem that the bytes of a safetensors file pose to `mamba2 step`.
///
/// # Errors
/// As [`forward_problem`].
pub fn step_problem(bytes: &[u8]) -> Result<StepProblem, CliError> {
    StepCase::parse(Path::new("bytes"), bytes).map(|case| case.problem)
}
