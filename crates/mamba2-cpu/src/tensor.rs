use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use mamba2_spec::{Dtype, HasMeta, TensorMeta};

use crate::CpuError;

/// Elements of an input, starting at the view's element 0.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum HostData<'a> {
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    F32(&'a [f32]),
    I32(&'a [i32]),
}

impl HostData<'_> {
    fn facts(&self) -> (Option<Dtype>, usize, u64) {
        match self {
            HostData::Bf16(v) => (Some(Dtype::Bf16), v.len(), v.as_ptr() as u64),
            HostData::F16(v) => (Some(Dtype::F16), v.len(), v.as_ptr() as u64),
            HostData::F32(v) => (Some(Dtype::F32), v.len(), v.as_ptr() as u64),
            HostData::I32(v) => (None, v.len(), v.as_ptr() as u64),
        }
    }
}

/// Elements of an output, starting at the view's element 0.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum HostDataMut<'a> {
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
    F32(&'a mut [f32]),
}

impl HostDataMut<'_> {
    fn facts(&self) -> (Option<Dtype>, usize, u64) {
        match self {
            HostDataMut::Bf16(v) => (Some(Dtype::Bf16), v.len(), v.as_ptr() as u64),
            HostDataMut::F16(v) => (Some(Dtype::F16), v.len(), v.as_ptr() as u64),
            HostDataMut::F32(v) => (Some(Dtype::F32), v.len(), v.as_ptr() as u64),
        }
    }
}

/// A strided, read-only view of host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostTensor<'a> {
    meta: TensorMeta,
    data: HostData<'a>,
}

impl<'a> HostTensor<'a> {
    /// A view of `data` with the shape and strides of `meta`.
    ///
    /// # Errors
    /// [`CpuError::DataDtype`] or [`CpuError::Span`].
    pub fn new(meta: TensorMeta, data: HostData<'a>) -> Result<HostTensor<'a>, CpuError> {
        let (dtype, len, _) = data.facts();
        check(&meta, dtype, len)?;
        Ok(HostTensor { meta, data })
    }

    /// The elements the view lies on.
    pub fn data(&self) -> HostData<'a> {
        self.data
    }

    /// Elements `at..at + to.len()` as float32.
    pub(crate) fn load(&self, at: usize, to: &mut [f32]) {
        match self.data {
            HostData::Bf16(v) => v[at..at + to.len()].convert_to_f32_slice(to),
            HostData::F16(v) => v[at..at + to.len()].convert_to_f32_slice(to),
            HostData::F32(v) => to.copy_from_slice(&v[at..at + to.len()]),
            HostData::I32(v) => to
                .iter_mut()
                .zip(&v[at..])
                .for_each(|(to, v)| *to = *v as f32),
        }
    }

    /// Element `at` as float32.
    pub(crate) fn get(&self, at: usize) -> f32 {
        match self.data {
            HostData::Bf16(v) => v[at].to_f32(),
            HostData::F16(v) => v[at].to_f32(),
            HostData::F32(v) => v[at],
            HostData::I32(v) => v[at] as f32,
        }
    }

    /// The elements of a one-dimensional i32 view.
    pub(crate) fn to_i32(self) -> Vec<i32> {
        let stride = self.stride(0);
        match self.data {
            HostData::I32(v) => (0..self.meta.elems()).map(|i| v[i * stride]).collect(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn stride(&self, axis: usize) -> usize {
        self.meta.strides()[axis]
    }
}

impl HasMeta for HostTensor<'_> {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }
    fn base_address(&self) -> u64 {
        self.data.facts().2
    }
}

/// A strided view of host memory that is written.
#[derive(Debug)]
pub struct HostTensorMut<'a> {
    meta: TensorMeta,
    data: HostDataMut<'a>,
}

impl<'a> HostTensorMut<'a> {
    /// A view of `data` with the shape and strides of `meta`.
    ///
    /// # Errors
    /// [`CpuError::DataDtype`] or [`CpuError::Span`].
    pub fn new(meta: TensorMeta, data: HostDataMut<'a>) -> Result<HostTensorMut<'a>, CpuError> {
        let (dtype, len, _) = data.facts();
        check(&meta, dtype, len)?;
        Ok(HostTensorMut { meta, data })
    }

    /// The elements the view lies on.
    pub fn data(&self) -> &HostDataMut<'a> {
        &self.data
    }

    /// The elements the view lies on, to be written.
    pub fn data_mut(&mut self) -> &mut HostDataMut<'a> {
        &mut self.data
    }
}

impl HasMeta for HostTensorMut<'_> {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }
    fn base_address(&self) -> u64 {
        self.data.facts().2
    }
}

fn check(meta: &TensorMeta, data: Option<Dtype>, len: usize) -> Result<(), CpuError> {
    if meta.dtype != data {
        let name = |dtype: Option<Dtype>| dtype.map_or("i32", Dtype::name);
        return Err(CpuError::DataDtype {
            described: name(meta.dtype),
            data: name(data),
        });
    }
    match meta.span_elems() {
        Some(span) if span <= len => Ok(()),
        span => Err(CpuError::Span {
            shape: meta.shape().to_vec(),
            strides: meta.strides().to_vec(),
            span: span.map_or("too many to count".into(), |span| span.to_string()),
            data: len,
        }),
    }
}
