//! Every legal config of a shape, run and compared with the right answer: for tests, and for `mamba2 run --every-config`.

use std::fmt;
use std::time::Instant;

use mamba2_cuda::{Device, Jit, LoadedForward, Stream};
use mamba2_spec::{DeviceFacts, Kernel, Problem, SpecError, StrategyConfig};
use rayon::prelude::*;

use super::compile::compile_kernel;
use super::output::Scratch;
use super::trial::{ForwardTrial, Oracle, failure_of};
use crate::executor::{Failure, FailureKind, Verified};
use crate::space::Space;
use crate::{Candidate, Target};

/// What became of some configs.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Configs that were to be run.
    pub configs: usize,
    /// Those that failed, and how. After a [`FailureKind::Crash`] nothing else was run: the context is gone.
    pub failures: Vec<(Candidate, Failure)>,
    /// Largest relative error of `out` among those that did not fail.
    pub out_error: f64,
    /// The same of the states.
    pub states_error: f64,
    /// Time for all of it, mostly compilation.
    pub seconds: f64,
}

impl Ran {
    /// True if the context is gone.
    pub fn crashed(&self) -> bool {
        self.failures
            .iter()
            .any(|(_, f)| f.kind == FailureKind::Crash)
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:5} configs {:4} failed  max error out {:.1e} states {:.1e}  {:.0} s",
            self.configs,
            self.failures.len(),
            self.out_error,
            self.states_error,
            self.seconds
        )
    }
}

/// Takes `most` of `all`, spread evenly, the first among them.
pub fn spread(all: Vec<Candidate>, most: Option<usize>) -> Vec<Candidate> {
    match most {
        Some(n) if n < all.len() => (0..n).map(|i| all[i * all.len() / n]).collect(),
        _ => all,
    }
}

/// Compiles candidates on all cores, then runs `check` on each in turn. `tick` is called twice a candidate: once it is compiled, and
/// once it was run.
pub fn run_all(
    jit: &Jit,
    device: &DeviceFacts,
    target: &Target,
    candidates: &[Candidate],
    mut check: impl FnMut(&Candidate) -> Result<Verified, Failure>,
    tick: &(dyn Fn() + Sync),
) -> Ran {
    let started = Instant::now();
    let compile = |candidate: &Candidate| -> Result<(), Failure> {
        let compiled = candidate
            .kernels()
            .iter()
            .try_for_each(|kernel| compile_kernel(jit, device, target, kernel).map(drop));
        tick();
        compiled
    };
    let compiled: Vec<Result<(), Failure>> = candidates.par_iter().map(compile).collect();
    let mut ran = Ran {
        configs: candidates.len(),
        ..Ran::default()
    };
    for (candidate, compiled) in candidates.iter().zip(compiled) {
        match compiled.and_then(|()| check(candidate)) {
            Ok(verified) => {
                ran.out_error = ran.out_error.max(verified.out_error);
                ran.states_error = ran.states_error.max(verified.states_error);
            }
            Err(failure) => ran.failures.push((*candidate, failure)),
        }
        tick();
        if ran.crashed() {
            break;
        }
    }
    ran.seconds = started.elapsed().as_secs_f64();
    ran
}

/// Every legal config of every kernel of the forward pass of a shape, or `most` of each kernel. A kernel's configs run beside the
/// default configs of the others. Kernels without a legal config are not listed.
///
/// # Errors
/// [`SpecError`] if the shape is refused or nothing fits the device.
pub fn forward_configs(
    problem: &Problem,
    device: &DeviceFacts,
    most: Option<usize>,
) -> Result<Vec<(Kernel, Vec<Candidate>)>, SpecError> {
    let space = Space::of(&Target::Forward(problem.clone()), device, None)?;
    let of_kernel = |kernel: Kernel| {
        let parts = space.assemblies.iter().flat_map(|a| &a.parts).flatten();
        let all = parts
            .filter(|c| matches!(c, Candidate::Kernel { kernel: k, .. } if *k == kernel))
            .copied()
            .collect();
        (kernel, spread(all, most))
    };
    let all = Kernel::ALL.map(of_kernel).into_iter();
    Ok(all.filter(|(_, chosen)| !chosen.is_empty()).collect())
}

