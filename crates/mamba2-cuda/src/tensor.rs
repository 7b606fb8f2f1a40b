use mamba2_spec::{Dtype, HasMeta, TensorMeta};

use crate::{CudaError, Device, DeviceBuffer};

/// A strided view of device memory.
#[derive(Clone, Debug)]
pub struct DeviceTensor {
    address: u64,
    meta: TensorMeta,
    /// Keeps the memory alive; `None` for the caller's own memory.
    owner: Option<DeviceBuffer>,
}

impl DeviceTensor {
    /// The view `meta` of `buffer`, from byte `offset_bytes`.
    ///
    /// # Errors
    /// [`CudaError::View`] if the view reaches past the end of the buffer.
    pub fn new(
        buffer: &DeviceBuffer,
        offset_bytes: usize,
        meta: TensorMeta,
    ) -> Result<DeviceTensor, CudaError> {
        let needed = span_bytes(&meta).unwrap_or(usize::MAX);
        let available = buffer.bytes().saturating_sub(offset_bytes);
        if needed > available {
            return Err(CudaError::View { available, needed });
        }
        Ok(DeviceTensor {
            address: buffer.address() + offset_bytes as u64,
            meta,
            owner: Some(buffer.clone()),
        })
    }

    /// A view of the caller's own device memory, of any library.
    ///
    /// # Safety
    /// Every element of the view is memory of the device that the call will run on, readable, and writable if it is an output, until
    /// the work enqueued with it is done.
    pub unsafe fn from_raw(address: u64, meta: TensorMeta) -> DeviceTensor {
        DeviceTensor {
            address,
            meta,
            owner: None,
        }
    }

    /// A view of a cudarc slice, from its first element, for work on `stream`.
    ///
    /// # Errors
    /// [`CudaError::View`] if the view reaches past the end of the slice.
    ///
    /// # Safety
    /// The slice is of the device that the call will run on, its elements have the dtype of `meta`, it outlives the work enqueued with it, and
    /// that work is enqueued on `stream` (or the caller orders the streams).
    pub unsafe fn from_cudarc<T>(
        slice: &impl cudarc::driver::DevicePtr<T>,
        stream: &cudarc::driver::CudaStream,
        meta: TensorMeta,
    ) -> Result<DeviceTensor, CudaError> {
        let (needed, available) = (span_bytes(&meta).unwrap_or(usize::MAX), slice.num_bytes());
        if needed > available {
            return Err(CudaError::View { available, needed });
        }
        let (address, _use) = slice.device_ptr(stream);
        Ok(DeviceTensor {
            address,
            meta,
            owner: None,
        })
    }

    /// Address of element 0.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Checks that the address can be used on `device`.
    pub(crate) fn check(&self, tensor: &'static str, device: &Device) -> Result<u64, CudaError> {
        if let Some(owner) = &self.owner
            && owner.device().info().ordinal != device.info().ordinal
        {
            let (expected, got) = (device.info().ordinal, owner.device().info().ordinal);
            return Err(CudaError::WrongDevice {
                what: tensor,
                expected,
                got,
            });
        }
        let align = elem_bytes(&self.meta);
        if self.meta.elems() > 0
            && (self.address == 0 || !self.address.is_multiple_of(align as u64))
        {
            return Err(CudaError::Address {
                tensor,
                align,
                address: self.address,
            });
        }
        Ok(self.address)
    }
}

impl HasMeta for DeviceTensor {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }
    fn base_address(&self) -> u64 {
        self.address
    }
}

/// Bytes of an element; the index tensors, which have no dtype, are i32.
pub(crate) fn elem_bytes(meta: &TensorMeta) -> usize {
    meta.dtype.map_or(4, Dtype::size_bytes)
}

/// Bytes from the first to one past the last element of a view; `None` if they do not fit the address space.
pub fn span_bytes(meta: &TensorMeta) -> Option<usize> {
    meta.span_elems()?.checked_mul(elem_bytes(meta))
}
