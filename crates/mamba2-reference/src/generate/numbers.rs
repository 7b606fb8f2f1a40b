use half::{bf16, f16};
use mamba2_spec::Dtype;
use rayon::prelude::*;

use crate::Values;

/// A counter-based generator: element `i` is a hash of (seed, tensor, i), so any part can be made alone and in parallel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream(u64);

impl Stream {
    pub(super) fn new(seed: u64, tensor: u64) -> Stream {
        Stream(mix(seed ^ mix(tensor.wrapping_add(1))))
    }

    /// 64 hashed bits.
    pub(super) fn bits(&self, i: usize) -> u64 {
        mix(self
            .0
            .wrapping_add((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Uniform in [0, 1).
    pub(super) fn uniform(&self, i: usize) -> f32 {
        (self.bits(i) >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Mean 0, variance 1, within +-3.5: the sum of four uniforms, which costs no logarithm and no cosine.
    pub(super) fn normal(&self, i: usize) -> f32 {
        let bits = self.bits(i);
        let sum = (0..4).map(|k| (bits >> (16 * k)) & 0xffff).sum::<u64>();
        (sum as f32 / 65536.0 - 2.0 + 2.0 / 65536.0) * 3f32.sqrt()
    }
}

/// splitmix64's finaliser.
fn mix(mut v: u64) -> u64 {
    v = (v ^ (v >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    v ^ (v >> 31)
}

/// `elems` values of `value(i)`, rounded to `dtype`, in parallel.
pub(super) fn fill(
    dtype: Dtype,
    elems: usize,
    value: impl Fn(usize) -> f32 + Sync + Send,
) -> Values {
    let each = (0..elems).into_par_iter().with_min_len(1 << 14);
    match dtype {
        Dtype::Bf16 => Values::Bf16(each.map(|i| bf16::from_f32(value(i))).collect()),
        Dtype::F16 => Values::F16(each.map(|i| f16::from_f32(value(i))).collect()),
        Dtype::F32 => Values::F32(each.map(value).collect()),
    }
}

pub(super) fn silu(v: f32) -> f32 {
    v / (1.0 + (-v).exp())
}

pub(super) fn softplus(v: f32) -> f32 {
    if v > 20.0 { v } else { v.exp().ln_1p() }
}

/// The v with `softplus(v) == target`, for target > 0.
pub(super) fn inverse_softplus(target: f32) -> f32 {
    if target > 20.0 {
        target
    } else {
        target + (-(-target).exp_m1()).ln()
    }
}
