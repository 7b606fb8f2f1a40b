//! The scalar functions of the operator, in forms that the compiler turns into vector code.

use mamba2_spec::DtLimit;

/// A running sum in log2 units as two floats: `hi` is the sum in float32, `lo` what that rounding lost. Differences of two
/// sums then keep full relative precision even when the sums are huge, at the cost of one addition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log2 {
    pub hi: f32,
    pub lo: f32,
}

impl Log2 {
    pub(crate) fn of(sum: f64) -> Log2 {
        let hi = sum as f32;
        let lo = if hi.is_finite() {
            (sum - f64::from(hi)) as f32
        } else {
            0.0
        };
        Log2 { hi, lo }
    }
}

/// `2^(hi + lo)` to about one unit in the last place, for a `lo` far below 1. Results under 2^-126 are 0.
///
/// Exponents of this operator are sums of `A dt <= 0`, so `hi <= 0`; an exponent above 0 (growing states) is computed too.
#[inline(always)]
pub(crate) fn exp2(hi: f32, lo: f32) -> f32 {
    // Comparisons, not `clamp`: NaN has to come through.
    let hi = if hi < -127.0 { -127.0 } else { hi };
    let hi = if hi > 128.0 { 128.0 } else { hi };
    // Adding 1.5 * 2^23 leaves the nearest whole number in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = hi + ROUND;
    let f = (hi - (shifted - ROUND)) + lo;
    // Interpolates 2^f at the Chebyshev nodes of [-1/2, 1/2]; relative error 2e-8.
    let mut p = 1.546_144_5e-4f32;
    for c in [
        1.340_042_8e-3,
        9.618_057e-3,
        5.550_327e-2,
        0.240_226_5,
        std::f32::consts::LN_2,
        1.0,
    ] {
        p = p * f + c;
    }
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

/// `row[j] = scores[j] * 2^(end - sums[j])`, with the sums split as in [`Log2`].
pub(crate) fn decayed_scores(row: &mut [f32], scores: &[f32], end: Log2, hi: &[f32], lo: &[f32]) {
    for (((row, score), hi), lo) in row.iter_mut().zip(scores).zip(hi).zip(lo) {
        *row = score * exp2(end.hi - hi, end.lo - lo);
    }
}

/// `y[i] *= silu(z[i])`. Both exponents are at most 0, so nothing overflows for any z.
pub(crate) fn gate(y: &mut [f32], z: &[f32]) {
    for (y, z) in y.iter_mut().zip(z) {
        let e = exp2(-z.abs() * std::f32::consts::LOG2_E, 0.0);
        let of_positive = 1.0 / (1.0 + e);
        *y *= z * if *z >= 0.0 {
            of_positive
        } else {
            e * of_positive
        };
    }
}

/// `sum_i a[i] b[i]`, in eight sums side by side: one would wait for each addition before the next.
pub(crate) fn dot(a: &[f64], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f64 = a
        .remainder()
        .iter()
        .zip(b.remainder())
        .map(|(a, b)| a * f64::from(*b))
        .sum();
    let mut sums = [0f64; LANES];
    for (a, b) in a.zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * f64::from(*b);
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// dt after bias, softplus (the identity above 20) and clamp, in that order.
pub(crate) fn step_size(raw: f32, bias: f32, softplus: bool, limit: DtLimit) -> f64 {
    let mut dt = f64::from(raw) + f64::from(bias);
    if softplus && dt <= 20.0 {
        dt = dt.exp().ln_1p();
    }
    if dt < f64::from(limit.min) {
        dt = f64::from(limit.min);
    }
    if dt > f64::from(limit.max) {
        dt = f64::from(limit.max);
    }
    dt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_exact_to_a_few_units_in_the_last_place() {
        for i in -126_000..=0 {
            let v = i as f32 / 1000.0;
            let want = f64::from(v).exp2();
            let error = (f64::from(exp2(v, 0.0)) - want).abs() / want;
            assert!(error < 1.5e-7, "2^{v}: {error}");
        }
    }

    #[test]
    fn exp2_of_whole_numbers_is_exact() {
        for i in -126..=127 {
            assert_eq!(exp2(i as f32, 0.0), (i as f32).exp2());
        }
    }

    #[test]
    fn exp2_meets_its_ends() {
        assert_eq!(exp2(-127.0, 0.0), 0.0);
        assert_eq!(exp2(f32::NEG_INFINITY, 0.0), 0.0);
        assert_eq!(exp2(1e30, 0.0), f32::INFINITY);
        assert!(exp2(f32::NAN, 0.0).is_nan());
    }

    #[test]
    fn the_low_part_of_a_sum_counts() {
        // Two sums near -6000 that differ by 1e-4: float32 alone has steps of 5e-4 there.
        let (a, b) = (Log2::of(-6_000.000_123), Log2::of(-6_000.000_023));
        let got = f64::from(exp2(a.hi - b.hi, a.lo - b.lo));
        assert!((got - (-1e-4f64).exp2()).abs() < 1.2e-7);
    }

    #[test]
    fn the_gate_is_finite_for_any_z() {
        let z = [-1e30f32, -200.0, -1.0, 0.0, 1.0, 200.0, 1e30];
        let mut y = [1f32; 7];
        gate(&mut y, &z);
        for (got, z) in y.into_iter().zip(z) {
            let want = f64::from(z) / (1.0 + (-f64::from(z)).exp());
            assert!(
                (f64::from(got) - want).abs() <= 2e-7 * want.abs() + 1e-30,
                "silu({z}) = {got}"
            );
        }
    }

    #[test]
    fn n13_bias_then_softplus_then_clamp() {
        let of = |raw, softplus, limit| step_size(raw, 0.5, softplus, limit);
        assert_eq!(of(89.5, true, DtLimit::NONE), 90.0);
        assert_eq!(of(999.5, true, DtLimit::NONE), 1000.0);
        assert!((of(-30.5, true, DtLimit::NONE) / 9.357_622_968_840_175e-14 - 1.0).abs() < 1e-9);
        assert_eq!(of(-5.0, false, DtLimit::NONE), 0.0);
        assert_eq!(
            of(
                5.0,
                true,
                DtLimit {
                    min: 0.001,
                    max: 0.1
                }
            ),
            f64::from(0.1f32)
        );
        assert_eq!(
            of(
                -30.0,
                true,
                DtLimit {
                    min: 0.001,
                    max: 0.1
                }
            ),
            f64::from(0.001f32)
        );
        assert_eq!(of(5.0, true, DtLimit { min: 0.0, max: 0.0 }), 0.0);
        assert!(
            of(
                f32::NAN,
                true,
                DtLimit {
                    min: 0.001,
                    max: 0.1
                }
            )
            .is_nan()
        );
    }
}
