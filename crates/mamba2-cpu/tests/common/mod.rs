//! Shared by the tests: owned host tensors, one call of a backend, and comparison with the oracle.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use mamba2_cpu::{CpuError, HostData, HostDataMut, HostTensor, HostTensorMut, forward, step};
use mamba2_reference::{
    Bounds, ErrorReport, Generated, GeneratedStep, RefInputs, RefOutputs, Values, recurrence,
};
use mamba2_spec::{
    DKind, Dtype, ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs, StepProblem,
    TensorMeta,
};

pub fn view<'a>(values: &'a Values, shape: &[usize]) -> HostTensor<'a> {
    HostTensor::new(TensorMeta::contiguous(values.dtype(), shape), data(values)).unwrap()
}

pub fn data(values: &Values) -> HostData<'_> {
    match values {
        Values::Bf16(v) => HostData::Bf16(v),
        Values::F16(v) => HostData::F16(v),
        Values::F32(v) => HostData::F32(v),
        Values::I32(v) => HostData::I32(v),
    }
}

pub fn data_mut(values: &mut Values) -> HostDataMut<'_> {
    match values {
        Values::Bf16(v) => HostDataMut::Bf16(v),
        Values::F16(v) => HostDataMut::F16(v),
        Values::F32(v) => HostDataMut::F32(v),
        Values::I32(_) => panic!("no output holds integers"),
    }
}

pub fn view_mut<'a>(values: &'a mut Values, shape: &[usize]) -> HostTensorMut<'a> {
    HostTensorMut::new(
        TensorMeta::contiguous(values.dtype(), shape),
        data_mut(values),
    )
    .unwrap()
}

pub fn d_shape(kind: DKind, nheads: usize, headdim: usize) -> Vec<usize> {
    if kind == DKind::PerHeaddim {
        vec![nheads, headdim]
    } else {
        vec![nheads]
    }
}

pub fn state_shape(p: &Problem) -> [usize; 4] {
    [p.sequences(), p.nheads, p.headdim, p.dstate]
}

pub fn token_shape(p: &Problem) -> [usize; 4] {
    [p.batch, p.seqlen, p.nheads, p.headdim]
}

/// Contiguous views of all inputs.
pub fn inputs<'a>(p: &Problem, g: &'a Generated) -> ForwardInputs<HostTensor<'a>> {
    let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
    ForwardInputs {
        x: view(&g.x, &token_shape(p)),
        dt: view(&g.dt, &token_shape(p)[..3]),
        a: view(&g.a, &[p.nheads]),
        b: view(&g.b, &group),
        c: view(&g.c, &group),
        d: g.d
            .as_ref()
            .map(|d| view(d, &d_shape(p.d, p.nheads, p.headdim))),
        z: g.z.as_ref().map(|z| view(z, &token_shape(p))),
        dt_bias: g.dt_bias.as_ref().map(|v| view(v, &[p.nheads])),
        initial_states: g.initial_states.as_ref().map(|v| view(v, &state_shape(p))),
        cu_seqlens: g.cu_seqlens.as_ref().map(|cu| {
            HostTensor::new(TensorMeta::contiguous(None, &[cu.len()]), HostData::I32(cu)).unwrap()
        }),
    }
}

/// Outputs of a call, as stored.
#[derive(Clone, Debug)]
pub struct Results {
    pub out: Values,
    pub final_states: Option<Values>,
}

impl Results {
    pub fn poisoned(p: &Problem) -> Results {
        Results {
            out: Values::poison(p.dtype, token_shape(p).iter().product()),
            final_states: p
                .final_states
                .map(|d| Values::poison(d, state_shape(p).iter().product())),
        }
    }

    /// Same bits, NaN included.
    pub fn same_bits(&self, other: &Results) -> bool {
        let states = |r: &Results| r.final_states.as_ref().map(Values::to_le_bytes);
        self.out.to_le_bytes() == other.out.to_le_bytes() && states(self) == states(other)
    }
}

/// One call with contiguous tensors and poisoned outputs.
pub fn try_run(p: &Problem, g: &Generated) -> (Result<(), CpuError>, Results) {
    let mut results = Results::poisoned(p);
    let mut outputs = ForwardOutputs {
        out: view_mut(&mut results.out, &token_shape(p)),
        final_states: results
            .final_states
            .as_mut()
            .map(|v| view_mut(v, &state_shape(p))),
    };
    let result = forward(p, &inputs(p, g), &mut outputs);
    (result, results)
}

pub fn run(p: &Problem, g: &Generated) -> Results {
    let (result, results) = try_run(p, g);
    result.unwrap_or_else(|e| panic!("{p}: {e}"));
    results
}

/// Elements of `out` that belong to a sequence: all, or those before the last packed offset.
pub fn used(p: &Problem, cu_seqlens: Option<&[i32]>) -> usize {
    let tokens = cu_seqlens.map_or(p.batch * p.seqlen, |cu| *cu.last().unwrap() as usize);
    tokens * p.nheads * p.headdim
}

