use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use mamba2_kernels::render;
use mamba2_spec::launch::{KernelLaunch, LaunchPlan, WORKSPACE_ALIGN_BYTES, plan};
use mamba2_spec::rules::check_strategy;
use mamba2_spec::{
    ForwardInputs, ForwardOutputs, HasMeta, Kernel, Problem, StrategyConfig, check_forward,
};
use rayon::prelude::*;

use crate::args::{ForwardArgs, Reader, first_stride, outer_strides, token_strides};
use crate::module::{Module, Start};
use crate::replay::Replay;
use crate::tensor_map::{EncodedMaps, TensorMap, TensorMaps};
use crate::{CudaError, Device, DeviceBuffer, DeviceTensor, Jit, Origin, Stream};

/// A forward pass of one problem with one config, compiled and loaded: calls enqueue and nothing else.
#[derive(Debug)]
pub struct LoadedForward {
    device: Device,
    problem: Problem,
    config: StrategyConfig,
    plan: LaunchPlan,
    replay: Replay, // goes before the kernels in it
    kernels: Box<[LoadedKernel]>,
    fixed: ForwardArgs,
    maps: EncodedMaps,
}

/// Bytes of parameters of a kernel with tensor maps. No kernel has more.
pub(crate) const MOST_PARAMETER_BYTES: usize =
    size_of::<ForwardArgs>().next_multiple_of(align_of::<TensorMaps>()) + size_of::<TensorMaps>();

/// One kernel of a loaded call.
pub(crate) struct LoadedKernel {
    pub module: Arc<Module>,
    pub launch: KernelLaunch,
    pub report: KernelReport,
}

impl std::fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.report.fmt(f)
    }
}

/// What is known of a loaded kernel beside its code.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelReport {
    /// How it is launched.
    pub launch: KernelLaunch,
    /// What ptxas said it needs.
    pub resources: Option<crate::Resources>,
    /// Local memory of a thread, as the driver sees it; anything but 0 is a spill or an array out of registers. Unit: bytes.
    pub local_bytes: u32,
    /// Length of the cubin.
    pub cubin_bytes: usize,
    /// Where the code came from.
    pub origin: Origin,
}

impl LoadedKernel {
    /// Compiles or fetches `rendered`, and loads it. A module that is loaded already is found by its identity alone: its cubin is not read
    /// again.
    pub fn load(
        device: &Device,
        jit: &Jit,
        rendered: &mamba2_kernels::Rendered,
    ) -> Result<LoadedKernel, CudaError> {
        let (arch, launch) = (device.facts().arch, rendered.launch);
        let identity = jit.identity(rendered, arch);
        let (module, was_loaded) = device.module(&identity.digest(), || {
            let code = jit.cubin_of(rendered, &identity, arch)?;
            Module::load(device, &code, launch.smem_bytes)
        })?;
        let report = KernelReport {
            launch,
            resources: module.resources,
            local_bytes: module.local_bytes,
            cubin_bytes: module.cubin_bytes,
            origin: if was_loaded {
                Origin::Loaded
            } else {
                module.origin
            },
        };
        Ok(LoadedKernel {
            module,
            launch,
            report,
        })
    }
}

