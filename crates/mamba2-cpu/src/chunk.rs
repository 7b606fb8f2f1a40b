//! The chunked forward pass of a few heads of one sequence. Letters: q tokens of a chunk, w = heads * headdim, n = dstate.

use mamba2_spec::{DKind, ForwardInputs, Problem};

use crate::HostTensor;
use crate::blocks::HeadBlock;
use crate::math::{self, Log2};
use crate::products::{Shape, add, matrix, matrix_mut, set};

/// Rows of one piece of a chunk's causal q x q matrix. Bounds the scratch for large chunks and skips what lies above the
/// diagonal, but for half of a piece.
const ROWS: usize = 64;

/// One thread's scratch, kept from chunk to chunk and from task to task.
pub(crate) struct Worker<'a> {
    problem: &'a Problem,
    inputs: &'a ForwardInputs<HostTensor<'a>>,
    chunk_size: usize,
    /// x, dt * x, then x * (dt * exp(G_last - G)): `[q, w]`.
    x: Vec<f32>,
    weighted_x: Vec<f32>,
    y: Vec<f32>,
    /// `[q, n]`.
    b: Vec<f32>,
    c: Vec<f32>,
    /// C B^T of ROWS tokens, and the same with decay: `[ROWS, q]`.
    scores: Vec<f32>,
    decayed: Vec<f32>,
    /// Per head, `[heads, q]`: dt, G in log2 units (see [`Log2`]), 2^G, dt * 2^(G_last - G).
    dt: Vec<f32>,
    sum_hi: Vec<f32>,
    sum_lo: Vec<f32>,
    from_start: Vec<f32>,
    to_end: Vec<f32>,
    /// Decay over the whole chunk, per head.
    decay: Vec<f64>,
    /// The carried state, `[w, n]`, and its rounding to float32 for the products. Carried in float64: constant inputs make
    /// float32 additions round the same way each time, which adds up to more than 1e-5 over a thousand chunks.
    state: Vec<f64>,
    state_f32: Vec<f32>,
    z: Vec<f32>,
}

/// Where a chunk is: first token in its row and number of tokens.
#[derive(Clone, Copy)]
struct Span {
    row: usize,
    token: usize,
    len: usize,
}