/// Holds `results` against `want` within section 3's bounds; a padded tail must still be poison.
pub fn assert_close(p: &Problem, g: &Generated, results: &Results, want: &RefOutputs) {
    assert_within(p, g, results, want, Bounds::of(p));
}

pub fn assert_within(
    p: &Problem,
    g: &Generated,
    results: &Results,
    want: &RefOutputs,
    bounds: Bounds,
) {
    let used = used(p, g.cu_seqlens.as_deref());
    let out = results.out.to_f64();
    let report = ErrorReport::compare(&out[..used], &want.out[..used]);
    assert!(report.within(bounds.out), "out of {p}: {report}");
    assert!(
        out[used..].iter().all(|v| v.is_nan()),
        "{p}: the padded tail was written"
    );
    if let Some(states) = &results.final_states {
        let report = ErrorReport::compare(&states.to_f64(), &want.final_states);
        assert!(
            report.within(bounds.states),
            "final_states of {p}: {report}"
        );
    }
}

/// Runs and compares with the recurrence.
pub fn check(p: &Problem, g: &Generated) -> Results {
    let results = run(p, g);
    assert_close(p, g, &results, &recurrence(p, &g.reference()));
    results
}

/// The inputs with every term positive: the size that rounding errors are measured by when terms cancel.
pub fn magnitudes(inputs: &RefInputs) -> RefInputs {
    let abs = |v: &Vec<f64>| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let some = |v: &Option<Vec<f64>>| v.as_ref().map(abs);
    RefInputs {
        x: abs(&inputs.x),
        b: abs(&inputs.b),
        c: abs(&inputs.c),
        d: some(&inputs.d),
        z: some(&inputs.z),
        initial_states: some(&inputs.initial_states),
        ..inputs.clone()
    }
}

pub fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

pub fn f32_problem(text: &str) -> Problem {
    let problem: Problem = text.parse().unwrap();
    problem.with_dtype(Dtype::F32)
}

/// One decode call with contiguous tensors: the state cache and the (poisoned before) output.
pub fn try_step(p: &StepProblem, g: &GeneratedStep) -> (Result<(), CpuError>, Values, Values) {
    let tokens = [p.batch, p.tokens, p.nheads, p.headdim];
    let group = [p.batch, p.tokens, p.ngroups, p.dstate];
    let inputs = StepInputs {
        x: view(&g.x, &tokens),
        dt: view(&g.dt, &tokens[..3]),
        a: view(&g.a, &[p.nheads]),
        b: view(&g.b, &group),
        c: view(&g.c, &group),
        d: g.d
            .as_ref()
            .map(|d| view(d, &d_shape(p.d, p.nheads, p.headdim))),
        z: g.z.as_ref().map(|z| view(z, &tokens)),
        dt_bias: g.dt_bias.as_ref().map(|v| view(v, &[p.nheads])),
        state_batch_indices: g.state_batch_indices.as_ref().map(|v| {
            HostTensor::new(TensorMeta::contiguous(None, &[v.len()]), HostData::I32(v)).unwrap()
        }),
    };
    let mut state = g.state.clone();
    let mut out = Values::poison(p.dtype, tokens.iter().product());
    let mut outputs = StepOutputs {
        state: view_mut(&mut state, &[p.slots, p.nheads, p.headdim, p.dstate]),
        out: view_mut(&mut out, &tokens),
    };
    let result = step(p, &inputs, &mut outputs);
    (result, state, out)
}

/// Tokens `first..first + len` of every row, or of a packed row, as a problem of their own. A piece of a packed row gets the
/// initial state of sequence `s`.
pub fn cut(
    problem: &Problem,
    g: &Generated,
    first: usize,
    len: usize,
    s: usize,
) -> (Problem, Generated) {
    let p = problem;
    let part = |v: &Values, width: usize| tokens(v, p.batch, p.seqlen, first..first + len, width);
    let state = p.nheads * p.headdim * p.dstate;
    let wide = p.nheads * p.headdim;
    let generated = Generated {
        x: part(&g.x, wide),
        dt: part(&g.dt, p.nheads),
        b: part(&g.b, p.ngroups * p.dstate),
        c: part(&g.c, p.ngroups * p.dstate),
        z: g.z.as_ref().map(|z| part(z, wide)),
        initial_states: g.initial_states.as_ref().map(|v| match p.packed {
            Some(sequences) => tokens(v, 1, sequences, s..s + 1, state),
            None => v.clone(),
        }),
        cu_seqlens: None,
        ..g.clone()
    };
    (
        Problem {
            seqlen: len,
            packed: None,
            ..p.clone()
        },
        generated,
    )
}

