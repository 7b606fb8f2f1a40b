//! The four matrix products of a chunk, on row-major scratch. matrixmultiply does them, through ndarray's safe interface.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, ShapeBuilder};

/// `rows x cols` elements whose rows are `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Shape {
    pub(crate) fn dense(rows: usize, cols: usize) -> Shape {
        Shape {
            rows,
            cols,
            stride: cols,
        }
    }
}

const FITS: &str = "scratch should be as large as its shape";

pub(crate) fn matrix(data: &[f32], s: Shape) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((s.rows, s.cols).strides((s.stride, 1)), data).expect(FITS)
}

pub(crate) fn matrix_mut(data: &mut [f32], s: Shape) -> ArrayViewMut2<'_, f32> {
    ArrayViewMut2::from_shape((s.rows, s.cols).strides((s.stride, 1)), data).expect(FITS)
}

/// `c = a b`.
pub(crate) fn set(c: ArrayViewMut2<'_, f32>, a: &ArrayView2<'_, f32>, b: &ArrayView2<'_, f32>) {
    let mut c = c;
    general_mat_mul(1.0, a, b, 0.0, &mut c);
}

/// `c += a b`.
pub(crate) fn add(c: ArrayViewMut2<'_, f32>, a: &ArrayView2<'_, f32>, b: &ArrayView2<'_, f32>) {
    let mut c = c;
    general_mat_mul(1.0, a, b, 1.0, &mut c);
}
