use mamba2_spec::{DKind, StepInputs, StepOutputs, StepProblem, check_step};
use ndarray::{Ix3, Ix4};

use crate::blocks::{HeadBlock, HeadBlocks, Sequence};
use crate::math;
use crate::views::Strided;
use crate::{CpuError, HostTensor, HostTensorMut, workers};

/// One decode step (mamba_ssm's `selective_state_update`): the state cache in place, a few tokens per row in order.
///
/// Shapes: see [`StepProblem`]. A state row is read once, carried in float64 over the tokens of the call, and rounded to
/// `state_dtype` once. A row whose index is -1 touches neither a slot nor its output. Parallel over (row, head).
///
/// # Errors
/// As [`crate::forward`]; and [`CpuError::StateIndex`] for an index outside `-1..slots` or a slot that two rows name.
/// Nothing is written then.
pub fn step(
    problem: &StepProblem,
    inputs: &StepInputs<HostTensor<'_>>,
    outputs: &mut StepOutputs<HostTensorMut<'_>>,
) -> Result<(), CpuError> {
    check_step(problem, inputs, outputs)?;
    let indices = inputs.state_batch_indices.map(HostTensor::to_i32);
    let slots = slots_of_rows(problem, indices.as_deref())?;
    let state = Strided::new(&mut outputs.state, "state")?;
    let out = Strided::new(&mut outputs.out, "out")?;

    let rows = rows(&slots, state, out, problem.tokens);
    let tasks = HeadBlocks::new(
        rows.into_iter(),
        problem.nheads,
        problem.nheads / problem.ngroups,
        1,
    );
    let at_most = problem.batch.saturating_mul(problem.nheads);
    workers::run(tasks, at_most, || Worker::new(problem, inputs), Worker::run);
    Ok(())
}

/// (slot, row) of every row that is not skipped, in order of slots.
fn slots_of_rows(
    problem: &StepProblem,
    indices: Option<&[i32]>,
) -> Result<Vec<(usize, usize)>, CpuError> {
    let Some(indices) = indices else {
        return Ok((0..problem.batch).map(|row| (row, row)).collect());
    };
    let mut slots = Vec::with_capacity(indices.len());
    for (row, index) in indices
        .iter()
        .enumerate()
        .filter(|(_, index)| **index != -1)
    {
        match usize::try_from(*index) {
            Ok(slot) if slot < problem.slots => slots.push((slot, row)),
            _ => {
                let expected = format!("-1 or a slot below {}", problem.slots);
                return Err(CpuError::StateIndex {
                    row,
                    expected,
                    got: *index,
                });
            }
        }
    }
    slots.sort_unstable();
    match slots.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(CpuError::StateIndex {
            row: pair[1].1,
            expected: format!("a slot of its own (row {} has this one)", pair[0].1),
            got: indices[pair[1].1],
        }),
        None => Ok(slots),
    }
}

/// The output and the state slot of every row that is not skipped.
fn rows<'a>(
    slots: &[(usize, usize)],
    state: Strided<'a, Ix4>,
    out: Strided<'a, Ix4>,
    tokens: usize,
) -> Vec<Sequence<'a>> {
    let mut states: Vec<(usize, Strided<'a, Ix3>)> = Vec::with_capacity(slots.len());
    let mut left = Some((state, 0));
    for (slot, row) in slots {
        let Some((rest, next)) = left.take() else {
            break;
        };
        let (first, rest) = rest.split_at(0, slot - next).1.take_first();
        states.push((*row, first));
        left = Some((rest, slot + 1));
    }
    states.sort_unstable_by_key(|(row, _)| *row);
    let mut rows = Vec::with_capacity(states.len());
    let mut left = Some((out, 0));
    for (row, state) in states {
        let Some((rest, next)) = left.take() else {
            break;
        };
        let (first, rest) = rest.split_at(0, row - next).1.take_first();
        rows.push(Sequence {
            index: row,
            row,
            first_token: 0,
            len: tokens,
            out: first,
            states: Some(state),
        });
        left = Some((rest, row + 1));
    }
    rows
}

