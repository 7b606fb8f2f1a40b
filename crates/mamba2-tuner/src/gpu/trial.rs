//! Runs of one problem on the device into poisoned, guarded outputs.

use mamba2_cuda::{
    CudaError, Device, DeviceBuffer, DeviceTensor, Jit, LoadedForward, LoadedStep, Stream,
};
use mamba2_reference::{
    Bounds, ErrorReport, Generated, GeneratedStep, recurrence, step as step_oracle,
};
use mamba2_spec::{
    Dtype, ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs, StepProblem,
};

use super::compare::{decode, distance};
use super::output::{Output, Scratch};
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

/// Results of a run that stay on the device, for others to be held against.
#[derive(Clone, Debug)]
pub struct Standard {
    out: DeviceBuffer,
    states: Option<DeviceBuffer>,
}

/// Relative distances (2-norms) from a [`Standard`]; zero without one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// Of `out`.
    pub out: f64,
    /// Of the states.
    pub states: f64,
}

/// Outputs of a call, in guarded memory.
struct Outputs {
    out: Output,
    states: Option<Output>,
}

impl Outputs {
    fn each(&self, f: impl FnMut(&Output) -> Result<(), CudaError>) -> Result<(), CudaError> {
        [&self.out].into_iter().chain(&self.states).try_for_each(f)
    }

    /// Makes a call twice on the same memory. `call` returns what it wrote outside its workspace. Nothing is downloaded.
    fn twice(
        &self,
        stream: &Stream,
        standard: Option<&Standard>,
        call: impl Fn() -> Result<Option<String>, CudaError>,
    ) -> Result<Distance, Failure> {
        let run = || {
            self.each(|o| o.reset(stream))?;
            call()
        };
        let both = || {
            let first = run()?;
            self.each(|o| o.keep(stream))?;
            let workspace = first.or(run()?);
            let out = self.out.compare(stream, standard.map(|s| &s.out))?;
            let of_states = standard.and_then(|s| s.states.as_ref());
            let states = self.states.as_ref().map(|o| o.compare(stream, of_states));
            Ok((workspace, out, states.transpose()?))
        };
        let (workspace, out, states) = both().map_err(|e: CudaError| failure_of(&e))?;
        let outside_states = self.states.as_ref().zip(states.as_ref());
        let outside = self
            .out
            .outside(&out)
            .or(workspace)
            .or_else(|| outside_states.and_then(|(o, compared)| o.outside(compared)));
        if let Some(text) = outside {
            return Err(Failure::new(FailureKind::OutOfBounds, text));
        }
        let states = states.unwrap_or_default();
        if out.differing + states.differing > 0 {
            let text = format!(
                "two runs differ in {} elements of out and {} of the states",
                out.differing, states.differing
            );
            return Err(Failure::new(FailureKind::Unstable, text));
        }
        Ok(Distance {
            out: out.relative_frobenius(),
            states: states.relative_frobenius(),
        })
    }

    fn standard(&self, stream: &Stream) -> Result<Standard, CudaError> {
        let copied = Standard {
            out: self.out.copy(stream)?,
            states: self.states.as_ref().map(|o| o.copy(stream)).transpose()?,
        };
        stream.synchronize()?;
        Ok(copied)
    }

    fn read(&self) -> Result<Run, CudaError> {
        Ok(Run {
            out: self.out.read()?,
            states: self
                .states
                .as_ref()
                .map_or_else(|| Ok(Vec::new()), Output::read)?,
        })
    }
}

/// A forward problem with its inputs on the device.
pub struct ForwardTrial {
    /// The problem.
    pub problem: Problem,
    inputs: ForwardInputs<DeviceTensor>,
    outputs: Outputs,
}

