use mamba2_spec::{DKind, Problem};
use rayon::prelude::*;

use crate::inputs::{RefInputs, RefOutputs, scatter, spans};

/// The forward pass by chunks of `chunk_size` tokens, in float64: chunk states first, then the pass over chunks, then outputs.
///
/// Decay between two tokens is the exponential of a sum taken directly over the tokens between them, never a difference
/// of running sums, so that a huge step inside a chunk costs the small ones beside it no digits. The answer does not
/// depend on `chunk_size` beyond rounding.
///
/// # Panics
/// If `chunk_size` is 0 or a tensor is shorter than the shape of `problem` asks for.
pub fn chunked(problem: &Problem, inputs: &RefInputs, chunk_size: usize) -> RefOutputs {
    assert!(chunk_size > 0, "chunk_size must not be 0");
    let spans = spans(problem, inputs.cu_seqlens.as_deref());
    let parts = (0..spans.len() * problem.nheads)
        .into_par_iter()
        .map(|i| {
            let (sequence, head) = (i / problem.nheads, i % problem.nheads);
            Head::gather(problem, inputs, sequence, spans[sequence], head).run(chunk_size)
        })
        .collect();
    scatter(problem, &spans, parts)
}

/// One head of one sequence, gathered: every axis but the token's own is gone.
struct Head {
    headdim: usize,
    dstate: usize,
    /// A * dt per token: the exponent of one token's decay.
    exponent: Vec<f64>,
    /// dt * x, `[len, headdim]`.
    dx: Vec<f64>,
    b: Vec<f64>,
    c: Vec<f64>,
    initial: Vec<f64>,
    /// D * x, `[len, headdim]`.
    skip: Vec<f64>,
    /// silu(z), `[len, headdim]`.
    gate: Option<Vec<f64>>,
}

impl Head {
    fn gather(
        p: &Problem,
        inputs: &RefInputs,
        sequence: usize,
        (first, len): (usize, usize),
        head: usize,
    ) -> Head {
        let tokens = first..first + len;
        let of_head = |data: &[f64]| -> Vec<f64> {
            tokens
                .clone()
                .flat_map(|t| data[(t * p.nheads + head) * p.headdim..][..p.headdim].to_vec())
                .collect()
        };
        // Blocked: the first nheads / ngroups heads share group 0.
        let group = head * p.ngroups / p.nheads;
        let of_group = |data: &[f64]| -> Vec<f64> {
            tokens
                .clone()
                .flat_map(|t| data[(t * p.ngroups + group) * p.dstate..][..p.dstate].to_vec())
                .collect()
        };
        let bias = inputs.dt_bias.as_ref().map_or(0.0, |bias| bias[head]);
        let (low, high) = (f64::from(p.dt_limit.min), f64::from(p.dt_limit.max));
        let dt: Vec<f64> = tokens
            .clone()
            .map(|t| inputs.dt[t * p.nheads + head] + bias)
            .map(|v| {
                if p.dt_softplus && v <= 20.0 {
                    v.max(0.0) + (-v.abs()).exp().ln_1p()
                } else {
                    v
                }
            })
            .map(|v| v.clamp(low, high))
            .collect();
        let x = of_head(&inputs.x);
        let per_token = |i: usize| i / p.headdim;
        let weight = |i: usize| match (p.d, &inputs.d) {
            (DKind::PerHead, Some(d)) => d[head],
            (DKind::PerHeaddim, Some(d)) => d[head * p.headdim + i % p.headdim],
            _ => 0.0,
        };
        let size = p.headdim * p.dstate;
        Head {
            headdim: p.headdim,
            dstate: p.dstate,
            exponent: dt.iter().map(|dt| dt * inputs.a[head]).collect(),
            dx: x
                .iter()
                .enumerate()
                .map(|(i, x)| x * dt[per_token(i)])
                .collect(),
            b: of_group(&inputs.b),
            c: of_group(&inputs.c),
            initial: inputs.initial_states.as_ref().map_or_else(
                || vec![0.0; size],
                |states| states[(sequence * p.nheads + head) * size..][..size].to_vec(),
            ),
            skip: x.iter().enumerate().map(|(i, x)| x * weight(i)).collect(),
            gate: inputs.z.as_ref().map(|z| {
                of_head(z)
                    .into_iter()
                    .map(|z| z / (1.0 + (-z).exp()))
                    .collect()
            }),
        }
    }

    fn run(self, chunk_size: usize) -> (Vec<f64>, Vec<f64>) {
        let chunks: Vec<(usize, usize)> = (0..self.exponent.len())
            .step_by(chunk_size)
            .map(|lo| (lo, (lo + chunk_size).min(self.exponent.len())))
            .collect();
        let own_states: Vec<Vec<f64>> = chunks.iter().map(|c| self.own_state(*c)).collect();
        let mut state = self.initial.clone();
        let mut y = Vec::with_capacity(self.dx.len());
        for (chunk, own) in chunks.into_iter().zip(own_states) {
            y.extend(self.output(chunk, &state));
            let total: f64 = self.exponent[chunk.0..chunk.1].iter().sum();
            let decay = total.exp();
            state = state
                .iter()
                .zip(own)
                .map(|(carried, own)| decay * carried + own)
                .collect();
        }
        for (i, y) in y.iter_mut().enumerate() {
            *y += self.skip[i];
            if let Some(gate) = &self.gate {
                *y *= gate[i];
            }
        }
        (y, state)
    }

    /// State at the end of a chunk that started from zero: `sum_j exp(sum of exponents after j) dx_j outer B_j`.
    fn own_state(&self, (lo, hi): (usize, usize)) -> Vec<f64> {
        let mut state = vec![0.0; self.headdim * self.dstate];
        let mut after = 0.0;
        for j in (lo..hi).rev() {
            let weight = f64::exp(after);
            let b = &self.b[j * self.dstate..][..self.dstate];
            for (dx, row) in self.dx[j * self.headdim..][..self.headdim]
                .iter()
                .zip(state.chunks_exact_mut(self.dstate))
            {
                row.iter_mut()
                    .zip(b)
                    .for_each(|(s, b)| *s += weight * dx * b);
            }
            after += self.exponent[j];
        }
        state
    }

    /// `Y_i = exp(sum up to i) (C_i h^T) + sum_{j <= i} exp(sum over j+1..=i) (C_i . B_j) dx_j` for the tokens of one chunk.
    fn output(&self, (lo, hi): (usize, usize), state: &[f64]) -> Vec<f64> {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut y = vec![0.0; (hi - lo) * self.headdim];
        // segment[j] = sum of the exponents of tokens j+1..=i, kept for all j while i walks down the chunk.
        let mut segment: Vec<f64> = Vec::with_capacity(hi - lo);
        let mut since_start = 0.0;
        for i in lo..hi {
            segment.iter_mut().for_each(|s| *s += self.exponent[i]);
            segment.push(0.0);
            since_start += self.exponent[i];
            let c = &self.c[i * self.dstate..][..self.dstate];
            let row = &mut y[(i - lo) * self.headdim..][..self.headdim];
            for (y, h) in row.iter_mut().zip(state.chunks_exact(self.dstate)) {
                *y = since_start.exp() * dot(h, c);
            }
            for (j, sum) in (lo..=i).zip(&segment) {
                let score = sum.exp() * dot(c, &self.b[j * self.dstate..][..self.dstate]);
                row.iter_mut()
                    .zip(&self.dx[j * self.headdim..])
                    .for_each(|(y, dx)| *y += score * dx);
            }
        }
        y
    }
}
