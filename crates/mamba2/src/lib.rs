//! Mamba-2 SSD forward pass and decode step.
//!
//! An [`Engine`] has a backend: the CPU, or a CUDA device whose kernels are compiled at run time by NVRTC and tuned per shape. A
//! [`Plan`] is a forward pass made ready for one [`Problem`]; [`StepPlan`] is a decode step.
//!
//! ```
//! use mamba2::{Dtype, Engine, ForwardInputs, ForwardOutputs, HostData, HostDataMut, HostTensor, HostTensorMut, TensorMeta};
//!
//! let engine = Engine::builder().cpu().build()?;
//! let plan = engine.plan(&"b=1,l=2,h=1,p=1,g=1,n=1,dtype=f32,d=none,init=none,final=none".parse()?)?;
//!
//! let view = |shape: &[usize], data| HostTensor::new(TensorMeta::contiguous(Some(Dtype::F32), shape), HostData::F32(data));
//! let inputs = ForwardInputs {
//!     x: view(&[1, 2, 1, 1], &[1.0, 0.0])?,
//!     dt: view(&[1, 2, 1], &[1.0, 1.0])?,
//!     a: view(&[1], &[-1.0])?,
//!     b: view(&[1, 2, 1, 1], &[1.0, 1.0])?,
//!     c: view(&[1, 2, 1, 1], &[1.0, 1.0])?,
//!     d: None, z: None, dt_bias: None, initial_states: None, cu_seqlens: None,
//! };
//! let mut y = [0f32; 2];
//! let out = HostTensorMut::new(TensorMeta::contiguous(Some(Dtype::F32), &[1, 2, 1, 1]), HostDataMut::F32(&mut y))?;
//! plan.forward_host(&inputs, &mut ForwardOutputs { out, final_states: None })?;
//! assert!((y[1] - (-1f32).exp()).abs() < 1e-6);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! On CUDA, with tensors that are already on the device (of this library, of cudarc, or raw pointers):
//!
//! ```no_run
//! # use mamba2::{DeviceTensor, Engine, ForwardInputs, ForwardOutputs, Problem};
//! # fn tensors() -> (ForwardInputs<DeviceTensor>, ForwardOutputs<DeviceTensor>) { unimplemented!() }
//! let engine = Engine::builder().cuda(0)?.build()?;
//! let plan = engine.plan(&"b=4,l=16384,h=8,p=64,g=1,n=128".parse()?)?;
//! let device = engine.device().expect("a CUDA engine has a device");
//! let workspace = device.alloc(plan.workspace_bytes())?;
//! let stream = device.stream()?;
//! let (inputs, outputs) = tensors();
//! plan.forward(&stream, &inputs, &outputs, &workspace)?; // enqueued, no more
//! stream.synchronize()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod bundles;
mod choice;
mod engine;
mod error;
mod host;
mod plan;

pub use choice::Choice;
pub use engine::{Backend, CUBIN_DIRECTORY, Engine, EngineBuilder, TuneHook};
pub use error::Error;
pub use plan::{Plan, StepPlan};

pub use mamba2_cpu::{CpuError, HostData, HostDataMut, HostTensor, HostTensorMut};
pub use mamba2_cuda::{
    Availability, CubinCache, CudaError, Current, Device, DeviceBuffer, DeviceTensor, Event, Graph,
    Jit, JitCounts, KernelReport, LoadedForward, LoadedStep, Samples, Stream, Timer, TimerPolicy,
    availability, span_bytes,
};
pub use mamba2_spec::{
    self as spec, Alignment, Arch, ChunkSize, DKind, DeviceFacts, DtLimit, Dtype, ForwardInputs,
    ForwardOutputs, HasMeta, Precision, Problem, SpecError, StepInputs, StepOutputs, StepProblem,
    StrategyConfig, TensorMeta, check_cu_seqlens,
};
pub use mamba2_tunedb::{CacheDir, Ladder, Mode, Record, Tier};