impl ForwardTrial {
    /// Uploads inputs and makes room for outputs. `jit` makes the kernel that checks them.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn new(
        device: &Device,
        jit: &Jit,
        problem: &Problem,
        made: &Generated,
        placement: Placement,
    ) -> Result<ForwardTrial, CudaError> {
        let lead = placement.lead_elems();
        let states = place::final_meta(problem, placement);
        let out_meta = place::out_meta(problem, placement);
        let out = Output::poisoned(device, jit, "out", out_meta, lead)?;
        Ok(ForwardTrial {
            problem: problem.clone(),
            inputs: place::forward(device, problem, made, placement)?,
            outputs: Outputs {
                // Tokens behind the last packed sequence may not be touched.
                out: match made.cu_seqlens.as_ref().map(|cu| cu.last()) {
                    Some(last) => out.of_tokens(last.map_or(0, |n| *n as usize)),
                    None => out,
                },
                states: states
                    .map(|meta| Output::poisoned(device, jit, "final_states", meta, lead))
                    .transpose()?,
            },
        })
    }

    /// The tensors of a call.
    pub fn call(&self) -> (&ForwardInputs<DeviceTensor>, ForwardOutputs<DeviceTensor>) {
        (
            &self.inputs,
            ForwardOutputs {
                out: self.outputs.out.view(),
                final_states: self.outputs.states.as_ref().map(Output::view),
            },
        )
    }

    /// Two runs into poison, which must give the same bits. Anything written outside the outputs is a failure, and so is an untouched
    /// tail that was touched. The results stay on the device, where they are measured against `standard`.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn check_twice(
        &self,
        loaded: &LoadedForward,
        stream: &Stream,
        scratch: &Scratch,
        standard: Option<&Standard>,
    ) -> Result<Distance, Failure> {
        let used = loaded.plan().workspace.total_bytes;
        let (inputs, outputs) = self.call();
        self.outputs.twice(stream, standard, || {
            scratch.reset(stream, used)?;
            loaded.enqueue(stream, inputs, &outputs, scratch.buffer())?;
            stream.synchronize()?;
            scratch.outside(used)
        })
    }

    /// [`ForwardTrial::check_twice`], and the result downloaded.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn run_twice(
        &self,
        loaded: &LoadedForward,
        stream: &Stream,
        scratch: &Scratch,
    ) -> Result<Run, Failure> {
        self.check_twice(loaded, stream, scratch, None)?;
        self.outputs.read().map_err(|e| failure_of(&e))
    }

    /// Keeps the result of the last run on the device.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn standard(&self, stream: &Stream) -> Result<Standard, CudaError> {
        self.outputs.standard(stream)
    }
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
        let want = recurrence(problem, &made.reference());
        Oracle::expecting(problem, made, want.out, want.final_states)
    }

    /// Of a forward pass whose right answer is known, dense and row-major. What `out` says of tokens behind the last packed sequence does
    /// not matter.
    pub fn expecting(
        problem: &Problem,
        made: &Generated,
        mut out: Vec<f64>,
        states: Vec<f64>,
    ) -> Oracle {
        if let Some(used) = made.cu_seqlens.as_ref().and_then(|cu| cu.last()) {
            out.truncate(*used as usize * problem.nheads * problem.headdim);
        }
        Oracle {
            out,
            states,
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
        let close = Verified {
            out_error: distance(&run.out, self.dtype, &self.out),
            states_error: self
                .states_dtype
                .map_or(0.0, |dtype| distance(&run.states, dtype, &self.states)),
        };
        let whole = self.is_whole(run);
        if whole && close.out_error <= self.bounds.out && close.states_error <= self.bounds.states {
            return Ok(close);
        }
        self.report(run)
    }

    /// True if there are as many elements as there should be.
    fn is_whole(&self, run: &Run) -> bool {
        let states = self.states_dtype.map_or(0, Dtype::size_bytes);
        run.out.len() >= self.out.len() * self.dtype.size_bytes()
            && run.states.len() == self.states.len() * states
    }

    /// [`Oracle::check`] with everything that can be said: sorts errors, which takes ten times as long.
    fn report(&self, run: &Run) -> Result<Verified, Failure> {
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
    outputs: Outputs,
    state: DeviceTensor,
    /// Rows whose index is negative.
    skipped: Vec<usize>,
}

impl StepTrial {
    /// Uploads inputs and the state cache and makes room for the output.
    ///
    /// # Errors
    /// As [`ForwardTrial::new`].
    pub fn new(
        device: &Device,
        jit: &Jit,
        problem: &StepProblem,
        made: &GeneratedStep,
        placement: Placement,
    ) -> Result<StepTrial, CudaError> {
        let lead = placement.lead_elems();
        let (out, state) = place::step_metas(problem, placement);
        let out = Output::poisoned(device, jit, "out", out, lead)?;
        let content = made.state.to_le_bytes();
        let state = Output::holding(device, jit, "state", state, lead, &content)?;
        let indices = made.state_batch_indices.as_deref();
        let numbered = indices.unwrap_or_default().iter().enumerate();
        Ok(StepTrial {
            problem: problem.clone(),
            inputs: place::step(device, problem, made, placement)?,
            state: state.view(),
            skipped: numbered
                .filter(|(_, i)| **i < 0)
                .map(|(row, _)| row)
                .collect(),
            outputs: Outputs {
                // Nothing of a skipped row may be touched.
                out: match indices {
                    Some(indices) => out.of_rows(indices)?,
                    None => out,
                },
                states: Some(state),
            },
        })
    }

    /// The tensors of a call.
    pub fn call(&self) -> (&StepInputs<DeviceTensor>, StepOutputs<DeviceTensor>) {
        (
            &self.inputs,
            StepOutputs {
                state: self.state.clone(),
                out: self.outputs.out.view(),
            },
        )
    }

    /// Two runs from the same state cache into a poisoned output, as [`ForwardTrial::check_twice`].
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn check_twice(
        &self,
        loaded: &LoadedStep,
        stream: &Stream,
        standard: Option<&Standard>,
    ) -> Result<Distance, Failure> {
        let (inputs, outputs) = self.call();
        self.outputs.twice(stream, standard, || {
            loaded.enqueue(stream, inputs, &outputs)?;
            stream.synchronize()?;
            Ok(None)
        })
    }

    /// [`StepTrial::check_twice`], and the result downloaded. The output of skipped rows, which were left alone, is set to zero in it,
    /// as the oracle has it.
    ///
    /// # Errors
    /// The [`Failure`].
    pub fn run_twice(&self, loaded: &LoadedStep, stream: &Stream) -> Result<Run, Failure> {
        self.check_twice(loaded, stream, None)?;
        let mut run = self.outputs.read().map_err(|e| failure_of(&e))?;
        let p = &self.problem;
        let row_bytes = p.tokens * p.nheads * p.headdim * p.dtype.size_bytes();
        for row in &self.skipped {
            run.out[row * row_bytes..(row + 1) * row_bytes].fill(0);
        }
        Ok(run)
    }

    /// As [`ForwardTrial::standard`].
    ///
    /// # Errors
    /// As [`ForwardTrial::standard`].
    pub fn standard(&self, stream: &Stream) -> Result<Standard, CudaError> {
        self.outputs.standard(stream)
    }
}
