//! Puts generated inputs into device memory: alone and exactly as large as they are, or as slices of a fused projection.

use mamba2_cuda::{CudaError, Device, DeviceTensor};
use mamba2_reference::{Generated, GeneratedStep, Values};
use mamba2_spec::{
    Alignment, DKind, Dtype, ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs,
    StepProblem, TensorMeta,
};

use super::layout::{elem_bytes, padded, scatter, span_bytes};
use super::output::POISON;

/// How tensors lie in memory. Whatever is no element is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Each tensor ends with its own allocation, rows padded only as the promised alignment asks.
    Exact,
    /// z, x, B, C (and dt if its dtype is the same) are slices of one projection; state and D rows have gaps.
    Fused,
    /// As [`Placement::Fused`], but nothing is aligned beyond its element.
    FusedOdd,
}

impl Placement {
    fn gap(self) -> usize {
        match self {
            Placement::Exact => 0,
            Placement::Fused => 8,
            Placement::FusedOdd => 3,
        }
    }

    /// Elements between the start of an allocation and the tensor.
    pub fn lead_elems(self) -> usize {
        usize::from(self == Placement::FusedOdd)
    }
}

/// Elements of `dtype` in the 16 bytes that [`Alignment::Bytes16`] promises.
fn align_elems(alignment: Alignment, dtype: Dtype) -> usize {
    match alignment {
        Alignment::Bytes16 => 16 / dtype.size_bytes(),
        Alignment::Element => 1,
    }
}

/// View of `out` for a placement.
pub fn out_meta(problem: &Problem, placement: Placement) -> TensorMeta {
    let p = problem;
    let shape = [p.batch, p.seqlen, p.nheads, p.headdim];
    token_meta(
        p.dtype,
        &shape,
        align_elems(p.alignment, p.dtype),
        placement.gap(),
    )
}

/// View of `final_states` for a placement, if they are wanted.
pub fn final_meta(problem: &Problem, placement: Placement) -> Option<TensorMeta> {
    let p = problem;
    let shape = [p.sequences(), p.nheads, p.headdim, p.dstate];
    p.final_states
        .map(|dtype| padded(Some(dtype), &shape, 1, placement.gap()))
}

/// `[batch, seqlen, heads, inner]` with a gap after each token.
fn token_meta(dtype: Dtype, shape: &[usize; 4], align: usize, gap: usize) -> TensorMeta {
    let head = if shape[2] > 1 {
        shape[3].next_multiple_of(align)
    } else {
        shape[3]
    };
    let token = (head * (shape[2].max(1) - 1) + shape[3] + gap).next_multiple_of(align);
    TensorMeta::strided(Some(dtype), shape, &[shape[1] * token, token, head, 1])
}

/// Puts the inputs of a forward pass on the device.
///
/// # Errors
/// [`CudaError`], also for lack of memory.
pub fn forward(
    device: &Device,
    problem: &Problem,
    made: &Generated,
    placement: Placement,
) -> Result<ForwardInputs<DeviceTensor>, CudaError> {
    let p = problem;
    let tokens = [p.batch, p.seqlen, p.nheads, p.headdim];
    let groups = [p.batch, p.seqlen, p.ngroups, p.dstate];
    let steps = [p.batch, p.seqlen, p.nheads];
    let projection = Projection {
        device,
        align: align_elems(p.alignment, p.dtype),
        placement,
        dtype: p.dtype,
    };
    let placed = projection.place(
        &[tokens, groups],
        [made.z.as_ref(), Some(&made.x), Some(&made.b), Some(&made.c)],
        &steps,
        &made.dt,
    )?;
    let [z, x, b, c, dt] = placed;
    let states = [p.sequences(), p.nheads, p.headdim, p.dstate];
    let initial = |values: &Values| {
        upload(
            device,
            values,
            &padded(values.dtype(), &states, 1, placement.gap()),
            placement.lead_elems(),
        )
    };
    let small = Small { device, placement };
    Ok(ForwardInputs {
        x: x.expect("x is always placed"),
        dt: dt.expect("dt is always placed"),
        a: small.heads(&made.a)?,
        b: b.expect("B is always placed"),
        c: c.expect("C is always placed"),
        d: small.d(made.d.as_ref(), p.d, p.nheads, p.headdim)?,
        z,
        dt_bias: made.dt_bias.as_ref().map(|v| small.heads(v)).transpose()?,
        initial_states: made.initial_states.as_ref().map(initial).transpose()?,
        cu_seqlens: small.integers(made.cu_seqlens.as_ref())?,
    })
}

