use mamba2_kernels::render_step;
use mamba2_spec::launch::KernelLaunch;
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::rules::check_step_config;
use mamba2_spec::{HasMeta, StepInputs, StepOutputs, StepProblem, check_step};

use crate::args::{Reader, StepArgs, first_stride, outer_strides, row_strides};
use crate::forward::{KernelReport, LoadedKernel, check_stream};
use crate::module::Start;
use crate::replay::Replay;
use crate::{CudaError, Device, DeviceTensor, Jit, Stream};

/// A decode step of one problem with one config, compiled and loaded.
#[derive(Debug)]
pub struct LoadedStep {
    device: Device,
    problem: StepProblem,
    config: StateUpdate,
    replay: Replay, // goes before the kernel in it
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
        let replay = Replay::of(device, &[&kernel.module], |stream| {
            launch(&kernel, stream, &fixed)
        });
        Ok(LoadedStep {
            device: device.clone(),
            problem: problem.clone(),
            config: *config,
            kernel,
            fixed,
            replay,
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

    /// True if steps that follow each other on one stream are launched as a CUDA graph.
    pub fn is_replayed(&self) -> bool {
        self.replay.is_there()
    }

    /// Registers, spills and origin of the kernel.
    pub fn report(&self) -> &KernelReport {
        &self.kernel.report
    }

    /// Bytes of parameters of the launch.
    pub fn parameter_bytes(&self) -> usize {
        size_of::<StepArgs>()
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
        let (dt_strides, dt_token_stride) = row_strides(Some(&inputs.dt));
        let (x_strides, x_token_stride) = row_strides(Some(&inputs.x));
        let (b_strides, b_token_stride) = row_strides(Some(&inputs.b));
        let (c_strides, c_token_stride) = row_strides(Some(&inputs.c));
        let (z_strides, z_token_stride) = row_strides(inputs.z.as_ref());
        let (out_strides, out_token_stride) = row_strides(Some(&outputs.out));
        let args = StepArgs {
            state: read.address("state", &outputs.state)?,
            state_strides: outer_strides(Some(&outputs.state)),
            state_batch_indices: read
                .optional("state_batch_indices", inputs.state_batch_indices.as_ref())?,
            aligned: self.rows_start_on_vectors(inputs, outputs).into(),
            dt: read.address("dt", &inputs.dt)?,
            A: read.address("A", &inputs.a)?,
            dt_bias: read.optional("dt_bias", inputs.dt_bias.as_ref())?,
            dt_row_stride: dt_strides.batch,
            x: read.address("x", &inputs.x)?,
            B: read.address("B", &inputs.b)?,
            C: read.address("C", &inputs.c)?,
            D: read.optional("D", inputs.d.as_ref())?,
            z: read.optional("z", inputs.z.as_ref())?,
            out: read.address("out", &outputs.out)?,
            x_strides,
            b_strides,
            c_strides,
            z_strides,
            out_strides,
            d_head_stride: first_stride(inputs.d.as_ref()),
            dt_token_stride,
            x_token_stride,
            b_token_stride,
            c_token_stride,
            z_token_stride,
            out_token_stride,
            ..self.fixed
        };
        let _bound = self.device.bind()?;
        let replayed = self.replay.enqueue(stream, |parameters| {
            // SAFETY: as in launch.
            unsafe { parameters.set(&args, None::<&()>) }
        });
        if replayed {
            return Ok(());
        }
        launch(&self.kernel, stream, &args)
    }

    /// True if the kernel may load whole vectors of the state, of B and of C.
    fn rows_start_on_vectors(
        &self,
        inputs: &StepInputs<DeviceTensor>,
        outputs: &StepOutputs<DeviceTensor>,
    ) -> bool {
        let vector = self.problem.vector_bytes();
        outputs.state.rows_start_on(vector.state)
            && inputs.b.rows_start_on(vector.inputs)
            && inputs.c.rows_start_on(vector.inputs)
    }
}

/// The device's context must be current.
fn launch(kernel: &LoadedKernel, stream: &Stream, args: &StepArgs) -> Result<(), CudaError> {
    // SAFETY: state_update takes one StepArgs by value. Its pointers are null, for a launch that is recorded and given others, or those of
    // tensors that were checked against the problem the kernel was compiled for; that they are valid was vouched for when they were made.
    unsafe {
        kernel
            .module
            .launch(stream, &kernel.launch, args, None::<&()>, Start::InOrder)
    }
}
