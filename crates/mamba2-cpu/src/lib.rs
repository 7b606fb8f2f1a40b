//! The CPU backend of mamba2-jit: everything the operator can do, on any machine, without CUDA.
//!
//! [`forward`] is the chunked forward pass, [`step`] the decode step, both on strided views of host memory
//! ([`HostTensor`], [`HostTensorMut`]). Work is spread over the current rayon pool.
//!
//! ```
//! use mamba2_cpu::{HostData, HostDataMut, HostTensor, HostTensorMut, forward};
//! use mamba2_spec::{Dtype, ForwardInputs, ForwardOutputs, Problem, TensorMeta};
//!
//! let problem: Problem = "b=1,l=3,h=1,p=1,g=1,n=1,dtype=f32,d=none,init=none,final=none".parse()?;
//! let view = |shape: &[usize], data| HostTensor::new(TensorMeta::contiguous(Some(Dtype::F32), shape), HostData::F32(data));
//! let inputs = ForwardInputs {
//!     x: view(&[1, 3, 1, 1], &[1.0, 0.0, 0.0])?,
//!     dt: view(&[1, 3, 1], &[1.0; 3])?,
//!     a: view(&[1], &[-1.0])?,
//!     b: view(&[1, 3, 1, 1], &[1.0; 3])?,
//!     c: view(&[1, 3, 1, 1], &[1.0; 3])?,
//!     d: None, z: None, dt_bias: None, initial_states: None, cu_seqlens: None,
//! };
//! let mut y = [0f32; 3];
//! let out = TensorMeta::contiguous(Some(Dtype::F32), &[1, 3, 1, 1]);
//! let out = HostTensorMut::new(out, HostDataMut::F32(&mut y))?;
//! forward(&problem, &inputs, &mut ForwardOutputs { out, final_states: None })?;
//! assert!((y[2] - (-2f32).exp()).abs() < 1e-6);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod blocks;
mod chunk;
mod error;
mod forward;
mod math;
mod products;
mod step;
mod tensor;
mod views;
mod workers;

pub use error::CpuError;
pub use forward::{DEFAULT_CHUNK_SIZE, forward, scratch_bytes};
pub use step::step;
pub use tensor::{HostData, HostDataMut, HostTensor, HostTensorMut};
