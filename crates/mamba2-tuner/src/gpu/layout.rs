//! Host images of strided tensors: which bytes of a buffer are elements, and which are not.

use mamba2_spec::{Dtype, TensorMeta};

/// Bytes of an element; index tensors are i32.
pub fn elem_bytes(meta: &TensorMeta) -> usize {
    meta.dtype.map_or(4, Dtype::size_bytes)
}

/// Calls `f` with offset and length in bytes of each stretch of neighbouring elements, in row-major order.
pub fn for_each_run(meta: &TensorMeta, mut f: impl FnMut(usize, usize)) {
    let elem = elem_bytes(meta);
    if meta.elems() == 0 {
        return;
    }
    if meta.is_contiguous() {
        return f(0, meta.elems() * elem);
    }
    let (shape, strides) = (meta.shape(), meta.strides());
    let inner = shape.len() - 1;
    let mut index = vec![0usize; inner];
    loop {
        let at: usize = index.iter().zip(strides).map(|(i, s)| i * s).sum();
        f(at * elem, shape[inner] * elem);
        let Some(axis) = (0..inner).rev().find(|a| index[*a] + 1 < shape[*a]) else {
            return;
        };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}

/// Bytes from the first to one past the last element.
pub fn span_bytes(meta: &TensorMeta) -> usize {
    mamba2_cuda::span_bytes(meta).expect("shapes should have been checked")
}

/// Writes dense row-major elements into `image` where the view at `offset_bytes` has them.
pub fn scatter(image: &mut [u8], offset_bytes: usize, meta: &TensorMeta, dense: &[u8]) {
    let mut from = 0;
    for_each_run(meta, |at, bytes| {
        image[offset_bytes + at..offset_bytes + at + bytes]
            .copy_from_slice(&dense[from..from + bytes]);
        from += bytes;
    });
}

/// Takes the elements of the view at `offset_bytes` out of `image`, dense and row-major.
pub fn gather(image: &[u8], offset_bytes: usize, meta: &TensorMeta) -> Vec<u8> {
    let mut dense = Vec::with_capacity(meta.elems() * elem_bytes(meta));
    for_each_run(meta, |at, bytes| {
        dense.extend_from_slice(&image[offset_bytes + at..offset_bytes + at + bytes])
    });
    dense
}

/// A row-major view whose axes but the innermost step by multiples of `align_elems`, plus `gap` elements after each innermost
/// row. With `align_elems` 1 and no gap it is contiguous.
pub fn padded(dtype: Option<Dtype>, shape: &[usize], align_elems: usize, gap: usize) -> TensorMeta {
    let mut strides = vec![1usize; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        let inner = strides[axis + 1] * shape[axis + 1];
        let gap = if axis + 2 == shape.len() { gap } else { 0 };
        strides[axis] = (inner + gap).next_multiple_of(align_elems.max(1));
    }
    TensorMeta::strided(dtype, shape, &strides)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_scattered_is_gathered_again_and_the_rest_stays() {
        let meta = padded(Some(Dtype::Bf16), &[2, 3, 5], 8, 0);
        assert_eq!(meta.strides(), [24, 8, 1]);
        let dense: Vec<u8> = (0..60).collect();
        let mut image = vec![0xEE; 6 + span_bytes(&meta)];
        scatter(&mut image, 6, &meta, &dense);
        assert_eq!(gather(&image, 6, &meta), dense);
        assert_eq!(
            image.iter().filter(|b| **b == 0xEE).count(),
            image.len() - 60
        );
    }

    #[test]
    fn a_view_without_padding_is_one_run() {
        let meta = padded(Some(Dtype::F32), &[4, 2, 8], 4, 0);
        assert!(meta.is_contiguous());
        let mut runs = Vec::new();
        for_each_run(&meta, |at, bytes| runs.push((at, bytes)));
        assert_eq!(runs, [(0, 256)]);
        for_each_run(&padded(Some(Dtype::F32), &[4, 0, 8], 4, 1), |_, _| {
            panic!("nothing to visit")
        });
    }
}
