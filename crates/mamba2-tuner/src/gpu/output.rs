use mamba2_cuda::{
    Compared, Comparer, Compares, CudaError, Device, DeviceBuffer, DeviceTensor, Jit, Stream,
};
use mamba2_spec::TensorMeta;

use super::layout::{elem_bytes, for_each_run, gather, scatter, span_bytes};

/// Bytes on both sides of an output that must keep their value.
pub const GUARD_BYTES: usize = 4096;
/// Every byte of a guard, and of the gaps of a strided view.
pub const CANARY: u8 = 0xA5;
/// Every byte of an output before a call: NaN in bf16, f16 and f32.
pub const POISON: u8 = 0xFF;

/// Device memory of one output of four axes, between guards. Each run starts from the same image. Checks are made on the device:
/// outputs of real shapes take hundreds of megabytes.
pub struct Output {
    name: &'static str,
    buffer: DeviceBuffer,
    image: DeviceBuffer,
    /// What the run before the last left.
    kept: DeviceBuffer,
    offset_bytes: usize,
    view: DeviceTensor,
    meta: TensorMeta,
    /// The part of the view that a call writes.
    extents: [usize; 4],
    /// A number for each row of the first axis; a call leaves alone those with a negative one.
    skipped: Option<DeviceBuffer>,
    comparer: Comparer,
}

impl Output {
    /// An output whose elements are NaN. `lead_elems` moves it off the alignment of the allocation.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn poisoned(
        device: &Device,
        jit: &Jit,
        name: &'static str,
        meta: TensorMeta,
        lead_elems: usize,
    ) -> Result<Output, CudaError> {
        Output::make(device, jit, name, meta, lead_elems, None)
    }

    /// A tensor that is updated in place, holding `dense` before each call.
    ///
    /// # Errors
    /// As [`Output::poisoned`].
    pub fn holding(
        device: &Device,
        jit: &Jit,
        name: &'static str,
        meta: TensorMeta,
        lead_elems: usize,
        dense: &[u8],
    ) -> Result<Output, CudaError> {
        Output::make(device, jit, name, meta, lead_elems, Some(dense))
    }

    fn make(
        device: &Device,
        jit: &Jit,
        name: &'static str,
        meta: TensorMeta,
        lead_elems: usize,
        dense: Option<&[u8]>,
    ) -> Result<Output, CudaError> {
        let offset_bytes = GUARD_BYTES + lead_elems * elem_bytes(&meta);
        let stream = device.stream()?;
        let image = make_image(device, &stream, &meta, offset_bytes, dense)?;
        let buffer = device.alloc(image.bytes())?;
        buffer.copy_from(&stream, &image)?;
        stream.synchronize()?;
        let view = DeviceTensor::new(&buffer, offset_bytes, meta)?;
        let dtype = meta.dtype.expect("outputs should be of float dtypes");
        Ok(Output {
            name,
            buffer,
            kept: device.alloc(image.bytes())?,
            image,
            offset_bytes,
            view,
            meta,
            extents: four(meta.shape()),
            skipped: None,
            comparer: Comparer::load(device, jit, dtype)?,
        })
    }

    /// The same output, of which a call writes the first `tokens` of the second axis and no more.
    pub fn of_tokens(mut self, tokens: usize) -> Output {
        self.extents[1] = tokens;
        self
    }

    /// The same output, of which a call leaves the rows alone that have a negative index.
    ///
    /// # Errors
    /// As [`Output::poisoned`].
    pub fn of_rows(mut self, indices: &[i32]) -> Result<Output, CudaError> {
        self.skipped = Some(self.buffer.device().upload(indices)?);
        Ok(self)
    }

    /// The view to pass to a call.
    pub fn view(&self) -> DeviceTensor {
        self.view.clone()
    }

    /// Enqueues that poison (or the content) and canaries are put back.
    ///
    /// # Errors
    /// A driver error.
    pub fn reset(&self, stream: &Stream) -> Result<(), CudaError> {
        self.buffer.copy_from(stream, &self.image)
    }

    /// Enqueues that what a run left is kept, to be compared with what the next leaves.
    ///
    /// # Errors
    /// A driver error.
    pub fn keep(&self, stream: &Stream) -> Result<(), CudaError> {
        self.kept.copy_from(stream, &self.buffer)
    }

    /// Enqueues a copy of what a run left, and returns where it will be.
    ///
    /// # Errors
    /// A driver error.
    pub fn copy(&self, stream: &Stream) -> Result<DeviceBuffer, CudaError> {
        let copy = self.buffer.device().alloc(self.buffer.bytes())?;
        copy.copy_from(stream, &self.buffer)?;
        Ok(copy)
    }

    /// Compares what the last run left with the image, with what was kept and with a [`Output::copy`] of an output like this one.
    ///
    /// # Errors
    /// A driver error.
    pub fn compare(
        &self,
        stream: &Stream,
        standard: Option<&DeviceBuffer>,
    ) -> Result<Compared, CudaError> {
        self.comparer.compare(
            stream,
            &Compares {
                first: &self.kept,
                second: &self.buffer,
                image: &self.image,
                standard,
                skipped: self.skipped.as_ref(),
                lead: self.offset_bytes / elem_bytes(&self.meta),
                shape: self.extents,
                strides: four(self.meta.strides()),
            },
        )
    }

    /// In words, where something was written that is no element for a call to write.
    pub fn outside(&self, compared: &Compared) -> Option<String> {
        let byte = compared.outside? * elem_bytes(&self.meta);
        let relative = byte as i64 - self.offset_bytes as i64;
        Some(format!(
            "{}: byte {relative} of {} was written, which is no element or of a row or tail to be left alone",
            self.name,
            span_bytes(&self.meta)
        ))
    }

    /// Downloads the elements that finished work left: dense, row-major.
    ///
    /// # Errors
    /// A driver error.
    pub fn read(&self) -> Result<Vec<u8>, CudaError> {
        if self.meta.is_contiguous() {
            let mut dense = vec![0u8; span_bytes(&self.meta)];
            self.buffer.read(self.offset_bytes, &mut dense)?;
            return Ok(dense);
        }
        let mut now = vec![0u8; self.buffer.bytes()];
        self.buffer.read(0, &mut now)?;
        Ok(gather(&now, self.offset_bytes, &self.meta))
    }
}

