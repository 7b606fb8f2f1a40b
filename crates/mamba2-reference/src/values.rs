use half::{bf16, f16};
use mamba2_spec::Dtype;
use rayon::prelude::*;

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

    /// Every element's bytes, little-endian, as safetensors files and devices hold them. Made in parallel: a state cache may have
    /// gigabytes.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Values::Bf16(v) => bytes_of(v, |v| v.to_le_bytes()),
            Values::F16(v) => bytes_of(v, |v| v.to_le_bytes()),
            Values::F32(v) => bytes_of(v, |v| v.to_le_bytes()),
            Values::I32(v) => bytes_of(v, |v| v.to_le_bytes()),
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

fn bytes_of<T: Sync, const N: usize>(
    values: &[T],
    bytes: impl Fn(&T) -> [u8; N] + Sync,
) -> Vec<u8> {
    const PIECE: usize = 1 << 14;
    let mut all = vec![0; values.len() * N];
    all.par_chunks_mut(PIECE * N)
        .zip(values.par_chunks(PIECE))
        .for_each(|(to, from)| {
            for (to, from) in to.chunks_exact_mut(N).zip(from) {
                to.copy_from_slice(&bytes(from));
            }
        });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_little_endian_and_in_order_whatever_the_number_of_elements() {
        for elems in [0, 1, (1 << 14) + 3] {
            let numbers: Vec<f32> = (0..elems).map(|i| i as f32 / 7.0).collect();
            let one_by_one: Vec<u8> = numbers.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(Values::F32(numbers).to_le_bytes(), one_by_one);
        }
        let halves = Values::Bf16(vec![bf16::from_bits(0x1234), bf16::from_bits(0x5678)]);
        assert_eq!(halves.to_le_bytes(), [0x34, 0x12, 0x78, 0x56]);
    }
}
