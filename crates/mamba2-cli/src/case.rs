//! Forward and decode calls as owned tensors: read from a file or generated, handed to the engine as views.

use std::path::Path;

use mamba2_cpu::{CpuError, HostTensor, HostTensorMut};
use mamba2_reference::{Generated, Pattern, RefOutputs, Values, generate, generate_step};
use mamba2_spec::{
    DKind, DtLimit, Dtype, ForwardInputs, ForwardOutputs, Problem, SpecError, StepInputs,
    StepOutputs, StepProblem,
};

use crate::error::CliError;
use crate::host::OwnedTensor;
use crate::tensor_file::TensorFile;

const FORWARD_TENSORS: &[&str] = &[
    "x",
    "dt",
    "A",
    "B",
    "C",
    "D",
    "z",
    "dt_bias",
    "initial_states",
    "cu_seqlens",
    "expected_out",
    "expected_final_states",
];
const STEP_TENSORS: &[&str] = &[
    "state",
    "x",
    "dt",
    "A",
    "B",
    "C",
    "D",
    "z",
    "dt_bias",
    "state_batch_indices",
    "expected_out",
    "expected_state",
];
/// `name` and `format` are labels that writers leave. `chunk_size` says how the file's maker split the sequence; the answer
/// does not depend on it, so `--chunk-size` decides, not the file.
const METADATA: &[&str] = &["name", "format", "chunk_size", "dt_softplus", "dt_limit"];

/// One forward call.
pub struct ForwardCase {
    /// Sizes and options.
    pub problem: Problem,
    /// Tensors to read.
    pub inputs: ForwardInputs<OwnedTensor>,
    /// `expected_out`, if the file has it.
    pub expected_out: Option<Vec<f64>>,
    /// `expected_final_states`, if the file has it.
    pub expected_final_states: Option<Vec<f64>>,
}

impl ForwardCase {
    /// Reads a case. The problem's sizes come from the shapes, its options from the metadata.
    pub fn read(path: &Path) -> Result<ForwardCase, CliError> {
        ForwardCase::parse(path, &read(path)?)
    }

