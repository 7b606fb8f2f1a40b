//! Every legal config of every kernel of the forward pass at small shapes in three dtypes: outputs poisoned, twice bit-equal,
//! canaries whole, no spill, within the bounds of the float64 oracle. Each kernel's configs run beside the default configs
//! of the others.
//!
//! Needs a GPU: prints `SKIPPED: no CUDA device` without one, and fails instead if MAMBA2_REQUIRE_GPU=1.
//! MAMBA2_RING2_SUBSET=N takes N configs of each kernel, spread over the space, for runs under compute-sanitizer.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use std::time::Instant;

use common::{Gpu, gpu, is_fatal, say};
use mamba2_reference::{Pattern, generate};
use mamba2_spec::{Dtype, Kernel, Problem};
use mamba2_tuner::gpu::{Oracle, Placement};
use mamba2_tuner::{Candidate, Failure, Target};

/// Tails 1, Q - 1, Q and Q + 1 for every chunk size Q; more work items than a persistent grid has blocks in the fifth. The
/// last three have several segments, ragged, for strategies that split sequences.
const SHAPES: [&str; 9] = [
    "b=2,l=257,h=4,p=64,g=1,n=128",
    "b=1,l=255,h=6,p=32,g=3,n=16",
    "b=1,l=256,h=8,p=80,g=8,n=64",
    "b=3,l=1,h=8,p=128,g=1,n=256",
    "b=40,l=193,h=12,p=64,g=3,n=64",
    "b=1,l=319,h=16,p=64,g=8,n=128",
    "b=2,l=1153,h=6,p=64,g=2,n=128",
    "b=1,l=2111,h=4,p=48,g=1,n=256",
    "b=1,l=8321,h=2,p=64,g=1,n=64",
];

/// Takes `n` of `all`, spread evenly, the first among them.
fn spread(all: Vec<Candidate>, n: Option<usize>) -> Vec<Candidate> {
    match n {
        Some(n) if n < all.len() => (0..n).map(|i| all[i * all.len() / n]).collect(),
        _ => all,
    }
}

fn subset() -> Option<usize> {
    let text = std::env::var("MAMBA2_RING2_SUBSET").ok()?;
    Some(
        text.parse()
            .expect("MAMBA2_RING2_SUBSET should be a number"),
    )
}

fn every_config_is_right(shape: usize, dtype: Dtype) {
    let Some(gpu) = gpu() else { return };
    let problem = SHAPES[shape].parse::<Problem>().unwrap().with_dtype(dtype);
    let target = Target::Forward(problem.clone());
    let space = gpu.space(&problem);
    let mut failures: Vec<(Candidate, Failure)> = Vec::new();
    let made = generate(&problem, 1, Pattern::Model);
    let oracle = Oracle::forward(&problem, &made);
    let trial = gpu.trial(&problem, &made, Placement::Exact);
    for kernel in Kernel::ALL {
        let started = Instant::now();
        let of_kernel =
            |c: &&Candidate| matches!(c, Candidate::Kernel { kernel: k, .. } if *k == kernel);
        let all: Vec<Candidate> = space
            .assemblies
            .iter()
            .flat_map(|a| &a.parts)
            .flatten()
            .filter(of_kernel)
            .copied()
            .collect();
        let chosen = spread(all, subset());
        if chosen.is_empty() {
            continue;
        }
        let before = failures.len();
        let (out, states) = run_all(&gpu, &target, &chosen, &mut failures, |config| {
            gpu.check(&trial, &oracle, config)
        });
        say(&format!(
            "{problem}  {:18} {:5} configs {:4} failed  max error out {out:.1e} states {states:.1e}  {:.0} s",
            kernel.name(),
            chosen.len(),
            failures.len() - before,
            started.elapsed().as_secs_f64()
        ));
    }
    let shown: Vec<String> = failures
        .iter()
        .take(20)
        .map(|(c, f)| format!("{c}: {f}"))
        .collect();
    assert!(
        failures.is_empty(),
        "{problem}: {} configs failed:\n{}",
        failures.len(),
        shown.join("\n")
    );
}

/// Largest errors of out and states.
fn run_all(
    gpu: &Gpu,
    target: &Target,
    chosen: &[Candidate],
    failures: &mut Vec<(Candidate, Failure)>,
    check: impl Fn(&mamba2_spec::StrategyConfig) -> Result<mamba2_tuner::Verified, Failure>,
) -> (f64, f64) {
    let mut worst = (0.0f64, 0.0f64);
    for (candidate, compiled) in chosen.iter().zip(gpu.compile(target, chosen)) {
        let Candidate::Kernel { within, .. } = candidate else {
            panic!("parts are kernels")
        };
        match compiled.and_then(|()| check(within)) {
            Ok(verified) => {
                worst = (
                    worst.0.max(verified.out_error),
                    worst.1.max(verified.states_error),
                )
            }
            Err(failure) => {
                assert!(
                    !is_fatal(&failure),
                    "{target}: {candidate} destroyed the context: {failure}"
                );
                failures.push((*candidate, failure));
            }
        }
    }
    worst
}

