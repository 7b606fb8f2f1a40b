//! Tensor maps of the Hopper copy engine, encoded from addresses and strides. The driver takes a few hundred nanoseconds for each, so
//! those of the last calls are kept.

use std::mem::MaybeUninit;
use std::sync::Mutex;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use mamba2_spec::{Dtype, ForwardInputs, ForwardOutputs, HasMeta};

use crate::driver::check;
use crate::{CudaError, DeviceTensor};

/// Rows of a box, one swizzle line each.
const BOX_TOKENS: u32 = 64;
/// Elements of dstate in a box of B or C.
const BOX_DSTATE: u32 = 64;

/// `TensorMap` of kernel-templates/ptx/sm90_tma.cuh.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u8; 128]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<CUtensorMap>());

impl Default for TensorMap {
    fn default() -> Self {
        TensorMap([0; 128])
    }
}

/// `TensorMaps` of kernel-templates/common/sm90_chunk.cuh.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct TensorMaps {
    pub x: TensorMap,
    pub b: TensorMap,
    pub c: TensorMap,
    pub z: TensorMap,
    pub out: TensorMap,
}

impl TensorMaps {
    /// The maps of a kernel whose boxes of x, z and out are `x_columns` wide.
    ///
    /// # Errors
    /// As [`TensorMap::of`].
    pub fn of(
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
        x_columns: u32,
    ) -> Result<TensorMaps, CudaError> {
        Ok(TensorMaps {
            x: TensorMap::of(&inputs.x, x_columns)?,
            b: TensorMap::of(&inputs.b, BOX_DSTATE)?,
            c: TensorMap::of(&inputs.c, BOX_DSTATE)?,
            z: match &inputs.z {
                Some(z) => TensorMap::of(z, x_columns)?,
                None => TensorMap::default(),
            },
            out: TensorMap::of(&outputs.out, x_columns)?,
        })
    }
}

/// The maps of the last calls of one plan. Addresses and strides are all that tells them apart: shapes and dtypes are the problem's, and
/// a map says nothing of what lies in memory, so that it is as good for a later tensor at the same place.
#[derive(Debug, Default)]
pub(crate) struct EncodedMaps {
    // Two kilobytes, which need not lie inside whatever holds a plan.
    kept: Box<Mutex<Kept>>,
}

/// Calls that are kept: the layers of a model that share a plan take turns with few sets of tensors.
const KEPT: usize = 4;

/// Address and outer strides of x, B, C, z and out.
type Place = [[u64; 4]; 5];

#[derive(Default)]
struct Kept {
    calls: [Option<(Place, TensorMaps)>; KEPT],
    /// The one to give up next.
    oldest: usize,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let places: Vec<_> = self.calls.iter().flatten().map(|(p, _)| p).collect();
        places.fmt(f)
    }
}

impl EncodedMaps {
    /// The maps of a call, from an earlier one if its tensors lay at the same place. Waits for no other thread: one that finds another
    /// at work here encodes for itself.
    ///
    /// # Errors
    /// As [`TensorMap::of`].
    pub fn of(
        &self,
        inputs: &ForwardInputs<DeviceTensor>,
        outputs: &ForwardOutputs<DeviceTensor>,
        x_columns: u32,
    ) -> Result<TensorMaps, CudaError> {
        let place = place(inputs, outputs);
        let Ok(mut kept) = self.kept.try_lock() else {
            return TensorMaps::of(inputs, outputs, x_columns);
        };
        if let Some((_, maps)) = kept.calls.iter().flatten().find(|(p, _)| *p == place) {
            return Ok(*maps);
        }
        let maps = TensorMaps::of(inputs, outputs, x_columns)?;
        let oldest = kept.oldest;
        kept.calls[oldest] = Some((place, maps));
        kept.oldest = (oldest + 1) % KEPT;
        Ok(maps)
    }
}

fn place(inputs: &ForwardInputs<DeviceTensor>, outputs: &ForwardOutputs<DeviceTensor>) -> Place {
    let of = |tensor: &DeviceTensor| match tensor.meta().strides() {
        [batch, token, head, ..] => [tensor.address(), *batch as u64, *token as u64, *head as u64],
        _ => [0; 4],
    };
    [
        of(&inputs.x),
        of(&inputs.b),
        of(&inputs.c),
        inputs.z.as_ref().map_or([0; 4], of),
        of(&outputs.out),
    ]
}

/// The copy engine's strides are below this. Unit: bytes.
const STRIDE_LIMIT: usize = 1 << 40;

impl TensorMap {
    /// True if every outer stride is one the copy engine can take. Alignment is [`mamba2_spec::check_forward`]'s.
    pub fn can_map(tensor: &DeviceTensor) -> bool {
        let meta = tensor.meta();
        let elem = meta.dtype.map_or(2, Dtype::size_bytes);
        let limit = STRIDE_LIMIT / elem;
        meta.shape()
            .iter()
            .zip(meta.strides())
            .all(|(n, stride)| *n <= 1 || (1..limit).contains(stride))
    }

    /// The map of a `[batch, seqlen, heads or groups, innermost]` tensor of 16-bit elements; boxes of 64 tokens x `columns` elements
    /// of one head, swizzled over their whole rows, zeros outside.
    ///
    /// # Errors
    /// A driver error for strides the copy engine cannot take (0, or beyond 2^40 bytes).
    fn of(tensor: &DeviceTensor, columns: u32) -> Result<TensorMap, CudaError> {
        let meta = tensor.meta();
        let (&[batch, tokens, heads, inner], &[batch_stride, token_stride, head_stride, _]) =
            (meta.shape(), meta.strides())
        else {
            return Err(CudaError::View {
                available: meta.shape().len(),
                needed: 4,
            });
        };
        let elem = meta.dtype.map_or(2, Dtype::size_bytes) as u64;
        let dtype = match meta.dtype {
            Some(Dtype::F16) => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let dims = [inner as u64, heads as u64, tokens as u64, batch as u64];
        // The stride of an axis of one element is never used, but must look sane.
        let stride = |n: usize, stride: usize| if n <= 1 { 16 } else { stride as u64 * elem };
        let strides = [
            stride(heads, head_stride),
            stride(tokens, token_stride),
            stride(batch, batch_stride),
        ];
        let swizzle = if columns == 32 {
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B
        } else {
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
        };
        let mut map = MaybeUninit::<CUtensorMap>::zeroed();
        // SAFETY: all pointers are to live arrays of the lengths rank 4 asks for; the driver writes the whole map and does not read
        // the tensor.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                dtype,
                4,
                tensor.address() as *mut std::ffi::c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                [columns, 1, BOX_TOKENS, 1].as_ptr(),
                [1u32; 4].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        // SAFETY: both are 128 plain bytes; the map was zeroed and then filled.
        Ok(unsafe { std::mem::transmute::<CUtensorMap, TensorMap>(map.assume_init()) })
    }
}
