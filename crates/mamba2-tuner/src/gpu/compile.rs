use mamba2_cuda::{CudaError, Jit, gate_fault};
use mamba2_kernels::{Rendered, render, render_step, template_digest};
use mamba2_spec::{DeviceFacts, Kernel, KernelConfig};
use mamba2_tunedb::joint_template_digest;
use rayon::prelude::*;

use super::trial::failure_of;
use crate::executor::{
    Check, Compiled, Conditions, Executor, Failure, FailureKind, Rounds, Verified,
};
use crate::{Candidate, Target, TunerError};

/// Compiles candidates into the cubin cache and can do nothing else. Needs NVRTC but no GPU, so it runs in a process of its own
/// while another one drives the device.
pub struct CompileExecutor {
    device: DeviceFacts,
    jit: Jit,
    conditions: [Conditions; Kernel::ALL.len()],
}

impl CompileExecutor {
    /// A compiler for `device`, whose driver calls itself `driver`.
    pub fn new(device: DeviceFacts, jit: Jit, driver: &str) -> CompileExecutor {
        let conditions = conditions(&jit, driver);
        CompileExecutor {
            device,
            jit,
            conditions,
        }
    }
}

/// What results depend on, per kernel. Made once: the digests are over all template text.
pub(super) fn conditions(jit: &Jit, driver: &str) -> [Conditions; Kernel::ALL.len()] {
    // Without NVRTC only cached cubins run, of whatever version they are.
    let nvrtc = jit
        .nvrtc()
        .map_or_else(|_| "none".to_string(), |n| n.version().to_string());
    Kernel::ALL.map(|kernel| Conditions {
        template_digest: joint_template_digest([template_digest(kernel)]),
        nvrtc: nvrtc.clone(),
        driver: driver.into(),
    })
}

pub(super) fn of_kernel(
    conditions: &[Conditions; Kernel::ALL.len()],
    kernel: Kernel,
) -> Conditions {
    let index = Kernel::ALL
        .iter()
        .position(|k| *k == kernel)
        .expect("ALL should hold every kernel");
    conditions[index].clone()
}

/// Compiles one kernel, or finds it in the cache.
///
/// # Errors
/// The [`Failure`]: the compiler's words, or what breaks the gate against spills and too much shared memory.
pub fn compile_kernel(
    jit: &Jit,
    device: &DeviceFacts,
    target: &Target,
    kernel: &KernelConfig,
) -> Result<Compiled, Failure> {
    let rendered: Rendered = match (target, kernel) {
        (Target::Forward(problem), _) => render(kernel, problem, device),
        (Target::Step(problem), KernelConfig::StateUpdate(config)) => {
            render_step(config, problem, device)
        }
        (Target::Step(_), _) => {
            return Err(Failure::new(
                FailureKind::Compile,
                "not a kernel of a decode step",
            ));
        }
    };
    let outcome = jit
        .cubin(&rendered, device.arch)
        .map_err(|e: CudaError| failure_of(&e))?;
    let resources = outcome.cubin.compiled.resources;
    match gate_fault(
        resources,
        rendered.launch.threads,
        rendered.launch.smem_bytes,
        device.shared_memory_optin_bytes,
    ) {
        Some(fault) => Err(Failure::new(
            FailureKind::Spill,
            format!("{}: {fault}", rendered.source_name),
        )),
        None => Ok(resources.map_or_else(Compiled::default, |r| Compiled {
            registers: r.registers,
            shared_bytes: r.shared_bytes,
        })),
    }
}

/// Compiles every kernel of each candidate, in parallel on the current rayon pool.
pub(super) fn compile_all(
    jit: &Jit,
    device: &DeviceFacts,
    target: &Target,
    candidates: &[Candidate],
) -> Vec<Result<Compiled, Failure>> {
    let compile = |candidate: &Candidate| {
        candidate
            .kernels()
            .iter()
            .try_fold(Compiled::default(), |all, kernel| {
                let one = compile_kernel(jit, device, target, kernel)?;
                Ok(Compiled {
                    registers: all.registers.max(one.registers),
                    shared_bytes: all.shared_bytes.max(one.shared_bytes),
                })
            })
    };
    candidates.par_iter().map(compile).collect()
}

impl Executor for CompileExecutor {
    fn device(&self) -> &DeviceFacts {
        &self.device
    }

    fn kernel_conditions(&self, kernel: Kernel) -> Conditions {
        of_kernel(&self.conditions, kernel)
    }

    fn memory_bytes(&self) -> Option<u64> {
        None
    }

    fn compile(
        &self,
        target: &Target,
        candidates: &[Candidate],
    ) -> Result<Vec<Result<Compiled, Failure>>, TunerError> {
        Ok(compile_all(&self.jit, &self.device, target, candidates))
    }

    fn verify(
        &self,
        _: &Target,
        _: &Candidate,
        _: Check,
    ) -> Result<Result<Verified, Failure>, TunerError> {
        Err(TunerError::Device(
            "a compile worker cannot run kernels".into(),
        ))
    }

    fn measure(
        &self,
        _: &Target,
        _: &[Candidate],
        _: Rounds,
    ) -> Result<Vec<Result<Vec<f64>, Failure>>, TunerError> {
        Err(TunerError::Device(
            "a compile worker cannot run kernels".into(),
        ))
    }
}
