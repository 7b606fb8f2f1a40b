//! The vocabulary of mamba2-jit: what is computed, on which tensors, with which tuning parameters, on which device.
//!
//! Everything here is pure: no I/O, no `unsafe`, no GPU. Three kinds of struct, never mixed:
//!
//! * the problem ([`Problem`], [`StepProblem`]): what the caller asks for;
//! * the searched parameters ([`StrategyConfig`] and the per-kernel structs of [`parameters`]): the only thing a tuning
//!   database stores;
//! * everything derived ([`launch`]): grids, threads, shared memory, workspace, recomputed from the two above.
//!
//! ```
//! use mamba2_spec::Problem;
//! let problem: Problem = "b=4,l=16384,h=8,p=64,g=1,n=128,dtype=bf16".parse().unwrap();
//! assert_eq!(problem.nheads / problem.ngroups, 8);
//! ```
#![forbid(unsafe_code)]

mod device;
mod dtype;
mod error;
pub mod estimate;
pub mod launch;
pub mod limit;
pub mod parameters;
mod problem;
pub mod rules;
mod step;
mod strategy;
mod tensors;

pub use device::{Arch, DeviceFacts};
pub use dtype::Dtype;
pub use error::SpecError;
pub use problem::{Alignment, ChunkSize, DKind, DtLimit, Precision, Problem};
pub use step::{StepProblem, StepVectors};
pub use strategy::{
    Kernel, KernelConfig, Sm90ChainConfig, Sm90FusedConfig, Sm90SplitFusedConfig,
    Sm90SwapFusedConfig, StrategyConfig, ThreeKernelConfig,
};
pub use tensors::{
    ForwardInputs, ForwardOutputs, HasMeta, StepInputs, StepOutputs, TensorMeta, check_cu_seqlens,
    check_forward, check_step,
};
