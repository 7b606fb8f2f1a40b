//! The real device: candidates are verified in guarded, poisoned memory and timed on CUDA graphs.

mod compare;
mod compile;
pub mod every_config;
mod executor;
mod layout;
mod output;
pub mod place;
mod trial;
mod twin;
mod twins;

use mamba2_reference::Pattern;

pub use compare::decode;
pub use compile::{CompileExecutor, compile_kernel};
pub use executor::GpuExecutor;
pub use output::{CANARY, GUARD_BYTES, Output, POISON, Scratch};
pub use place::Placement;
pub use trial::{Distance, ForwardTrial, Oracle, Run, Standard, StepTrial, failure_of};
pub use twin::{of_forward as twin_of_forward, of_step as twin_of_step};

/// Inputs like those of a trained model: some heads forget at once, some remember across many chunks.
const PATTERN: Pattern = Pattern::Model;
const SEED: u64 = 1;
