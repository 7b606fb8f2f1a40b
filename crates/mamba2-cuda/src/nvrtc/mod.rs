//! The compiler: CUDA C++ text in, cubin out. Needs libnvrtc, but neither a GPU nor a driver.

mod library;
mod log;
mod search;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use mamba2_kernels::{Rendered, Source};
use mamba2_spec::Arch;
use serde::{Deserialize, Serialize};

use crate::CudaError;
use crate::environment::Environment;
use library::{NvrtcLibrary, Outcome};
pub use log::Resources;

/// Version of an NVRTC library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NvrtcVersion {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for NvrtcVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// How kernels are compiled, beyond what the templates need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompileOptions {
    /// Source lines in the cubin, for profilers and compute-sanitizer.
    pub lineinfo: bool,
    /// Barriers that compute-sanitizer's racecheck can follow: every thread arrives at them, instead of one for its warp.
    pub racecheck: bool,
}

impl CompileOptions {
    /// As `MAMBA2_RACECHECK` says.
    pub fn from_environment() -> CompileOptions {
        CompileOptions {
            lineinfo: false,
            racecheck: crate::environment::racecheck(),
        }
    }

    /// The options for NVRTC, sorted, without the architecture and without paths.
    ///
    /// No fast-math: it would flush denormals and approximate the divisions of softplus and silu. No precompiled headers:
    /// parallel processes race on their directory.
    pub fn to_list(self) -> Vec<String> {
        let mut options = vec![
            "--device-as-default-execution-space",
            "--ptxas-options=-v",
            "--std=c++17",
        ];
        if self.lineinfo {
            options.push("--generate-line-info");
        }
        if self.racecheck {
            options.push("--define-macro=MAMBA2_RACECHECK");
        }
        options.sort_unstable();
        options.into_iter().map(String::from).collect()
    }
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The binary, for one architecture.
    pub cubin: Vec<u8>,
    /// The compiler's log, verbatim.
    pub log: String,
    /// Registers, spills and static shared memory; `None` if the log does not say.
    pub resources: Option<Resources>,
    /// Architecture the code is for: the one asked for, or an older one of the same major version.
    pub target: Arch,
}

/// An open NVRTC library. Cheap to clone; compiles from several threads at once.
#[derive(Clone)]
pub struct Nvrtc {
    library: Arc<NvrtcLibrary>,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvrtc({} from {})", self.version(), self.path())
    }
}

impl Nvrtc {
    /// Finds and opens libnvrtc. The order of the search is that of the crate's documentation.
    ///
    /// # Errors
    /// [`CudaError::NvrtcMissing`] with everything that was tried.
    pub fn load() -> Result<Nvrtc, CudaError> {
        Nvrtc::load_in(&Environment::read())
    }

    pub(crate) fn load_in(environment: &Environment) -> Result<Nvrtc, CudaError> {
        Ok(Nvrtc {
            library: Arc::new(NvrtcLibrary::open(environment)?),
        })
    }

    /// Version of the library.
    pub fn version(&self) -> NvrtcVersion {
        self.library.version
    }

    /// File the library was loaded from.
    pub fn path(&self) -> &str {
        &self.library.path
    }

    /// Architectures it can compile for.
    pub fn supported_archs(&self) -> Vec<Arch> {
        self.library.supported.iter().map(|n| Arch(*n)).collect()
    }

    /// The architecture to compile for so that the code runs on `arch`: `arch` itself, or the newest supported one of the
    /// same major version that is not newer (such code runs there unchanged).
    ///
    /// # Errors
    /// [`CudaError::UnsupportedArch`] naming the GPU, this NVRTC and which of them is too old.
    pub fn target_for(&self, arch: Arch) -> Result<Arch, CudaError> {
        choose_target(arch, &self.library.supported).map_err(|need| CudaError::UnsupportedArch {
            arch: arch.nvrtc_name(),
            nvrtc: format!("{} ({})", self.version(), self.path()),
            supported: self.library.supported.clone(),
            need,
        })
    }

    /// Compiles a kernel for `arch`, with the default options.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log, [`CudaError::UnsupportedArch`], or [`CudaError::Nvrtc`].
    pub fn compile(&self, source: &Source, arch: Arch) -> Result<Compiled, CudaError> {
        self.compile_with(source, arch, CompileOptions::default())
    }

    /// Compiles a kernel for `arch`.
    ///
    /// # Errors
    /// As [`Nvrtc::compile`].
    pub fn compile_with(
        &self,
        source: &Source,
        arch: Arch,
        options: CompileOptions,
    ) -> Result<Compiled, CudaError> {
        let target = self.target_for(arch)?;
        let mut list = options.to_list();
        list.insert(0, format!("--gpu-architecture={}", target.nvrtc_name()));
        // NVRTC's own cache gives the code of an earlier compilation without its log, so without registers and spills. We have
        // a cache of our own.
        if self.version() >= FIRST_WITH_A_CACHE {
            list.push("--no-cache".into());
        }
        match self
            .library
            .compile(source.source_name, source.source, &source.headers(), &list)?
        {
            Outcome::Compiled { cubin, log } => Ok(Compiled {
                cubin,
                resources: Resources::from_log(&log),
                log,
                target,
            }),
            Outcome::Refused { log } => Err(CudaError::Compile {
                kernel: source.entry.into(),
                source_name: source.source_name.into(),
                compiler: format!("NVRTC {}, options {}", self.version(), list.join(" ")),
                log,
            }),
        }
    }

