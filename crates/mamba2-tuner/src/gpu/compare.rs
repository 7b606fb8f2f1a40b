//! Results that lie in memory as bytes.

use half::{bf16, f16};
use mamba2_spec::Dtype;
use rayon::prelude::*;

/// Elements that one thread takes at least.
const PIECE: usize = 1 << 14;

/// Dense elements as float64 (exact).
pub fn decode(dense: &[u8], dtype: Dtype) -> Vec<f64> {
    dense
        .par_chunks_exact(dtype.size_bytes())
        .with_min_len(PIECE)
        .map(|bytes| number(bytes, dtype))
        .collect()
}

fn number(bytes: &[u8], dtype: Dtype) -> f64 {
    match (dtype, bytes) {
        (Dtype::Bf16, [a, b]) => bf16::from_le_bytes([*a, *b]).to_f64(),
        (Dtype::F16, [a, b]) => f16::from_le_bytes([*a, *b]).to_f64(),
        (Dtype::F32, [a, b, c, d]) => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_is_not_a_number_in_any_dtype() {
        for dtype in Dtype::ALL {
            let poison = vec![crate::gpu::POISON; 8];
            assert!(decode(&poison, dtype).iter().all(|v| v.is_nan()), "{dtype}");
        }
    }
}
