//! The physical limit of a forward pass: fewest bytes, fewest matrix operations. Benchmarks print it beside every time.

use crate::{Dtype, Problem};

/// Fewest bytes and floating-point operations a forward pass can do with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Every input read once, every output written once. Unit: bytes.
    pub bytes: f64,
    /// C B^T once a group and causal halves only, at `chunk_size` 64. Unit: floating-point operations.
    pub flops: f64,
}

/// Device-to-device copy of an H200, read plus written, bytes per second (measured, see PERFORMANCE in the benchmark notes).
pub const H200_COPY_BYTES_PER_S: f64 = 4.25e12;
/// 8192^3 bf16 product of an H200 on random data, operations per second (measured).
pub const H200_BF16_FLOPS_PER_S: f64 = 774e12;

impl Limit {
    /// The limit of `problem`.
    pub fn of(problem: &Problem) -> Limit {
        let p = problem;
        let (tokens, nheads) = ((p.batch * p.seqlen) as f64, p.nheads as f64);
        let (headdim, dstate, ngroups) = (p.headdim as f64, p.dstate as f64, p.ngroups as f64);
        let elem = p.dtype.size_bytes() as f64;
        let state = p.sequences() as f64 * nheads * headdim * dstate;
        let of_state = |d: Option<Dtype>| d.map_or(0.0, |d| d.size_bytes() as f64 * state);
        let streams = if p.z { 3.0 } else { 2.0 };
        let bytes = tokens
            * (streams * nheads * headdim * elem
                + 2.0 * ngroups * dstate * elem
                + nheads * p.dt_dtype.size_bytes() as f64)
            + of_state(p.initial_states)
            + of_state(p.final_states);
        let chunk = 64f64.min(p.seqlen.max(1) as f64);
        let flops = tokens
            * (ngroups * chunk * dstate + nheads * (chunk * headdim + 4.0 * headdim * dstate));
        Limit { bytes, flops }
    }

    /// Time under the given ceilings, in microseconds: the larger of the two.
    pub fn us(&self, bytes_per_s: f64, flops_per_s: f64) -> f64 {
        (self.bytes / bytes_per_s).max(self.flops / flops_per_s) * 1e6
    }
}