/// Runs candidates of one kernel of a forward pass: outputs poisoned and guarded, twice bit-equal, within the bounds of `oracle`.
pub fn run_forward_configs(
    device: &Device,
    jit: &Jit,
    stream: &Stream,
    trial: &ForwardTrial,
    oracle: &Oracle,
    candidates: &[Candidate],
    tick: &(dyn Fn() + Sync),
) -> Ran {
    let target = Target::Forward(trial.problem.clone());
    let check = |candidate: &Candidate| match candidate {
        Candidate::Kernel { within, .. } | Candidate::Strategy(within) => {
            let run = run_config(device, jit, stream, trial, within)?;
            oracle.check(&run)
        }
        Candidate::Step(_) => Err(Failure::new(
            FailureKind::Launch,
            "a decode config is not part of a forward pass",
        )),
    };
    run_all(jit, device.facts(), &target, candidates, check, tick)
}

/// Two runs of one config on poisoned, guarded memory, and the result.
///
/// # Errors
/// The [`Failure`].
pub fn run_config(
    device: &Device,
    jit: &Jit,
    stream: &Stream,
    trial: &ForwardTrial,
    config: &StrategyConfig,
) -> Result<super::Run, Failure> {
    let loaded =
        LoadedForward::load(device, jit, &trial.problem, config).map_err(|e| failure_of(&e))?;
    let scratch =
        Scratch::new(device, loaded.plan().workspace.total_bytes).map_err(|e| failure_of(&e))?;
    trial.run_twice(&loaded, stream, &scratch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mamba2_cuda::CubinCache;
    use mamba2_spec::Arch;

    fn candidates() -> Vec<Candidate> {
        let problem: Problem = "b=1,l=300,h=4,p=64,g=1,n=64".parse().unwrap();
        let device = DeviceFacts::assumed(Arch(90));
        let all = forward_configs(&problem, &device, Some(3)).unwrap();
        all.into_iter().flat_map(|(_, chosen)| chosen).collect()
    }

    #[test]
    fn every_kernel_that_fits_a_shape_has_its_own_configs() {
        let device = DeviceFacts::assumed(Arch(90));
        let problem: Problem = "b=1,l=300,h=4,p=64,g=1,n=64".parse().unwrap();
        let all = forward_configs(&problem, &device, None).unwrap();
        assert!(all.iter().any(|(k, _)| *k == Kernel::ComputeOut));
        assert!(all.iter().all(|(k, _)| *k != Kernel::StateUpdate));
        for (kernel, configs) in &all {
            for (i, one) in configs.iter().enumerate() {
                assert!(!configs[..i].contains(one), "{kernel}: {one} twice");
            }
        }
        let few = forward_configs(&problem, &device, Some(2)).unwrap();
        assert_eq!(few.len(), all.len());
        assert!(few.iter().all(|(_, chosen)| chosen.len() <= 2));
    }

    #[test]
    fn failures_are_collected_errors_kept_and_a_crash_ends_it() {
        let problem: Problem = "b=1,l=300,h=4,p=64,g=1,n=64".parse().unwrap();
        let target = Target::Forward(problem);
        let device = DeviceFacts::assumed(Arch(90));
        let jit = Jit::new(CubinCache::disabled());
        if let Err(error) = jit.nvrtc() {
            assert!(std::env::var_os("CI").is_none(), "CI needs NVRTC: {error}");
            eprintln!("SKIPPED: no NVRTC\n{error}");
            return;
        }
        let chosen: Vec<Candidate> = candidates().into_iter().take(4).collect();
        let ticks = std::sync::atomic::AtomicUsize::new(0);
        let mut asked = 0;
        let ran = run_all(
            &jit,
            &device,
            &target,
            &chosen,
            |_| {
                asked += 1;
                match asked {
                    1 => Ok(Verified {
                        out_error: 0.25,
                        states_error: 0.125,
                    }),
                    2 => Err(Failure::new(FailureKind::Wrong, "far off")),
                    _ => Err(Failure::new(FailureKind::Crash, "gone")),
                }
            },
            &|| {
                ticks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            },
        );
        assert_eq!((asked, ran.configs, ran.failures.len()), (3, 4, 2));
        assert_eq!((ran.out_error, ran.states_error), (0.25, 0.125));
        assert!(ran.crashed());
        assert_eq!(ticks.into_inner(), 4 + 3);
        assert!(ran.to_string().contains("4 configs    2 failed"), "{ran}");
    }
}
