use std::sync::Arc;

use mamba2_kernels::Tool;
use mamba2_spec::Dtype;

use crate::args::{CompareArgs, CopyArgs};
use crate::forward::{MOST_PARAMETER_BYTES, check_stream};
use crate::module::{Grid, Module, Start};
use crate::stream::Stream;
use crate::{CudaError, Device, DeviceBuffer, Jit};

/// Most blocks of the comparison.
const COMPARE_BLOCKS: u32 = 512;
/// Elements that a thread of the comparison takes at least: what each thread leaves is downloaded, which takes longer than comparing a
/// small output.
const COMPARE_UNITS: usize = 32;
/// 64-bit words that each thread of the comparison leaves.
const FOUND_WORDS: usize = 4;

fn load(device: &Device, jit: &Jit, tool: Tool) -> Result<Arc<Module>, CudaError> {
    let arch = device.facts().arch;
    let source = tool.render(arch);
    let identity = jit.identity(&source, arch);
    let load = || Module::load(device, &jit.cubin_of(&source, &identity, arch)?, 0);
    Ok(device.module(&identity.digest(), load)?.0)
}

/// Blocks that compare `units` elements. They depend on nothing else, so that the sums are the same on every GPU.
fn compare_blocks(units: usize) -> u32 {
    let needed = units.div_ceil(COMPARE_UNITS * Tool::THREADS as usize);
    needed.clamp(1, COMPARE_BLOCKS as usize) as u32
}

fn grid(blocks: u32) -> Grid {
    Grid {
        blocks,
        blocks_y: 1,
        threads: Tool::THREADS,
        smem_bytes: 0,
    }
}

/// A copy by a kernel, which is faster than the driver's: the speed of memory.
pub struct Copier {
    device: Device,
    module: Arc<Module>,
}

/// Bytes that the kernel copies at once.
const VECTOR_BYTES: usize = 16;
/// Vectors that a thread of tool_copy takes at a time, its IN_FLIGHT.
const VECTORS_IN_FLIGHT: u64 = 4;

impl Copier {
    /// Compiles the kernel or takes it from the cache, and loads it.
    ///
    /// # Errors
    /// A compile error, or a driver error.
    pub fn load(device: &Device, jit: &Jit) -> Result<Copier, CudaError> {
        Ok(Copier {
            device: device.clone(),
            module: load(device, jit, Tool::Copy)?,
        })
    }

    /// Enqueues a copy of all of `from` to `to`.
    ///
    /// # Errors
    /// [`CudaError::View`] if the sizes differ or are no multiple of 16 bytes, [`CudaError::WrongDevice`]; nothing was enqueued. A
    /// driver error.
    pub fn copy(
        &self,
        stream: &Stream,
        to: &DeviceBuffer,
        from: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let whole = from.bytes().next_multiple_of(VECTOR_BYTES);
        same_size(to, whole)?;
        same_size(from, whole)?;
        check_stream(stream, &self.device)?;
        let args = CopyArgs {
            from: address(from, &self.device)?,
            to: address(to, &self.device)?,
            vectors: (whole / VECTOR_BYTES) as i64,
        };
        let blocks = (args.vectors as u64).div_ceil(VECTORS_IN_FLIGHT * u64::from(Tool::THREADS));
        let blocks = blocks.clamp(1, 1 << 30) as u32;
        let _bound = self.device.bind()?;
        // SAFETY: tool_copy takes one CopyArgs by value. Both buffers have that many vectors, and addresses of allocations are aligned.
        unsafe {
            self.module
                .launch(stream, grid(blocks), &args, None::<&()>, Start::InOrder)
        }
    }
}

/// A kernel that does nothing: what a launch costs host and device at least.
pub struct Nothing {
    device: Device,
    module: Arc<Module>,
}

type AnyParameters = [u64; MOST_PARAMETER_BYTES / 8];