/// A view between guards, with its content or poison. What is contiguous is never assembled on the host: it may have gigabytes.
fn make_image(
    device: &Device,
    stream: &Stream,
    meta: &TensorMeta,
    offset_bytes: usize,
    dense: Option<&[u8]>,
) -> Result<DeviceBuffer, CudaError> {
    let bytes = offset_bytes + span_bytes(meta) + GUARD_BYTES;
    if !meta.is_contiguous() {
        let mut image = vec![CANARY; bytes];
        match dense {
            Some(dense) => scatter(&mut image, offset_bytes, meta, dense),
            None => for_each_run(meta, |at, bytes| {
                image[offset_bytes + at..offset_bytes + at + bytes].fill(POISON)
            }),
        }
        return device.upload(&image);
    }
    let image = device.alloc(bytes)?;
    image.fill(stream, CANARY)?;
    match dense {
        Some(dense) => {
            // The copy is on another stream.
            stream.synchronize()?;
            image.write(offset_bytes, dense)?;
        }
        None => image.fill_part(stream, offset_bytes, span_bytes(meta), POISON)?,
    }
    Ok(image)
}

fn four(axes: &[usize]) -> [usize; 4] {
    axes.try_into().expect("outputs should have four axes")
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

    /// Enqueues that the `used` bytes that a call may use are poisoned, and guard put behind them. What is behind the guard is poison too.
    ///
    /// # Errors
    /// A driver error.
    pub fn reset(&self, stream: &Stream, used: usize) -> Result<(), CudaError> {
        self.buffer.fill(stream, POISON)?;
        self.buffer.fill_part(stream, used, GUARD_BYTES, CANARY)
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