    /// Reads a case from the bytes of a file, which may be anything. `path` is for messages.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<ForwardCase, CliError> {
        let mut file = TensorFile::parse(path, bytes, FORWARD_TENSORS, METADATA)?;
        let (softplus, limit) = dt_options(&file)?;
        let inputs = ForwardInputs {
            x: file.require("x")?,
            dt: file.require("dt")?,
            a: file.require("A")?,
            b: file.require("B")?,
            c: file.require("C")?,
            d: file.take("D"),
            z: file.take("z"),
            dt_bias: file.take("dt_bias"),
            initial_states: file.take("initial_states"),
            cu_seqlens: file.take("cu_seqlens"),
        };
        let spec = CliError::in_file(path);
        let x = axes("x", "[batch, seqlen, nheads, headdim]", &inputs.x).map_err(&spec)?;
        let b = axes("B", "[batch, seqlen, ngroups, dstate]", &inputs.b).map_err(&spec)?;
        let mut problem = Problem::new(x[0], x[1], x[2], x[3], b[2], b[3]);
        problem.dtype = float("x", &inputs.x).map_err(&spec)?;
        problem.dt_dtype = float("dt", &inputs.dt).map_err(&spec)?;
        problem.d = d_kind(inputs.d.as_ref());
        problem.z = inputs.z.is_some();
        problem.dt_bias = inputs.dt_bias.is_some();
        problem.dt_softplus = softplus;
        problem.dt_limit = limit;
        problem.initial_states =
            optional_float("initial_states", inputs.initial_states.as_ref()).map_err(&spec)?;
        if let Some(cu) = &inputs.cu_seqlens {
            let offsets = cu.as_i32().ok_or_else(|| {
                file.refuse("cu_seqlens: expected dtype i32, got a float dtype".into())
            })?;
            mamba2_spec::check_cu_seqlens(offsets, problem.seqlen).map_err(&spec)?;
            problem.packed = Some(offsets.len() - 1);
        }
        problem.check().map_err(&spec)?;
        final_states_fit(&problem).map_err(|reason| file.refuse(reason))?;
        let expected_out = expected(&mut file, "expected_out", inputs.x.shape())?;
        let states = [
            problem.sequences(),
            problem.nheads,
            problem.headdim,
            problem.dstate,
        ];
        let expected_final_states = expected(&mut file, "expected_final_states", &states)?;
        let mut case = ForwardCase {
            problem,
            inputs,
            expected_out,
            expected_final_states,
        };
        case.promise_alignment();
        mamba2_spec::check_forward(&case.problem, &case.inputs, &case.outputs()).map_err(&spec)?;
        Ok(case)
    }

    /// A case of made values.
    pub fn generated(problem: &Problem, seed: u64, pattern: Pattern) -> ForwardCase {
        let p = problem;
        let g = generate(problem, seed, pattern);
        let tokens = [p.batch, p.seqlen, p.nheads, p.headdim];
        let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
        let states = [p.sequences(), p.nheads, p.headdim, p.dstate];
        let inputs = ForwardInputs {
            x: OwnedTensor::new(&tokens, g.x),
            dt: OwnedTensor::new(&tokens[..3], g.dt),
            a: OwnedTensor::new(&[p.nheads], g.a),
            b: OwnedTensor::new(&group, g.b),
            c: OwnedTensor::new(&group, g.c),
            d: g.d
                .map(|v| OwnedTensor::new(d_shape(p.d, &[p.nheads, p.headdim]), v)),
            z: g.z.map(|v| OwnedTensor::new(&tokens, v)),
            dt_bias: g.dt_bias.map(|v| OwnedTensor::new(&[p.nheads], v)),
            initial_states: g.initial_states.map(|v| OwnedTensor::new(&states, v)),
            cu_seqlens: g
                .cu_seqlens
                .map(|v| OwnedTensor::new(&[v.len()], Values::I32(v))),
        };
        let mut case = ForwardCase {
            problem: problem.clone(),
            inputs,
            expected_out: None,
            expected_final_states: None,
        };
        case.promise_alignment();
        case
    }

    /// Promises what these tensors keep, and no more.
    fn promise_alignment(&mut self) {
        self.problem.alignment = self.inputs.alignment(&self.outputs());
    }

    /// Zeroed outputs of the right shapes.
    pub fn outputs(&self) -> ForwardOutputs<OwnedTensor> {
        let p = &self.problem;
        let states = [p.sequences(), p.nheads, p.headdim, p.dstate];
        ForwardOutputs {
            out: OwnedTensor::zeros(p.dtype, &[p.batch, p.seqlen, p.nheads, p.headdim]),
            final_states: p
                .final_states
                .map(|dtype| OwnedTensor::zeros(dtype, &states)),
        }
    }

    /// Views of the inputs.
    pub fn views(&self) -> Result<ForwardInputs<HostTensor<'_>>, CpuError> {
        let i = &self.inputs;
        Ok(ForwardInputs {
            x: i.x.view()?,
            dt: i.dt.view()?,
            a: i.a.view()?,
            b: i.b.view()?,
            c: i.c.view()?,
            d: optional_view(&i.d)?,
            z: optional_view(&i.z)?,
            dt_bias: optional_view(&i.dt_bias)?,
            initial_states: optional_view(&i.initial_states)?,
            cu_seqlens: optional_view(&i.cu_seqlens)?,
        })
    }

    /// The inputs as bare values.
    pub fn made(&self) -> Generated {
        let i = &self.inputs;
        let of = |tensor: &OwnedTensor| tensor.values().clone();
        let optional = |tensor: &Option<OwnedTensor>| tensor.as_ref().map(of);
        Generated {
            x: of(&i.x),
            dt: of(&i.dt),
            a: of(&i.a),
            b: of(&i.b),
            c: of(&i.c),
            d: optional(&i.d),
            z: optional(&i.z),
            dt_bias: optional(&i.dt_bias),
            initial_states: optional(&i.initial_states),
            cu_seqlens: i
                .cu_seqlens
                .as_ref()
                .and_then(OwnedTensor::as_i32)
                .map(<[i32]>::to_vec),
        }
    }

    /// The answer of the float64 recurrence.
    pub fn oracle(&self) -> RefOutputs {
        mamba2_reference::recurrence(&self.problem, &self.made().reference())
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    std::fs::read(path).map_err(CliError::io(path, "read"))
}

/// Empty sequences cost a file nothing and the output a whole state each: a small file may ask for more than there is.
fn final_states_fit(p: &Problem) -> Result<(), String> {
    let Some(dtype) = p.final_states else {
        return Ok(());
    };
    let bytes = [p.sequences(), p.nheads, p.headdim, p.dstate]
        .iter()
        .try_fold(dtype.size_bytes(), |all, n| all.checked_mul(*n));
    // Asked of the system, which knows what it has; given back at once.
    let fits = bytes.is_some_and(|n| Vec::<u8>::new().try_reserve_exact(n).is_ok());
    if fits {
        return Ok(());
    }
    Err(format!(
        "final_states: expected states that fit in memory, got [{}, {}, {}, {}] of {dtype}",
        p.sequences(),
        p.nheads,
        p.headdim,
        p.dstate
    ))
}