/// Tokens of each row of `[batch, seqlen, width]`.
fn tokens(
    values: &Values,
    batch: usize,
    seqlen: usize,
    range: std::ops::Range<usize>,
    width: usize,
) -> Values {
    fn of<T: Copy>(v: &[T], batch: usize, row: usize, part: std::ops::Range<usize>) -> Vec<T> {
        (0..batch)
            .flat_map(|b| v[b * row..][part.clone()].iter().copied())
            .collect()
    }
    let (row, part) = (seqlen * width, range.start * width..range.end * width);
    match values {
        Values::Bf16(v) => Values::Bf16(of(v, batch, row, part)),
        Values::F16(v) => Values::F16(of(v, batch, row, part)),
        Values::F32(v) => Values::F32(of(v, batch, row, part)),
        Values::I32(v) => Values::I32(of(v, batch, row, part)),
    }
}

/// The whole of `problem` through `step`, `tokens_a_step` at a time: outputs and states.
pub fn decode(
    problem: &Problem,
    g: &Generated,
    state_dtype: Dtype,
    tokens_a_step: usize,
) -> (Vec<f64>, Vec<f64>) {
    let p = problem;
    let mut step = StepProblem::new(p.batch, p.nheads, p.headdim, p.ngroups, p.dstate);
    (step.dtype, step.dt_dtype, step.state_dtype) = (p.dtype, p.dt_dtype, state_dtype);
    (step.d, step.z, step.dt_bias) = (p.d, p.z, p.dt_bias);
    (step.dt_softplus, step.dt_limit) = (p.dt_softplus, p.dt_limit);
    let wide = p.nheads * p.headdim;
    let states = p.batch * wide * p.dstate;
    let mut state = match &g.initial_states {
        Some(v) => Values::rounded(state_dtype, &v.to_f64()),
        None => Values::zeros(state_dtype, states),
    };
    let mut out = vec![0.0; p.batch * p.seqlen * wide];
    for first in (0..p.seqlen).step_by(tokens_a_step) {
        step.tokens = tokens_a_step.min(p.seqlen - first);
        let (_, part) = cut(problem, g, first, step.tokens, 0);
        let one = GeneratedStep {
            x: part.x,
            dt: part.dt,
            a: part.a,
            b: part.b,
            c: part.c,
            d: part.d,
            z: part.z,
            dt_bias: part.dt_bias,
            state_batch_indices: None,
            state,
        };
        let (result, next, y) = try_step(&step, &one);
        result.unwrap();
        state = next;
        let row = step.tokens * wide;
        for (b, y) in y.to_f64().chunks_exact(row).enumerate() {
            out[(b * p.seqlen + first) * wide..][..row].copy_from_slice(y);
        }
    }
    (out, state.to_f64())
}

/// Where a view has elements that are none of the tensor's.
#[derive(Clone, Copy, Debug)]
pub struct Gaps {
    /// Before the first element.
    pub lead: usize,
    /// After each innermost row.
    pub row: usize,
    /// After each token, or each state.
    pub token: usize,
}

/// The view of a contiguous tensor with gaps; its innermost axis stays contiguous.
pub fn gapped(dtype: Option<Dtype>, shape: &[usize], gaps: Gaps) -> TensorMeta {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len() - 1).rev() {
        let gap = match shape.len() - 1 - axis {
            1 => gaps.row,
            2 => gaps.token,
            _ => 0,
        };
        strides[axis] = strides[axis + 1] * shape[axis + 1] + gap;
    }
    TensorMeta::strided(dtype, shape, &strides)
}

/// Index of element `i` of a tensor in the memory of its view.
fn place(meta: &TensorMeta, i: usize) -> usize {
    let mut rest = i;
    let axes = meta.shape().iter().zip(meta.strides()).rev();
    axes.fold(0, |at, (extent, stride)| {
        let index = rest % extent;
        rest /= extent;
        at + index * stride
    })
}

/// Memory of the view `meta` of `values`, `lead` elements in; everything else is NaN.
pub fn spread(values: &Values, meta: &TensorMeta, lead: usize) -> Values {
    let mut all = vec![f64::NAN; lead + meta.span_elems().unwrap()];
    for (i, v) in values.to_f64().into_iter().enumerate() {
        all[lead + place(meta, i)] = v;
    }
    Values::rounded(values.dtype().unwrap(), &all)
}

/// The elements of a view. Everything else must still be NaN.
pub fn gather(values: &Values, meta: &TensorMeta) -> Values {
    let all = values.to_f64();
    let mut written = vec![false; all.len()];
    let picked: Vec<f64> = (0..meta.elems())
        .map(|i| {
            written[place(meta, i)] = true;
            all[place(meta, i)]
        })
        .collect();
    assert!(
        all.iter().zip(&written).all(|(v, w)| *w || v.is_nan()),
        "a gap was written"
    );
    Values::rounded(values.dtype().unwrap(), &picked)
}

/// The elements of `values` from `lead` on.
pub fn data_from(values: &Values, lead: usize) -> HostData<'_> {
    match values {
        Values::Bf16(v) => HostData::Bf16(&v[lead..]),
        Values::F16(v) => HostData::F16(&v[lead..]),
        Values::F32(v) => HostData::F32(&v[lead..]),
        Values::I32(v) => HostData::I32(&v[lead..]),
    }
}
