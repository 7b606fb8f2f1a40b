use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use half::{bf16, f16};

use crate::driver::check;
use crate::stream::Stream;
use crate::{CudaError, Device};

mod sealed {
    pub trait Sealed {}
}

/// An element that can be copied to and from a device byte by byte: no padding, every bit pattern is a value.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($t:ty),+) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {}
    )+};
}

elements!(u8, i32, u64, f32, bf16, f16);

struct Allocation {
    device: Device,
    address: u64,
    /// False for memory that belongs to someone else.
    owned: bool,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.owned
            && self.address != 0
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: allocated once by cuMemAlloc, freed once. The driver waits for work that still uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Device memory of an exact size. Clones share it; the last one frees it.
///
/// Plain `cuMemAlloc`: it exists on every device, stream-ordered pools do not (fractional vGPUs), and nothing here allocates
/// while a forward pass is enqueued.
#[derive(Clone)]
pub struct DeviceBuffer {
    allocation: Arc<Allocation>,
    bytes: usize,
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "DeviceBuffer({} bytes at {:#x})",
            self.bytes,
            self.address()
        )
    }
}

impl Device {
    /// Allocates exactly `bytes` of device memory, uninitialised. 0 bytes take nothing and have the address 0.
    ///
    /// # Errors
    /// A driver error; see [`CudaError::is_out_of_memory`].
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        let mut address = 0u64;
        if bytes > 0 {
            let _bound = self.bind()?;
            // SAFETY: the pointer is to a live integer.
            check("cuMemAlloc", unsafe {
                sys::cuMemAlloc_v2(&mut address, bytes)
            })?;
        }
        Ok(DeviceBuffer {
            allocation: Arc::new(Allocation {
                device: self.clone(),
                address,
                owned: true,
            }),
            bytes,
        })
    }

    /// Allocates memory that holds a copy of `data`.
    ///
    /// # Errors
    /// As [`Device::alloc`].
    pub fn upload<T: Element>(&self, data: &[T]) -> Result<DeviceBuffer, CudaError> {
        let buffer = self.alloc(size_of_val(data))?;
        buffer.write(0, data)?;
        Ok(buffer)
    }

    /// Memory of this device that someone else owns, frees and keeps alive.
    ///
    /// # Safety
    /// `address..address + bytes` is memory of this device, and stays so until the last clone, the last tensor made of it and
    /// all work enqueued with them are gone.
    pub unsafe fn borrow_memory(&self, address: u64, bytes: usize) -> DeviceBuffer {
        DeviceBuffer {
            allocation: Arc::new(Allocation {
                device: self.clone(),
                address,
                owned: false,
            }),
            bytes,
        }
    }
}

impl DeviceBuffer {
    /// Address of the first byte, 0 if the buffer is empty.
    pub fn address(&self) -> u64 {
        self.allocation.address
    }

    /// Size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.allocation.device
    }

    fn range(&self, offset_bytes: usize, bytes: usize) -> Result<u64, CudaError> {
        match offset_bytes.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address() + offset_bytes as u64),
            _ => Err(CudaError::View {
                available: self.bytes.saturating_sub(offset_bytes),
                needed: bytes,
            }),
        }
    }

    /// Copies `data` to byte `offset_bytes` and waits for it. Does not wait for work on other streams.
    ///
    /// # Errors
    /// [`CudaError::View`] if it does not fit, or a driver error.
    pub fn write<T: Element>(&self, offset_bytes: usize, data: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        let address = self.range(offset_bytes, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        // SAFETY: source and destination have that many bytes; Element has no padding.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(address, data.as_ptr().cast::<c_void>(), bytes)
        })?;
        // From pageable memory the copy may return with the last piece still on its way; work on a non-blocking stream would not
        // wait for it.
        // SAFETY: the null stream always exists.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(std::ptr::null_mut())
        })
    }

    /// Copies from byte `offset_bytes` to `data` and waits for it. Work on other streams must have been waited for.
    ///
    /// # Errors
    /// [`CudaError::View`] if it reaches past the end, or a driver error, also of earlier asynchronous work.
    pub fn read<T: Element>(&self, offset_bytes: usize, data: &mut [T]) -> Result<(), CudaError> {
        let bytes = size_of_val(data);
        let address = self.range(offset_bytes, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        // SAFETY: source and destination have that many bytes; every bit pattern is a value of Element.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast::<c_void>(), address, bytes)
        })
    }

    /// Enqueues a fill of the whole buffer with `byte`.
    ///
    /// # Errors
    /// A driver error.
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        self.fill_part(stream, 0, self.bytes, byte)
    }

    /// Enqueues a fill of `bytes` bytes from byte `offset_bytes` on with `byte`.
    ///
    /// # Errors
    /// [`CudaError::View`] if they reach past the end, or a driver error.
    pub fn fill_part(
        &self,
        stream: &Stream,
        offset_bytes: usize,
        bytes: usize,
        byte: u8,
    ) -> Result<(), CudaError> {
        let address = self.range(offset_bytes, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        // SAFETY: the buffer has that many bytes from there on.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(address, byte, bytes, stream.raw())
        })
    }

    /// Enqueues a copy of all of `source` to the start of this buffer.
    ///
    /// # Errors
    /// [`CudaError::View`] if it does not fit, or a driver error.
    pub fn copy_from(&self, stream: &Stream, source: &DeviceBuffer) -> Result<(), CudaError> {
        let address = self.range(0, source.bytes)?;
        if source.bytes == 0 {
            return Ok(());
        }
        let _bound = self.device().bind()?;
        // SAFETY: source and destination have that many bytes.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(address, source.address(), source.bytes, stream.raw())
        })
    }
}
