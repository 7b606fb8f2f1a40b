//! What the search needs of a device.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Mutex;

use mamba2_spec::{DeviceFacts, Kernel};
use mamba2_tunedb::joint_template_digest;
use serde::{Deserialize, Serialize};

use crate::{Candidate, Target, TunerError};

/// A device on which candidates are compiled, verified and timed.
///
/// A candidate's failure is an answer, not an error: only a device that cannot be used at all is a [`TunerError`].
pub trait Executor: Sync {
    /// Facts that tuning depends on.
    fn device(&self) -> &DeviceFacts;

    /// What a result of `kernel` depends on beside the shape, the config and the device.
    fn kernel_conditions(&self, kernel: Kernel) -> Conditions;

    /// What a result of `candidate` depends on beside the shape and the device: that of all its kernels.
    fn conditions(&self, candidate: &Candidate) -> Conditions {
        let of_kernels: Vec<Conditions> = candidate
            .kernels()
            .into_iter()
            .map(|k| self.kernel_conditions(k.kernel()))
            .collect();
        let first = of_kernels
            .first()
            .expect("a candidate should have a kernel");
        Conditions {
            template_digest: joint_template_digest(
                of_kernels.iter().map(|c| c.template_digest.clone()),
            ),
            nvrtc: first.nvrtc.clone(),
            driver: first.driver.clone(),
        }
    }

    /// Makes whatever [`Executor::verify`] and [`Executor::measure`] need for a shape: inputs, oracle. They do it themselves if
    /// it was not done; apart, it does not count against the time limit of a candidate.
    ///
    /// # Errors
    /// [`TunerError::Unfit`] if the shape is too large for the device, [`TunerError::Device`] if the device is lost for good.
    fn prepare(&self, _target: &Target) -> Result<(), TunerError> {
        Ok(())
    }

    /// True once the device needs a new process: its context was destroyed by a candidate.
    fn is_lost(&self) -> bool {
        false
    }

    /// Device memory that one candidate may use, in bytes; `None` if unknown.
    fn memory_bytes(&self) -> Option<u64>;

    /// Compiles candidates in parallel, those first whose code serves the most of them. `tell` hears of each when its code is there, from
    /// any thread, until it breaks off. Runs at the same time as the other calls.
    ///
    /// # Errors
    /// [`TunerError::Device`] if no candidate can ever be compiled here.
    fn compile(
        &self,
        target: &Target,
        candidates: &[Candidate],
        tell: Tell<'_>,
    ) -> Result<(), TunerError>;

    /// [`Executor::compile`], with one answer each, in order.
    ///
    /// # Errors
    /// As [`Executor::compile`].
    fn compile_all(
        &self,
        target: &Target,
        candidates: &[Candidate],
    ) -> Result<Vec<Result<Compiled, Failure>>, TunerError> {
        let results = Mutex::new(vec![None; candidates.len()]);
        self.compile(target, candidates, &|step| {
            if let Compiling::Done(members, result) = step {
                let mut results = results.lock().expect("no holder of this lock should panic");
                members
                    .into_iter()
                    .for_each(|i| results[i] = Some(result.clone()));
            }
            ControlFlow::Continue(())
        })?;
        let results = results
            .into_inner()
            .expect("no holder of this lock should panic");
        Ok(results
            .into_iter()
            .map(|r| r.expect("every candidate should have an answer"))
            .collect())
    }

    /// Loads compiled candidates onto the device ahead of their use, all at once. What fails here fails again, and is told, when it is
    /// verified.
    ///
    /// # Errors
    /// [`TunerError::Device`] if the device is lost for good.
    fn load(&self, _target: &Target, _candidates: &[Candidate]) -> Result<(), TunerError> {
        Ok(())
    }

    /// Runs a candidate twice into poisoned outputs and checks them.
    ///
    /// # Errors
    /// [`TunerError::Device`] if the device is lost for good.
    fn verify(
        &self,
        target: &Target,
        candidate: &Candidate,
        check: Check,
    ) -> Result<Result<Verified, Failure>, TunerError>;