impl<'a> Worker<'a> {
    /// Scratch for chunks of up to `chunk_size` tokens and up to `heads` heads.
    pub(crate) fn new(
        problem: &'a Problem,
        inputs: &'a ForwardInputs<HostTensor<'a>>,
        chunk_size: usize,
        heads: usize,
    ) -> Worker<'a> {
        let (q, w, n) = (chunk_size, heads * problem.headdim, problem.dstate);
        let floats = |n: usize| vec![0f32; n];
        let rows = ROWS.min(q);
        Worker {
            problem,
            inputs,
            chunk_size,
            x: floats(q * w),
            weighted_x: floats(q * w),
            y: floats(q * w),
            b: floats(q * n),
            c: floats(q * n),
            scores: floats(rows * q),
            decayed: floats(rows * q),
            dt: floats(heads * q),
            sum_hi: floats(heads * q),
            sum_lo: floats(heads * q),
            from_start: floats(heads * q),
            to_end: floats(heads * q),
            decay: vec![0.0; heads],
            state: vec![0.0; w * n],
            state_f32: floats(w * n),
            z: floats(problem.headdim),
        }
    }

    /// Bytes that [`Worker::new`] allocates.
    pub(crate) fn scratch_bytes(problem: &Problem, chunk_size: usize, heads: usize) -> usize {
        let (q, w, n) = (chunk_size, heads * problem.headdim, problem.dstate);
        let floats =
            3 * q * w + 2 * q * n + 2 * ROWS.min(q) * q + 5 * heads * q + w * n + problem.headdim;
        4 * floats + 8 * (heads + w * n)
    }

    /// All tokens of `block`, then its final state.
    pub(crate) fn run(&mut self, mut block: HeadBlock<'_>) {
        let mut carried = self.load_state(&block);
        let mut done = 0;
        while done < block.len {
            let len = self.chunk_size.min(block.len - done);
            let span = Span {
                row: block.row,
                token: block.first_token + done,
                len,
            };
            self.load_chunk(&block, span);
            self.sum_exponents(&block, span);
            self.carried_part(&block, len, carried);
            self.scale_x(&block, len, Weight::Dt);
            self.own_part(&block, len);
            self.store_out(&mut block, span, done);
            done += len;
            if done < block.len || block.states.is_some() {
                self.scale_x(&block, len, Weight::ToEnd);
                self.advance_state(&block, len, carried);
                carried = true;
            }
        }
        self.store_state(&mut block);
    }

    /// The initial state, or zeros; false if it is zero.
    fn load_state(&mut self, block: &HeadBlock<'_>) -> bool {
        let (headdim, dstate) = (self.problem.headdim, self.problem.dstate);
        let elems = block.heads * headdim * dstate;
        let Some(initial) = &self.inputs.initial_states else {
            self.state[..elems].fill(0.0);
            self.state_f32[..elems].fill(0.0);
            return false;
        };
        for (i, row) in self.state_f32[..elems].chunks_exact_mut(dstate).enumerate() {
            let (head, p) = (block.first_head + i / headdim, i % headdim);
            initial.load(
                block.index * initial.stride(0) + head * initial.stride(1) + p * initial.stride(2),
                row,
            );
        }
        self.state
            .iter_mut()
            .zip(&self.state_f32[..elems])
            .for_each(|(wide, v)| *wide = f64::from(*v));
        true
    }

    fn load_chunk(&mut self, block: &HeadBlock<'_>, span: Span) {
        let (p, inputs) = (self.problem, self.inputs);
        let w = block.heads * p.headdim;
        let group = block.first_head / p.heads_per_group();
        let token_of =
            |t: &HostTensor<'_>, i: usize| span.row * t.stride(0) + (span.token + i) * t.stride(1);
        for (i, row) in self.x[..span.len * w].chunks_exact_mut(w).enumerate() {
            for (k, row) in row.chunks_exact_mut(p.headdim).enumerate() {
                inputs.x.load(
                    token_of(&inputs.x, i) + (block.first_head + k) * inputs.x.stride(2),
                    row,
                );
            }
        }
        for (from, to) in [(&inputs.b, &mut self.b), (&inputs.c, &mut self.c)] {
            for (i, row) in to[..span.len * p.dstate]
                .chunks_exact_mut(p.dstate)
                .enumerate()
            {
                from.load(token_of(from, i) + group * from.stride(2), row);
            }
        }
    }

    /// dt, G and what follows from them.
    fn sum_exponents(&mut self, block: &HeadBlock<'_>, span: Span) {
        let (p, inputs, q) = (self.problem, self.inputs, span.len);
        for k in 0..block.heads {
            let head = block.first_head + k;
            let a = f64::from(inputs.a.get(head * inputs.a.stride(0))) * std::f64::consts::LOG2_E;
            let bias = inputs
                .dt_bias
                .as_ref()
                .map_or(0.0, |t| t.get(head * t.stride(0)));
            let at = k * q..(k + 1) * q;
            let (dts, his, los) = (
                &mut self.dt[at.clone()],
                &mut self.sum_hi[at.clone()],
                &mut self.sum_lo[at.clone()],
            );
            let dt = &inputs.dt;
            let first = span.row * dt.stride(0) + span.token * dt.stride(1) + head * dt.stride(2);
            let mut sum = 0f64;
            for i in 0..q {
                let dt = math::step_size(
                    dt.get(first + i * dt.stride(1)),
                    bias,
                    p.dt_softplus,
                    p.dt_limit,
                );
                sum += a * dt;
                let Log2 { hi, lo } = Log2::of(sum);
                (dts[i], his[i], los[i]) = (dt as f32, hi, lo);
            }
            let last = Log2::of(sum);
            self.decay[k] = sum.exp2();
            for i in 0..q {
                self.from_start[k * q + i] = math::exp2(his[i], los[i]);
                self.to_end[k * q + i] = dts[i] * math::exp2(last.hi - his[i], last.lo - los[i]);
            }
        }
    }

    /// `y = 2^G (C h^T)`: what the state at the chunk's start contributes.
    fn carried_part(&mut self, block: &HeadBlock<'_>, q: usize, carried: bool) {
        let (headdim, n) = (self.problem.headdim, self.problem.dstate);
        let w = block.heads * headdim;
        let y = &mut self.y[..q * w];
        if !carried {
            y.fill(0.0);
            return;
        }
        let state = matrix(&self.state_f32[..w * n], Shape::dense(w, n));
        set(
            matrix_mut(y, Shape::dense(q, w)),
            &matrix(&self.c[..q * n], Shape::dense(q, n)),
            &state.t(),
        );
        for (i, row) in y.chunks_exact_mut(w).enumerate() {
            for (k, row) in row.chunks_exact_mut(headdim).enumerate() {
                let scale = self.from_start[k * q + i];
                row.iter_mut().for_each(|y| *y *= scale);
            }
        }
    }

    /// `weighted_x = x * weight`, one weight for each token and head.
    fn scale_x(&mut self, block: &HeadBlock<'_>, q: usize, weight: Weight) {
        let headdim = self.problem.headdim;
        let w = block.heads * headdim;
        let weights = match weight {
            Weight::Dt => &self.dt,
            Weight::ToEnd => &self.to_end,
        };
        for (i, (to, from)) in self.weighted_x[..q * w]
            .chunks_exact_mut(w)
            .zip(self.x.chunks_exact(w))
            .enumerate()
        {
            for (k, (to, from)) in to
                .chunks_exact_mut(headdim)
                .zip(from.chunks_exact(headdim))
                .enumerate()
            {
                let weight = weights[k * q + i];
                to.iter_mut().zip(from).for_each(|(to, x)| *to = x * weight);
            }
        }
    }

    /// `y_i += sum_{j <= i} 2^(G_i - G_j) (C_i . B_j) dt_j x_j`, ROWS tokens at a time; C B^T is shared by the heads.
    fn own_part(&mut self, block: &HeadBlock<'_>, q: usize) {
        let (headdim, n) = (self.problem.headdim, self.problem.dstate);
        let w = block.heads * headdim;
        for first in (0..q).step_by(ROWS) {
            let rows = ROWS.min(q - first);
            let cols = first + rows;
            let tile = Shape::dense(rows, cols);
            let c = matrix(&self.c[first * n..cols * n], Shape::dense(rows, n));
            let b = matrix(&self.b[..cols * n], Shape::dense(cols, n));
            set(
                matrix_mut(&mut self.scores[..rows * cols], tile),
                &c,
                &b.t(),
            );
            for k in 0..block.heads {
                let (hi, lo) = (&self.sum_hi[k * q..][..cols], &self.sum_lo[k * q..][..cols]);
                for (i, (row, scores)) in self
                    .decayed
                    .chunks_exact_mut(cols)
                    .zip(self.scores.chunks_exact(cols))
                    .take(rows)
                    .enumerate()
                {
                    // The exponent is computed at and left of the diagonal only: right of it, it is positive.
                    let causal = first + i + 1;
                    let end = Log2 {
                        hi: hi[causal - 1],
                        lo: lo[causal - 1],
                    };
                    math::decayed_scores(&mut row[..causal], &scores[..causal], end, hi, lo);
                    row[causal..].fill(0.0);
                }
                let of_head = |rows| Shape {
                    rows,
                    cols: headdim,
                    stride: w,
                };
                add(
                    matrix_mut(&mut self.y[first * w + k * headdim..], of_head(rows)),
                    &matrix(&self.decayed[..rows * cols], tile),
                    &matrix(&self.weighted_x[k * headdim..], of_head(cols)),
                );
            }
        }
    }

    /// Skip term and gate, then the chunk's outputs in their dtype.
    fn store_out(&mut self, block: &mut HeadBlock<'_>, span: Span, done: usize) {
        let (p, inputs) = (self.problem, self.inputs);
        let w = block.heads * p.headdim;
        let rows = self.y[..span.len * w]
            .chunks_exact_mut(w)
            .zip(self.x.chunks_exact(w));
        for (i, (y, x)) in rows.enumerate() {
            for (k, (y, x)) in y
                .chunks_exact_mut(p.headdim)
                .zip(x.chunks_exact(p.headdim))
                .enumerate()
            {
                let head = block.first_head + k;
                match (p.d, &inputs.d) {
                    (DKind::PerHead, Some(d)) => {
                        let d = d.get(head * d.stride(0));
                        y.iter_mut().zip(x).for_each(|(y, x)| *y += d * x);
                    }
                    (DKind::PerHeaddim, Some(d)) => {
                        let at = head * d.stride(0);
                        y.iter_mut()
                            .zip(x)
                            .enumerate()
                            .for_each(|(i, (y, x))| *y += d.get(at + i) * x);
                    }
                    _ => {}
                }
                if let Some(z) = &inputs.z {
                    z.load(
                        span.row * z.stride(0)
                            + (span.token + i) * z.stride(1)
                            + head * z.stride(2),
                        &mut self.z,
                    );
                    math::gate(y, &self.z);
                }
                block.out.store(done + i, k, y);
            }
        }
    }

    /// `h = 2^G_last h + weighted_x^T B`.
    fn advance_state(&mut self, block: &HeadBlock<'_>, q: usize, carried: bool) {
        let n = self.problem.dstate;
        let w = block.heads * self.problem.headdim;
        let x = matrix(&self.weighted_x[..q * w], Shape::dense(q, w));
        let b = matrix(&self.b[..q * n], Shape::dense(q, n));
        set(
            matrix_mut(&mut self.state_f32[..w * n], Shape::dense(w, n)),
            &x.t(),
            &b,
        );
        let of_head = self.problem.headdim * n;
        let heads = self
            .state
            .chunks_exact_mut(of_head)
            .zip(self.state_f32.chunks_exact_mut(of_head));
        for ((wide, narrow), decay) in heads.zip(&self.decay).take(block.heads) {
            // A state that is known to be zero is not multiplied: a decay may be infinite for growing states.
            let decay = if carried { *decay } else { 0.0 };
            for (wide, narrow) in wide.iter_mut().zip(narrow) {
                *wide = *wide * decay + f64::from(*narrow);
                *narrow = *wide as f32;
            }
        }
    }

    fn store_state(&mut self, block: &mut HeadBlock<'_>) {
        let (headdim, dstate) = (self.problem.headdim, self.problem.dstate);
        let Some(states) = &mut block.states else {
            return;
        };
        for (i, row) in self.state_f32[..block.heads * headdim * dstate]
            .chunks_exact(dstate)
            .enumerate()
        {
            states.store(i / headdim, i % headdim, row);
        }
    }
}

#[derive(Clone, Copy)]
enum Weight {
    Dt,
    ToEnd,
}
