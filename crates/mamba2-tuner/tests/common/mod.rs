//! What the GPU tests share: the device, or a skip that cannot be mistaken for a pass.
//!
//! These run from a carried executable, so nothing here depends on where the sources are.

#![allow(dead_code)]

use std::io::Write;

use mamba2_cuda::{CubinCache, Device, Jit, Stream};
use mamba2_reference::Generated;
use mamba2_spec::{Problem, StrategyConfig};
use mamba2_tuner::gpu::every_config::run_config;
use mamba2_tuner::gpu::{ForwardTrial, Oracle, Placement, Run, compile_kernel};
use mamba2_tuner::{Candidate, Failure, FailureKind, Target, Verified, space::Space};

pub struct Gpu {
    pub device: Device,
    pub jit: Jit,
    pub stream: Stream,
}

/// Writes past the capture of the test harness, so that a skip is seen in every run.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// The first GPU; `None` without one, unless MAMBA2_REQUIRE_GPU=1 makes that a failure.
pub fn gpu() -> Option<Gpu> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(error) => {
            let required = std::env::var("MAMBA2_REQUIRE_GPU").is_ok_and(|v| v == "1");
            assert!(!required, "MAMBA2_REQUIRE_GPU=1, but: {error}");
            say("SKIPPED: no CUDA device");
            return None;
        }
    };
    let stream = device.stream().expect("a stream");
    let cubins = std::env::temp_dir().join("mamba2-ring2-cubins");
    Some(Gpu {
        device,
        jit: Jit::new(CubinCache::new(cubins).with_limit(8 << 30)),
        stream,
    })
}

impl Gpu {
    /// Compiles every kernel of the candidates on all cores. One answer each.
    pub fn compile(&self, target: &Target, candidates: &[Candidate]) -> Vec<Result<(), Failure>> {
        use rayon::prelude::*;
        let compile = |c: &Candidate| {
            c.kernels().iter().try_for_each(|k| {
                compile_kernel(&self.jit, self.device.facts(), target, k).map(drop)
            })
        };
        candidates.par_iter().map(compile).collect()
    }

    /// Two runs of one config on poisoned, guarded memory.
    pub fn run(&self, trial: &ForwardTrial, config: &StrategyConfig) -> Result<Run, Failure> {
        run_config(&self.device, &self.jit, &self.stream, trial, config)
    }

    pub fn check(
        &self,
        trial: &ForwardTrial,
        oracle: &Oracle,
        config: &StrategyConfig,
    ) -> Result<Verified, Failure> {
        oracle.check(&self.run(trial, config)?)
    }

    pub fn trial(&self, problem: &Problem, made: &Generated, placement: Placement) -> ForwardTrial {
        ForwardTrial::new(&self.device, &self.jit, problem, made, placement)
            .expect("memory for a test problem")
    }

    pub fn space(&self, problem: &Problem) -> Space {
        Space::of(&Target::Forward(problem.clone()), self.device.facts(), None)
            .expect("a legal problem")
    }
}

/// After these the context is gone, and every further result would be noise.
pub fn is_fatal(failure: &Failure) -> bool {
    failure.kind == FailureKind::Crash
}
