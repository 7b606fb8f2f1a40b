//! Owned tensors in host memory, and the views that the engine takes.

use half::{bf16, f16};
use mamba2_cpu::{CpuError, HostData, HostDataMut, HostTensor, HostTensorMut};
use mamba2_reference::Values;
use mamba2_spec::{Dtype, HasMeta, TensorMeta};

/// A contiguous tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedTensor {
    meta: TensorMeta,
    values: Values,
}

impl OwnedTensor {
    /// Takes values, as many as `shape` has elements.
    pub fn new(shape: &[usize], values: Values) -> OwnedTensor {
        OwnedTensor {
            meta: TensorMeta::contiguous(values.dtype(), shape),
            values,
        }
    }

    /// All zeros.
    pub fn zeros(dtype: Dtype, shape: &[usize]) -> OwnedTensor {
        OwnedTensor::new(shape, Values::zeros(dtype, shape.iter().product()))
    }

    /// From little-endian bytes; `dtype` is `None` for i32. The length must be the product of `shape` times the element size.
    pub fn from_le_bytes(dtype: Option<Dtype>, shape: &[usize], bytes: &[u8]) -> OwnedTensor {
        let (pairs, quads) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
        let values = match dtype {
            Some(Dtype::Bf16) => {
                Values::Bf16(pairs.iter().map(|b| bf16::from_le_bytes(*b)).collect())
            }
            Some(Dtype::F16) => Values::F16(pairs.iter().map(|b| f16::from_le_bytes(*b)).collect()),
            Some(Dtype::F32) => Values::F32(quads.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            None => Values::I32(quads.iter().map(|b| i32::from_le_bytes(*b)).collect()),
        };
        OwnedTensor::new(shape, values)
    }

    /// Extents of the axes.
    pub fn shape(&self) -> &[usize] {
        self.meta.shape()
    }

    /// Element type, `None` for i32.
    pub fn dtype(&self) -> Option<Dtype> {
        self.meta.dtype
    }

    /// The values, row-major.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// The values as float64.
    pub fn to_f64(&self) -> Vec<f64> {
        self.values.to_f64()
    }

    /// The values of an index tensor; `None` for float tensors.
    pub fn as_i32(&self) -> Option<&[i32]> {
        match &self.values {
            Values::I32(v) => Some(v),
            _ => None,
        }
    }

    /// The values as little-endian bytes.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        self.values.to_le_bytes()
    }

    /// A view to read.
    pub fn view(&self) -> Result<HostTensor<'_>, CpuError> {
        let data = match &self.values {
            Values::Bf16(v) => HostData::Bf16(v),
            Values::F16(v) => HostData::F16(v),
            Values::F32(v) => HostData::F32(v),
            Values::I32(v) => HostData::I32(v),
        };
        HostTensor::new(self.meta, data)
    }

    /// A view to write. Nothing writes index tensors: their view is empty, and refused by its dtype.
    pub fn view_mut(&mut self) -> Result<HostTensorMut<'_>, CpuError> {
        let data = match &mut self.values {
            Values::Bf16(v) => HostDataMut::Bf16(v),
            Values::F16(v) => HostDataMut::F16(v),
            Values::F32(v) => HostDataMut::F32(v),
            Values::I32(_) => HostDataMut::F32(&mut []),
        };
        HostTensorMut::new(self.meta, data)
    }
}

impl HasMeta for OwnedTensor {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    fn base_address(&self) -> u64 {
        let address = match &self.values {
            Values::Bf16(v) => v.as_ptr().addr(),
            Values::F16(v) => v.as_ptr().addr(),
            Values::F32(v) => v.as_ptr().addr(),
            Values::I32(v) => v.as_ptr().addr(),
        };
        address as u64
    }
}
