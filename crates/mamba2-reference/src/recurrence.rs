use mamba2_spec::{DKind, Problem};
use rayon::prelude::*;

use crate::inputs::{RefInputs, RefOutputs, scatter, spans};

/// The forward pass one token at a time, in float64: the definition of the operator.
///
/// `h_t = exp(A dt_t) h_{t-1} + dt_t (x_t outer B_t)`, `y_t = h_t C_t + D x_t`, then `y_t silu(z_t)` if there is a gate.
/// Runs over (sequence, head) in parallel; the result does not depend on the number of threads.
///
/// # Panics
/// If a tensor is shorter than the shape of `problem` asks for.
pub fn recurrence(problem: &Problem, inputs: &RefInputs) -> RefOutputs {
    let spans = spans(problem, inputs.cu_seqlens.as_deref());
    let parts = (0..spans.len() * problem.nheads)
        .into_par_iter()
        .map(|i| {
            one_head(
                problem,
                inputs,
                i / problem.nheads,
                spans[i / problem.nheads],
                i % problem.nheads,
            )
        })
        .collect();
    scatter(problem, &spans, parts)
}

fn one_head(
    p: &Problem,
    inputs: &RefInputs,
    sequence: usize,
    (first, len): (usize, usize),
    head: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (headdim, dstate) = (p.headdim, p.dstate);
    let group = head / (p.nheads / p.ngroups);
    let state_at = (sequence * p.nheads + head) * headdim * dstate;
    let mut h = match &inputs.initial_states {
        Some(initial) => initial[state_at..state_at + headdim * dstate].to_vec(),
        None => vec![0.0; headdim * dstate],
    };
    let mut y = vec![0.0; len * headdim];
    for t in 0..len {
        let token = first + t;
        let dt = step_size(p, inputs, inputs.dt[token * p.nheads + head], head);
        let decay = (inputs.a[head] * dt).exp();
        let x = &inputs.x[(token * p.nheads + head) * headdim..][..headdim];
        let b = &inputs.b[(token * p.ngroups + group) * dstate..][..dstate];
        let c = &inputs.c[(token * p.ngroups + group) * dstate..][..dstate];
        for (i, (row, y)) in h
            .chunks_exact_mut(dstate)
            .zip(&mut y[t * headdim..])
            .enumerate()
        {
            let dx = dt * x[i];
            for ((h, b), c) in row.iter_mut().zip(b).zip(c) {
                *h = decay * *h + dx * b;
                *y += *h * c;
            }
            match (p.d, &inputs.d) {
                (DKind::PerHead, Some(d)) => *y += d[head] * x[i],
                (DKind::PerHeaddim, Some(d)) => *y += d[head * headdim + i] * x[i],
                _ => {}
            }
            if let Some(z) = &inputs.z {
                let z = z[(token * p.nheads + head) * headdim + i];
                *y *= z / (1.0 + (-z).exp());
            }
        }
    }
    (y, h)
}

/// Bias, then softplus (the identity above 20), then the clamp.
fn step_size(p: &Problem, inputs: &RefInputs, raw: f64, head: usize) -> f64 {
    let mut dt = raw;
    if let Some(bias) = &inputs.dt_bias {
        dt += bias[head];
    }
    if p.dt_softplus && dt <= 20.0 {
        dt = dt.exp().ln_1p();
    }
    // Not `clamp`: a NaN must stay one, and the bounds are float32.
    if dt < f64::from(p.dt_limit.min) {
        dt = f64::from(p.dt_limit.min);
    }
    if dt > f64::from(p.dt_limit.max) {
        dt = f64::from(p.dt_limit.max);
    }
    dt
}
