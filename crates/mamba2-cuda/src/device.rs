use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute};
use mamba2_spec::{Arch, DeviceFacts};

use crate::CudaError;
use crate::driver::{Driver, check};
use crate::module::Module;

/// What the driver says about one GPU, without making a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Ordinal among the visible devices.
    pub ordinal: usize,
    /// What tuning depends on.
    pub facts: DeviceFacts,
    /// `GPU-...`, as nvidia-smi prints it.
    pub uuid: String,
    /// PCI bus id, as nvidia-smi prints it.
    pub pci_bus_id: String,
}

/// A CUDA device with its primary context retained. Cheap to clone, usable from any thread.
///
/// Every call leaves the caller's current context what it was: it pushes the device's and pops it again, or finds it current and does
/// neither. A thread that makes many calls makes it current once, with [`Device::make_current`] or by the means of whatever
/// else uses the device.
#[derive(Clone)]
pub struct Device {
    pub(crate) shared: Arc<DeviceShared>,
}

pub(crate) struct DeviceShared {
    info: DeviceInfo,
    driver: Driver,
    device: CUdevice,
    context: CUcontext,
    modules: Mutex<HashMap<String, Weak<Module>>>,
}

// SAFETY: a context may be used from any thread that makes it current, which every call here does.
unsafe impl Send for DeviceShared {}
// SAFETY: the driver serialises calls on one context; the table of modules has its own lock.
unsafe impl Sync for DeviceShared {}

impl Drop for DeviceShared {
    fn drop(&mut self) {
        // SAFETY: retained once in open, released once here. Errors at process exit mean nothing to anyone.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let i = self.info();
        write!(
            f,
            "Device({} {}, {}, {})",
            i.ordinal, i.facts.name, i.uuid, i.pci_bus_id
        )
    }
}

/// Keeps a device's context current on this thread; dropping it restores the caller's.
pub(crate) struct Bound<'a> {
    _device: &'a DeviceShared,
    /// False if it was current before.
    pushed: bool,
    // Contexts are current per thread: the guard must be dropped where it was made.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        let mut popped: CUcontext = std::ptr::null_mut();
        // SAFETY: pushed on this thread by bind, and every other push of this crate is popped before.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

/// Keeps a device's context current on the thread that made it: see [`Device::make_current`]. Guards of one thread are dropped in the
/// reverse of the order in which they were made.
#[must_use = "the context is current until this is dropped"]
pub struct Current<'a>(#[allow(dead_code)] Bound<'a>);

impl Device {
    /// Number of visible devices.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] and its kin.
    pub fn count() -> Result<usize, CudaError> {
        let _ = Driver::get()?;
        count()
    }

    /// Every visible device, without making a context.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] and its kin.
    pub fn list() -> Result<Vec<DeviceInfo>, CudaError> {
        let _ = Driver::get()?;
        (0..count()?)
            .map(|ordinal| describe(ordinal).map(|(_, info)| info))
            .collect()
    }

