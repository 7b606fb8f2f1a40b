//! Outputs as strided views that can be taken apart into disjoint pieces, one for each task. Safe code only: the borrow
//! checker and ndarray's overlap check see to it that no two tasks write the same element.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use mamba2_spec::{HasMeta, TensorMeta};
use ndarray::{ArrayViewMut, ArrayViewMut1, Axis, Ix3, Ix4, RemoveAxis, ShapeBuilder};

use crate::{CpuError, HostDataMut, HostTensorMut};

/// A writable strided view of any dtype.
pub(crate) enum Strided<'a, D> {
    Bf16(ArrayViewMut<'a, bf16, D>),
    F16(ArrayViewMut<'a, f16, D>),
    F32(ArrayViewMut<'a, f32, D>),
}

impl<'a> Strided<'a, Ix4> {
    /// The four axes of `tensor`, whose name is for the error.
    pub(crate) fn new(
        tensor: &'a mut HostTensorMut<'_>,
        name: &'static str,
    ) -> Result<Self, CpuError> {
        let meta = *tensor.meta();
        Ok(match tensor.data_mut() {
            HostDataMut::Bf16(v) => Strided::Bf16(view(&meta, v, name)?),
            HostDataMut::F16(v) => Strided::F16(view(&meta, v, name)?),
            HostDataMut::F32(v) => Strided::F32(view(&meta, v, name)?),
        })
    }

    /// The first entry of axis 0, and the rest.
    pub(crate) fn take_first(self) -> (Strided<'a, Ix3>, Self) {
        let (first, rest) = self.split_at(0, 1);
        let first = match first {
            Strided::Bf16(v) => Strided::Bf16(v.index_axis_move(Axis(0), 0)),
            Strided::F16(v) => Strided::F16(v.index_axis_move(Axis(0), 0)),
            Strided::F32(v) => Strided::F32(v.index_axis_move(Axis(0), 0)),
        };
        (first, rest)
    }
}

impl<D: RemoveAxis> Strided<'_, D> {
    /// Entries before `at` of `axis`, and the rest.
    pub(crate) fn split_at(self, axis: usize, at: usize) -> (Self, Self) {
        match self {
            Strided::Bf16(v) => {
                let (a, b) = v.split_at(Axis(axis), at);
                (Strided::Bf16(a), Strided::Bf16(b))
            }
            Strided::F16(v) => {
                let (a, b) = v.split_at(Axis(axis), at);
                (Strided::F16(a), Strided::F16(b))
            }
            Strided::F32(v) => {
                let (a, b) = v.split_at(Axis(axis), at);
                (Strided::F32(a), Strided::F32(b))
            }
        }
    }
}

impl Strided<'_, Ix3> {
    /// Writes the innermost row `[i, j, ..]`, rounded to the view's dtype.
    pub(crate) fn store(&mut self, i: usize, j: usize, from: &[f32]) {
        match self {
            Strided::Bf16(v) => row(v, i, j).convert_from_f32_slice(from),
            Strided::F16(v) => row(v, i, j).convert_from_f32_slice(from),
            Strided::F32(v) => row(v, i, j).copy_from_slice(from),
        }
    }

    /// Reads the innermost row `[i, j, ..]` as float32.
    pub(crate) fn load(&mut self, i: usize, j: usize, to: &mut [f32]) {
        match self {
            Strided::Bf16(v) => row(v, i, j).convert_to_f32_slice(to),
            Strided::F16(v) => row(v, i, j).convert_to_f32_slice(to),
            Strided::F32(v) => to.copy_from_slice(row(v, i, j)),
        }
    }
}

fn row<'v, T>(view: &'v mut ArrayViewMut<'_, T, Ix3>, i: usize, j: usize) -> &'v mut [T] {
    let row: ArrayViewMut1<'v, T> = view
        .view_mut()
        .index_axis_move(Axis(0), i)
        .index_axis_move(Axis(0), j);
    row.into_slice()
        .expect("the innermost axis should be contiguous, as check_forward asked")
}

fn view<'a, T>(
    meta: &TensorMeta,
    data: &'a mut [T],
    tensor: &'static str,
) -> Result<ArrayViewMut<'a, T, Ix4>, CpuError> {
    let overlap = || CpuError::Overlap {
        tensor,
        shape: meta.shape().to_vec(),
        strides: meta.strides().to_vec(),
    };
    let four = |v: &[usize]| <[usize; 4]>::try_from(v).map_err(|_| overlap());
    let shape = four(meta.shape())?;
    if meta.elems() == 0 {
        return ArrayViewMut::from_shape(shape, &mut data[..0]).map_err(|_| overlap());
    }
    let strides = four(meta.strides())?;
    let span = meta.span_elems().unwrap_or(data.len());
    ArrayViewMut::from_shape(shape.strides(strides), &mut data[..span]).map_err(|_| overlap())
}
