//! The CUDA driver library, through cudarc's `driver::sys`.
//!
//! cudarc opens the library at the first call and panics if it is absent or lacks the function. [`Driver::get`] comes before
//! any other call in this crate: it asks for presence first, then for every function in [`FUNCTIONS`], so nothing panics.
//! The list holds only functions that drivers have had since CUDA 12.0, whatever CUDA version cudarc's types are of; a test
//! compares it with the calls in the sources.

use std::ffi::{CStr, c_int};

use cudarc::driver::sys::{self, CUresult};

use crate::CudaError;
use crate::nvrtc::loaded_library_path;

/// Every driver function this crate calls.
const FUNCTIONS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// Proof that the driver library is open, complete and initialised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// CUDA version the driver supports, as (major, minor).
    pub version: (u32, u32),
}

impl Driver {
    /// Opens and initialises the driver. Harmless to repeat.
    pub fn get() -> Result<Driver, CudaError> {
        // SAFETY: opens libcuda by name and closes it again.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver {
                tried: tried_names(),
            });
        }
        // SAFETY: present, as just seen, so this does not panic.
        let library = unsafe { sys::culib() };
        for symbol in FUNCTIONS {
            // SAFETY: only the presence of the symbol is looked at.
            if unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err() {
                return Err(CudaError::DriverTooOld {
                    symbol,
                    path: driver_path(),
                });
            }
        }
        // SAFETY: the function exists, as just seen.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut version: c_int = 0;
        // SAFETY: the pointer is to a live integer.
        check("cuDriverGetVersion", unsafe {
            sys::cuDriverGetVersion(&mut version)
        })?;
        Ok(Driver {
            version: (version as u32 / 1000, version as u32 % 1000 / 10),
        })
    }
}

/// The loaded driver library's file.
pub(crate) fn driver_path() -> String {
    loaded_library_path("libcuda.so").map_or_else(|| "libcuda".into(), |p| p.display().to_string())
}

fn tried_names() -> Vec<String> {
    ["cuda", "nvcuda"]
        .into_iter()
        .flat_map(cudarc::get_lib_name_candidates)
        .collect()
}

/// Turns a driver status into an error. Call only after [`Driver::get`].
pub(crate) fn check(call: &'static str, status: CUresult) -> Result<(), CudaError> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the pointer is to a live pointer, which the driver points at a static string or leaves null.
    let known = unsafe { sys::cuGetErrorString(status, &mut text) } == CUresult::CUDA_SUCCESS
        && !text.is_null();
    let text = if known {
        // SAFETY: not null, and a static NUL-terminated string by the driver's documentation.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    } else {
        "no description".into()
    };
    let hint = match status {
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "; the library found first is a toolkit's stub, take its directory off the loader's path"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "; the device has too little free memory",
        _ => "",
    };
    Err(CudaError::Driver {
        call,
        code: status as u32,
        name: format!("{status:?}"),
        text: format!("{text}{hint}"),
    })
}

/// `cuEventElapsedTime`, which cudarc's bindings of CUDA 13 replace by a function that drivers before 12.8 lack.
pub(crate) fn elapsed_ms(start: sys::CUevent, end: sys::CUevent) -> Result<f32, CudaError> {
    type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
    // SAFETY: the events exist, so the library is open.
    let library = unsafe { sys::culib() };
    // SAFETY: the signature is cuda.h's, unchanged since CUDA 2.
    let elapsed = unsafe { library.get::<Elapsed>(b"cuEventElapsedTime") }.map_err(|_| {
        CudaError::DriverTooOld {
            symbol: "cuEventElapsedTime",
            path: driver_path(),
        }
    })?;
    let mut ms = 0f32;
    // SAFETY: the pointer is to a live float; the events are live, by whoever calls.
    check("cuEventElapsedTime", unsafe {
        elapsed(&mut ms, start, end)
    })?;
    Ok(ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i2_every_driver_function_in_the_sources_is_checked_before_use() {
        let mut called = std::collections::BTreeSet::from(["cuEventElapsedTime".to_string()]);
        for entry in
            std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).expect("sources")
        {
            let path = entry.expect("entry").path();
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            for part in text.split("sys::cu").skip(1) {
                let name: String = part
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                    .collect();
                if name != "lib" && !name.is_empty() && part[name.len()..].starts_with('(') {
                    called.insert(format!("cu{name}"));
                }
            }
        }
        let listed = FUNCTIONS.iter().map(|f| f.to_string()).collect();
        assert_eq!(called, listed);
    }

    #[test]
    fn i2_a_machine_without_a_driver_gets_a_typed_error_that_lists_what_was_tried() {
        match Driver::get() {
            Ok(driver) => assert!(driver.version >= (12, 0)),
            Err(CudaError::NoDriver { tried }) => {
                assert!(tried.iter().any(|n| n == "libcuda.so.1"), "{tried:?}")
            }
            Err(CudaError::Driver { .. } | CudaError::DriverTooOld { .. }) => {}
            Err(other) => panic!("unexpected kind: {other}"),
        }
    }
}