fn optional_view(tensor: &Option<OwnedTensor>) -> Result<Option<HostTensor<'_>>, CpuError> {
    tensor.as_ref().map(OwnedTensor::view).transpose()
}

/// Views of forward outputs.
pub fn output_views(
    outputs: &mut ForwardOutputs<OwnedTensor>,
) -> Result<ForwardOutputs<HostTensorMut<'_>>, CpuError> {
    Ok(ForwardOutputs {
        out: outputs.out.view_mut()?,
        final_states: outputs
            .final_states
            .as_mut()
            .map(OwnedTensor::view_mut)
            .transpose()?,
    })
}

/// One decode call.
pub struct StepCase {
    /// Sizes and options.
    pub problem: StepProblem,
    /// Tensors to read.
    pub inputs: StepInputs<OwnedTensor>,
    /// The state cache before the step.
    pub state: OwnedTensor,
    /// `expected_out`, if the file has it.
    pub expected_out: Option<Vec<f64>>,
    /// `expected_state`, if the file has it.
    pub expected_state: Option<Vec<f64>>,
}

impl StepCase {
    /// Reads a case, as [`ForwardCase::read`] does.
    pub fn read(path: &Path) -> Result<StepCase, CliError> {
        StepCase::parse(path, &read(path)?)
    }

    /// Reads a case from the bytes of a file, as [`ForwardCase::parse`] does.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<StepCase, CliError> {
        let mut file = TensorFile::parse(path, bytes, STEP_TENSORS, METADATA)?;
        let (softplus, limit) = dt_options(&file)?;
        let state = file.require("state")?;
        let inputs = StepInputs {
            x: file.require("x")?,
            dt: file.require("dt")?,
            a: file.require("A")?,
            b: file.require("B")?,
            c: file.require("C")?,
            d: file.take("D"),
            z: file.take("z"),
            dt_bias: file.take("dt_bias"),
            state_batch_indices: file.take("state_batch_indices"),
        };
        let spec = CliError::in_file(path);
        let x = axes("x", "[batch, tokens, nheads, headdim]", &inputs.x).map_err(&spec)?;
        let b = axes("B", "[batch, tokens, ngroups, dstate]", &inputs.b).map_err(&spec)?;
        let cache = axes("state", "[slots, nheads, headdim, dstate]", &state).map_err(&spec)?;
        let mut problem = StepProblem::new(x[0], x[2], x[3], b[2], b[3]);
        problem.tokens = x[1];
        problem.slots = cache[0];
        problem.dtype = float("x", &inputs.x).map_err(&spec)?;
        problem.dt_dtype = float("dt", &inputs.dt).map_err(&spec)?;
        problem.state_dtype = float("state", &state).map_err(&spec)?;
        problem.d = d_kind(inputs.d.as_ref());
        problem.z = inputs.z.is_some();
        problem.dt_bias = inputs.dt_bias.is_some();
        problem.dt_softplus = softplus;
        problem.dt_limit = limit;
        problem.indices = inputs.state_batch_indices.is_some();
        problem.check().map_err(&spec)?;
        let expected_out = expected(&mut file, "expected_out", inputs.x.shape())?;
        let expected_state = expected(&mut file, "expected_state", state.shape())?;
        let case = StepCase {
            problem,
            inputs,
            state,
            expected_out,
            expected_state,
        };
        mamba2_spec::check_step(&case.problem, &case.inputs, &case.outputs()).map_err(&spec)?;
        Ok(case)
    }

    /// A case of made values.
    pub fn generated(problem: &StepProblem, seed: u64, pattern: Pattern) -> StepCase {
        let p = problem;
        let g = generate_step(problem, seed, pattern);
        let tokens = [p.batch, p.tokens, p.nheads, p.headdim];
        let group = [p.batch, p.tokens, p.ngroups, p.dstate];
        let inputs = StepInputs {
            x: OwnedTensor::new(&tokens, g.x),
            dt: OwnedTensor::new(&tokens[..3], g.dt),
            a: OwnedTensor::new(&[p.nheads], g.a),
            b: OwnedTensor::new(&group, g.b),
            c: OwnedTensor::new(&group, g.c),
            d: g.d
                .map(|v| OwnedTensor::new(d_shape(p.d, &[p.nheads, p.headdim]), v)),
            z: g.z.map(|v| OwnedTensor::new(&tokens, v)),
            dt_bias: g.dt_bias.map(|v| OwnedTensor::new(&[p.nheads], v)),
            state_batch_indices: g
                .state_batch_indices
                .map(|v| OwnedTensor::new(&[p.batch], Values::I32(v))),
        };
        let state = OwnedTensor::new(&[p.slots, p.nheads, p.headdim, p.dstate], g.state);
        StepCase {
            problem: problem.clone(),
            inputs,
            state,
            expected_out: None,
            expected_state: None,
        }
    }

    /// The cache before the step, to be updated in place, and a zeroed output.
    pub fn outputs(&self) -> StepOutputs<OwnedTensor> {
        let p = &self.problem;
        StepOutputs {
            state: self.state.clone(),
            out: OwnedTensor::zeros(p.dtype, &[p.batch, p.tokens, p.nheads, p.headdim]),
        }
    }

    /// Views of the inputs.
    pub fn views(&self) -> Result<StepInputs<HostTensor<'_>>, CpuError> {
        let i = &self.inputs;
        Ok(StepInputs {
            x: i.x.view()?,
            dt: i.dt.view()?,
            a: i.a.view()?,
            b: i.b.view()?,
            c: i.c.view()?,
            d: optional_view(&i.d)?,
            z: optional_view(&i.z)?,
            dt_bias: optional_view(&i.dt_bias)?,
            state_batch_indices: optional_view(&i.state_batch_indices)?,
        })
    }
}

