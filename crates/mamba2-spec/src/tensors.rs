use crate::{Alignment, DKind, Dtype, Problem, SpecError, StepProblem};

/// Shape, strides and dtype of a strided tensor of up to four axes. Strides are in elements; 0 repeats along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// Element type; `None` for the i32 index tensors.
    pub dtype: Option<Dtype>,
    rank: usize,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl TensorMeta {
    /// A tensor whose innermost axis is contiguous and whose other axes follow without gaps.
    ///
    /// # Panics
    /// If `shape` has more than four axes.
    pub fn contiguous(dtype: Option<Dtype>, shape: &[usize]) -> TensorMeta {
        let mut strides = [1usize; 4];
        for i in (0..shape.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1].saturating_mul(shape[i + 1]);
        }
        TensorMeta::strided(dtype, shape, &strides[..shape.len()])
    }

    /// A tensor with the given strides, in elements.
    ///
    /// # Panics
    /// If `shape` and `strides` differ in length or have more than four axes.
    pub fn strided(dtype: Option<Dtype>, shape: &[usize], strides: &[usize]) -> TensorMeta {
        assert!(
            shape.len() <= 4 && shape.len() == strides.len(),
            "a tensor has at most four axes, one stride each"
        );
        let mut meta = TensorMeta {
            dtype,
            rank: shape.len(),
            shape: [1; 4],
            strides: [0; 4],
        };
        meta.shape[..shape.len()].copy_from_slice(shape);
        meta.strides[..strides.len()].copy_from_slice(strides);
        meta
    }

    /// Extents of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Strides of the axes, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.shape().iter().product()
    }

    /// Elements from the first to one past the last that the view touches; `None` on overflow.
    pub fn span_elems(&self) -> Option<usize> {
        if self.elems() == 0 {
            return Some(0);
        }
        self.shape()
            .iter()
            .zip(self.strides())
            .try_fold(1usize, |span, (n, stride)| {
                span.checked_add((n - 1).checked_mul(*stride)?)
            })
    }

    /// True if elements follow each other without gaps in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let dense = TensorMeta::contiguous(self.dtype, self.shape());
        self.elems() == 0
            || self
                .shape()
                .iter()
                .zip(self.strides())
                .zip(dense.strides())
                .all(|((n, a), b)| *n == 1 || a == b)
    }
}

/// Anything that can say its shape, strides and dtype. `base_address` is the address of element 0, for alignment.
pub trait HasMeta {
    /// Shape, strides and dtype.
    fn meta(&self) -> &TensorMeta;
    /// Address of the first element (host or device), 0 if unknown.
    fn base_address(&self) -> u64;

    /// True if every row along the innermost axis starts at a multiple of `bytes`.
    fn rows_start_on(&self, bytes: usize) -> bool {
        let meta = self.meta();
        let elem = meta.dtype.map_or(4, Dtype::size_bytes);
        let outer = meta.shape().len().saturating_sub(1);
        self.base_address().is_multiple_of(bytes as u64)
            && meta.shape()[..outer]
                .iter()
                .zip(meta.strides())
                .all(|(n, s)| *n <= 1 || (s * elem).is_multiple_of(bytes))
    }
}

impl HasMeta for TensorMeta {
    fn meta(&self) -> &TensorMeta {
        self
    }
    fn base_address(&self) -> u64 {
        0
    }
}

/// Inputs of a forward pass; `T` is a host slice, a device pointer or plain [`TensorMeta`]. Shapes: see [`Problem`].
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the names are those of the table at `Problem`
pub struct ForwardInputs<T> {
    pub x: T,
    pub dt: T,
    pub a: T,
    pub b: T,
    pub c: T,
    pub d: Option<T>,
    pub z: Option<T>,
    pub dt_bias: Option<T>,
    pub initial_states: Option<T>,
    pub cu_seqlens: Option<T>,
}