impl LoadedForward {
    /// Compiles the kernels of `config` (in parallel, on the current rayon pool) or takes them from the cache, and loads them.
    /// Must not run while a stream is being captured.
    ///
    /// # Errors
    /// [`CudaError::Spec`] if the config is not legal for the problem on this device, a compile error, or a driver error.
    pub fn load(
        device: &Device,
        jit: &Jit,
        problem: &Problem,
        config: &StrategyConfig,
    ) -> Result<LoadedForward, CudaError> {
        check_strategy(config, problem, device.facts())?;
        let plan = plan(config, problem, device.facts());
        let fixed = ForwardArgs::of(problem, &plan)?;
        let kernels = config
            .kernels()
            .par_iter()
            .zip(&plan.launches)
            .map(|(kernel, launch)| {
                let mut rendered = render(kernel, problem, device.facts());
                rendered.launch = *launch; // the plan knows what the other kernels leave to do
                LoadedKernel::load(device, jit, &rendered)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut loaded = LoadedForward {
            device: device.clone(),
            problem: problem.clone(),
            config: *config,
            plan,
            kernels: kernels.into(),
            fixed,
            maps: EncodedMaps::default(),
            replay: Replay::none(),
        };
        loaded.replay = loaded.record();
        Ok(loaded)
    }

    /// The call as a graph. Not of blocks that wait for each other: a cooperative launch starts 0.6 us later out of a graph.
    fn record(&self) -> Replay {
        let launched = || self.kernels.iter().filter(|k| k.launch.grid > 0);
        if launched().any(|k| k.launch.kernel == Kernel::Sm90ChainForward) {
            return Replay::none();
        }
        let modules: Vec<&Module> = launched().map(|k| &*k.module).collect();
        Replay::of(&self.device, &modules, |stream| {
            let maps = TensorMaps::default();
            self.launch(stream, self.fixed, &maps, 0..self.kernels.len())
        })
    }

    /// The problem it was made for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The config it was made with.
    pub fn config(&self) -> &StrategyConfig {
        &self.config
    }

    /// The device it was loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Launches and workspace.
    pub fn plan(&self) -> &LaunchPlan {
        &self.plan
    }

    /// True if calls that follow each other on one stream are launched as one CUDA graph.
    pub fn is_replayed(&self) -> bool {
        self.replay.is_there()
    }

    /// Registers, spills and origin of each kernel, in launch order.
    pub fn reports(&self) -> impl Iterator<Item = &KernelReport> {
        self.kernels.iter().map(|k| &k.report)
    }

    /// Bytes of parameters of each launch of a call.
    pub fn parameter_bytes(&self) -> impl Iterator<Item = usize> {
        let launched = self.kernels.iter().filter(|k| k.launch.grid > 0);
        launched.map(|k| {
            if k.launch.kernel.needs_wgmma() {
                MOST_PARAMETER_BYTES
            } else {
                size_of::<ForwardArgs>()
            }
        })
    }

    /// Enqueues the forward pass on `stream`. No allocation, no synchronisation; may be captured in a CUDA graph. The contents
    /// of a device-side cu_seqlens are not looked at: see [`mamba2_spec::check_cu_seqlens`].
    ///
    /// The workspace has at least `plan().workspace.total_bytes` bytes, starts at a multiple of
    /// [`WORKSPACE_ALIGN_BYTES`], and belongs to this call until its work is done.
    ///
    /// # Errors
    /// [`CudaError::Spec`] for a tensor that does not fit the problem, [`CudaError::Address`], [`CudaError::WrongDevice`],
    /// [`CudaError::Workspace`]; nothing was enqueued then. A driver error at a launch may leave earlier kernels enqueued.
    pub fn enqueue(
        &self,
        stream: &Stream,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
        workspace: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let args = self.args(stream, inputs, outputs, workspace)?;
        let _bound = self.device.bind()?;
        let maps = self.tensor_maps(inputs, outputs)?;
        let all = 0..self.kernels.len();
        let replayed = self.replay.enqueue(stream, |parameters| {
            self.each_launch(args, &maps, all.clone(), |kernel, args, maps, _| {
                if kernel.launch.grid == 0 {
                    return Ok(());
                }
                // SAFETY: as in launch.
                unsafe { parameters.set(args, maps) }
            })
        });
        if replayed {
            return Ok(());
        }
        self.launch(stream, args, &maps, all)
    }

    /// Enqueues kernel `index` alone, in the order of `plan().launches`, for timing. The kernels before it must have run on this
    /// workspace for its results to mean anything.
    ///
    /// # Errors
    /// As [`LoadedForward::enqueue`]; [`CudaError::View`] for an index beyond the last kernel.
    pub fn enqueue_kernel(
        &self,
        index: usize,
        stream: &Stream,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
        workspace: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        if index >= self.kernels.len() {
            return Err(CudaError::View {
                available: self.kernels.len(),
                needed: index + 1,
            });
        }
        let args = self.args(stream, inputs, outputs, workspace)?;
        let _bound = self.device.bind()?;
        let maps = self.tensor_maps(inputs, outputs)?;
        self.launch(stream, args, &maps, index..index + 1)
    }

    /// Enqueues some of the kernels. The device's context must be current.
    fn launch(
        &self,
        stream: &Stream,
        args: ForwardArgs,
        maps: &TensorMaps,
        which: std::ops::Range<usize>,
    ) -> Result<(), CudaError> {
        self.each_launch(args, maps, which, |kernel, args, maps, start| {
            // SAFETY: every kernel of a forward pass takes one ForwardArgs by value, and those that say so one TensorMaps after it. The
            // pointers are null, for launches that are recorded and given others, or those of tensors whose shapes, strides and dtypes
            // were checked against the problem the kernel was compiled for; that they are valid was vouched for when they were made.
            unsafe {
                kernel
                    .module
                    .launch(stream, &kernel.launch, args, maps, start)
            }
        })
    }

    /// Calls `f` with each of these kernels and what it is launched with.
    fn each_launch(
        &self,
        mut args: ForwardArgs,
        maps: &TensorMaps,
        which: std::ops::Range<usize>,
        mut f: impl FnMut(
            &LoadedKernel,
            &ForwardArgs,
            Option<&TensorMaps>,
            Start,
        ) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut first = true;
        for kernel in &self.kernels[which] {
            args.work_items = kernel.launch.work_items as i64;
            args.blocks_per_group = kernel.launch.blocks_per_group;
            let maps = kernel.launch.kernel.needs_wgmma().then_some(maps);
            let start = match kernel.launch.kernel {
                Kernel::Sm90ChainForward => {
                    args.call = next_call();
                    Start::Together
                }
                _ if !first && self.device.overlaps_launches() => Start::Early,
                _ => Start::InOrder,
            };
            f(kernel, &args, maps, start)?;
            first &= kernel.launch.grid == 0;
        }
        Ok(())
    }

    /// True if these views can be used: kernels that copy by tensor maps want every outer stride of x, B, C, z and out to be positive and
    /// below 2^40 bytes. A call with others needs a config without such kernels.
    pub fn accepts(
        &self,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
    ) -> bool {
        let mut copied = inputs.copied().chain([&outputs.out]);
        !self.uses_tensor_maps(inputs) || copied.all(TensorMap::can_map)
    }

    fn uses_tensor_maps(&self, inputs: &ForwardInputs<DeviceTensor>) -> bool {
        let used = self
            .kernels
            .iter()
            .any(|k| k.launch.kernel.needs_wgmma() && k.launch.grid > 0);
        used && inputs.x.meta().elems() > 0
    }

    /// The tensor maps of this call, empty if no kernel copies by them. The device's context must be current. The kernels of a strategy
    /// have the same boxes.
    fn tensor_maps(
        &self,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
    ) -> Result<TensorMaps, CudaError> {
        let columns = self
            .kernels
            .iter()
            .find_map(|k| k.launch.kernel.x_box_columns());
        match columns {
            Some(columns) if self.uses_tensor_maps(inputs) => {
                self.maps.of(inputs, outputs, columns)
            }
            _ => Ok(TensorMaps::default()),
        }
    }

    /// Checks a call and fills its arguments. Allocates nothing.
    fn args(
        &self,
        stream: &Stream,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
        workspace: &DeviceBuffer,
    ) -> Result<ForwardArgs, CudaError> {
        check_forward(&self.problem, inputs, outputs)?;
        check_stream(stream, &self.device)?;
        let base = check_workspace(workspace, self.plan.workspace.total_bytes, &self.device)?;
        let read = Reader {
            device: &self.device,
        };
        let region = |r: mamba2_spec::launch::Region| base + r.offset_bytes as u64;
        let w = &self.plan.workspace;
        Ok(ForwardArgs {
            x: read.address("x", &inputs.x)?,
            dt: read.address("dt", &inputs.dt)?,
            A: read.address("A", &inputs.a)?,
            B: read.address("B", &inputs.b)?,
            C: read.address("C", &inputs.c)?,
            D: read.optional("D", inputs.d.as_ref())?,
            z: read.optional("z", inputs.z.as_ref())?,
            dt_bias: read.optional("dt_bias", inputs.dt_bias.as_ref())?,
            initial_states: read.optional("initial_states", inputs.initial_states.as_ref())?,
            cu_seqlens: read.optional("cu_seqlens", inputs.cu_seqlens.as_ref())?,
            out: read.address("out", &outputs.out)?,
            final_states: read.optional("final_states", outputs.final_states.as_ref())?,
            dt_out: region(w.dt_out),
            da_cumsum: region(w.da_cumsum),
            state_weight: region(w.state_weight),
            states: region(w.states),
            flags: region(w.flags),
            x_strides: token_strides(Some(&inputs.x)),
            dt_strides: token_strides(Some(&inputs.dt)),
            b_strides: token_strides(Some(&inputs.b)),
            c_strides: token_strides(Some(&inputs.c)),
            z_strides: token_strides(inputs.z.as_ref()),
            out_strides: token_strides(Some(&outputs.out)),
            initial_strides: outer_strides(inputs.initial_states.as_ref()),
            final_strides: outer_strides(outputs.final_states.as_ref()),
            d_head_stride: first_stride(inputs.d.as_ref()),
            ..self.fixed
        })
    }
}

/// A number that flags in a workspace do not hold by chance or from an earlier call: the workspace is not cleared. Never zero, which a
/// flag is when it is down.
fn next_call() -> u64 {
    static NEXT: LazyLock<AtomicU64> =
        LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(std::process::id())));
    NEXT.fetch_add(1, Ordering::Relaxed) << 16 | 1 << 63
}

pub(crate) fn check_stream(stream: &Stream, device: &Device) -> Result<(), CudaError> {
    let (expected, got) = (device.info().ordinal, stream.device().info().ordinal);
    if expected == got {
        Ok(())
    } else {
        Err(CudaError::WrongDevice {
            what: "stream",
            expected,
            got,
        })
    }
}

fn check_workspace(
    workspace: &DeviceBuffer,
    expected_bytes: usize,
    device: &Device,
) -> Result<u64, CudaError> {
    let (expected, got) = (device.info().ordinal, workspace.device().info().ordinal);
    if expected != got {
        return Err(CudaError::WrongDevice {
            what: "workspace",
            expected,
            got,
        });
    }
    let (address, got_bytes, align) = (
        workspace.address(),
        workspace.bytes(),
        WORKSPACE_ALIGN_BYTES,
    );
    let null = address == 0 && expected_bytes > 0;
    if got_bytes < expected_bytes || null || !address.is_multiple_of(align as u64) {
        return Err(CudaError::Workspace {
            expected_bytes,
            got_bytes,
            align,
            address,
        });
    }
    Ok(address)
}