impl Nothing {
    /// Compiles the kernel, with that many bytes of parameters, or takes it from the cache, and loads it.
    ///
    /// # Errors
    /// A compile error, or a driver error.
    pub fn load(device: &Device, jit: &Jit, parameter_bytes: usize) -> Result<Nothing, CudaError> {
        let bytes = parameter_bytes.clamp(8, size_of::<AnyParameters>());
        Ok(Nothing {
            device: device.clone(),
            module: load(device, jit, Tool::Nothing(bytes.next_multiple_of(8) as u32))?,
        })
    }

    /// Enqueues a launch, with no check but that the context is current.
    ///
    /// # Errors
    /// A driver error.
    pub fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: tool_nothing takes one struct, which is no larger than this, and does not look at it.
        unsafe {
            let parameters: AnyParameters = [0; MOST_PARAMETER_BYTES / 8];
            self.module
                .launch(stream, grid(1), &parameters, None::<&()>, Start::InOrder)
        }
    }
}

/// Address of a buffer on `device`.
fn address(buffer: &DeviceBuffer, device: &Device) -> Result<u64, CudaError> {
    let (expected, got) = (device.info().ordinal, buffer.device().info().ordinal);
    if expected == got {
        return Ok(buffer.address());
    }
    Err(CudaError::WrongDevice {
        what: "buffer",
        expected,
        got,
    })
}

fn same_size(buffer: &DeviceBuffer, bytes: usize) -> Result<(), CudaError> {
    if buffer.bytes() == bytes {
        return Ok(());
    }
    Err(CudaError::View {
        available: buffer.bytes(),
        needed: bytes,
    })
}

/// What [`Comparer::compare`] is to look at: buffers of one size that hold one view each, at the same place.
#[derive(Clone, Copy, Debug)]
pub struct Compares<'a> {
    /// What a first run left.
    pub first: &'a DeviceBuffer,
    /// What a second run left.
    pub second: &'a DeviceBuffer,
    /// What was there before each.
    pub image: &'a DeviceBuffer,
    /// What the second is measured against, if anything.
    pub standard: Option<&'a DeviceBuffer>,
    /// Numbers of rows of the first axis, i32: those with a negative one are no elements.
    pub skipped: Option<&'a DeviceBuffer>,
    /// Elements before the view.
    pub lead: usize,
    /// Extents of the view, row-major.
    pub shape: [usize; 4],
    /// Strides of the view, in elements; the last is 1.
    pub strides: [usize; 4],
}

/// What [`Comparer::compare`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Compared {
    /// Sum of `(second - standard)^2` over the view.
    pub error: f64,
    /// Sum of `standard^2` over the view.
    pub norm: f64,
    /// The first place that is no element of the view and was written, in elements from the start of the buffer.
    pub outside: Option<usize>,
    /// Elements whose bits differ between the runs.
    pub differing: usize,
}

impl Compared {
    /// `|second - standard| / |standard|` (2-norms); infinite if an element of either is not finite.
    pub fn relative_frobenius(&self) -> f64 {
        match (self.error, self.norm) {
            (error, norm) if !(error + norm).is_finite() => f64::INFINITY,
            (0.0, _) => 0.0,
            (error, norm) => (error / norm).sqrt(),
        }
    }

    /// Adds up what threads found, in their order.
    fn of(found: &[u64]) -> Compared {
        let mut all = Compared::default();
        for thread in found.chunks_exact(FOUND_WORDS) {
            all.error += f64::from_bits(thread[0]);
            all.norm += f64::from_bits(thread[1]);
            // -1: none.
            let outside = usize::try_from(thread[2] as i64).ok();
            all.outside = [all.outside, outside].into_iter().flatten().min();
            all.differing += thread[3] as usize;
        }
        all
    }
}

/// Checks and compares results on the device, so that large ones need not be downloaded.
pub struct Comparer {
    device: Device,
    module: Arc<Module>,
    found: DeviceBuffer,
    elem_bytes: usize,
}