    /// The compile gate: compiles for `arch` and refuses register spills, shared memory beyond the architecture's limit, and
    /// blocks that need more registers than a multiprocessor has. Needs no GPU.
    ///
    /// # Errors
    /// [`CudaError::Gate`] with the fault and the log, or whatever [`Nvrtc::compile`] refuses.
    pub fn compile_gate(&self, rendered: &Rendered, arch: Arch) -> Result<Compiled, CudaError> {
        let compiled = self.compile(rendered, arch)?;
        match gate_fault(
            compiled.resources,
            rendered.launch.threads,
            rendered.launch.smem_bytes,
            arch.shared_memory_optin_bytes(),
        ) {
            None => Ok(compiled),
            Some(fault) => Err(CudaError::Gate {
                kernel: format!("{} on {}", rendered.entry, compiled.target),
                source_name: rendered.source_name.into(),
                fault,
                log: compiled.log,
            }),
        }
    }
}

/// The oldest NVRTC known to have a cache of its own and the option against it.
const FIRST_WITH_A_CACHE: NvrtcVersion = NvrtcVersion {
    major: 13,
    minor: 0,
};

/// Registers of a multiprocessor, on every architecture since Maxwell.
const REGISTERS: u32 = 65536;

/// What the compile gate has against a kernel of these resources, if anything.
pub fn gate_fault(
    resources: Option<Resources>,
    threads: u32,
    smem_bytes: usize,
    shared_memory_optin_bytes: usize,
) -> Option<String> {
    let Some(r) = resources else {
        return Some("the compiler's log says nothing about registers and spills".into());
    };
    if r.spill_store_bytes + r.spill_load_bytes > 0 {
        return Some(format!(
            "register spill: {} bytes stored, {} bytes loaded, {} registers a thread",
            r.spill_store_bytes, r.spill_load_bytes, r.registers
        ));
    }
    let shared = r.shared_bytes as usize + smem_bytes;
    if shared > shared_memory_optin_bytes {
        return Some(format!(
            "shared memory: expected at most {shared_memory_optin_bytes} bytes, got {} static and {} dynamic",
            r.shared_bytes, smem_bytes
        ));
    }
    // Registers are given to warps in units of 256, that is 8 a thread.
    let registers = r.registers.next_multiple_of(8) * threads;
    (registers > REGISTERS).then(|| {
        format!(
            "{} registers a thread times {} threads: expected at most {REGISTERS}",
            r.registers, threads
        )
    })
}

fn choose_target(arch: Arch, supported: &[u32]) -> Result<Arch, &'static str> {
    if supported.contains(&arch.0) {
        return Ok(arch);
    }
    // Not across sm_90a: architecture-specific code runs on that very architecture only.
    let compatible = supported
        .iter()
        .copied()
        .filter(|s| s / 10 == arch.0 / 10 && *s < arch.0 && *s != 90)
        .max();
    match (compatible, supported.iter().min()) {
        (Some(target), _) => Ok(Arch(target)),
        (None, Some(oldest)) if arch.0 < *oldest => {
            Err("the GPU is too old for this NVRTC: an older NVRTC would do")
        }
        _ => Err("this NVRTC is too old for the GPU: install a newer one"),
    }
}

/// The file a library whose name starts with `stem` was loaded from, as the kernel of the operating system tells it.
pub(crate) fn loaded_library_path(stem: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(stem))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i4_an_architecture_between_supported_ones_takes_the_older_of_its_major_version() {
        let supported = [80, 86, 90, 100, 120];
        assert_eq!(choose_target(Arch(89), &supported), Ok(Arch(86)));
        assert_eq!(choose_target(Arch(103), &supported), Ok(Arch(100)));
        assert_eq!(choose_target(Arch(121), &supported), Ok(Arch(120)));
        assert_eq!(choose_target(Arch(90), &supported), Ok(Arch(90)));
    }

    #[test]
    fn i4_an_architecture_without_a_relative_names_the_side_that_is_too_old() {
        let supported = [80, 86, 90];
        assert!(
            choose_target(Arch(35), &supported)
                .expect_err("too old")
                .contains("GPU is too old")
        );
        assert!(
            choose_target(Arch(121), &supported)
                .expect_err("too new")
                .contains("NVRTC is too old")
        );
        assert!(
            choose_target(Arch(91), &supported).is_err(),
            "sm_90a code runs on 9.0 only"
        );
    }

    #[test]
    fn options_are_sorted_and_free_of_paths() {
        for lineinfo in [false, true] {
            let list = CompileOptions {
                lineinfo,
                ..CompileOptions::default()
            }
            .to_list();
            assert!(list.is_sorted(), "{list:?}");
            assert!(
                list.iter().all(|o| !o.contains('/') && !o.contains("fast")),
                "{list:?}"
            );
        }
    }

    #[test]
    fn the_gate_refuses_spills_shared_memory_and_register_overflow() {
        let smem_bytes = 90 * 1024;
        let good = Resources {
            registers: 255,
            shared_bytes: 1024,
            ..Default::default()
        };
        assert_eq!(gate_fault(Some(good), 256, smem_bytes, 99 * 1024), None);
        assert!(gate_fault(None, 256, smem_bytes, 99 * 1024).is_some());
        let spill = Resources {
            spill_load_bytes: 4,
            ..good
        };
        assert!(
            gate_fault(Some(spill), 256, smem_bytes, 99 * 1024)
                .expect("fault")
                .contains("spill")
        );
        assert!(
            gate_fault(Some(good), 256, smem_bytes, 90 * 1024)
                .expect("fault")
                .contains("shared memory")
        );
        assert!(
            gate_fault(Some(good), 288, smem_bytes, 99 * 1024)
                .expect("fault")
                .contains("registers")
        );
    }
}
