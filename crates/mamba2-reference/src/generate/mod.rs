//! Deterministic inputs: the same problem, seed and pattern give the same bits on every machine with the same libm.

mod numbers;
mod offsets;
mod pattern;
mod step;

use mamba2_spec::{DKind, Dtype, Problem};

use crate::{RefInputs, Values};
use numbers::{Stream, fill};

pub use offsets::default_cu_seqlens;
pub use pattern::Pattern;
pub use step::{GeneratedStep, generate_step};

/// Inputs of a forward pass, contiguous, in the dtypes and shapes of a [`Problem`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names are those of the table at `Problem`
pub struct Generated {
    pub x: Values,
    pub dt: Values,
    pub a: Values,
    pub b: Values,
    pub c: Values,
    pub d: Option<Values>,
    pub z: Option<Values>,
    pub dt_bias: Option<Values>,
    pub initial_states: Option<Values>,
    pub cu_seqlens: Option<Vec<i32>>,
}

impl Generated {
    /// The same values in float64, for the oracles. Takes four times the memory of 16-bit inputs, so it is made on demand.
    pub fn reference(&self) -> RefInputs {
        let some = |values: &Option<Values>| values.as_ref().map(Values::to_f64);
        RefInputs {
            x: self.x.to_f64(),
            dt: self.dt.to_f64(),
            a: self.a.to_f64(),
            b: self.b.to_f64(),
            c: self.c.to_f64(),
            d: some(&self.d),
            z: some(&self.z),
            dt_bias: some(&self.dt_bias),
            initial_states: some(&self.initial_states),
            cu_seqlens: self.cu_seqlens.clone(),
        }
    }

    /// Puts NaN into every token past the last packed offset, which no backend may read. Nothing happens to plain rows.
    pub fn poison_tail(&mut self, problem: &Problem) {
        let Some(used) = self.cu_seqlens.as_ref().and_then(|cu| cu.last()) else {
            return;
        };
        let used = *used as usize;
        let per_token = [
            (Some(&mut self.x), problem.nheads * problem.headdim),
            (self.z.as_mut(), problem.nheads * problem.headdim),
            (Some(&mut self.dt), problem.nheads),
            (Some(&mut self.b), problem.ngroups * problem.dstate),
            (Some(&mut self.c), problem.ngroups * problem.dstate),
        ];
        for (values, width) in per_token {
            if let Some(values) = values {
                values.poison_range(used * width..values.len());
            }
        }
    }
}

/// Makes inputs for `problem`. Packed problems get uneven offsets with empty and one-token sequences and a padded tail
/// ([`default_cu_seqlens`]).
pub fn generate(problem: &Problem, seed: u64, pattern: Pattern) -> Generated {
    let cu = problem
        .packed
        .map(|sequences| default_cu_seqlens(problem.seqlen, sequences, seed));
    make(problem, seed, pattern, cu)
}

/// Makes inputs for a packed `problem` with the given offsets.
///
/// # Panics
/// If the problem is not packed, or for another number of sequences.
pub fn generate_packed(
    problem: &Problem,
    seed: u64,
    pattern: Pattern,
    cu_seqlens: &[i32],
) -> Generated {
    assert_eq!(
        problem.packed.map(|n| n + 1),
        Some(cu_seqlens.len()),
        "[sequences + 1] offsets of a packed problem"
    );
    make(problem, seed, pattern, Some(cu_seqlens.to_vec()))
}

fn make(problem: &Problem, seed: u64, pattern: Pattern, cu_seqlens: Option<Vec<i32>>) -> Generated {
    let p = problem;
    let tokens = p.batch * p.seqlen;
    let of_tokens = tokens * p.nheads * p.headdim;
    let of_groups = tokens * p.ngroups * p.dstate;
    let states = p.sequences() * p.nheads * p.headdim * p.dstate;
    let stream = |tensor: u64| Stream::new(seed, tensor);
    let heads = pattern::Heads::new(pattern, p.nheads, p.dt_bias, stream(0));
    let (x, b, c, z, d, h0) = (
        stream(1),
        stream(2),
        stream(3),
        stream(4),
        stream(5),
        stream(6),
    );
    let dt = stream(7);
    let row = p.seqlen * p.nheads * p.headdim;
    let d_elems = match p.d {
        DKind::None => None,
        DKind::PerHead => Some(p.nheads),
        DKind::PerHeaddim => Some(p.nheads * p.headdim),
    };
    Generated {
        x: fill(p.dtype, of_tokens, |i| {
            let token_of_row = i % row.max(1) / (p.nheads * p.headdim);
            pattern.x(&x, i, token_of_row)
        }),
        dt: fill(p.dt_dtype, tokens * p.nheads, |i| {
            heads.dt(&dt, i, i % p.nheads, p.dt_softplus)
        }),
        a: Values::F32(heads.a.clone()),
        b: fill(p.dtype, of_groups, |i| {
            pattern.b(&b, i, i / p.dstate % p.ngroups)
        }),
        c: fill(p.dtype, of_groups, |i| pattern.c(&c, i)),
        d: d_elems.map(|n| fill(Dtype::F32, n, |i| d.normal(i))),
        z: p.z.then(|| fill(p.dtype, of_tokens, |i| z.normal(i))),
        dt_bias: heads.bias.clone().map(Values::F32),
        initial_states: p
            .initial_states
            .map(|dtype| fill(dtype, states, |i| pattern.state(&h0, i))),
        cu_seqlens,
    }
}
