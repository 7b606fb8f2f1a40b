//! Shared by the integration tests: made inputs as host and device tensors.
#![allow(dead_code)]

use mamba2::{
    Device, DeviceBuffer, DeviceTensor, Dtype, ForwardInputs, ForwardOutputs, HasMeta, HostData,
    HostDataMut, HostTensor, HostTensorMut, Plan, Problem, StepInputs, StepOutputs, StepPlan,
    StepProblem, TensorMeta,
};
use mamba2_reference::{
    Bounds, ErrorReport, Generated, GeneratedStep, RefOutputs, Values, recurrence,
};

/// A view of all of `values`.
pub fn view<'a>(values: &'a Values, shape: &[usize]) -> HostTensor<'a> {
    let data = match values {
        Values::Bf16(v) => HostData::Bf16(v),
        Values::F16(v) => HostData::F16(v),
        Values::F32(v) => HostData::F32(v),
        Values::I32(v) => HostData::I32(v),
    };
    HostTensor::new(TensorMeta::contiguous(values.dtype(), shape), data).expect("a whole tensor")
}

pub fn view_mut<'a>(values: &'a mut Values, shape: &[usize]) -> HostTensorMut<'a> {
    let meta = TensorMeta::contiguous(values.dtype(), shape);
    let data = match values {
        Values::Bf16(v) => HostDataMut::Bf16(v),
        Values::F16(v) => HostDataMut::F16(v),
        Values::F32(v) => HostDataMut::F32(v),
        Values::I32(_) => panic!("no output is i32"),
    };
    HostTensorMut::new(meta, data).expect("a whole tensor")
}

pub struct Shapes {
    pub tokens: [usize; 4],
    pub group: [usize; 4],
    pub states: [usize; 4],
    pub d: Vec<usize>,
}

pub fn shapes(p: &Problem) -> Shapes {
    Shapes {
        tokens: [p.batch, p.seqlen, p.nheads, p.headdim],
        group: [p.batch, p.seqlen, p.ngroups, p.dstate],
        states: [p.sequences(), p.nheads, p.headdim, p.dstate],
        d: if p.d == mamba2::DKind::PerHeaddim {
            vec![p.nheads, p.headdim]
        } else {
            vec![p.nheads]
        },
    }
}

/// The made inputs as host tensors; `offsets` holds cu_seqlens.
pub fn host_inputs<'a>(
    p: &Problem,
    made: &'a Generated,
    offsets: &'a Option<Values>,
) -> ForwardInputs<HostTensor<'a>> {
    let s = shapes(p);
    ForwardInputs {
        x: view(&made.x, &s.tokens),
        dt: view(&made.dt, &s.tokens[..3]),
        a: view(&made.a, &[p.nheads]),
        b: view(&made.b, &s.group),
        c: view(&made.c, &s.group),
        d: made.d.as_ref().map(|v| view(v, &s.d)),
        z: made.z.as_ref().map(|v| view(v, &s.tokens)),
        dt_bias: made.dt_bias.as_ref().map(|v| view(v, &[p.nheads])),
        initial_states: made.initial_states.as_ref().map(|v| view(v, &s.states)),
        cu_seqlens: offsets.as_ref().map(|v| view(v, &[p.sequences() + 1])),
    }
}

pub fn offsets(made: &Generated) -> Option<Values> {
    made.cu_seqlens.clone().map(Values::I32)
}

/// Results of a call, poisoned before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    pub out: Values,
    pub final_states: Option<Values>,
}

pub fn poisoned(p: &Problem) -> Results {
    let elems = |shape: &[usize]| shape.iter().product();
    let s = shapes(p);
    Results {
        out: Values::poison(p.dtype, elems(&s.tokens)),
        final_states: p.final_states.map(|d| Values::poison(d, elems(&s.states))),
    }
}

/// Bits of all values, so that NaN equals NaN.
pub fn bits(results: &Results) -> Vec<u8> {
    let mut bytes = results.out.to_le_bytes();
    bytes.extend(results.final_states.iter().flat_map(Values::to_le_bytes));
    bytes
}

pub fn run_host(plan: &Plan, made: &Generated) -> Results {
    let p = plan.problem();
    let mut results = poisoned(p);
    let s = shapes(p);
    let offsets = offsets(made);
    let mut outputs = ForwardOutputs {
        out: view_mut(&mut results.out, &s.tokens),
        final_states: results
            .final_states
            .as_mut()
            .map(|v| view_mut(v, &s.states)),
    };
    plan.forward_host(&host_inputs(p, made, &offsets), &mut outputs)
        .unwrap_or_else(|e| panic!("{p}: {e}"));
    results
}

