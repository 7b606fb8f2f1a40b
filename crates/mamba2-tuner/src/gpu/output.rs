use mamba2_cuda::{CudaError, Device, DeviceBuffer, DeviceTensor};
use mamba2_spec::TensorMeta;

use super::layout::{elem_bytes, for_each_run, gather, scatter, span_bytes};

/// Bytes on both sides of an output that must keep their value.
pub const GUARD_BYTES: usize = 4096;
/// Every byte of a guard, and of the gaps of a strided view.
pub const CANARY: u8 = 0xA5;
/// Every byte of an output before a call: NaN in bf16, f16 and f32.
pub const POISON: u8 = 0xFF;

/// Device memory of one output, between guards. Each run starts from the same image.
pub struct Output {
    name: &'static str,
    buffer: DeviceBuffer,
    image: Vec<u8>,
    offset_bytes: usize,
    view: DeviceTensor,
    meta: TensorMeta,
}

/// What a call left in an [`Output`].
pub struct Written {
    /// Dense elements, row-major.
    pub dense: Vec<u8>,
    /// What was written outside the elements, if anything.
    pub outside: Option<String>,
}

impl Output {
    /// An output whose elements are NaN. `lead_elems` moves it off the alignment of the allocation.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn poisoned(
        device: &Device,
        name: &'static str,
        meta: TensorMeta,
        lead_elems: usize,
    ) -> Result<Output, CudaError> {
        Output::make(device, name, meta, lead_elems, None)
    }

    /// A tensor that is updated in place, holding `dense` before each call.
    ///
    /// # Errors
    /// As [`Output::poisoned`].
    pub fn holding(
        device: &Device,
        name: &'static str,
        meta: TensorMeta,
        lead_elems: usize,
        dense: &[u8],
    ) -> Result<Output, CudaError> {
        Output::make(device, name, meta, lead_elems, Some(dense))
    }

    fn make(
        device: &Device,
        name: &'static str,
        meta: TensorMeta,
        lead_elems: usize,
        dense: Option<&[u8]>,
    ) -> Result<Output, CudaError> {
        let offset_bytes = GUARD_BYTES + lead_elems * elem_bytes(&meta);
        let mut image = vec![CANARY; offset_bytes + span_bytes(&meta) + GUARD_BYTES];
        match dense {
            Some(dense) => scatter(&mut image, offset_bytes, &meta, dense),
            None => for_each_run(&meta, |at, bytes| {
                image[offset_bytes + at..offset_bytes + at + bytes].fill(POISON)
            }),
        }
        let buffer = device.alloc(image.len())?;
        let view = DeviceTensor::new(&buffer, offset_bytes, meta)?;
        let output = Output {
            name,
            buffer,
            image,
            offset_bytes,
            view,
            meta,
        };
        output.reset()?;
        Ok(output)
    }

    /// The view to pass to a call.
    pub fn view(&self) -> DeviceTensor {
        self.view.clone()
    }

    /// Puts poison (or the content) and canaries back.
    ///
    /// # Errors
    /// A driver error.
    pub fn reset(&self) -> Result<(), CudaError> {
        self.buffer.write(0, &self.image)
    }

    /// Reads what finished work left.
    ///
    /// # Errors
    /// A driver error.
    pub fn read(&self) -> Result<Written, CudaError> {
        let mut now = vec![0u8; self.image.len()];
        self.buffer.read(0, &mut now)?;
        Ok(Written {
            dense: gather(&now, self.offset_bytes, &self.meta),
            outside: self.outside(now),
        })
    }

    /// The first byte that is no element and changed.
    fn outside(&self, mut now: Vec<u8>) -> Option<String> {
        // Elements may be anything: take them out of the comparison.
        for_each_run(&self.meta, |at, bytes| {
            let range = self.offset_bytes + at..self.offset_bytes + at + bytes;
            now[range.clone()].copy_from_slice(&self.image[range]);
        });
        if now == self.image {
            return None;
        }
        let at = now.iter().zip(&self.image).position(|(a, b)| a != b)?;
        let relative = at as i64 - self.offset_bytes as i64;
        Some(format!(
            "{}: byte {relative} of {} was written",
            self.name,
            span_bytes(&self.meta)
        ))
    }
}

/// Scratch memory of a call, poisoned before each run, with a guard behind it.
pub struct Scratch {
    buffer: DeviceBuffer,
    bytes: usize,
}

impl Scratch {
    /// At least `bytes` of workspace.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn new(device: &Device, bytes: usize) -> Result<Scratch, CudaError> {
        Ok(Scratch {
            buffer: device.alloc(bytes + GUARD_BYTES)?,
            bytes,
        })
    }

    /// Its size without the guard.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The buffer to pass to a call.
    pub fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    /// Poisons the `used` bytes that a call may use; all behind them is guard.
    ///
    /// # Errors
    /// A driver error.
    pub fn reset(&self, stream: &mamba2_cuda::Stream, used: usize) -> Result<(), CudaError> {
        self.buffer.fill(stream, POISON)?;
        stream.synchronize()?;
        self.buffer.write(used, &[CANARY; GUARD_BYTES])
    }

    /// What was written right behind the `used` bytes, if anything.
    ///
    /// # Errors
    /// A driver error.
    pub fn outside(&self, used: usize) -> Result<Option<String>, CudaError> {
        let mut guard = [0u8; GUARD_BYTES];
        self.buffer.read(used, &mut guard)?;
        let at = guard.iter().position(|b| *b != CANARY);
        Ok(at.map(|at| format!("workspace: byte {} of {used} was written", used + at)))
    }
}
