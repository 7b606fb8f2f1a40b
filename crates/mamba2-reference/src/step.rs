use mamba2_spec::{DKind, StepProblem};

use crate::inputs::{StepRefInputs, StepRefOutputs};

/// The decode step in float64: each row's tokens in order on the state of its slot, updated in place.
///
/// Row `i` uses slot `state_batch_indices[i]`, or slot `i` without indices; -1 skips the row. Rows are applied in order.
///
/// # Panics
/// If a tensor is shorter than the shape of `problem` asks for, or an index is outside `-1..slots`.
pub fn step(problem: &StepProblem, inputs: &StepRefInputs) -> StepRefOutputs {
    let p = problem;
    let mut state = inputs.state.clone();
    let mut out = vec![0.0; p.batch * p.tokens * p.nheads * p.headdim];
    for row in 0..p.batch {
        let slot = match &inputs.state_batch_indices {
            Some(indices) if indices[row] == -1 => continue,
            Some(indices) => {
                usize::try_from(indices[row]).expect("state index should be -1 or a slot")
            }
            None => row,
        };
        for token in 0..p.tokens {
            for head in 0..p.nheads {
                one_token(
                    p,
                    inputs,
                    slot,
                    row * p.tokens + token,
                    head,
                    &mut state,
                    &mut out,
                );
            }
        }
    }
    StepRefOutputs { out, state }
}

fn one_token(
    p: &StepProblem,
    inputs: &StepRefInputs,
    slot: usize,
    token: usize,
    head: usize,
    state: &mut [f64],
    out: &mut [f64],
) {
    let mut dt =
        inputs.dt[token * p.nheads + head] + inputs.dt_bias.as_ref().map_or(0.0, |bias| bias[head]);
    if p.dt_softplus && dt <= 20.0 {
        dt = dt.exp().ln_1p();
    }
    dt = dt.clamp(f64::from(p.dt_limit.min), f64::from(p.dt_limit.max));
    let decay = (dt * inputs.a[head]).exp();
    let group = head / (p.nheads / p.ngroups);
    let b = &inputs.b[(token * p.ngroups + group) * p.dstate..][..p.dstate];
    let c = &inputs.c[(token * p.ngroups + group) * p.dstate..][..p.dstate];
    for i in 0..p.headdim {
        let at = (token * p.nheads + head) * p.headdim + i;
        let x = inputs.x[at];
        let h = &mut state[((slot * p.nheads + head) * p.headdim + i) * p.dstate..][..p.dstate];
        let mut y = 0.0;
        for n in 0..p.dstate {
            h[n] = decay * h[n] + dt * x * b[n];
            y += h[n] * c[n];
        }
        y += match (p.d, &inputs.d) {
            (DKind::PerHead, Some(d)) => d[head] * x,
            (DKind::PerHeaddim, Some(d)) => d[head * p.headdim + i] * x,
            _ => 0.0,
        };
        if let Some(z) = &inputs.z {
            y *= z[at] / (1.0 + (-z[at]).exp());
        }
        out[at] = y;
    }
}
