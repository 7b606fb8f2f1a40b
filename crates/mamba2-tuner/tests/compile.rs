//! The compile worker's executor with a real NVRTC. No GPU.
//!
//! Without NVRTC these print `SKIPPED: no NVRTC`; with CI=true that is a failure.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Mutex;

use mamba2_cuda::{CubinCache, Jit};
use mamba2_spec::{Arch, DeviceFacts, Kernel, StepProblem};
use mamba2_tuner::gpu::CompileExecutor;
use mamba2_tuner::{Candidate, Check, Compiling, Executor, FailureKind, Target, space::Space};

fn executor(cubins: &std::path::Path) -> Option<CompileExecutor> {
    let jit = Jit::new(CubinCache::new(cubins));
    if let Err(error) = jit.nvrtc() {
        assert!(
            std::env::var("CI").is_err(),
            "NVRTC must be there in CI: {error}"
        );
        let _ = writeln!(std::io::stdout(), "SKIPPED: no NVRTC");
        return None;
    }
    Some(CompileExecutor::new(
        DeviceFacts::assumed(Arch(90)),
        jit,
        "13.0",
    ))
}

#[test]
fn the_default_of_every_strategy_compiles_without_a_spill_and_lands_in_the_cache() {
    let cubins = tempfile::tempdir().unwrap();
    let Some(executor) = executor(cubins.path()) else {
        return;
    };
    let target = Target::Forward("b=1,l=1000,h=4,p=64,g=1,n=128".parse().unwrap());
    let space = Space::of(&target, executor.device(), None).unwrap();
    let mut candidates: Vec<Candidate> = Vec::new();
    for assembly in &space.assemblies {
        let new = |c: &Candidate| {
            candidates
                .iter()
                .all(|known| known.kernels()[0].kernel() != c.kernels()[0].kernel())
        };
        let firsts: Vec<Candidate> = assembly
            .parts
            .iter()
            .map(|part| part[0])
            .filter(new)
            .collect();
        candidates.extend(firsts);
    }
    assert!(candidates.len() >= 3);
    for (candidate, compiled) in candidates
        .iter()
        .zip(executor.compile_all(&target, &candidates).unwrap())
    {
        let compiled = compiled.unwrap_or_else(|failure| panic!("{candidate}: {failure}"));
        assert!(compiled.registers > 0, "{candidate}");
    }
    let cached = std::fs::read_dir(cubins.path()).unwrap().filter(|e| {
        e.as_ref()
            .unwrap()
            .path()
            .extension()
            .is_some_and(|extension| extension == "cubin")
    });
    assert_eq!(cached.count(), candidates.len());
}

#[test]
fn candidates_that_differ_in_launch_arguments_only_are_compiled_once_and_first() {
    let cubins = tempfile::tempdir().unwrap();
    let Some(executor) = executor(cubins.path()) else {
        return;
    };
    let target = Target::Forward("b=1,l=16384,h=4,p=64,g=1,n=128".parse().unwrap());
    let space = Space::of(&target, executor.device(), None).unwrap();
    // One kernel of its own, then one that runs with segments of several lengths.
    let mut candidates: Vec<Candidate> = vec![space.assemblies[0].parts[0][0]];
    for assembly in &space.assemblies {
        let of_scan = |c: &&Candidate| c.kernels()[0].kernel() == Kernel::SegmentScan;
        candidates.extend(assembly.parts.iter().map(|part| &part[0]).filter(of_scan));
    }
    assert!(candidates.len() > 3);
    let steps = Mutex::new(Vec::new());
    // One thread, so that the order can be seen.
    let tell = |step: Compiling| {
        steps.lock().unwrap().push(step);
        ControlFlow::Continue(())
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    pool.install(|| executor.compile(&target, &candidates, &tell))
        .unwrap();
    let done: Vec<Vec<usize>> = steps
        .into_inner()
        .unwrap()
        .into_iter()
        .filter_map(|step| match step {
            Compiling::Done(members, result) => {
                result.unwrap();
                Some(members)
            }
            Compiling::Started(_) => None,
        })
        .collect();
    let all: Vec<usize> = (1..candidates.len()).collect();
    assert_eq!(done, [all, vec![0]]);
}

#[test]
fn a_decode_step_compiles_and_a_candidate_for_another_kind_of_shape_is_a_failure() {
    let cubins = tempfile::tempdir().unwrap();
    let Some(executor) = executor(cubins.path()) else {
        return;
    };
    let step = Target::Step(StepProblem::new(4, 8, 64, 1, 128));
    let default = Space::of(&step, executor.device(), None).unwrap().default;
    let forward = Target::Forward("b=1,l=100,h=4,p=64,g=1,n=64".parse().unwrap());
    let other = Space::of(&forward, executor.device(), None)
        .unwrap()
        .default;
    let answers = executor.compile_all(&step, &[default, other]).unwrap();
    assert!(answers[0].is_ok(), "{:?}", answers[0]);
    assert_eq!(answers[1].as_ref().unwrap_err().kind, FailureKind::Compile);
    assert!(
        executor.verify(&step, &default, Check::Twin).is_err(),
        "it has no GPU"
    );
}

#[test]
fn conditions_name_the_compiler_the_driver_and_each_kernels_template() {
    let cubins = tempfile::tempdir().unwrap();
    let Some(executor) = executor(cubins.path()) else {
        return;
    };
    let conditions = Kernel::ALL.map(|k| executor.kernel_conditions(k));
    assert!(
        conditions
            .iter()
            .all(|c| c.driver == "13.0" && c.nvrtc.contains('.')),
        "{conditions:?}"
    );
    let mut digests: Vec<&str> = conditions
        .iter()
        .map(|c| c.template_digest.as_str())
        .collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(
        digests.len(),
        Kernel::ALL.len(),
        "each kernel has its own template"
    );
}
