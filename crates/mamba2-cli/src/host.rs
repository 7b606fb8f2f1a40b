//! Owned tensors in host memory, and the views that the engine takes.

use half::{bf16, f16};
use mamba2_cpu::{CpuError, HostData, HostDataMut, HostTensor, HostTensorMut};
use mamba2_spec::{Dtype, HasMeta, TensorMeta};

/// Contiguous elements of one dtype.
#[derive(Clone, Debug, PartialEq)]
enum Elements {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// A contiguous tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedTensor {
    meta: TensorMeta,
    elements: Elements,
}

impl OwnedTensor {
    /// All zeros.
    pub fn zeros(dtype: Dtype, shape: &[usize]) -> OwnedTensor {
        let n = shape.iter().product();
        let elements = match dtype {
            Dtype::Bf16 => Elements::Bf16(vec![bf16::ZERO; n]),
            Dtype::F16 => Elements::F16(vec![f16::ZERO; n]),
            Dtype::F32 => Elements::F32(vec![0.0; n]),
        };
        OwnedTensor {
            meta: TensorMeta::contiguous(Some(dtype), shape),
            elements,
        }
    }

    /// From little-endian bytes; `dtype` is `None` for i32. The length must be the product of `shape` times the element size.
    pub fn from_le_bytes(dtype: Option<Dtype>, shape: &[usize], bytes: &[u8]) -> OwnedTensor {
        let (pairs, quads) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
        let elements = match dtype {
            Some(Dtype::Bf16) => {
                Elements::Bf16(pairs.iter().map(|b| bf16::from_le_bytes(*b)).collect())
            }
            Some(Dtype::F16) => {
                Elements::F16(pairs.iter().map(|b| f16::from_le_bytes(*b)).collect())
            }
            Some(Dtype::F32) => {
                Elements::F32(quads.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            None => Elements::I32(quads.iter().map(|b| i32::from_le_bytes(*b)).collect()),
        };
        OwnedTensor {
            meta: TensorMeta::contiguous(dtype, shape),
            elements,
        }
    }

    /// From float64 values, rounded to `dtype`.
    pub fn from_f64(dtype: Dtype, shape: &[usize], values: &[f64]) -> OwnedTensor {
        let elements = match dtype {
            Dtype::Bf16 => Elements::Bf16(values.iter().map(|v| bf16::from_f64(*v)).collect()),
            Dtype::F16 => Elements::F16(values.iter().map(|v| f16::from_f64(*v)).collect()),
            Dtype::F32 => Elements::F32(values.iter().map(|v| *v as f32).collect()),
        };
        OwnedTensor {
            meta: TensorMeta::contiguous(Some(dtype), shape),
            elements,
        }
    }

    /// An index tensor.
    pub fn from_i32(shape: &[usize], values: Vec<i32>) -> OwnedTensor {
        OwnedTensor {
            meta: TensorMeta::contiguous(None, shape),
            elements: Elements::I32(values),
        }
    }

    /// Extents of the axes.
    pub fn shape(&self) -> &[usize] {
        self.meta.shape()
    }

    /// Element type, `None` for i32.
    pub fn dtype(&self) -> Option<Dtype> {
        self.meta.dtype
    }

    /// The values as float64.
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.elements {
            Elements::Bf16(v) => v.iter().map(|x| x.to_f64()).collect(),
            Elements::F16(v) => v.iter().map(|x| x.to_f64()).collect(),
            Elements::F32(v) => v.iter().map(|x| f64::from(*x)).collect(),
            Elements::I32(v) => v.iter().map(|x| f64::from(*x)).collect(),
        }
    }

    /// The values of an index tensor; `None` for float tensors.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.elements {
            Elements::I32(v) => Some(v),
            _ => None,
        }
    }

    /// The values as little-endian bytes.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match &self.elements {
            Elements::Bf16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Elements::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Elements::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Elements::I32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// A view to read.
    pub fn view(&self) -> Result<HostTensor<'_>, CpuError> {
        let data = match &self.elements {
            Elements::Bf16(v) => HostData::Bf16(v),
            Elements::F16(v) => HostData::F16(v),
            Elements::F32(v) => HostData::F32(v),
            Elements::I32(v) => HostData::I32(v),
        };
        HostTensor::new(self.meta, data)
    }

    /// A view to write; index tensors are refused by the engine's dtype check, so they are handed over as empty floats.
    pub fn view_mut(&mut self) -> Result<HostTensorMut<'_>, CpuError> {
        let data = match &mut self.elements {
            Elements::Bf16(v) => HostDataMut::Bf16(v),
            Elements::F16(v) => HostDataMut::F16(v),
            Elements::F32(v) => HostDataMut::F32(v),
            Elements::I32(_) => HostDataMut::F32(&mut []),
        };
        HostTensorMut::new(self.meta, data)
    }
}

impl HasMeta for OwnedTensor {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    fn base_address(&self) -> u64 {
        match &self.elements {
            Elements::Bf16(v) => v.as_ptr().addr() as u64,
            Elements::F16(v) => v.as_ptr().addr() as u64,
            Elements::F32(v) => v.as_ptr().addr() as u64,
            Elements::I32(v) => v.as_ptr().addr() as u64,
        }
    }
}