/// Views of `out` and of the state cache of a decode step.
pub fn step_metas(problem: &StepProblem, placement: Placement) -> (TensorMeta, TensorMeta) {
    let p = problem;
    let out = token_meta(
        p.dtype,
        &[p.batch, p.tokens, p.nheads, p.headdim],
        1,
        placement.gap(),
    );
    let state = padded(
        Some(p.state_dtype),
        &[p.slots, p.nheads, p.headdim, p.dstate],
        1,
        placement.gap(),
    );
    (out, state)
}

/// Puts the inputs of a decode step on the device; the state cache is an output.
///
/// # Errors
/// As [`forward`].
pub fn step(
    device: &Device,
    problem: &StepProblem,
    made: &GeneratedStep,
    placement: Placement,
) -> Result<StepInputs<DeviceTensor>, CudaError> {
    let p = problem;
    let tokens = [p.batch, p.tokens, p.nheads, p.headdim];
    let groups = [p.batch, p.tokens, p.ngroups, p.dstate];
    let steps = [p.batch, p.tokens, p.nheads];
    let projection = Projection {
        device,
        align: 1,
        placement,
        dtype: p.dtype,
    };
    let placed = projection.place(
        &[tokens, groups],
        [made.z.as_ref(), Some(&made.x), Some(&made.b), Some(&made.c)],
        &steps,
        &made.dt,
    )?;
    let [z, x, b, c, dt] = placed;
    let small = Small { device, placement };
    Ok(StepInputs {
        x: x.expect("x is always placed"),
        dt: dt.expect("dt is always placed"),
        a: small.heads(&made.a)?,
        b: b.expect("B is always placed"),
        c: c.expect("C is always placed"),
        d: small.d(made.d.as_ref(), p.d, p.nheads, p.headdim)?,
        z,
        dt_bias: made.dt_bias.as_ref().map(|v| small.heads(v)).transpose()?,
        state_batch_indices: small.integers(made.state_batch_indices.as_ref())?,
    })
}

/// Memory for the outputs of a forward pass, with whatever is in it. For timing; verifying calls use
/// [`super::Output`], which is guarded and poisoned.
///
/// # Errors
/// As [`forward`].
pub fn forward_outputs(
    device: &Device,
    problem: &Problem,
    placement: Placement,
) -> Result<ForwardOutputs<DeviceTensor>, CudaError> {
    let lead = placement.lead_elems();
    Ok(ForwardOutputs {
        out: unwritten(device, &out_meta(problem, placement), lead)?,
        final_states: final_meta(problem, placement)
            .map(|meta| unwritten(device, &meta, lead))
            .transpose()?,
    })
}

/// The state cache of a decode step on the device, and memory for its output. For timing, as [`forward_outputs`].
///
/// # Errors
/// As [`forward`].
pub fn step_outputs(
    device: &Device,
    problem: &StepProblem,
    made: &GeneratedStep,
    placement: Placement,
) -> Result<StepOutputs<DeviceTensor>, CudaError> {
    let (out, state) = step_metas(problem, placement);
    let lead = placement.lead_elems();
    Ok(StepOutputs {
        state: upload(device, &made.state, &state, lead)?,
        out: unwritten(device, &out, lead)?,
    })
}

/// The inputs that are no slice of a projection.
struct Small<'a> {
    device: &'a Device,
    placement: Placement,
}

impl Small<'_> {
    /// A or dt_bias.
    fn heads(&self, values: &Values) -> Result<DeviceTensor, CudaError> {
        let meta = TensorMeta::contiguous(Some(Dtype::F32), &[values.len()]);
        upload(self.device, values, &meta, 0)
    }

    /// cu_seqlens or state_batch_indices.
    fn integers(&self, values: Option<&Vec<i32>>) -> Result<Option<DeviceTensor>, CudaError> {
        let up = |v: &Vec<i32>| {
            let meta = TensorMeta::contiguous(None, &[v.len()]);
            upload(self.device, &Values::I32(v.clone()), &meta, 0)
        };
        values.map(up).transpose()
    }

    fn d(
        &self,
        values: Option<&Values>,
        kind: DKind,
        nheads: usize,
        headdim: usize,
    ) -> Result<Option<DeviceTensor>, CudaError> {
        let gap = self.placement.gap();
        let meta = match kind {
            DKind::PerHeaddim => padded(Some(Dtype::F32), &[nheads, headdim], 1, gap),
            _ => TensorMeta::contiguous(Some(Dtype::F32), &[nheads]),
        };
        values.map(|d| upload(self.device, d, &meta, 0)).transpose()
    }
}

/// z, x, B, C and dt, placed.
type Placed = [Option<DeviceTensor>; 5];

struct Projection<'a> {
    device: &'a Device,
    align: usize,
    placement: Placement,
    dtype: Dtype,
}

