//! What the operator should compute, how far a result is off, and inputs that show faults.
//!
//! * [`recurrence`] and [`chunked`]: two float64 oracles that share no code but the tensor shapes. One walks token by
//!   token, the other multiplies chunks; a mistake would have to be made twice, in two forms, to go unseen.
//! * [`step`]: the decode step in float64.
//! * [`ErrorReport`] and [`Bounds`]: distance between a result and an oracle, and the distance that is accepted.
//! * [`generate`], [`generate_step`]: deterministic inputs, already rounded to the problem's dtypes, in patterns that
//!   public bug reports showed to matter ([`Pattern`]).
//!
//! Meant for tests and for the tuner's verification. Indices out of the documented shapes panic here; callers check first
//! (`mamba2_spec::check_forward`).
//!
//! ```
//! use mamba2_reference::{ErrorReport, Pattern, chunked, generate, recurrence};
//! let problem = "b=1,l=100,h=4,p=8,g=2,n=16,dtype=bf16".parse().unwrap();
//! let inputs = generate(&problem, 7, Pattern::Plain).reference();
//! let report = ErrorReport::compare(&chunked(&problem, &inputs, 32).out, &recurrence(&problem, &inputs).out);
//! assert!(report.relative_frobenius < 1e-11);
//! ```
#![forbid(unsafe_code)]

mod bounds;
mod chunked;
mod error;
mod generate;
mod inputs;
mod recurrence;
mod step;
mod values;

pub use bounds::Bounds;
pub use chunked::chunked;
pub use error::{ErrorReport, relative_frobenius};
pub use generate::{
    Generated, GeneratedStep, Pattern, default_cu_seqlens, generate, generate_packed, generate_step,
};
pub use inputs::{RefInputs, RefOutputs, StepRefInputs, StepRefOutputs};
pub use recurrence::recurrence;
pub use step::step;
pub use values::Values;
