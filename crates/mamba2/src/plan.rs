use mamba2_cpu::{HostTensor, HostTensorMut};
use mamba2_cuda::{DeviceBuffer, DeviceTensor, KernelReport, LoadedForward, LoadedStep, Stream};
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{
    Alignment, ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs, StepProblem,
};

use crate::choice::Choice;
use crate::{Error, host};

/// A forward pass that is ready to run: see [`crate::Engine::plan`].
#[derive(Debug)]
pub struct Plan {
    problem: Problem,
    choice: Choice,
    loaded: Option<Loaded>,
}

/// The kernels of a plan on CUDA.
#[derive(Debug)]
struct Loaded {
    /// For calls that keep what the problem promises.
    main: LoadedForward,
    /// For calls of a problem that promises 16-byte alignment with tensors that do not have it, or that a fast path cannot take.
    unaligned: Option<LoadedForward>,
}

impl Plan {
    pub(crate) fn cpu(problem: Problem) -> Plan {
        Plan {
            problem,
            choice: Choice::cpu(),
            loaded: None,
        }
    }

    pub(crate) fn cuda(
        problem: Problem,
        main: LoadedForward,
        unaligned: Option<LoadedForward>,
        choice: Choice,
    ) -> Plan {
        Plan {
            problem,
            choice,
            loaded: Some(Loaded { main, unaligned }),
        }
    }

    /// The problem it was made for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Which config it runs with, and who chose it.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Bytes of workspace that [`Plan::forward`] needs; 0 on the CPU backend.
    pub fn workspace_bytes(&self) -> usize {
        let bytes = |l: &LoadedForward| l.plan().workspace.total_bytes;
        self.loaded.as_ref().map_or(0, |l| {
            bytes(&l.main).max(l.unaligned.as_ref().map_or(0, bytes))
        })
    }

    /// Every kernel that is ready, with its registers, spills and origin: first those of [`Plan::choice`], then those for calls
    /// with unaligned tensors. Empty on the CPU backend.
    pub fn reports(&self) -> Vec<&KernelReport> {
        let all = self
            .loaded
            .iter()
            .flat_map(|l| std::iter::once(&l.main).chain(&l.unaligned));
        all.flat_map(LoadedForward::reports).collect()
    }

    /// The loaded kernels of [`Plan::choice`], for timing; `None` on the CPU backend.
    pub fn loaded(&self) -> Option<&LoadedForward> {
        self.loaded.as_ref().map(|l| &l.main)
    }

    /// Enqueues the forward pass on `stream`. No allocation, no synchronisation; may be captured in a CUDA graph. Calls that follow
    /// each other on one stream are launched as a graph of the plan's own (but not chains, whose blocks wait for each other), which takes the
    /// host half the time of one launch and a third of that of three; profilers show it as one unless asked for its nodes
    /// (`nsys profile --cuda-graph-trace=node`). Threads may share a plan.
    ///
    /// Tensors have the shapes and dtypes of [`Problem`]. If the problem promises 16-byte alignment and these tensors do not have
    /// it, the call takes the other path of the plan. `workspace` has [`Plan::workspace_bytes`] and belongs to the call
    /// until its work is done. Offsets in a device-side cu_seqlens are not looked at: check them where they are made, with
    /// [`mamba2_spec::check_cu_seqlens`]. No output may share memory with an input or with another output: kernels of one call overlap.
    ///
    /// # Errors
    /// [`Error::NotOnDevice`] on the CPU backend, [`Error::Cuda`] for a tensor or workspace that does not fit; nothing was enqueued.
    pub fn forward(
        &self,
        stream: &Stream,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
        workspace: &DeviceBuffer,
    ) -> Result<(), Error> {
        let loaded = self.loaded.as_ref().ok_or(Error::NotOnDevice)?;
        let path = match &loaded.unaligned {
            Some(any)
                if inputs.alignment(outputs) == Alignment::Element
                    || !loaded.main.accepts(inputs, outputs) =>
            {
                any
            }
            _ => &loaded.main,
        };
        Ok(path.enqueue(stream, inputs, outputs, workspace)?)
    }

    /// Computes a forward pass on host tensors and waits for it, on either backend. On CUDA, views keep their strides on the
    /// device, and memory for inputs, outputs and workspace is taken for the call.
    ///
    /// # Errors
    /// [`Error::Spec`], [`Error::Cpu`] or [`Error::Cuda`]. After a refusal no output was written.
    pub fn forward_host(
        &self,
        inputs: &ForwardInputs<HostTensor<'_>>,
        outputs: &mut ForwardOutputs<HostTensorMut<'_>>,
    ) -> Result<(), Error> {
        match &self.loaded {
            None => Ok(mamba2_cpu::forward(&self.problem, inputs, outputs)?),
            Some(loaded) => host::forward(self, loaded.main.device(), inputs, outputs),
        }
    }
}

/// A decode step that is ready to run: see [`crate::Engine::step_plan`].
#[derive(Debug)]
pub struct StepPlan {
    problem: StepProblem,
    choice: Choice<StateUpdate>,
    loaded: Option<LoadedStep>,
}

impl StepPlan {
    pub(crate) fn cpu(problem: StepProblem) -> StepPlan {
        StepPlan {
            problem,
            choice: Choice::cpu(),
            loaded: None,
        }
    }

    pub(crate) fn cuda(
        problem: StepProblem,
        loaded: LoadedStep,
        choice: Choice<StateUpdate>,
    ) -> StepPlan {
        StepPlan {
            problem,
            choice,
            loaded: Some(loaded),
        }
    }

    /// The problem it was made for.
    pub fn problem(&self) -> &StepProblem {
        &self.problem
    }

    /// Which config it runs with, and who chose it.
    pub fn choice(&self) -> &Choice<StateUpdate> {
        &self.choice
    }

    /// The loaded kernel, for timing; `None` on the CPU backend.
    pub fn loaded(&self) -> Option<&LoadedStep> {
        self.loaded.as_ref()
    }

    /// Enqueues the step on `stream`. No allocation, no synchronisation, no workspace; may be captured in a CUDA graph. As with
    /// [`Plan::forward`], steps that follow each other on one stream are launched as a graph of the plan's own. Indices on
    /// the device are not looked at: those at or above `slots`, or the same slot twice, are the caller's fault to avoid.
    ///
    /// # Errors
    /// [`Error::NotOnDevice`] on the CPU backend, [`Error::Cuda`] for a tensor that does not fit; nothing was enqueued.
    pub fn step(
        &self,
        stream: &Stream,
        inputs: &StepInputs<DeviceTensor>,
        outputs: &StepOutputs<DeviceTensor>,
    ) -> Result<(), Error> {
        Ok(self
            .loaded
            .as_ref()
            .ok_or(Error::NotOnDevice)?
            .enqueue(stream, inputs, outputs)?)
    }

    /// Computes a step on host tensors and waits for it, on either backend. The state is updated in place.
    ///
    /// # Errors
    /// [`Error::Spec`], [`Error::Cpu`] or [`Error::Cuda`]. After a refusal nothing was written.
    pub fn step_host(
        &self,
        inputs: &StepInputs<HostTensor<'_>>,
        outputs: &mut StepOutputs<HostTensorMut<'_>>,
    ) -> Result<(), Error> {
        match &self.loaded {
            None => Ok(mamba2_cpu::step(&self.problem, inputs, outputs)?),
            Some(loaded) => host::step(self, loaded.device(), inputs, outputs),
        }
    }
}
