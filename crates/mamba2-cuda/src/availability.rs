use mamba2_spec::Arch;

use crate::driver::{Driver, driver_path};
use crate::{CudaError, Device, DeviceInfo, Nvrtc, NvrtcVersion};

/// What there is of CUDA on this machine.
#[derive(Clone, Debug)]
pub struct Availability {
    /// The driver and its devices, or why there is none.
    pub driver: Result<DriverInfo, CudaError>,
    /// The compiler, or everything that was tried to find it.
    pub nvrtc: Result<NvrtcInfo, CudaError>,
}

/// The CUDA driver.
#[derive(Clone, Debug)]
pub struct DriverInfo {
    /// File of the library.
    pub path: String,
    /// CUDA version it supports, as (major, minor).
    pub version: (u32, u32),
    /// Visible devices.
    pub devices: Vec<DeviceInfo>,
}

/// The NVRTC library.
#[derive(Clone, Debug)]
pub struct NvrtcInfo {
    /// File of the library.
    pub path: String,
    /// Its version.
    pub version: NvrtcVersion,
    /// Architectures it compiles for.
    pub archs: Vec<Arch>,
}

/// Looks for driver, devices and compiler. Never panics; makes no context and changes nothing on a GPU.
pub fn availability() -> Availability {
    let driver = Driver::get().and_then(|driver| {
        Ok(DriverInfo {
            path: driver_path(),
            version: driver.version,
            devices: Device::list()?,
        })
    });
    let nvrtc = Nvrtc::load().map(|n| NvrtcInfo {
        path: n.path().into(),
        version: n.version(),
        archs: n.supported_archs(),
    });
    Availability { driver, nvrtc }
}