    /// Times candidates in interleaved rounds. One answer each, in order: all samples, in microseconds.
    ///
    /// # Errors
    /// [`TunerError::Device`] if the device is lost for good.
    fn measure(
        &self,
        target: &Target,
        candidates: &[Candidate],
        rounds: Rounds,
    ) -> Result<Vec<Result<Vec<f64>, Failure>>, TunerError>;
}

/// What a stored result depends on. A failure is tried again, and a timing taken again, when one of these changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conditions {
    /// Digests of the templates of the kernels involved.
    pub template_digest: String,
    /// Version of the compiler.
    pub nvrtc: String,
    /// Version of the driver.
    pub driver: String,
}

/// Who is told what [`Executor::compile`] does.
pub type Tell<'a> = &'a (dyn Fn(Compiling) -> ControlFlow<()> + Sync);

/// What [`Executor::compile`] tells. Candidates are named by their places in the list; those that are one piece of code go together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compiling {
    /// These are being compiled. May be left out.
    Started(Vec<usize>),
    /// The answer for these.
    Done(Vec<usize>, Result<Compiled, Failure>),
}

/// Which check [`Executor::verify`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// A small problem with the same constants against the float64 oracle.
    Twin,
    /// The shape itself against the outputs of another config, the default if that works.
    RealShape {
        /// The config whose outputs are the standard.
        against: Candidate,
    },
}

/// How often [`Executor::measure`] times each candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rounds {
    /// Times that the list is gone through.
    pub rounds: u32,
    /// Samples of a candidate in each round.
    pub samples: u32,
}

/// What the compiler said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compiled {
    /// Registers of a thread, the largest of the kernels.
    pub registers: u32,
    /// Static shared memory of a block, in bytes, the largest of the kernels.
    pub shared_bytes: u32,
}

/// What the check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// Relative Frobenius error of the output.
    pub out_error: f64,
    /// Relative Frobenius error of the final states; 0 if there are none.
    pub states_error: f64,
}

/// Why a candidate cannot win.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Kind.
    pub kind: FailureKind,
    /// Details: the compiler's words, the error found, the signal.
    pub reason: String,
}

impl Failure {
    /// A failure of `kind`.
    pub fn new(kind: FailureKind, reason: impl Into<String>) -> Failure {
        Failure {
            kind,
            reason: reason.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.reason)
    }
}

/// Kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The compiler refused it.
    Compile,
    /// It spills registers.
    Spill,
    /// It could not be loaded or launched.
    Launch,
    /// Its results are wrong.
    Wrong,
    /// Two runs gave different bits.
    Unstable,
    /// It wrote outside its outputs.
    OutOfBounds,
    /// It did not end in time.
    Hang,
    /// It killed the worker process or its context.
    Crash,
    /// The device had not enough memory; not the candidate's fault for ever.
    OutOfMemory,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [FailureKind; 9] = [
        FailureKind::Compile,
        FailureKind::Spill,
        FailureKind::Launch,
        FailureKind::Wrong,
        FailureKind::Unstable,
        FailureKind::OutOfBounds,
        FailureKind::Hang,
        FailureKind::Crash,
        FailureKind::OutOfMemory,
    ];

    /// As in records and reports.
    pub fn name(self) -> &'static str {
        match self {
            FailureKind::Compile => "compile",
            FailureKind::Spill => "spill",
            FailureKind::Launch => "launch",
            FailureKind::Wrong => "wrong",
            FailureKind::Unstable => "unstable",
            FailureKind::OutOfBounds => "out_of_bounds",
            FailureKind::Hang => "hang",
            FailureKind::Crash => "crash",
            FailureKind::OutOfMemory => "out_of_memory",
        }
    }

    /// True if the same candidate would fail again under the same [`Conditions`], so that it is stored and not retried.
    pub fn is_lasting(self) -> bool {
        self != FailureKind::OutOfMemory
    }
}