    /// Opens device `ordinal` of the visible ones and retains its primary context. No setting of the GPU is changed.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoDevice`], a driver error, or [`CudaError::Spec`] for a GPU that is too old.
    pub fn open(ordinal: usize) -> Result<Device, CudaError> {
        let driver = Driver::get()?;
        let count = count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let (device, info) = describe(ordinal)?;
        info.facts.arch.require_supported()?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the device was just looked up, the pointer is to a live handle.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut context, device)
        })?;
        Ok(Device {
            shared: Arc::new(DeviceShared {
                info,
                driver,
                device,
                context,
                modules: Mutex::default(),
            }),
        })
    }

    /// Ordinal, facts, UUID and PCI id.
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// What tuning depends on.
    pub fn facts(&self) -> &DeviceFacts {
        &self.shared.info.facts
    }

    /// CUDA version the driver supports, as (major, minor).
    pub fn driver_version(&self) -> (u32, u32) {
        self.shared.driver.version
    }

    /// True if a kernel may start while the one before it runs (programmatic dependent launch): Hopper and later, and a driver that
    /// can also capture such a pair in a graph.
    pub(crate) fn overlaps_launches(&self) -> bool {
        self.facts().arch.0 >= 90 && self.driver_version() >= (12, 3)
    }

    /// Free and total memory. Unit: bytes.
    ///
    /// # Errors
    /// A driver error.
    pub fn memory_bytes(&self) -> Result<(usize, usize), CudaError> {
        let _bound = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live integers.
        check("cuMemGetInfo", unsafe {
            sys::cuMemGetInfo_v2(&mut free, &mut total)
        })?;
        Ok((free, total))
    }

    /// Makes the device's context current on this thread until the guard is dropped, so that calls need not do it each: a pair of driver
    /// calls less for every one.
    ///
    /// # Errors
    /// A driver error.
    pub fn make_current(&self) -> Result<Current<'_>, CudaError> {
        self.bind().map(Current)
    }

    pub(crate) fn bind(&self) -> Result<Bound<'_>, CudaError> {
        self.shared.bind()
    }

    /// The module published under `digest`, or the one `load` makes; and true if it was there. Two threads may both load: one copy is
    /// dropped.
    pub(crate) fn module(
        &self,
        digest: &str,
        load: impl FnOnce() -> Result<Module, CudaError>,
    ) -> Result<(Arc<Module>, bool), CudaError> {
        let lock = || {
            self.shared
                .modules
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(module) = lock().get(digest).and_then(Weak::upgrade) {
            return Ok((module, true));
        }
        let module = Arc::new(load()?);
        let mut modules = lock();
        modules.retain(|_, m| m.strong_count() > 0);
        modules.insert(digest.to_string(), Arc::downgrade(&module));
        Ok((module, false))
    }
}

impl DeviceShared {
    pub(crate) fn bind(&self) -> Result<Bound<'_>, CudaError> {
        let mut current: CUcontext = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        check("cuCtxGetCurrent", unsafe {
            sys::cuCtxGetCurrent(&mut current)
        })?;
        let pushed = current != self.context;
        if pushed {
            // SAFETY: the context is retained as long as self lives, which the guard borrows.
            check("cuCtxPushCurrent", unsafe {
                sys::cuCtxPushCurrent_v2(self.context)
            })?;
        }
        Ok(Bound {
            _device: self,
            pushed,
            _not_send: std::marker::PhantomData,
        })
    }
}

fn count() -> Result<usize, CudaError> {
    let mut count: c_int = 0;
    // SAFETY: the pointer is to a live integer.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    Ok(count.max(0) as usize)
}

fn describe(ordinal: usize) -> Result<(CUdevice, DeviceInfo), CudaError> {
    let mut device: CUdevice = 0;
    // SAFETY: the pointer is to a live handle; a wrong ordinal is an error of the driver.
    check("cuDeviceGet", unsafe {
        sys::cuDeviceGet(&mut device, ordinal as c_int)
    })?;
    let attribute = |which: CUdevice_attribute| {
        let mut value: c_int = 0;
        // SAFETY: the pointer is to a live integer, the device exists.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, which, device)
        })?;
        Ok::<u32, CudaError>(value.max(0) as u32)
    };
    let mut text = [0 as std::ffi::c_char; 256];
    // SAFETY: the driver writes at most the given number of bytes, NUL included.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int, device)
    })?;
    let name = c_text(&text);
    // SAFETY: as above.
    check("cuDeviceGetPCIBusId", unsafe {
        sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as c_int, device)
    })?;
    let pci_bus_id = c_text(&text);
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the pointer is to a live struct of the type the function writes.
    check("cuDeviceGetUuid", unsafe {
        sys::cuDeviceGetUuid_v2(&mut uuid, device)
    })?;
    use CUdevice_attribute::*;
    let facts = DeviceFacts {
        arch: Arch::from_compute_capability(
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sm_count: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_memory_optin_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as usize,
        l2_bytes: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        name,
    };
    let info = DeviceInfo {
        ordinal,
        facts,
        uuid: uuid_text(uuid.bytes.map(|b| b as u8)),
        pci_bus_id,
    };
    Ok((device, info))
}

fn c_text(text: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|c| *c as u8).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map(|s| s.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let hex = crate::key::hex(&bytes);
    format!(
        "GPU-{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
