//! The tuner: every legal config of a shape is compiled, verified and measured; the fastest right one is stored.
//!
//! The search ([`tune`]) knows no GPU. It asks an [`Executor`] to compile, verify and time candidates, and keeps every
//! result in a [`Sink`], so an interrupted job repeats nothing and a new candidate costs only its own measurement.
//!
//! 1. *Screen*: each candidate is compiled (all in one queue, while the device works on what is there already), run twice on
//!    a small twin of the shape against the float64 oracle, and timed. Hopeless ones are cut after a first look: those far
//!    behind their group, and kernels that take longer alone than a whole pass of another strategy.
//! 2. *Refine*: near ties at the head of a group are timed again, interleaved.
//! 3. *Finals*: kernels of a (chunk_size, layout) are put together by the sum of their times; the best sums and the
//!    default config are checked on the shape itself and timed end to end in interleaved rounds. Inside the noise the
//!    default wins, then the fixed order.
#![forbid(unsafe_code)]

mod choose;
mod db_sink;
mod error;
mod executor;
pub mod fake;
pub mod gpu;
mod hold_out;
mod job;
mod phases;
mod policy;
mod progress;
pub mod report;
mod search;
pub mod shapes;
mod sink;
pub mod space;
mod stats;
mod target;
pub mod worker;

pub use choose::choose;
pub use db_sink::{DbSink, record_of};
pub use error::TunerError;
pub use executor::{
    Check, Compiled, Compiling, Conditions, Executor, Failure, FailureKind, Rounds, Tell, Verified,
};
pub use hold_out::{HeldOut, HoldOutReport, Verdict, run_hold_out};
pub use job::run_job;
pub use mamba2_tunedb::Shard;
pub use phases::{Phase, Phases};
pub use policy::Policy;
pub use progress::{Progress, Silent};
pub use report::{JobReport, TuneReport};
pub use search::{tune, tune_space, tune_step, tune_target};
pub use sink::{Choice, Hopeless, MemorySink, Outcome, Sink, Stage, Stored};
pub use stats::Summary;
pub use target::{Candidate, Target};
