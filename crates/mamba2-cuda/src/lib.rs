//! CUDA for mamba2-jit: finds driver and compiler, compiles rendered kernels to cubins, keeps them, loads and launches them,
//! and times them. The only crate with `unsafe`.
//!
//! Nothing here panics on a machine without a GPU, a driver or NVRTC; [`availability`] says what there is.
//!
//! ```
//! let found = mamba2_cuda::availability();
//! match &found.driver {
//!     Ok(driver) => println!("CUDA {:?} with {} devices", driver.version, driver.devices.len()),
//!     Err(error) => println!("{error}"),
//! }
//! ```
//!
//! # Where NVRTC is looked for
//!
#![doc = include_str!("nvrtc/SEARCH.md")]
//!
//! # Kernels on disk
//!
//! [`CubinCache`] keeps one file a kernel, with the whole [`KernelKey`] inside, published by rename. [`Jit`] stands before it: a
//! process whose kernels are all cached neither opens NVRTC nor calls it.

mod args;
mod availability;
mod cache;
mod device;
mod driver;
mod environment;
mod error;
mod forward;
mod jit;
mod key;
mod memory;
mod module;
mod nvrtc;
mod replay;
mod step;
mod stream;
mod tensor;
mod tensor_map;
mod timer;
mod tools;

pub use availability::{Availability, DriverInfo, NvrtcInfo, availability};
pub use cache::{Cubin, CubinCache, DEFAULT_CACHE_BYTES, Pruned, Wanted};
pub use device::{Current, Device, DeviceInfo};
pub use error::CudaError;
pub use forward::{KernelReport, LoadedForward};
pub use jit::{Jit, JitCounts, JitOutcome, Origin, ShippedCubins};
pub use key::{KernelIdentity, KernelKey};
pub use memory::{DeviceBuffer, Element};
pub use nvrtc::{CompileOptions, Compiled, Nvrtc, NvrtcVersion, Resources, gate_fault};
pub use step::LoadedStep;
pub use stream::{Event, Graph, Stream};
pub use tensor::{DeviceTensor, span_bytes};
pub use timer::{Call, Samples, Timer, TimerPolicy};
pub use tools::{Compared, Comparer, Compares, Copier, Nothing};