impl Projection<'_> {
    /// `shapes`: of z and x, and of B and C.
    fn place(
        &self,
        shapes: &[[usize; 4]; 2],
        four: [Option<&Values>; 4],
        dt_shape: &[usize; 3],
        dt: &Values,
    ) -> Result<Placed, CudaError> {
        let shape_of = |i: usize| shapes[usize::from(i >= 2)];
        if self.placement == Placement::Exact {
            let place = |i: usize| {
                let meta = token_meta(self.dtype, &shape_of(i), self.align, 0);
                four[i]
                    .map(|values| upload(self.device, values, &meta, 0))
                    .transpose()
            };
            let dt_meta = TensorMeta::contiguous(dt.dtype(), dt_shape);
            return Ok([
                place(0)?,
                place(1)?,
                place(2)?,
                place(3)?,
                Some(upload(self.device, dt, &dt_meta, 0)?),
            ]);
        }
        self.fused(shape_of, four, dt_shape, dt)
    }

    fn fused(
        &self,
        shape_of: impl Fn(usize) -> [usize; 4],
        four: [Option<&Values>; 4],
        dt_shape: &[usize; 3],
        dt: &Values,
    ) -> Result<Placed, CudaError> {
        let dt_inside = dt.dtype() == Some(self.dtype);
        let mut row = 0;
        let mut starts = [0; 5];
        for (i, start) in starts.iter_mut().enumerate() {
            let width = match i {
                4 if dt_inside => dt_shape[2],
                4 => 0,
                _ if four[i].is_none() => 0,
                _ => {
                    let [_, _, heads, inner] = shape_of(i);
                    // Heads are next to each other: strides of a slice of a projection.
                    if heads > 1 {
                        heads * inner.next_multiple_of(self.align)
                    } else {
                        inner
                    }
                }
            };
            *start = row;
            row = (row + width).next_multiple_of(self.align);
        }
        row += if self.placement == Placement::FusedOdd {
            usize::from(row.is_multiple_of(2))
        } else {
            0
        };
        let [batch, seqlen, ..] = shape_of(1);
        let elem = self.dtype.size_bytes();
        let lead = self.placement.lead_elems();
        let mut image = vec![POISON; (lead + batch * seqlen * row) * elem];
        let view = |i: usize| {
            let [batch, seqlen, heads, inner] = shape_of(i);
            let head = if heads > 1 {
                inner.next_multiple_of(self.align)
            } else {
                inner
            };
            TensorMeta::strided(
                Some(self.dtype),
                &[batch, seqlen, heads, inner],
                &[seqlen * row, row, head, 1],
            )
        };
        let dt_view = TensorMeta::strided(dt.dtype(), dt_shape, &[seqlen * row, row, 1]);
        let at = |i: usize| (lead + starts[i]) * elem;
        for (i, values) in four.iter().enumerate() {
            if let Some(values) = values {
                scatter(&mut image, at(i), &view(i), &values.to_le_bytes());
            }
        }
        if dt_inside {
            scatter(&mut image, at(4), &dt_view, &dt.to_le_bytes());
        }
        let buffer = self.device.upload(&image)?;
        let slice = |i: usize| {
            four[i]
                .map(|_| DeviceTensor::new(&buffer, at(i), view(i)))
                .transpose()
        };
        let dt = if dt_inside {
            DeviceTensor::new(&buffer, at(4), dt_view)?
        } else {
            upload(
                self.device,
                dt,
                &padded(dt.dtype(), dt_shape, 1, self.placement.gap()),
                lead,
            )?
        };
        Ok([slice(0)?, slice(1)?, slice(2)?, slice(3)?, Some(dt)])
    }
}

/// One tensor in an allocation of its own, which ends where the tensor ends.
fn upload(
    device: &Device,
    values: &Values,
    meta: &TensorMeta,
    lead_elems: usize,
) -> Result<DeviceTensor, CudaError> {
    let buffer = if meta.is_contiguous() && lead_elems == 0 {
        match values {
            Values::Bf16(v) => device.upload(v)?,
            Values::F16(v) => device.upload(v)?,
            Values::F32(v) => device.upload(v)?,
            Values::I32(v) => device.upload(v)?,
        }
    } else {
        let offset = lead_elems * elem_bytes(meta);
        let mut image = vec![POISON; offset + span_bytes(meta)];
        scatter(&mut image, offset, meta, &values.to_le_bytes());
        device.upload(&image)?
    };
    DeviceTensor::new(&buffer, lead_elems * elem_bytes(meta), *meta)
}

/// As [`upload`], without values.
fn unwritten(
    device: &Device,
    meta: &TensorMeta,
    lead_elems: usize,
) -> Result<DeviceTensor, CudaError> {
    let offset = lead_elems * elem_bytes(meta);
    let buffer = device.alloc(offset + span_bytes(meta))?;
    DeviceTensor::new(&buffer, offset, *meta)
}