/// Tokens that belong to a sequence.
pub fn used_tokens(p: &Problem, made: &Generated) -> usize {
    made.cu_seqlens
        .as_ref()
        .and_then(|cu| cu.last())
        .map_or(p.seqlen, |n| *n as usize)
}

/// Compares with the float64 recurrence.
pub fn assert_right(p: &Problem, made: &Generated, results: &Results) {
    let want: RefOutputs = recurrence(p, &made.reference());
    let bounds = Bounds::of(p);
    let row = used_tokens(p, made) * p.nheads * p.headdim;
    // A padded tail is not written: compare what is.
    let n = if p.packed.is_some() {
        row
    } else {
        want.out.len()
    };
    let got = results.out.to_f64();
    let report = ErrorReport::compare(&got[..n], &want.out[..n]);
    assert!(n == 0 || report.within(bounds.out), "{p}: out {report:?}");
    if let Some(states) = &results.final_states {
        let report = ErrorReport::compare(&states.to_f64(), &want.final_states);
        assert!(
            states.is_empty() || report.within(bounds.states),
            "{p}: final_states {report:?}"
        );
    }
}

pub fn step_shapes(p: &StepProblem) -> ([usize; 4], [usize; 4], [usize; 4], Vec<usize>) {
    (
        [p.batch, p.tokens, p.nheads, p.headdim],
        [p.batch, p.tokens, p.ngroups, p.dstate],
        [p.slots, p.nheads, p.headdim, p.dstate],
        if p.d == mamba2::DKind::PerHeaddim {
            vec![p.nheads, p.headdim]
        } else {
            vec![p.nheads]
        },
    )
}

fn step_inputs<'a>(
    p: &StepProblem,
    made: &'a GeneratedStep,
    indices: &'a Option<Values>,
) -> StepInputs<HostTensor<'a>> {
    let (tokens, group, _, d) = step_shapes(p);
    StepInputs {
        x: view(&made.x, &tokens),
        dt: view(&made.dt, &tokens[..3]),
        a: view(&made.a, &[p.nheads]),
        b: view(&made.b, &group),
        c: view(&made.c, &group),
        d: made.d.as_ref().map(|v| view(v, &d)),
        z: made.z.as_ref().map(|v| view(v, &tokens)),
        dt_bias: made.dt_bias.as_ref().map(|v| view(v, &[p.nheads])),
        state_batch_indices: indices.as_ref().map(|v| view(v, &[p.batch])),
    }
}

fn slots(made: &GeneratedStep) -> Option<Values> {
    made.state_batch_indices.clone().map(Values::I32)
}

/// Runs a step; returns `out` and the state.
pub fn run_step_host(plan: &StepPlan, made: &GeneratedStep) -> (Values, Values) {
    let p = plan.problem();
    let (tokens, _, state_shape, _) = step_shapes(p);
    let mut out = Values::poison(p.dtype, tokens.iter().product());
    let mut state = made.state.clone();
    let indices = slots(made);
    let mut outputs = StepOutputs {
        state: view_mut(&mut state, &state_shape),
        out: view_mut(&mut out, &tokens),
    };
    plan.step_host(&step_inputs(p, made, &indices), &mut outputs)
        .unwrap_or_else(|e| panic!("{p}: {e}"));
    (out, state)
}

/// How device tensors are laid in their buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// At the start of a buffer of the exact size.
    Exact,
    /// At the end of a buffer of whole 2 MiB pages, so that reading past the end faults.
    PageEnd,
    /// Two bytes (16-bit dtypes) or four after a 16-byte boundary.
    OffBy1,
}

/// Device copy of a host tensor, with its buffer.
pub fn to_device(
    device: &Device,
    host: &HostTensor<'_>,
    place: Place,
) -> (DeviceBuffer, DeviceTensor) {
    let meta = *host.meta();
    let elem = meta.dtype.map_or(4, Dtype::size_bytes);
    let bytes = mamba2::span_bytes(&meta).expect("size");
    let (size, offset) = match place {
        Place::Exact => (bytes, 0),
        Place::PageEnd => {
            let size = bytes.next_multiple_of(2 << 20);
            (size, size - bytes)
        }
        Place::OffBy1 => (bytes + elem, elem),
    };
    let buffer = device.alloc(size).expect("alloc");
    let n = meta.span_elems().expect("span");
    match host.data() {
        HostData::Bf16(v) => buffer.write(offset, &v[..n]),
        HostData::F16(v) => buffer.write(offset, &v[..n]),
        HostData::F32(v) => buffer.write(offset, &v[..n]),
        HostData::I32(v) => buffer.write(offset, &v[..n]),
    }
    .expect("upload");
    let tensor = DeviceTensor::new(&buffer, offset, meta).expect("view");
    (buffer, tensor)
}

