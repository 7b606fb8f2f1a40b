use std::ffi::{CString, c_int, c_void};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule};
use mamba2_spec::launch::KernelLaunch;

use crate::driver::check;
use crate::stream::Stream;
use crate::{CudaError, Device, JitOutcome, Origin, Resources};

/// Dynamic shared memory beyond this needs opting in.
const SHARED_MEMORY_WITHOUT_OPTIN_BYTES: usize = 48 * 1024;

/// Blocks of a launch, and what each has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Blocks along x; nothing is launched if 0.
    pub blocks: u32,
    /// Blocks along y.
    pub blocks_y: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub smem_bytes: usize,
}

/// When the blocks of a launch may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Once the kernel enqueued before is done.
    InOrder,
    /// While the kernel enqueued before still runs; this one waits for it itself.
    Early,
    /// In order, and all of them at once: blocks may wait for each other. An error if they do not fit the device.
    Together,
}

impl From<&KernelLaunch> for Grid {
    fn from(launch: &KernelLaunch) -> Grid {
        Grid {
            blocks: launch.grid,
            blocks_y: launch.grid_y,
            threads: launch.threads,
            smem_bytes: launch.smem_bytes,
        }
    }
}

/// A loaded cubin and its one kernel.
pub(crate) struct Module {
    device: Device,
    module: CUmodule,
    function: CUfunction,
    /// Local memory of a thread: spills and arrays that did not fit registers. Unit: bytes.
    pub local_bytes: u32,
    /// What ptxas said it needs.
    pub resources: Option<Resources>,
    /// Length of the cubin.
    pub cubin_bytes: usize,
    /// Where the code came from.
    pub origin: Origin,
}

// SAFETY: handles of modules and functions may be used from any thread whose current context is theirs.
unsafe impl Send for Module {}
// SAFETY: a function's attributes are set before it is shared; launches do not change it.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: loaded once, unloaded once. The driver waits for kernels that still run.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

impl Module {
    /// Loads `cubin` and makes its kernel ready for launches with that much dynamic shared memory, so that no launch loads anything.
    pub fn load(
        device: &Device,
        code: &JitOutcome,
        smem_bytes: usize,
    ) -> Result<Module, CudaError> {
        let cubin = &code.cubin;
        let key = &cubin.key;
        let refused = |e: CudaError| match e {
            CudaError::Driver {
                ref name, ref text, ..
            } if !e.is_fatal() && !e.is_out_of_memory() => {
                let (major, minor) = device.driver_version();
                CudaError::ModuleRefused {
                    kernel: format!("{} for {}", key.identity.kernel, cubin.compiled.target),
                    nvrtc: key.nvrtc.to_string(),
                    driver: format!("{major}.{minor}"),
                    reason: format!("{name} ({text})"),
                }
            }
            other => other,
        };
        let _bound = device.bind()?;
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the pointer is to a whole ELF image whose digest was checked; the driver copies it.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, cubin.compiled.cubin.as_ptr().cast::<c_void>())
        })
        .map_err(refused)?;
        let mut loaded = Module {
            device: device.clone(),
            module,
            function: std::ptr::null_mut(),
            local_bytes: 0,
            resources: cubin.compiled.resources,
            cubin_bytes: cubin.compiled.cubin.len(),
            origin: code.origin,
        };
        let name = CString::new(key.identity.kernel.as_str()).unwrap_or_default();
        // SAFETY: the module is loaded, the name is NUL-terminated, the pointer is to a live handle.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut loaded.function, loaded.module, name.as_ptr())
        })
        .map_err(refused)?;
        let mut local: c_int = 0;
        use CUfunction_attribute::*;
        // Also makes a lazily loading driver load the function now rather than at the first launch, perhaps in a capture.
        // SAFETY: the pointer is to a live integer, the function exists.
        check("cuFuncGetAttribute", unsafe {
            sys::cuFuncGetAttribute(
                &mut local,
                CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
                loaded.function,
            )
        })
        .map_err(refused)?;
        loaded.local_bytes = local.max(0) as u32;
        if smem_bytes > SHARED_MEMORY_WITHOUT_OPTIN_BYTES {
            // SAFETY: the function exists; a value beyond the device's limit is an error of the driver.
            check("cuFuncSetAttribute", unsafe {
                sys::cuFuncSetAttribute(
                    loaded.function,
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    smem_bytes as c_int,
                )
            })
            .map_err(refused)?;
        }
        Ok(loaded)
    }

    /// The kernel.
    pub fn function(&self) -> CUfunction {
        self.function
    }

    /// Where a launch's parameters lie, as the driver takes them: it copies as many as the kernel has and writes none.
    pub fn parameters<A, B>(args: &A, more: Option<&B>) -> [*mut c_void; 2] {
        let more = more.map_or(std::ptr::null(), std::ptr::from_ref);
        [
            std::ptr::from_ref(args).cast_mut().cast::<c_void>(),
            more.cast_mut().cast::<c_void>(),
        ]
    }

    /// Enqueues one launch with `args` and, if the kernel takes a second parameter, `more`. The device's context must be current.
    ///
    /// # Safety
    /// `A` and `B` are the parameter types of the kernel (`more` is `None` if it has one), and every pointer in them is valid on
    /// the device for what the kernel does.
    pub unsafe fn launch<A, B>(
        &self,
        stream: &Stream,
        grid: impl Into<Grid>,
        args: &A,
        more: Option<&B>,
        start: Start,
    ) -> Result<(), CudaError> {
        let grid = grid.into();
        if grid.blocks == 0 {
            return Ok(());
        }
        let mut parameters = Module::parameters(args, more);
        use sys::{CUlaunchAttributeID::*, CUlaunchAttributeValue};
        let (id, value) = match start {
            Start::Early => (
                CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: 1,
                },
            ),
            Start::Together => (
                CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                CUlaunchAttributeValue { cooperative: 1 },
            ),
            Start::InOrder => (
                CU_LAUNCH_ATTRIBUTE_IGNORE,
                CUlaunchAttributeValue { cooperative: 0 },
            ),
        };
        let mut attribute = sys::CUlaunchAttribute {
            id,
            pad: [0; 4],
            value,
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks,
            gridDimY: grid.blocks_y,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.smem_bytes as u32,
            hStream: stream.raw(),
            attrs: &mut attribute,
            numAttrs: u32::from(start != Start::InOrder),
        };
        // SAFETY: parameters of the kernel's types, by whoever calls; the driver copies as many as the kernel has and writes none. The config
        // and its one attribute live until the call returns.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.function,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}
