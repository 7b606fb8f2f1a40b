use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use mamba2_cuda::{CudaError, Jit, gate_fault};
use mamba2_kernels::{Rendered, render, render_step, template_digest};
use mamba2_spec::{DeviceFacts, Kernel, KernelConfig};
use mamba2_tunedb::joint_template_digest;
use rayon::prelude::*;

use super::trial::failure_of;
use crate::executor::{
    Check, Compiled, Compiling, Conditions, Executor, Failure, FailureKind, Rounds, Tell, Verified,
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

fn rendered(
    device: &DeviceFacts,
    target: &Target,
    kernel: &KernelConfig,
) -> Result<Rendered, Failure> {
    match (target, kernel) {
        (Target::Forward(problem), _) => Ok(render(kernel, problem, device)),
        (Target::Step(problem), KernelConfig::StateUpdate(config)) => {
            Ok(render_step(config, problem, device))
        }
        (Target::Step(_), _) => Err(Failure::new(
            FailureKind::Compile,
            "not a kernel of a decode step",
        )),
    }
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
    let rendered = rendered(device, target, kernel)?;
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

/// Places of the candidates that are the same code (they differ in launch arguments only), those first that are the most.
fn same_code(
    jit: &Jit,
    device: &DeviceFacts,
    target: &Target,
    candidates: &[Candidate],
) -> Vec<Vec<usize>> {
    let code = |candidate: &Candidate| -> Option<Vec<(String, u32, usize)>> {
        let one = |kernel: &KernelConfig| {
            let rendered = rendered(device, target, kernel).ok()?;
            let digest = jit.identity(&rendered, device.arch).digest();
            Some((digest, rendered.launch.threads, rendered.launch.smem_bytes))
        };
        candidate.kernels().iter().map(one).collect()
    };
    let codes: Vec<_> = candidates.par_iter().map(code).collect();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known = HashMap::new();
    for (i, code) in codes.into_iter().enumerate() {
        let new = groups.len();
        // What cannot be rendered is like nothing else.
        let at = code.map_or(new, |code| *known.entry(code).or_insert(new));
        if at == new {
            groups.push(Vec::new());
        }
        groups[at].push(i);
    }
    groups.sort_by_key(|members| std::cmp::Reverse(members.len()));
    groups
}

/// Compiles every kernel of each candidate: one queue that all cores take from, in order, so that none is idle before its end.
pub(super) fn compile_each(
    jit: &Jit,
    device: &DeviceFacts,
    target: &Target,
    candidates: &[Candidate],
    tell: Tell<'_>,
) {
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
    let groups = same_code(jit, device, target, candidates);
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = || {
        while let Some(members) = groups.get(next.fetch_add(1, Ordering::Relaxed)) {
            let say = |step| {
                if tell(step) == ControlFlow::Break(()) {
                    stopped.store(true, Ordering::Relaxed);
                }
                stopped.load(Ordering::Relaxed)
            };
            if say(Compiling::Started(members.clone())) {
                return;
            }
            let result = compile(&candidates[members[0]]);
            if say(Compiling::Done(members.clone(), result)) {
                return;
            }
        }
    };
    // Threads of its own: those of the pool are needed for comparing results meanwhile. One core is left to whoever launches what is being
    // timed.
    let threads = (rayon::current_num_threads() - 1).clamp(1, groups.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
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
        tell: Tell<'_>,
    ) -> Result<(), TunerError> {
        compile_each(&self.jit, &self.device, target, candidates, tell);
        Ok(())
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
