//! Owned tensors for the benchmarks.
#![allow(dead_code)] // each benchmark uses its part

use mamba2_cpu::{HostData, HostDataMut, HostTensor, HostTensorMut, forward, step};
use mamba2_reference::{Generated, GeneratedStep, Pattern, Values, generate, generate_step};
use mamba2_spec::{
    ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs, StepProblem, TensorMeta,
};

fn view<'a>(values: &'a Values, shape: &[usize]) -> HostTensor<'a> {
    let data = match values {
        Values::Bf16(v) => HostData::Bf16(v),
        Values::F16(v) => HostData::F16(v),
        Values::F32(v) => HostData::F32(v),
        Values::I32(v) => HostData::I32(v),
    };
    HostTensor::new(TensorMeta::contiguous(values.dtype(), shape), data).expect("views should fit")
}

fn view_mut<'a>(values: &'a mut Values, shape: &[usize]) -> HostTensorMut<'a> {
    let meta = TensorMeta::contiguous(values.dtype(), shape);
    let data = match values {
        Values::Bf16(v) => HostDataMut::Bf16(v),
        Values::F16(v) => HostDataMut::F16(v),
        Values::F32(v) => HostDataMut::F32(v),
        Values::I32(_) => unreachable!("no output holds integers"),
    };
    HostTensorMut::new(meta, data).expect("views should fit")
}

/// A forward call with its inputs and outputs. D is `[nheads]`, no z, no packing.
pub struct Forward {
    pub problem: Problem,
    inputs: Generated,
    out: Values,
    states: Option<Values>,
}

impl Forward {
    pub fn new(problem: Problem) -> Forward {
        let p = &problem;
        let tokens = p.batch * p.seqlen * p.nheads * p.headdim;
        let states = p.sequences() * p.nheads * p.headdim * p.dstate;
        Forward {
            inputs: generate(p, 1, Pattern::Plain),
            out: Values::zeros(p.dtype, tokens),
            states: p.final_states.map(|dtype| Values::zeros(dtype, states)),
            problem,
        }
    }

    pub fn run(&mut self) {
        let (p, g) = (&self.problem, &self.inputs);
        let tokens = [p.batch, p.seqlen, p.nheads, p.headdim];
        let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
        let state = [p.sequences(), p.nheads, p.headdim, p.dstate];
        let inputs = ForwardInputs {
            x: view(&g.x, &tokens),
            dt: view(&g.dt, &tokens[..3]),
            a: view(&g.a, &[p.nheads]),
            b: view(&g.b, &group),
            c: view(&g.c, &group),
            d: g.d.as_ref().map(|d| view(d, &[p.nheads])),
            z: None,
            dt_bias: None,
            initial_states: g.initial_states.as_ref().map(|v| view(v, &state)),
            cu_seqlens: None,
        };
        let mut outputs = ForwardOutputs {
            out: view_mut(&mut self.out, &tokens),
            final_states: self.states.as_mut().map(|v| view_mut(v, &state)),
        };
        forward(p, &inputs, &mut outputs).expect("forward should run");
    }
}

/// A decode call with its inputs, state cache and output.
pub struct Step {
    pub problem: StepProblem,
    inputs: GeneratedStep,
    out: Values,
}

impl Step {
    pub fn new(problem: StepProblem) -> Step {
        let out = Values::zeros(
            problem.dtype,
            problem.batch * problem.tokens * problem.nheads * problem.headdim,
        );
        Step {
            inputs: generate_step(&problem, 1, Pattern::Plain),
            out,
            problem,
        }
    }

    pub fn run(&mut self) {
        let (p, g) = (&self.problem, &mut self.inputs);
        let tokens = [p.batch, p.tokens, p.nheads, p.headdim];
        let group = [p.batch, p.tokens, p.ngroups, p.dstate];
        let inputs = StepInputs {
            x: view(&g.x, &tokens),
            dt: view(&g.dt, &tokens[..3]),
            a: view(&g.a, &[p.nheads]),
            b: view(&g.b, &group),
            c: view(&g.c, &group),
            d: g.d.as_ref().map(|d| view(d, &[p.nheads])),
            z: None,
            dt_bias: None,
            state_batch_indices: None,
        };
        let mut outputs = StepOutputs {
            state: view_mut(&mut g.state, &[p.slots, p.nheads, p.headdim, p.dstate]),
            out: view_mut(&mut self.out, &tokens),
        };
        step(p, &inputs, &mut outputs).expect("step should run");
    }
}
