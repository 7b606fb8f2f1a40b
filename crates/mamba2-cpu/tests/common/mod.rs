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