/// Everything of one call on the device.
pub struct OnDevice {
    pub inputs: ForwardInputs<DeviceTensor>,
    pub outputs: ForwardOutputs<DeviceTensor>,
    pub workspace: DeviceBuffer,
    out: (DeviceBuffer, usize),
    final_states: Option<(DeviceBuffer, usize)>,
    problem: Problem,
}

impl OnDevice {
    pub fn new(device: &Device, plan: &Plan, made: &Generated, place: Place) -> OnDevice {
        let p = plan.problem();
        let offsets = offsets(made);
        let host = host_inputs(p, made, &offsets);
        let up = |t: &HostTensor<'_>| to_device(device, t, place).1;
        let up_all = |t: &Option<HostTensor<'_>>| t.as_ref().map(up);
        let inputs = ForwardInputs {
            x: up(&host.x),
            dt: up(&host.dt),
            a: up(&host.a),
            b: up(&host.b),
            c: up(&host.c),
            d: up_all(&host.d),
            z: up_all(&host.z),
            dt_bias: up_all(&host.dt_bias),
            initial_states: up_all(&host.initial_states),
            cu_seqlens: up_all(&host.cu_seqlens),
        };
        let (results, s) = (poisoned(p), shapes(p));
        let out = to_device(device, &view(&results.out, &s.tokens), place);
        let final_states = results
            .final_states
            .as_ref()
            .map(|v| to_device(device, &view(v, &s.states), place));
        let offset = |(buffer, tensor): &(DeviceBuffer, DeviceTensor)| {
            (
                buffer.clone(),
                (tensor.address() - buffer.address()) as usize,
            )
        };
        let workspace = device.alloc(plan.workspace_bytes()).expect("workspace");
        let stream = device.stream().expect("stream");
        workspace.fill(&stream, 0xff).expect("poison");
        stream.synchronize().expect("synchronize");
        OnDevice {
            inputs,
            outputs: ForwardOutputs {
                out: out.1.clone(),
                final_states: final_states.as_ref().map(|f| f.1.clone()),
            },
            workspace,
            out: offset(&out),
            final_states: final_states.as_ref().map(offset),
            problem: p.clone(),
        }
    }

    pub fn results(&self) -> Results {
        let mut results = poisoned(&self.problem);
        read(&self.out, &mut results.out);
        if let (Some(from), Some(to)) = (&self.final_states, results.final_states.as_mut()) {
            read(from, to);
        }
        results
    }
}

fn read((buffer, offset): &(DeviceBuffer, usize), to: &mut Values) {
    match to {
        Values::Bf16(v) => buffer.read(*offset, v),
        Values::F16(v) => buffer.read(*offset, v),
        Values::F32(v) => buffer.read(*offset, v),
        Values::I32(v) => buffer.read(*offset, v),
    }
    .expect("download");
}

/// Everything of one step on the device.
pub struct StepOnDevice {
    pub inputs: StepInputs<DeviceTensor>,
    pub outputs: StepOutputs<DeviceTensor>,
    out: (DeviceBuffer, Values),
    state: (DeviceBuffer, Values),
}

impl StepOnDevice {
    pub fn new(device: &Device, plan: &StepPlan, made: &GeneratedStep) -> StepOnDevice {
        let p = plan.problem();
        let (tokens, _, state_shape, _) = step_shapes(p);
        let indices = slots(made);
        let host = step_inputs(p, made, &indices);
        let up = |t: &HostTensor<'_>| to_device(device, t, Place::Exact).1;
        let up_all = |t: &Option<HostTensor<'_>>| t.as_ref().map(up);
        let out = Values::poison(p.dtype, tokens.iter().product());
        let on = |v: &Values, shape: &[usize]| to_device(device, &view(v, shape), Place::Exact);
        let (out_buffer, out_tensor) = on(&out, &tokens);
        let (state_buffer, state_tensor) = on(&made.state, &state_shape);
        StepOnDevice {
            inputs: StepInputs {
                x: up(&host.x),
                dt: up(&host.dt),
                a: up(&host.a),
                b: up(&host.b),
                c: up(&host.c),
                d: up_all(&host.d),
                z: up_all(&host.z),
                dt_bias: up_all(&host.dt_bias),
                state_batch_indices: up_all(&host.state_batch_indices),
            },
            outputs: StepOutputs {
                state: state_tensor,
                out: out_tensor,
            },
            out: (out_buffer, out),
            state: (state_buffer, made.state.clone()),
        }
    }

    /// `out` and the state.
    pub fn results(&self) -> (Values, Values) {
        let of = |(buffer, like): &(DeviceBuffer, Values)| {
            let mut values = like.clone();
            read(&(buffer.clone(), 0), &mut values);
            values
        };
        (of(&self.out), of(&self.state))
    }
}
