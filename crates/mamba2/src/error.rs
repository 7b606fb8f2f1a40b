use mamba2_cpu::CpuError;
use mamba2_cuda::CudaError;
use mamba2_spec::SpecError;
use mamba2_tunedb::TuneDbError;
use thiserror::Error;

/// Why an engine, a plan or a call was refused. Unless a CUDA driver error says otherwise, nothing was computed or enqueued.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem, a tensor or an option is not as documented.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The CPU backend refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The CUDA backend refused or failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The tuning database refused. A faulty record is a warning, never this.
    #[error(transparent)]
    TuneDb(#[from] TuneDbError),
    /// Device tensors were given to a plan of the CPU backend.
    #[error(
        "forward and step take device tensors and need the CUDA backend; on the CPU backend call forward_host or step_host"
    )]
    NotOnDevice,
    /// The mode asks for tuning, but nobody was named to do it.
    #[error("mode Tune: expected a tuner (EngineBuilder::tuner), got none")]
    NoTuner,
    /// Tuning failed in mode Tune; the reason is the tuner's.
    #[error("tuning: {0}")]
    Tuning(String),
}

impl Error {
    /// True if there is no usable GPU, driver or compiler: the CPU backend would work.
    pub fn is_no_device(&self) -> bool {
        matches!(
            self,
            Error::Cuda(
                CudaError::NoDriver { .. }
                    | CudaError::DriverTooOld { .. }
                    | CudaError::NoDevice { .. }
                    | CudaError::NvrtcMissing { .. }
            )
        ) || matches!(
            self,
            Error::Cuda(CudaError::Driver {
                call: "cuInit" | "cuDeviceGetCount",
                ..
            })
        )
    }
}