/// One thread's scratch.
struct Worker<'a> {
    problem: &'a StepProblem,
    inputs: &'a StepInputs<HostTensor<'a>>,
    /// `[tokens, headdim]`.
    x: Vec<f32>,
    y: Vec<f32>,
    /// `[tokens, dstate]`.
    b: Vec<f32>,
    c: Vec<f32>,
    /// dt and exp(A dt), per token.
    dt: Vec<(f64, f64)>,
    /// One row of the state.
    narrow: Vec<f32>,
    wide: Vec<f64>,
    z: Vec<f32>,
}

impl<'a> Worker<'a> {
    fn new(problem: &'a StepProblem, inputs: &'a StepInputs<HostTensor<'a>>) -> Worker<'a> {
        let floats = |n: usize| vec![0f32; n];
        let (t, p, n) = (problem.tokens, problem.headdim, problem.dstate);
        Worker {
            problem,
            inputs,
            x: floats(t * p),
            y: floats(t * p),
            b: floats(t * n),
            c: floats(t * n),
            dt: vec![(0.0, 0.0); t],
            narrow: floats(n),
            wide: vec![0.0; n],
            z: floats(p),
        }
    }

    /// All tokens of one row and one head.
    fn run(&mut self, mut block: HeadBlock<'_>) {
        let p = self.problem;
        self.load(&block);
        let Some(states) = &mut block.states else {
            return;
        };
        for i in 0..p.headdim {
            states.load(0, i, &mut self.narrow);
            self.wide
                .iter_mut()
                .zip(&self.narrow)
                .for_each(|(wide, v)| *wide = f64::from(*v));
            for (t, (dt, decay)) in self.dt.iter().enumerate() {
                let dx = dt * f64::from(self.x[t * p.headdim + i]);
                let (b, c) = (
                    &self.b[t * p.dstate..][..p.dstate],
                    &self.c[t * p.dstate..][..p.dstate],
                );
                self.wide
                    .iter_mut()
                    .zip(b)
                    .for_each(|(h, b)| *h = *h * decay + dx * f64::from(*b));
                self.y[t * p.headdim + i] = math::dot(&self.wide, c) as f32;
            }
            self.narrow
                .iter_mut()
                .zip(&self.wide)
                .for_each(|(v, wide)| *v = *wide as f32);
            states.store(0, i, &self.narrow);
        }
        self.store_out(&mut block);
    }

    fn load(&mut self, block: &HeadBlock<'_>) {
        let (p, inputs, head) = (self.problem, self.inputs, block.first_head);
        let a = f64::from(inputs.a.get(head * inputs.a.stride(0)));
        let bias = inputs
            .dt_bias
            .as_ref()
            .map_or(0.0, |t| t.get(head * t.stride(0)));
        let at = |tensor: &HostTensor<'_>, t: usize, inner: usize| {
            block.row * tensor.stride(0) + t * tensor.stride(1) + inner * tensor.stride(2)
        };
        let group = head / (p.nheads / p.ngroups);
        for t in 0..p.tokens {
            inputs.x.load(
                at(&inputs.x, t, head),
                &mut self.x[t * p.headdim..][..p.headdim],
            );
            inputs.b.load(
                at(&inputs.b, t, group),
                &mut self.b[t * p.dstate..][..p.dstate],
            );
            inputs.c.load(
                at(&inputs.c, t, group),
                &mut self.c[t * p.dstate..][..p.dstate],
            );
            let dt = math::step_size(
                inputs.dt.get(at(&inputs.dt, t, head)),
                bias,
                p.dt_softplus,
                p.dt_limit,
            );
            self.dt[t] = (dt, (a * dt).exp());
        }
    }

    fn store_out(&mut self, block: &mut HeadBlock<'_>) {
        let (p, inputs, head) = (self.problem, self.inputs, block.first_head);
        let rows = self
            .y
            .chunks_exact_mut(p.headdim)
            .zip(self.x.chunks_exact(p.headdim));
        for (t, (y, x)) in rows.enumerate() {
            for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
                *y += match (p.d, &inputs.d) {
                    (DKind::PerHead, Some(d)) => d.get(head * d.stride(0)) * x,
                    (DKind::PerHeaddim, Some(d)) => d.get(head * d.stride(0) + i) * x,
                    _ => 0.0,
                };
            }
            if let Some(z) = &inputs.z {
                z.load(
                    block.row * z.stride(0) + t * z.stride(1) + head * z.stride(2),
                    &mut self.z,
                );
                math::gate(y, &self.z);
            }
            block.out.store(t, 0, y);
        }
    }
}
