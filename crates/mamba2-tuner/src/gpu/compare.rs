//! Distance between results that lie in memory as bytes.

use half::{bf16, f16};
use mamba2_spec::Dtype;
use rayon::prelude::*;

/// Elements of a piece that one thread compares.
const PIECE_BYTES: usize = 1 << 16;

/// Dense elements as float64 (exact).
pub fn decode(dense: &[u8], dtype: Dtype) -> Vec<f64> {
    dense
        .chunks_exact(dtype.size_bytes())
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

/// `|got - want| / |want|` (2-norms) of two dense tensors, without copies in float64: the shapes of a job are large.
/// Infinite if an element of either is not finite, or the lengths differ.
pub fn relative_frobenius(got: &[u8], want: &[u8], dtype: Dtype) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let piece = |(got, want): (&[u8], &[u8])| {
        let size = dtype.size_bytes();
        got.chunks_exact(size).zip(want.chunks_exact(size)).fold(
            (0.0f64, 0.0f64),
            |(error, norm), (g, w)| {
                let (g, w) = (number(g, dtype), number(w, dtype));
                (error + (g - w) * (g - w), norm + w * w)
            },
        )
    };
    // Sums of fixed pieces in a fixed order: the same result whatever the number of threads.
    let sums: Vec<(f64, f64)> = got
        .par_chunks(PIECE_BYTES)
        .zip(want.par_chunks(PIECE_BYTES))
        .map(piece)
        .collect();
    let (error, norm) = sums.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
    match (error, norm) {
        (error, norm) if !(error + norm).is_finite() => f64::INFINITY,
        (0.0, _) => 0.0,
        (error, norm) => (error / norm).sqrt(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn distance_of_known_vectors() {
        let want = bytes(&[3.0, 4.0]);
        assert_eq!(relative_frobenius(&want, &want, Dtype::F32), 0.0);
        assert!((relative_frobenius(&bytes(&[3.0, 4.5]), &want, Dtype::F32) - 0.1).abs() < 1e-12);
        assert_eq!(
            relative_frobenius(&bytes(&[3.0]), &want, Dtype::F32),
            f64::INFINITY
        );
    }

    #[test]
    fn poison_is_not_a_number_in_any_dtype() {
        for dtype in Dtype::ALL {
            let poison = vec![crate::gpu::POISON; 8];
            assert!(decode(&poison, dtype).iter().all(|v| v.is_nan()), "{dtype}");
            assert_eq!(relative_frobenius(&poison, &[0; 8], dtype), f64::INFINITY);
        }
    }
}