/// Outputs of a forward pass.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct ForwardOutputs<T> {
    pub out: T,
    pub final_states: Option<T>,
}

/// Inputs of a decode step. Shapes: see [`StepProblem`].
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct StepInputs<T> {
    pub x: T,
    pub dt: T,
    pub a: T,
    pub b: T,
    pub c: T,
    pub d: Option<T>,
    pub z: Option<T>,
    pub dt_bias: Option<T>,
    pub state_batch_indices: Option<T>,
}

/// What a decode step writes: the state cache (in place) and the output tokens.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct StepOutputs<T> {
    pub state: T,
    pub out: T,
}

struct Expected {
    tensor: &'static str,
    axes: &'static str,
    shape: [usize; 4],
    rank: usize,
    dtype: Option<Dtype>,
    /// Stride 0 would make writes collide.
    written: bool,
}

impl Expected {
    fn new(
        tensor: &'static str,
        axes: &'static str,
        shape: &[usize],
        dtype: Option<Dtype>,
    ) -> Expected {
        let mut padded = [1; 4];
        padded[..shape.len()].copy_from_slice(shape);
        Expected {
            tensor,
            axes,
            shape: padded,
            rank: shape.len(),
            dtype,
            written: false,
        }
    }

    fn written(mut self) -> Expected {
        self.written = true;
        self
    }

    fn check(&self, got: &impl HasMeta) -> Result<(), SpecError> {
        let meta = got.meta();
        let expected = &self.shape[..self.rank];
        if meta.shape() != expected {
            return Err(SpecError::Shape {
                tensor: self.tensor,
                axes: self.axes,
                expected: expected.to_vec(),
                got: meta.shape().to_vec(),
            });
        }
        if meta.dtype != self.dtype {
            let name = |d: Option<Dtype>| d.map_or("i32", Dtype::name).to_string();
            return Err(SpecError::Dtype {
                tensor: self.tensor,
                expected: name(self.dtype),
                got: name(meta.dtype),
            });
        }
        let stride = |expected| {
            Err(SpecError::Stride {
                tensor: self.tensor,
                expected,
                got: meta.strides().to_vec(),
            })
        };
        if let (Some(1..), Some(inner)) = (
            meta.shape().last().map(|n| *n - usize::from(*n > 0)),
            meta.strides().last(),
        ) && *inner != 1
        {
            return stride("a contiguous innermost axis (stride 1)");
        }
        let Some(span) = meta.span_elems() else {
            return stride("a view that fits the address space");
        };
        if span > isize::MAX as usize / 4 {
            return stride("a view that fits the address space");
        }
        if self.written && self.overlaps(meta) {
            return stride("an output whose elements do not overlap");
        }
        Ok(())
    }

    /// Conservative for sane layouts: sorted by stride, each axis must step over the one inside it.
    fn overlaps(&self, meta: &TensorMeta) -> bool {
        if meta.elems() == 0 {
            return false;
        }
        let mut axes = [(0usize, 1usize); 4];
        for (slot, (n, s)) in axes.iter_mut().zip(meta.shape().iter().zip(meta.strides())) {
            *slot = if *n > 1 { (*s, *n) } else { (0, 1) };
        }
        axes.sort_unstable();
        let mut span = 1usize;
        for (stride, n) in axes.into_iter().filter(|(_, n)| *n > 1) {
            if stride < span {
                return true;
            }
            span += stride * (n - 1);
        }
        false
    }

    fn optional<T: HasMeta>(self, promised: bool, got: Option<&T>) -> Result<(), SpecError> {
        let word = |b| if b { "present" } else { "absent" };
        match got {
            Some(t) if promised => self.check(t),
            None if !promised => Ok(()),
            _ => Err(SpecError::Presence {
                tensor: self.tensor,
                expected: word(promised),
                got: word(got.is_some()),
            }),
        }
    }
}

