//! Host tensors on the CUDA backend: upload, run, download.

use mamba2_cpu::{CpuError, HostData, HostDataMut, HostTensor, HostTensorMut};
use mamba2_cuda::{CudaError, Device, DeviceBuffer, DeviceTensor};
use mamba2_spec::{
    Alignment, ForwardInputs, ForwardOutputs, HasMeta, Problem, StepInputs, StepOutputs,
    StepProblem, TensorMeta, check_cu_seqlens, check_forward, check_step,
};

use crate::Error;
use crate::plan::{Plan, StepPlan};

pub(crate) fn forward(
    plan: &Plan,
    device: &Device,
    inputs: &ForwardInputs<HostTensor<'_>>,
    outputs: &mut ForwardOutputs<HostTensorMut<'_>>,
) -> Result<(), Error> {
    // Where the host's pointers lie means nothing on the device.
    let problem = Problem {
        alignment: Alignment::Element,
        ..plan.problem().clone()
    };
    check_forward(&problem, inputs, outputs)?;
    if let Some(offsets) = &inputs.cu_seqlens {
        check_cu_seqlens(&indices(offsets), problem.seqlen)?;
    }
    let up = |tensor: &HostTensor<'_>| upload(device, tensor);
    let up_all = |tensor: &Option<HostTensor<'_>>| tensor.as_ref().map(up).transpose();
    let device_inputs = ForwardInputs {
        x: up(&inputs.x)?,
        dt: up(&inputs.dt)?,
        a: up(&inputs.a)?,
        b: up(&inputs.b)?,
        c: up(&inputs.c)?,
        d: up_all(&inputs.d)?,
        z: up_all(&inputs.z)?,
        dt_bias: up_all(&inputs.dt_bias)?,
        initial_states: up_all(&inputs.initial_states)?,
        cu_seqlens: up_all(&inputs.cu_seqlens)?,
    };
    // A padded tail of a packed call is not written, so what is there must survive the round trip.
    let keep = problem.packed.is_some();
    let out = Output::new(device, &outputs.out, keep)?;
    let final_states = outputs
        .final_states
        .as_ref()
        .map(|t| Output::new(device, t, false))
        .transpose()?;
    let device_outputs = ForwardOutputs {
        out: out.tensor.clone(),
        final_states: final_states.as_ref().map(|o| o.tensor.clone()),
    };
    let workspace = device.alloc(plan.workspace_bytes())?;
    let stream = device.stream()?;
    plan.forward(&stream, &device_inputs, &device_outputs, &workspace)?;
    stream.synchronize()?;
    out.download(&mut outputs.out)?;
    if let (Some(from), Some(to)) = (final_states, outputs.final_states.as_mut()) {
        from.download(to)?;
    }
    Ok(())
}

pub(crate) fn step(
    plan: &StepPlan,
    device: &Device,
    inputs: &StepInputs<HostTensor<'_>>,
    outputs: &mut StepOutputs<HostTensorMut<'_>>,
) -> Result<(), Error> {
    check_step(plan.problem(), inputs, outputs)?;
    if let Some(slots) = &inputs.state_batch_indices {
        check_slots(&indices(slots), plan.problem())?;
    }
    let up = |tensor: &HostTensor<'_>| upload(device, tensor);
    let up_all = |tensor: &Option<HostTensor<'_>>| tensor.as_ref().map(up).transpose();
    let device_inputs = StepInputs {
        x: up(&inputs.x)?,
        dt: up(&inputs.dt)?,
        a: up(&inputs.a)?,
        b: up(&inputs.b)?,
        c: up(&inputs.c)?,
        d: up_all(&inputs.d)?,
        z: up_all(&inputs.z)?,
        dt_bias: up_all(&inputs.dt_bias)?,
        state_batch_indices: up_all(&inputs.state_batch_indices)?,
    };
    let state = Output::new(device, &outputs.state, true)?;
    // Rows that are skipped keep what they had.
    let out = Output::new(device, &outputs.out, inputs.state_batch_indices.is_some())?;
    let device_outputs = StepOutputs {
        state: state.tensor.clone(),
        out: out.tensor.clone(),
    };
    let stream = device.stream()?;
    plan.step(&stream, &device_inputs, &device_outputs)?;
    stream.synchronize()?;
    state.download(&mut outputs.state)?;
    out.download(&mut outputs.out)
}

/// Every row names a slot of its own, or -1.
fn check_slots(slots: &[i32], problem: &StepProblem) -> Result<(), Error> {
    let mut taken = vec![false; problem.slots];
    for (row, got) in slots.iter().copied().enumerate() {
        let expected = match usize::try_from(got) {
            Err(_) => continue,
            Ok(slot) => match taken.get_mut(slot) {
                None => format!(
                    "a slot below {}, or a negative number to skip the row",
                    problem.slots
                ),
                Some(true) => "a slot that no earlier row has".into(),
                Some(free) => {
                    *free = true;
                    continue;
                }
            },
        };
        return Err(CpuError::StateIndex { row, expected, got }.into());
    }
    Ok(())
}

/// The elements of a one-dimensional i32 tensor.
fn indices(tensor: &HostTensor<'_>) -> Vec<i32> {
    let stride = tensor.meta().strides().first().copied().unwrap_or(1);
    match tensor.data() {
        HostData::I32(v) => (0..tensor.meta().elems()).map(|i| v[i * stride]).collect(),
        _ => Vec::new(),
    }
}

fn span(meta: &TensorMeta) -> usize {
    meta.span_elems()
        .expect("a checked view should fit the address space")
}

fn upload(device: &Device, tensor: &HostTensor<'_>) -> Result<DeviceTensor, Error> {
    let n = span(tensor.meta());
    let buffer = match tensor.data() {
        HostData::Bf16(v) => device.upload(&v[..n]),
        HostData::F16(v) => device.upload(&v[..n]),
        HostData::F32(v) => device.upload(&v[..n]),
        HostData::I32(v) => device.upload(&v[..n]),
    }?;
    Ok(DeviceTensor::new(&buffer, 0, *tensor.meta())?)
}

/// Device memory behind an output view.
struct Output {
    buffer: DeviceBuffer,
    tensor: DeviceTensor,
}

impl Output {
    /// Takes memory for `tensor`. What the host has there is uploaded if the kernels may leave some of it as it is: on request, and
    /// between the elements of a view with gaps.
    fn new(device: &Device, tensor: &HostTensorMut<'_>, keep: bool) -> Result<Output, CudaError> {
        let meta = *tensor.meta();
        let n = span(&meta);
        let keep = keep || !meta.is_contiguous();
        let buffer = match tensor.data() {
            HostDataMut::Bf16(v) if keep => device.upload(&v[..n])?,
            HostDataMut::F16(v) if keep => device.upload(&v[..n])?,
            HostDataMut::F32(v) if keep => device.upload(&v[..n])?,
            _ => device.alloc(mamba2_cuda::span_bytes(&meta).unwrap_or(usize::MAX))?,
        };
        let tensor = DeviceTensor::new(&buffer, 0, meta)?;
        Ok(Output { buffer, tensor })
    }

    fn download(&self, to: &mut HostTensorMut<'_>) -> Result<(), Error> {
        let n = span(to.meta());
        match to.data_mut() {
            HostDataMut::Bf16(v) => self.buffer.read(0, &mut v[..n]),
            HostDataMut::F16(v) => self.buffer.read(0, &mut v[..n]),
            HostDataMut::F32(v) => self.buffer.read(0, &mut v[..n]),
        }?;
        Ok(())
    }
}
