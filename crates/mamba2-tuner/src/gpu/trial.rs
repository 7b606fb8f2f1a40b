//! Runs of one problem on the device into poisoned, guarded outputs.

use mamba2_cuda::{CudaError, Device, DeviceTensor, LoadedForward, LoadedStep, Stream};
use mamba2_reference::{
    Bounds, ErrorReport, Generated, GeneratedStep, recurrence, step as step_oracle,
};
use mamba2_spec::{
    Dtype, ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs, StepProblem,
};

use super::compare::decode;
use super::output::{Output, POISON, Scratch};
use super::place::{self, Placement};
use crate::executor::{Failure, FailureKind, Verified};

/// The kind of failure that a CUDA error is.
pub fn failure_of(error: &CudaError) -> Failure {
    let kind = match error {
        _ if error.is_fatal() => FailureKind::Crash,
        _ if error.is_out_of_memory() => FailureKind::OutOfMemory,
        CudaError::Compile { .. } | CudaError::Nvrtc { .. } | CudaError::UnsupportedArch { .. } => {
            FailureKind::Compile
        }
        CudaError::Gate { .. } => FailureKind::Spill,
        _ => FailureKind::Launch,
    };
    Failure::new(kind, error.to_string())
}

/// What one run left in the outputs: dense bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// `out`.
    pub out: Vec<u8>,
    /// `final_states`, or the whole state cache of a decode step; empty if there are none.
    pub states: Vec<u8>,
}

/// A forward problem with its inputs on the device.
pub struct ForwardTrial {
    /// The problem.
    pub problem: Problem,
    inputs: ForwardInputs<DeviceTensor>,
    out: Output,
    states: Option<Output>,
    /// Tokens that belong to a sequence; those behind them may not be touched.
    used_tokens: usize,
}

impl ForwardTrial {
    /// Uploads inputs and makes room for outputs.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn new(
        device: &Device,
        problem: &Problem,
        made: &Generated,
        placement: Placement,
    ) -> Result<ForwardTrial, CudaError> {
        let lead = placement.lead_elems();
        let states = place::final_meta(problem, placement);
        Ok(ForwardTrial {
            problem: problem.clone(),
            inputs: place::forward(device, problem, made, placement)?,
            out: Output::poisoned(device, "out", place::out_meta(problem, placement), lead)?,
            states: states
                .map(|meta| Output::poisoned(device, "final_states", meta, lead))
                .transpose()?,
            used_tokens: match &made.cu_seqlens {
                Some(cu) => cu.last().map_or(0, |last| *last as usize),
                None => problem.batch * problem.seqlen,
            },
        })
    }

    /// The tensors of a call.
    pub fn call(&self) -> (&ForwardInputs<DeviceTensor>, ForwardOutputs<DeviceTensor>) {
        (
            &self.inputs,
            ForwardOutputs {
                out: self.out.view(),
                final_states: self.states.as_ref().map(Output::view),
            },
        )
    }

    /// One run into poison. Anything written outside the outputs is a failure, and so is an untouched tail that was touched.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn run(
        &self,
        loaded: &LoadedForward,
        stream: &Stream,
        scratch: &Scratch,
    ) -> Result<Run, Failure> {
        let used = loaded.plan().workspace.total_bytes;
        let (inputs, outputs) = self.call();
        let enqueue = || {
            self.out.reset()?;
            self.states.as_ref().map_or(Ok(()), Output::reset)?;
            scratch.reset(stream, used)?;
            loaded.enqueue(stream, inputs, &outputs, scratch.buffer())?;
            stream.synchronize()?;
            let states = self.states.as_ref().map(Output::read).transpose()?;
            Ok((self.out.read()?, states, scratch.outside(used)?))
        };
        let (out, states, workspace) = enqueue().map_err(|e: CudaError| failure_of(&e))?;
        let outside = out
            .outside
            .or(workspace)
            .or(states.as_ref().and_then(|s| s.outside.clone()));
        let used_bytes = self.used_tokens
            * self.problem.nheads
            * self.problem.headdim
            * self.problem.dtype.size_bytes();
        let tail = out.dense[used_bytes..].iter().position(|b| *b != POISON);
        let tail = tail.map(|at| format!("out: byte {at} of the padded tail was written"));
        if let Some(text) = outside.or(tail) {
            return Err(Failure::new(FailureKind::OutOfBounds, text));
        }
        Ok(Run {
            out: out.dense,
            states: states.map(|s| s.dense).unwrap_or_default(),
        })
    }

    /// Two runs that must give the same bits.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn run_twice(
        &self,
        loaded: &LoadedForward,
        stream: &Stream,
        scratch: &Scratch,
    ) -> Result<Run, Failure> {
        let first = self.run(loaded, stream, scratch)?;
        same_bits(first, self.run(loaded, stream, scratch)?)
    }
}

fn same_bits(first: Run, second: Run) -> Result<Run, Failure> {
    if first == second {
        return Ok(first);
    }
    let differing = |a: &[u8], b: &[u8]| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let text = format!(
        "two runs differ in {} bytes of out and {} of the states",
        differing(&first.out, &second.out),
        differing(&first.states, &second.states)
    );
    Err(Failure::new(FailureKind::Unstable, text))
}

/// What a run should give, by the float64 oracle.
pub struct Oracle {
    out: Vec<f64>,
    states: Vec<f64>,
    dtype: Dtype,
    states_dtype: Option<Dtype>,
    bounds: Bounds,
}