fn expected_d(kind: DKind, nheads: usize, headdim: usize) -> Expected {
    match kind {
        DKind::PerHeaddim => Expected::new(
            "D",
            "[nheads, headdim]",
            &[nheads, headdim],
            Some(Dtype::F32),
        ),
        _ => Expected::new("D", "[nheads]", &[nheads], Some(Dtype::F32)),
    }
}

/// Checks every tensor of a forward call against the problem. Allocates nothing when all is well.
///
/// # Errors
/// The first tensor that does not fit, with the expected and the found value. Nothing was computed.
pub fn check_forward<I: HasMeta, O: HasMeta>(
    problem: &Problem,
    inputs: &ForwardInputs<I>,
    outputs: &ForwardOutputs<O>,
) -> Result<(), SpecError> {
    problem.check()?;
    let p = problem;
    let tokens = [p.batch, p.seqlen, p.nheads, p.headdim];
    let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
    let state = [p.sequences(), p.nheads, p.headdim, p.dstate];
    const TOKENS: &str = "[batch, seqlen, nheads, headdim]";
    const GROUP: &str = "[batch, seqlen, ngroups, dstate]";
    let states = if p.packed.is_some() {
        "[sequences, nheads, headdim, dstate]"
    } else {
        "[batch, nheads, headdim, dstate]"
    };
    let float = Some(Dtype::F32);
    Expected::new("x", TOKENS, &tokens, Some(p.dtype)).check(&inputs.x)?;
    Expected::new(
        "dt",
        "[batch, seqlen, nheads]",
        &tokens[..3],
        Some(p.dt_dtype),
    )
    .check(&inputs.dt)?;
    Expected::new("A", "[nheads]", &[p.nheads], float).check(&inputs.a)?;
    Expected::new("B", GROUP, &group, Some(p.dtype)).check(&inputs.b)?;
    Expected::new("C", GROUP, &group, Some(p.dtype)).check(&inputs.c)?;
    expected_d(p.d, p.nheads, p.headdim).optional(p.d != DKind::None, inputs.d.as_ref())?;
    Expected::new("z", TOKENS, &tokens, Some(p.dtype)).optional(p.z, inputs.z.as_ref())?;
    Expected::new("dt_bias", "[nheads]", &[p.nheads], float)
        .optional(p.dt_bias, inputs.dt_bias.as_ref())?;
    Expected::new("initial_states", states, &state, p.initial_states)
        .optional(p.initial_states.is_some(), inputs.initial_states.as_ref())?;
    Expected::new("cu_seqlens", "[sequences + 1]", &[p.sequences() + 1], None)
        .optional(p.packed.is_some(), inputs.cu_seqlens.as_ref())?;
    Expected::new("out", TOKENS, &tokens, Some(p.dtype))
        .written()
        .check(&outputs.out)?;
    Expected::new("final_states", states, &state, p.final_states)
        .written()
        .optional(p.final_states.is_some(), outputs.final_states.as_ref())?;
    if p.alignment == Alignment::Bytes16 && !views_allow_16_byte_copies(inputs, outputs) {
        return Err(SpecError::Stride {
            tensor: "x, B, C, z or out",
            expected: "base pointers and strides in multiples of 16 bytes, as Alignment::Bytes16 promises",
            got: inputs.x.meta().strides().to_vec(),
        });
    }
    Ok(())
}

/// True if x, B, C, z and out start at, and step by, multiples of 16 bytes.
fn views_allow_16_byte_copies<I: HasMeta, O: HasMeta>(
    inputs: &ForwardInputs<I>,
    outputs: &ForwardOutputs<O>,
) -> bool {
    inputs.copied().all(is_16_byte_aligned) && is_16_byte_aligned(&outputs.out)
}

fn is_16_byte_aligned<T: HasMeta>(tensor: &T) -> bool {
    tensor.rows_start_on(16)
}