impl Comparer {
    /// Compiles the kernel or takes it from the cache, and loads it.
    ///
    /// # Errors
    /// A compile error, or a driver error.
    pub fn load(device: &Device, jit: &Jit, dtype: Dtype) -> Result<Comparer, CudaError> {
        let threads = (COMPARE_BLOCKS * Tool::THREADS) as usize;
        Ok(Comparer {
            device: device.clone(),
            module: load(device, jit, Tool::Compare(dtype))?,
            found: device.alloc(threads * FOUND_WORDS * size_of::<u64>())?,
            elem_bytes: dtype.size_bytes(),
        })
    }

    /// Compares, and waits for the answer. Sums are made in a fixed order: the same buffers give the same bits.
    ///
    /// # Errors
    /// [`CudaError::View`] for buffers of different sizes or too few numbers of rows, [`CudaError::WrongDevice`]; a driver error, also
    /// of earlier work on `stream`.
    pub fn compare(&self, stream: &Stream, compares: &Compares<'_>) -> Result<Compared, CudaError> {
        let c = compares;
        for buffer in [c.second, c.image].into_iter().chain(c.standard) {
            same_size(buffer, c.first.bytes())?;
        }
        if let Some(skipped) = c.skipped {
            same_size(skipped, c.shape[0] * size_of::<i32>())?;
        }
        check_stream(stream, &self.device)?;
        let address =
            |buffer: Option<&DeviceBuffer>| buffer.map_or(Ok(0), |b| address(b, &self.device));
        let args = CompareArgs {
            first: address(Some(c.first))?,
            second: address(Some(c.second))?,
            image: address(Some(c.image))?,
            standard: address(c.standard)?,
            skipped: address(c.skipped)?,
            found: address(Some(&self.found))?,
            units: (c.first.bytes() / self.elem_bytes) as i64,
            lead: c.lead as i64,
            shape: c.shape.map(|n| n as i64),
            // An axis of one element may have any stride.
            strides: c.strides.map(|n| n.max(1) as i64),
        };
        let blocks = compare_blocks(args.units as usize);
        let bound = self.device.bind()?;
        // SAFETY: tool_compare takes one CompareArgs by value. It reads `units` elements of four buffers that have as many, one number
        // for each row of the first axis, and writes one result a thread, for at most COMPARE_BLOCKS of which `found` was made.
        unsafe {
            self.module
                .launch(stream, grid(blocks), &args, None::<&()>, Start::InOrder)
        }?;
        drop(bound);
        stream.synchronize()?;
        let mut found = vec![0u64; (blocks * Tool::THREADS) as usize * FOUND_WORDS];
        self.found.read(0, &mut found)?;
        Ok(Compared::of(&found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_threads_are_added_and_the_first_fault_is_named() {
        let thread = |error: f64, norm: f64, outside: i64, differing: u64| {
            [error.to_bits(), norm.to_bits(), outside as u64, differing]
        };
        let found = [
            thread(1.0, 60.0, -1, 0),
            thread(0.0, 0.0, 7, 2),
            thread(3.0, 40.0, 5, 1),
        ];
        let all = Compared::of(found.as_flattened());
        assert_eq!(
            all,
            Compared {
                error: 4.0,
                norm: 100.0,
                outside: Some(5),
                differing: 3
            }
        );
        assert!((all.relative_frobenius() - 0.2).abs() < 1e-15);
    }

    #[test]
    fn a_small_output_is_compared_by_few_blocks_and_a_large_one_by_at_most_all() {
        assert_eq!(compare_blocks(0), 1);
        assert_eq!(compare_blocks(32 * 256), 1);
        assert_eq!(compare_blocks(32 * 256 + 1), 2);
        assert_eq!(compare_blocks(1 << 40), COMPARE_BLOCKS);
    }

    #[test]
    fn what_is_not_finite_is_infinitely_far() {
        let far = |error, norm| {
            Compared {
                error,
                norm,
                ..Compared::default()
            }
            .relative_frobenius()
        };
        assert_eq!(far(f64::NAN, 1.0), f64::INFINITY);
        assert_eq!(far(1.0, 0.0), f64::INFINITY);
        assert_eq!(far(0.0, 0.0), 0.0);
    }
}
