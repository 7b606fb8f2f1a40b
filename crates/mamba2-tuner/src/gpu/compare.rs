//! Results that lie in memory as bytes.

use half::{bf16, f16};
use mamba2_reference::relative_frobenius;
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

/// Relative error (2-norms) of the first of the dense elements, as many as there are in `want`; infinite if there are fewer, or one is
/// not finite. Allocates nothing of their size.
pub fn distance(dense: &[u8], dtype: Dtype, want: &[f64]) -> f64 {
    if dense.len() < want.len() * dtype.size_bytes() {
        return f64::INFINITY;
    }
    // One loop for each dtype, so that nothing is decided within.
    match dtype {
        Dtype::Bf16 => relative_frobenius(want, |i| {
            f64::from(bf16::from_le_bytes([dense[2 * i], dense[2 * i + 1]]).to_f32())
        }),
        Dtype::F16 => relative_frobenius(want, |i| {
            f64::from(f16::from_le_bytes([dense[2 * i], dense[2 * i + 1]]).to_f32())
        }),
        Dtype::F32 => relative_frobenius(want, |i| number(&dense[4 * i..4 * i + 4], dtype)),
    }
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
    use mamba2_reference::ErrorReport;

    #[test]
    fn the_distance_is_that_of_the_decoded_elements_and_poison_is_infinitely_far() {
        for dtype in Dtype::ALL {
            let size = dtype.size_bytes();
            let dense: Vec<u8> = (0..=255u8)
                .cycle()
                .take(5000 * size)
                .map(|b| b & 0x3b)
                .collect();
            let got = decode(&dense, dtype);
            let want: Vec<f64> = got.iter().map(|g| g * 1.01 + 1e-6).collect();
            let report = ErrorReport::compare(&got, &want);
            let off = distance(&dense, dtype, &want) / report.relative_frobenius - 1.0;
            assert!(off.abs() < 1e-12, "{dtype}: {off}");
            assert!(distance(&dense[..size], dtype, &want).is_infinite());
            let poison = vec![crate::gpu::POISON; dense.len()];
            assert!(distance(&poison, dtype, &want).is_infinite(), "{dtype}");
        }
    }

    #[test]
    fn poison_is_not_a_number_in_any_dtype() {
        for dtype in Dtype::ALL {
            let poison = vec![crate::gpu::POISON; 8];
            assert!(decode(&poison, dtype).iter().all(|v| v.is_nan()), "{dtype}");
        }
    }
}