macro_rules! every_config {
    ($($name:ident: $shape:literal, $dtype:ident;)+) => {$(
        #[test]
        fn $name() {
            every_config_is_right($shape, Dtype::$dtype);
        }
    )+};
}

every_config! {
    every_config_is_right_in_bf16_one_token_past_the_chunk: 0, Bf16;
    every_config_is_right_in_bf16_one_token_short_of_the_chunk_with_3_groups: 1, Bf16;
    every_config_is_right_in_bf16_at_full_chunks_with_8_groups_and_headdim_80: 2, Bf16;
    every_config_is_right_in_bf16_at_one_token_with_dstate_256: 3, Bf16;
    every_config_is_right_in_bf16_with_more_work_than_blocks: 4, Bf16;
    every_config_is_right_in_bf16_with_8_groups_and_a_tail_of_63: 5, Bf16;
    every_config_is_right_in_bf16_with_segments_up_to_1024: 6, Bf16;
    every_config_is_right_in_bf16_with_segments_up_to_2048_and_dstate_256: 7, Bf16;
    every_config_is_right_in_bf16_with_segments_up_to_8192: 8, Bf16;
    every_config_is_right_in_f16_one_token_past_the_chunk: 0, F16;
    every_config_is_right_in_f16_one_token_short_of_the_chunk_with_3_groups: 1, F16;
    every_config_is_right_in_f16_at_full_chunks_with_8_groups_and_headdim_80: 2, F16;
    every_config_is_right_in_f16_at_one_token_with_dstate_256: 3, F16;
    every_config_is_right_in_f16_with_more_work_than_blocks: 4, F16;
    every_config_is_right_in_f16_with_8_groups_and_a_tail_of_63: 5, F16;
    every_config_is_right_in_f16_with_segments_up_to_1024: 6, F16;
    every_config_is_right_in_f32_one_token_past_the_chunk: 0, F32;
    every_config_is_right_in_f32_one_token_short_of_the_chunk_with_3_groups: 1, F32;
    every_config_is_right_in_f32_at_full_chunks_with_8_groups_and_headdim_80: 2, F32;
    every_config_is_right_in_f32_at_one_token_with_dstate_256: 3, F32;
    every_config_is_right_in_f32_with_more_work_than_blocks: 4, F32;
    every_config_is_right_in_f32_with_8_groups_and_a_tail_of_63: 5, F32;
}

#[test]
fn every_decode_config_is_right_in_every_dtype() {
    use mamba2_reference::generate_step;
    use mamba2_spec::{StepProblem, rules};
    use mamba2_tuner::gpu::{StepTrial, failure_of};
    let Some(gpu) = gpu() else { return };
    let mut failures = Vec::new();
    for (dtype, state) in [
        (Dtype::Bf16, Dtype::F32),
        (Dtype::F16, Dtype::F16),
        (Dtype::F32, Dtype::F32),
        (Dtype::Bf16, Dtype::Bf16),
    ] {
        for (headdim, dstate, groups) in [(64, 128, 1), (80, 16, 3), (128, 256, 1)] {
            let mut problem = StepProblem::new(5, 6, headdim, groups, dstate);
            (problem.dtype, problem.dt_dtype, problem.state_dtype) = (dtype, dtype, state);
            (problem.slots, problem.indices, problem.tokens) = (9, true, 2);
            let made = generate_step(&problem, 1, Pattern::Model);
            let oracle = Oracle::step(&problem, &made);
            let trial =
                StepTrial::new(&gpu.device, &gpu.jit, &problem, &made, Placement::Exact).unwrap();
            let all = rules::legal_step_configs(&problem, gpu.device.facts());
            let chosen = spread(all.into_iter().map(Candidate::Step).collect(), subset());
            for (candidate, compiled) in chosen
                .iter()
                .zip(gpu.compile(&Target::Step(problem.clone()), &chosen))
            {
                let Candidate::Step(config) = candidate else {
                    panic!("a step's candidates are steps")
                };
                let result = compiled.and_then(|()| {
                    let load =
                        mamba2_cuda::LoadedStep::load(&gpu.device, &gpu.jit, &problem, config);
                    oracle.check(&trial.run_twice(&load.map_err(|e| failure_of(&e))?, &gpu.stream)?)
                });
                if let Err(failure) = result {
                    assert!(!is_fatal(&failure), "{problem}: {candidate}: {failure}");
                    failures.push(format!("{problem}: {candidate}: {failure}"));
                }
            }
            say(&format!(
                "{problem}  state_update {:5} configs {:4} failed so far",
                chosen.len(),
                failures.len()
            ));
        }
    }
    failures.truncate(20);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