/// Views of what a step writes.
pub fn step_output_views(
    outputs: &mut StepOutputs<OwnedTensor>,
) -> Result<StepOutputs<HostTensorMut<'_>>, CpuError> {
    Ok(StepOutputs {
        state: outputs.state.view_mut()?,
        out: outputs.out.view_mut()?,
    })
}

/// `[nheads]` or `[nheads, headdim]`.
fn d_shape(kind: DKind, sizes: &[usize; 2]) -> &[usize] {
    if kind == DKind::PerHeaddim {
        sizes
    } else {
        &sizes[..1]
    }
}

/// The four axes of a tensor that gives the problem its sizes.
fn axes(
    name: &'static str,
    axes: &'static str,
    tensor: &OwnedTensor,
) -> Result<[usize; 4], SpecError> {
    tensor.shape().try_into().map_err(|_| SpecError::Option {
        key: name.into(),
        expected: format!("four axes {axes}"),
        got: format!("{:?}", tensor.shape()),
    })
}

fn float(name: &'static str, tensor: &OwnedTensor) -> Result<Dtype, SpecError> {
    tensor.dtype().ok_or_else(|| SpecError::Dtype {
        tensor: name,
        expected: "bf16, f16 or f32".into(),
        got: "i32".into(),
    })
}

fn optional_float(
    name: &'static str,
    tensor: Option<&OwnedTensor>,
) -> Result<Option<Dtype>, SpecError> {
    tensor.map(|t| float(name, t)).transpose()
}

fn d_kind(d: Option<&OwnedTensor>) -> DKind {
    match d.map(|t| t.shape().len()) {
        None => DKind::None,
        Some(2) => DKind::PerHeaddim,
        // Any other rank meets the shape check of [nheads].
        Some(_) => DKind::PerHead,
    }
}

fn expected(
    file: &mut TensorFile,
    name: &'static str,
    shape: &[usize],
) -> Result<Option<Vec<f64>>, CliError> {
    let Some(tensor) = file.take(name) else {
        return Ok(None);
    };
    if tensor.shape() != shape || tensor.dtype().is_none() {
        return Err(file.refuse(format!(
            "{name}: expected a float tensor of shape {shape:?}, got shape {:?}",
            tensor.shape()
        )));
    }
    Ok(Some(tensor.to_f64()))
}

/// `dt_softplus` and `dt_limit` of the metadata.
fn dt_options(file: &TensorFile) -> Result<(bool, DtLimit), CliError> {
    let softplus = match file.option("dt_softplus") {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => {
            return Err(file.refuse(format!(
                "metadata dt_softplus: expected \"true\" or \"false\", got {other:?}"
            )));
        }
    };
    if let Some(text) = file.option("chunk_size")
        && !text.parse::<u32>().is_ok_and(|n| n > 0)
    {
        return Err(file.refuse(format!(
            "metadata chunk_size: expected a whole number of tokens, got {text:?}"
        )));
    }
    let Some(text) = file.option("dt_limit") else {
        return Ok((softplus, DtLimit::NONE));
    };
    let numbers = text
        .split_once(',')
        .and_then(|(lo, hi)| Some((lo.trim().parse().ok()?, hi.trim().parse().ok()?)));
    let Some((min, max)) = numbers else {
        return Err(file.refuse(format!(
            "metadata dt_limit: expected \"lo,hi\", two numbers, got {text:?}"
        )));
    };
    let limit = DtLimit { min, max };
    limit.check().map_err(CliError::in_file(&file.path))?;
    Ok((softplus, limit))
}
