use mamba2_spec::{DKind, Dtype, StepProblem};

use super::numbers::{Stream, fill};
use super::pattern::{Heads, Pattern};
use crate::{StepRefInputs, Values};

/// Inputs of a decode step and its state cache, contiguous, in the dtypes and shapes of a [`StepProblem`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names are those of the table at `StepProblem`
pub struct GeneratedStep {
    pub x: Values,
    pub dt: Values,
    pub a: Values,
    pub b: Values,
    pub c: Values,
    pub d: Option<Values>,
    pub z: Option<Values>,
    pub dt_bias: Option<Values>,
    pub state_batch_indices: Option<Vec<i32>>,
    pub state: Values,
}

impl GeneratedStep {
    /// The same values in float64, for the oracle.
    pub fn reference(&self) -> StepRefInputs {
        let some = |values: &Option<Values>| values.as_ref().map(Values::to_f64);
        StepRefInputs {
            x: self.x.to_f64(),
            dt: self.dt.to_f64(),
            a: self.a.to_f64(),
            b: self.b.to_f64(),
            c: self.c.to_f64(),
            d: some(&self.d),
            z: some(&self.z),
            dt_bias: some(&self.dt_bias),
            state_batch_indices: self.state_batch_indices.clone(),
            state: self.state.to_f64(),
        }
    }
}

/// Makes inputs for a decode step. Indices are distinct slots in scattered order; every fourth row is skipped (-1), and so
/// are rows for which no slot is left.
pub fn generate_step(problem: &StepProblem, seed: u64, pattern: Pattern) -> GeneratedStep {
    let p = problem;
    let tokens = p.batch * p.tokens;
    let (of_tokens, of_groups) = (tokens * p.nheads * p.headdim, tokens * p.ngroups * p.dstate);
    let stream = |tensor: u64| Stream::new(seed, tensor);
    let heads = Heads::new(pattern, p.nheads, p.dt_bias, stream(0));
    let (x, b, c, z, d, h0) = (
        stream(1),
        stream(2),
        stream(3),
        stream(4),
        stream(5),
        stream(6),
    );
    let dt = stream(7);
    let d_elems = match p.d {
        DKind::None => None,
        DKind::PerHead => Some(p.nheads),
        DKind::PerHeaddim => Some(p.nheads * p.headdim),
    };
    GeneratedStep {
        x: fill(p.dtype, of_tokens, |i| {
            pattern.x(&x, i, i / (p.nheads * p.headdim))
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
        state_batch_indices: p
            .indices
            .then(|| scattered_slots(p.batch, p.slots, stream(8))),
        state: fill(
            p.state_dtype,
            p.slots * p.nheads * p.headdim * p.dstate,
            |i| pattern.state(&h0, i),
        ),
    }
}

fn scattered_slots(rows: usize, slots: usize, stream: Stream) -> Vec<i32> {
    let mut order: Vec<usize> = (0..slots).collect();
    order.sort_by_key(|slot| stream.bits(*slot));
    let mut free = order.into_iter();
    (0..rows)
        .map(|row| match if row % 4 == 3 { None } else { free.next() } {
            Some(slot) => i32::try_from(slot).expect("slots should fit an i32"),
            None => -1,
        })
        .collect()
}
