use mamba2_kernels::render_step;
use mamba2_spec::launch::KernelLaunch;
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::rules::check_step_config;
use mamba2_spec::{StepInputs, StepOutputs, StepProblem, check_step};

use crate::args::{Reader, StepArgs, first_stride, outer_strides, token_strides};
use crate::forward::{KernelReport, LoadedKernel, check_stream};
use crate::{CudaError, Device, DeviceTensor, Jit, Stream};

/// A decode step of one problem with one config, compiled and loaded.
#[derive(Debug)]
pub struct LoadedStep {
    device: Device,
    problem: StepProblem,
    config: StateUpdate,
    kernel: LoadedKernel,
    fixed: StepArgs,
}

impl LoadedStep {
    /// Compiles the kernel or takes it from the cache, and loads it. Must not run while a stream is being captured.
    ///
    /// # Errors
    /// [`CudaError::Spec`] if the config is not legal for the problem on this device, a compile error, or a driver error.
    pub fn load(
        device: &Device,
        jit: &Jit,
        problem: &StepProblem,
        config: &StateUpdate,
    ) -> Result<LoadedStep, CudaError> {
        check_step_config(config, problem, device.facts())?;
        let fixed = StepArgs::of(problem)?;
        let kernel =
            LoadedKernel::load(device, jit, &render_step(config, problem, device.facts()))?;
        Ok(LoadedStep {
            device: device.clone(),
            problem: problem.clone(),
            config: *config,
            kernel,
            fixed,
        })
    }

    /// The problem it was made for.
    pub fn problem(&self) -> &StepProblem {
        &self.problem
    }

    /// The config it was made with.
    pub fn config(&self) -> &StateUpdate {
        &self.config
    }

    /// The device it was loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How the kernel is launched.
    pub fn launch(&self) -> &KernelLaunch {
        &self.kernel.launch
    }

    /// Registers, spills and origin of the kernel.
    pub fn report(&self) -> &KernelReport {
        &self.kernel.report
    }

    /// Enqueues the step on `stream`. No allocation, no synchronisation; may be captured in a CUDA graph. Rows whose index is
    /// negative are skipped; an index of `slots` or more is not looked for here.
    ///
    /// # Errors
    /// [`CudaError::Spec`] for a tensor that does not fit the problem, [`CudaError::Address`], [`CudaError::WrongDevice`], or a
    /// driver error. Nothing was enqueued.
    pub fn enqueue(
        &self,
        stream: &Stream,
        inputs: &StepInputs<DeviceTensor>,
        outputs: &StepOutputs<DeviceTensor>,
    ) -> Result<(), CudaError> {
        check_step(&self.problem, inputs, outputs)?;
        check_stream(stream, &self.device)?;
        let read = Reader {
            device: &self.device,
        };
        let args = StepArgs {
            state: read.address("state", &outputs.state)?,
            x: read.address("x", &inputs.x)?,
            dt: read.address("dt", &inputs.dt)?,
            A: read.address("A", &inputs.a)?,
            B: read.address("B", &inputs.b)?,
            C: read.address("C", &inputs.c)?,
            D: read.optional("D", inputs.d.as_ref())?,
            z: read.optional("z", inputs.z.as_ref())?,
            dt_bias: read.optional("dt_bias", inputs.dt_bias.as_ref())?,
            state_batch_indices: read
                .optional("state_batch_indices", inputs.state_batch_indices.as_ref())?,
            out: read.address("out", &outputs.out)?,
            x_strides: token_strides(Some(&inputs.x)),
            dt_strides: token_strides(Some(&inputs.dt)),
            b_strides: token_strides(Some(&inputs.b)),
            c_strides: token_strides(Some(&inputs.c)),
            z_strides: token_strides(inputs.z.as_ref()),
            out_strides: token_strides(Some(&outputs.out)),
            state_strides: outer_strides(Some(&outputs.state)),
            d_head_stride: first_stride(inputs.d.as_ref()),
            indices_stride: first_stride(inputs.state_batch_indices.as_ref()),
            work_items: self.kernel.launch.work_items as i64,
            ..self.fixed
        };
        let _bound = self.device.bind()?;
        // SAFETY: state_update takes one StepArgs by value. Its pointers are those of tensors that were checked against the problem the
        // kernel was compiled for; that they are valid was vouched for when they were made.
        unsafe {
            self.kernel
                .module
                .launch(stream, &self.kernel.launch, &args, None::<&()>, false)
        }
    }
}
