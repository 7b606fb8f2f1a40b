use serde::{Deserialize, Serialize};

use crate::SpecError;

/// A GPU architecture that kernels can be compiled for, named by compute capability.
///
/// `major * 10 + minor`, as in `sm_90`. Architecture-specific features (`sm_90a`) are implied by [`Arch::nvrtc_name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Arch(pub u32);

impl Arch {
    /// Architectures that CI compiles every kernel for.
    pub const GATED: [Arch; 7] = [
        Arch(80),
        Arch(86),
        Arch(89),
        Arch(90),
        Arch(100),
        Arch(103),
        Arch(120),
    ];

    /// Lowest architecture with the tensor and async-copy instructions of the portable path.
    pub const MINIMUM: Arch = Arch(80);

    /// From a compute capability such as (9, 0).
    pub fn from_compute_capability(major: u32, minor: u32) -> Arch {
        Arch(major * 10 + minor)
    }

    /// Refuses GPUs older than [`Arch::MINIMUM`].
    ///
    /// # Errors
    /// [`SpecError::Size`] naming both compute capabilities.
    pub fn require_supported(self) -> Result<Arch, SpecError> {
        if self >= Arch::MINIMUM {
            return Ok(self);
        }
        Err(SpecError::Size {
            name: "compute capability",
            expected: "8.0 or newer (the CPU backend runs everywhere)".into(),
            got: format!("{}.{}", self.0 / 10, self.0 % 10),
        })
    }

    /// Value of `--gpu-architecture`: `sm_90a` on Hopper, whose wgmma and TMA need the suffix, else `sm_XX`.
    pub fn nvrtc_name(self) -> String {
        match self.0 {
            90 => "sm_90a".into(),
            n => format!("sm_{n}"),
        }
    }

    /// True where wgmma exists (Hopper only; Blackwell dropped it).
    pub fn has_wgmma(self) -> bool {
        self.0 == 90
    }

    /// Largest shared memory one block may opt in to, in bytes (CUDA programming guide, table of compute capabilities).
    pub fn shared_memory_optin_bytes(self) -> usize {
        match self.0 {
            80 | 87 => 163 * 1024,
            90 | 100 | 103 | 110 => 227 * 1024,
            86 | 89 | 120 | 121 => 99 * 1024,
            n if n >= 90 => 99 * 1024,
            _ => 48 * 1024,
        }
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.nvrtc_name())
    }
}

/// What tuning depends on in a GPU. The product name is for people only and never part of a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Architecture (compute capability).
    pub arch: Arch,
    /// Streaming multiprocessors that are visible (a MIG slice has fewer).
    pub sm_count: u32,
    /// Largest shared memory of one block after opting in, in bytes.
    pub shared_memory_optin_bytes: usize,
    /// L2 cache, in bytes. Display and benchmark sizing only.
    pub l2_bytes: usize,
    /// Product name. Display only.
    pub name: String,
}

impl DeviceFacts {
    /// Facts of a full card of `arch`, for compiling and planning where no GPU is present.
    pub fn assumed(arch: Arch) -> DeviceFacts {
        DeviceFacts {
            arch,
            sm_count: match arch.0 {
                80 => 108,
                90 => 132,
                100 | 103 => 148,
                120 => 170,
                _ => 84,
            },
            shared_memory_optin_bytes: arch.shared_memory_optin_bytes(),
            l2_bytes: 40 << 20,
            name: format!("assumed {arch}"),
        }
    }

    /// True if `other` has the same tuning-relevant facts (everything but name and L2).
    pub fn same_for_tuning(&self, other: &DeviceFacts) -> bool {
        self.arch == other.arch
            && self.sm_count == other.sm_count
            && self.shared_memory_optin_bytes == other.shared_memory_optin_bytes
    }
}
