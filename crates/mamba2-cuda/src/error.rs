use std::path::PathBuf;

use mamba2_spec::SpecError;
use thiserror::Error;

/// What went wrong on the CUDA side. Unless the variant says otherwise, nothing was enqueued.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The problem, a tensor or a config was refused before anything touched the GPU.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// No CUDA driver library on this machine.
    #[error("no CUDA driver: tried {}\n(the CPU backend needs none)", tried.join(", "))]
    NoDriver {
        /// Library names in the order they were tried.
        tried: Vec<String>,
    },
    /// The driver library lacks a function: older than CUDA 12.0, or a stub.
    #[error(
        "the CUDA driver {path} has no function {symbol}: expected a driver for CUDA 12.0 or newer"
    )]
    DriverTooOld {
        /// First function that is missing.
        symbol: &'static str,
        /// The library that was loaded.
        path: String,
    },
    /// A driver call failed.
    #[error("{call}: {name} ({text})")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Number of the error.
        code: u32,
        /// `CUDA_ERROR_...`.
        name: String,
        /// The driver's own words.
        text: String,
    },
    /// The device asked for does not exist.
    #[error(
        "CUDA device {ordinal}: expected an ordinal below {count}, the number of visible devices"
    )]
    NoDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many devices the driver shows (CUDA_VISIBLE_DEVICES counts).
        count: usize,
    },
    /// No NVRTC library was found.
    #[error(
        "no NVRTC library; tried in order:\n{}\nset MAMBA2_NVRTC_PATH to the library or its directory, or `pip install nvidia-cuda-nvrtc`",
        lines(tried)
    )]
    NvrtcMissing {
        /// Every library name and directory, with why it did not serve.
        tried: Vec<String>,
    },
    /// An NVRTC call failed for a reason other than the kernel's text.
    #[error("{call}: {text} (NVRTC {version} from {path})")]
    Nvrtc {
        /// The NVRTC function.
        call: &'static str,
        /// NVRTC's own words.
        text: String,
        /// Version of the library.
        version: String,
        /// The library.
        path: String,
    },
    /// This NVRTC cannot compile for the GPU.
    #[error("NVRTC {nvrtc} cannot compile for {arch}: it supports {supported:?}; {need}")]
    UnsupportedArch {
        /// `sm_XX` that was asked for.
        arch: String,
        /// Version and path of the library.
        nvrtc: String,
        /// Compute capabilities it knows, as `major * 10 + minor`.
        supported: Vec<u32>,
        /// Which side is too old.
        need: &'static str,
    },
    /// The kernel did not compile. The log is the compiler's, verbatim.
    #[error("{source_name}: {kernel} does not compile ({compiler})\n{log}")]
    Compile {
        /// Kernel.
        kernel: String,
        /// Path of the template below kernel-templates/.
        source_name: String,
        /// Version of NVRTC, and the options it was given, the architecture among them.
        compiler: String,
        /// The compiler's log.
        log: String,
    },
    /// The kernel compiled, but breaks a promise of the compile gate.
    #[error("{source_name}: {kernel}: {fault}\n{log}")]
    Gate {
        /// Kernel and architecture.
        kernel: String,
        /// Path of the template below kernel-templates/.
        source_name: String,
        /// What is wrong: a spill, too much shared memory, too many registers.
        fault: String,
        /// The compiler's log.
        log: String,
    },
    /// The driver refused a compiled kernel.
    #[error(
        "the driver (CUDA {driver}) refused {kernel}, compiled by NVRTC {nvrtc}: {reason}; \
         a driver older than NVRTC needs an NVRTC of its own major version"
    )]
    ModuleRefused {
        /// Kernel and architecture.
        kernel: String,
        /// Version of NVRTC.
        nvrtc: String,
        /// CUDA version of the driver.
        driver: String,
        /// The driver's own words.
        reason: String,
    },
    /// The workspace does not serve.
    #[error(
        "workspace: expected at least {expected_bytes} bytes at a multiple of {align}, got {got_bytes} at {address:#x}"
    )]
    Workspace {
        /// [`crate::LoadedForward::plan`]'s size.
        expected_bytes: usize,
        /// Size that came.
        got_bytes: usize,
        /// Required alignment of the address.
        align: usize,
        /// Address that came.
        address: u64,
    },
    /// A tensor with elements has no address, or one its dtype cannot be read at.
    #[error(
        "{tensor}: expected a device address that is a multiple of {align} and not null, got {address:#x}"
    )]
    Address {
        /// Name of the tensor.
        tensor: &'static str,
        /// Bytes of an element.
        align: usize,
        /// Address that came.
        address: u64,
    },
    /// A tensor, stream or workspace is of another device than the loaded kernels.
    #[error("{what}: expected device {expected}, got device {got}")]
    WrongDevice {
        /// Name of the tensor, `stream` or `workspace`.
        what: &'static str,
        /// Ordinal of the device the kernels are loaded on.
        expected: usize,
        /// Ordinal that came.
        got: usize,
    },
    /// A view does not fit the buffer it is taken of.
    #[error("view: expected at most {available} bytes, {needed} needed")]
    View {
        /// Bytes of the buffer behind the offset.
        available: usize,
        /// Bytes that the view spans.
        needed: usize,
    },
    /// A count does not fit the 32-bit argument of the kernels.
    #[error("{name}: expected at most {max}, got {got}", max = i32::MAX)]
    TooLarge {
        /// Which count.
        name: &'static str,
        /// Its value.
        got: usize,
    },
    /// A file of the cubin cache cannot be used. Kernels are compiled instead; only cache commands return this.
    #[error("cubin cache, {}: {reason}", path.display())]
    Cache {
        /// File or directory.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A timing was asked for that means nothing.
    #[error("timer: expected {expected}, got {got}")]
    Timer {
        /// What is accepted.
        expected: &'static str,
        /// What came.
        got: String,
    },
}

impl CudaError {
    /// True if the error destroyed the context: every later call on the device fails until the process ends.
    pub fn is_fatal(&self) -> bool {
        // CUDA_ERROR_ECC_UNCORRECTABLE, the 7xx launch failures and CUDA_ERROR_LAUNCH_FAILED are sticky.
        matches!(
            self,
            CudaError::Driver {
                code: 214 | 700 | 702 | 710 | 714..=719,
                ..
            }
        )
    }

    /// True if the device has too little free memory.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Driver { code: 2, .. })
    }
}

fn lines(items: &[String]) -> String {
    items
        .iter()
        .map(|i| format!("  {i}"))
        .collect::<Vec<_>>()
        .join("\n")
}