impl<T> ForwardInputs<T> {
    /// The tensors that kernels may copy row by row into shared memory: x, B, C, and z if there is one.
    pub fn copied(&self) -> impl Iterator<Item = &T> {
        [&self.x, &self.b, &self.c].into_iter().chain(&self.z)
    }
}

impl<T: HasMeta> ForwardInputs<T> {
    /// The strongest [`Alignment`] that these views allow.
    pub fn alignment<O: HasMeta>(&self, outputs: &ForwardOutputs<O>) -> Alignment {
        if views_allow_16_byte_copies(self, outputs) {
            Alignment::Bytes16
        } else {
            Alignment::Element
        }
    }
}

/// Checks packed offsets: `cu[0] == 0`, non-decreasing, last at most `seqlen`. Tokens past the last offset are a padded tail.
///
/// # Errors
/// [`SpecError::CuSeqlens`] naming the first offset at fault.
pub fn check_cu_seqlens(cu_seqlens: &[i32], seqlen: usize) -> Result<(), SpecError> {
    let fault = |text: String| Err(SpecError::CuSeqlens(text));
    match cu_seqlens {
        [] => return fault("expected [sequences + 1] offsets, got none".into()),
        [first, ..] if *first != 0 => {
            return fault(format!("expected the first offset to be 0, got {first}"));
        }
        _ => {}
    }
    for (i, pair) in cu_seqlens.windows(2).enumerate() {
        if pair[1] < pair[0] {
            return fault(format!(
                "expected non-decreasing offsets, got {} after {} at index {}",
                pair[1],
                pair[0],
                i + 1
            ));
        }
    }
    match cu_seqlens.last() {
        Some(last) if *last as usize > seqlen => fault(format!(
            "expected the last offset to be at most seqlen = {seqlen}, got {last}"
        )),
        _ => Ok(()),
    }
}

/// Checks every tensor of a decode call.
///
/// # Errors
/// As [`check_forward`].
pub fn check_step<I: HasMeta, O: HasMeta>(
    problem: &StepProblem,
    inputs: &StepInputs<I>,
    outputs: &StepOutputs<O>,
) -> Result<(), SpecError> {
    problem.check()?;
    let p = problem;
    let tokens = [p.batch, p.tokens, p.nheads, p.headdim];
    let group = [p.batch, p.tokens, p.ngroups, p.dstate];
    const TOKENS: &str = "[batch, tokens, nheads, headdim]";
    const GROUP: &str = "[batch, tokens, ngroups, dstate]";
    let float = Some(Dtype::F32);
    Expected::new("x", TOKENS, &tokens, Some(p.dtype)).check(&inputs.x)?;
    Expected::new(
        "dt",
        "[batch, tokens, nheads]",
        &tokens[..3],
        Some(p.dt_dtype),
    )
    .check(&inputs.dt)?;
    Expected::new("A", "[nheads]", &[p.nheads], float).check(&inputs.a)?;
    Expected::new("B", GROUP, &group, Some(p.dtype)).check(&inputs.b)?;
    Expected::new("C", GROUP, &group, Some(p.dtype)).check(&inputs.c)?;
    expected_d(p.d, p.nheads, p.headdim).optional(p.d != DKind::None, inputs.d.as_ref())?;
    Expected::new("z", TOKENS, &tokens, Some(p.dtype)).optional(p.z, inputs.z.as_ref())?;
    Expected::new("dt_bias", "[nheads]", &[p.nheads], float)
        .optional(p.dt_bias, inputs.dt_bias.as_ref())?;
    Expected::new("state_batch_indices", "[batch]", &[p.batch], None)
        .optional(p.indices, inputs.state_batch_indices.as_ref())?;
    Expected::new(
        "state",
        "[slots, nheads, headdim, dstate]",
        &[p.slots, p.nheads, p.headdim, p.dstate],
        Some(p.state_dtype),
    )
    .written()
    .check(&outputs.state)?;
    Expected::new("out", TOKENS, &tokens, Some(p.dtype))
        .written()
        .check(&outputs.out)
}
