use half::{bf16, f16};
use mamba2_spec::Dtype;

/// Elements of one tensor in the dtype they are stored in.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Values {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    F32(Vec<f32>),
    I32(Vec<i32>),
}

impl Values {
    /// `elems` zeros.
    pub fn zeros(dtype: Dtype, elems: usize) -> Values {
        match dtype {
            Dtype::Bf16 => Values::Bf16(vec![bf16::ZERO; elems]),
            Dtype::F16 => Values::F16(vec![f16::ZERO; elems]),
            Dtype::F32 => Values::F32(vec![0.0; elems]),
        }
    }

    /// `elems` NaN, to poison an output or a part that must not be read.
    pub fn poison(dtype: Dtype, elems: usize) -> Values {
        match dtype {
            Dtype::Bf16 => Values::Bf16(vec![bf16::NAN; elems]),
            Dtype::F16 => Values::F16(vec![f16::NAN; elems]),
            Dtype::F32 => Values::F32(vec![f32::NAN; elems]),
        }
    }

    /// Float64 values rounded to `dtype` (nearest, ties to even).
    pub fn rounded(dtype: Dtype, values: &[f64]) -> Values {
        match dtype {
            Dtype::Bf16 => Values::Bf16(values.iter().map(|v| bf16::from_f64(*v)).collect()),
            Dtype::F16 => Values::F16(values.iter().map(|v| f16::from_f64(*v)).collect()),
            Dtype::F32 => Values::F32(values.iter().map(|v| *v as f32).collect()),
        }
    }

    /// Element type; `None` for i32.
    pub fn dtype(&self) -> Option<Dtype> {
        match self {
            Values::Bf16(_) => Some(Dtype::Bf16),
            Values::F16(_) => Some(Dtype::F16),
            Values::F32(_) => Some(Dtype::F32),
            Values::I32(_) => None,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Values::Bf16(v) => v.len(),
            Values::F16(v) => v.len(),
            Values::F32(v) => v.len(),
            Values::I32(v) => v.len(),
        }
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every element as float64 (exact).
    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Values::Bf16(v) => v.iter().map(|v| v.to_f64()).collect(),
            Values::F16(v) => v.iter().map(|v| v.to_f64()).collect(),
            Values::F32(v) => v.iter().map(|v| f64::from(*v)).collect(),
            Values::I32(v) => v.iter().map(|v| f64::from(*v)).collect(),
        }
    }

    /// Every element's bytes, little-endian, as safetensors files and devices hold them.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Values::Bf16(v) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Values::F16(v) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Values::F32(v) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Values::I32(v) => v.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// Overwrites elements `range` with NaN.
    ///
    /// # Panics
    /// If the range is outside the tensor, or the elements are integers.
    pub fn poison_range(&mut self, range: std::ops::Range<usize>) {
        match self {
            Values::Bf16(v) => v[range].fill(bf16::NAN),
            Values::F16(v) => v[range].fill(f16::NAN),
            Values::F32(v) => v[range].fill(f32::NAN),
            Values::I32(_) => panic!("integers have no NaN"),
        }
    }
}