impl Oracle {
    /// Of a forward pass.
    pub fn forward(problem: &Problem, made: &Generated) -> Oracle {
        let mut want = recurrence(problem, &made.reference());
        if let Some(used) = made.cu_seqlens.as_ref().and_then(|cu| cu.last()) {
            want.out
                .truncate(*used as usize * problem.nheads * problem.headdim);
        }
        Oracle {
            out: want.out,
            states: want.final_states,
            dtype: problem.dtype,
            states_dtype: problem.final_states,
            bounds: Bounds::of(problem),
        }
    }

    /// Of a decode step. Rows that are skipped stay as poisoned, and are left out of the comparison.
    pub fn step(problem: &StepProblem, made: &GeneratedStep) -> Oracle {
        let want = step_oracle(problem, &made.reference());
        Oracle {
            out: want.out,
            states: want.state,
            dtype: problem.dtype,
            states_dtype: Some(problem.state_dtype),
            bounds: Bounds::of_step(problem),
        }
    }

    /// Compares a run.
    ///
    /// # Errors
    /// [`FailureKind::Wrong`] with the full error report.
    pub fn check(&self, run: &Run) -> Result<Verified, Failure> {
        let out = decode(&run.out, self.dtype);
        let out = ErrorReport::compare(&out[..self.out.len().min(out.len())], &self.out);
        let states = self
            .states_dtype
            .map(|dtype| ErrorReport::compare(&decode(&run.states, dtype), &self.states));
        let mut faults = Vec::new();
        if !out.within(self.bounds.out) {
            faults.push(format!(
                "out: expected a relative error of at most {:.1e}, got {out}",
                self.bounds.out
            ));
        }
        if let Some(states) = states.filter(|s| !s.within(self.bounds.states)) {
            faults.push(format!(
                "states: expected a relative error of at most {:.1e}, got {states}",
                self.bounds.states
            ));
        }
        if faults.is_empty() {
            let states_error = states.map_or(0.0, |s| s.relative_frobenius);
            return Ok(Verified {
                out_error: out.relative_frobenius,
                states_error,
            });
        }
        Err(Failure::new(FailureKind::Wrong, faults.join("; ")))
    }

    /// The bounds that [`Oracle::check`] holds a run to.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }
}

/// A decode problem with its inputs on the device.
pub struct StepTrial {
    /// The problem.
    pub problem: StepProblem,
    inputs: StepInputs<DeviceTensor>,
    out: Output,
    state: Output,
    /// Rows whose index is negative: nothing of them may be touched.
    skipped: Vec<usize>,
}

impl StepTrial {
    /// Uploads inputs and the state cache and makes room for the output.
    ///
    /// # Errors
    /// As [`ForwardTrial::new`].
    pub fn new(
        device: &Device,
        problem: &StepProblem,
        made: &GeneratedStep,
        placement: Placement,
    ) -> Result<StepTrial, CudaError> {
        let lead = placement.lead_elems();
        let (out, state) = place::step_metas(problem, placement);
        let indices = made.state_batch_indices.iter().flatten().enumerate();
        Ok(StepTrial {
            problem: problem.clone(),
            inputs: place::step(device, problem, made, placement)?,
            out: Output::poisoned(device, "out", out, lead)?,
            state: Output::holding(device, "state", state, lead, &made.state.to_le_bytes())?,
            skipped: indices
                .filter(|(_, i)| **i < 0)
                .map(|(row, _)| row)
                .collect(),
        })
    }

    /// The tensors of a call.
    pub fn call(&self) -> (&StepInputs<DeviceTensor>, StepOutputs<DeviceTensor>) {
        (
            &self.inputs,
            StepOutputs {
                state: self.state.view(),
                out: self.out.view(),
            },
        )
    }

    /// One run from the same state cache into a poisoned output. The output of skipped rows is set to zero in the result, as
    /// the oracle has it, after it was found untouched.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn run(&self, loaded: &LoadedStep, stream: &Stream) -> Result<Run, Failure> {
        let (inputs, outputs) = self.call();
        let enqueue = || {
            self.out.reset()?;
            self.state.reset()?;
            loaded.enqueue(stream, inputs, &outputs)?;
            stream.synchronize()?;
            Ok((self.out.read()?, self.state.read()?))
        };
        let (mut out, state) = enqueue().map_err(|e: CudaError| failure_of(&e))?;
        let p = &self.problem;
        let row_bytes = p.tokens * p.nheads * p.headdim * p.dtype.size_bytes();
        let mut outside = out.outside.or(state.outside);
        for row in &self.skipped {
            let bytes = &mut out.dense[row * row_bytes..(row + 1) * row_bytes];
            if bytes.iter().any(|b| *b != POISON) {
                outside.get_or_insert_with(|| {
                    format!("out: row {row}, which is to be skipped, was written")
                });
            }
            bytes.fill(0);
        }
        match outside {
            Some(text) => Err(Failure::new(FailureKind::OutOfBounds, text)),
            None => Ok(Run {
                out: out.dense,
                states: state.dense,
            }),
        }
    }

    /// Two runs that must give the same bits.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn run_twice(&self, loaded: &LoadedStep, stream: &Stream) -> Result<Run, Failure> {
        let first = self.run(loaded, stream)?;
        same_bits(first, self.run(loaded, stream)?)
    }
}
