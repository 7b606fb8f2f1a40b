//! Every legal config of every kernel of the forward pass at small shapes in three dtypes: outputs poisoned, twice bit-equal,
//! canaries whole, no spill, within the bounds of the float64 oracle. Each kernel's configs run beside the default configs
//! of the others.
//!
//! Needs a GPU: prints `SKIPPED: no CUDA device` without one, and fails instead if MAMBA2_REQUIRE_GPU=1.
//! MAMBA2_RING2_SUBSET=N takes N configs of each kernel, spread over the space, for runs under compute-sanitizer.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use common::{gpu, say};
use mamba2_cuda::LoadedStep;
use mamba2_reference::{Pattern, generate};
use mamba2_spec::{Dtype, Problem};
use mamba2_tuner::gpu::every_config::{forward_configs, run_all, run_forward_configs, spread};
use mamba2_tuner::gpu::{Oracle, Placement};
use mamba2_tuner::{Candidate, Failure, Target};

/// Tails 1, Q - 1, Q and Q + 1 for every chunk size Q; more work items than a persistent grid has blocks in the fifth. The
/// last four have several segments, ragged, for strategies that split sequences; the last of them is for clusters of two blocks.
const SHAPES: [&str; 10] = [
    "b=2,l=257,h=4,p=64,g=1,n=128",
    "b=1,l=255,h=6,p=32,g=3,n=16",
    "b=1,l=256,h=8,p=80,g=8,n=64",
    "b=3,l=1,h=8,p=128,g=1,n=256",
    "b=40,l=193,h=12,p=64,g=3,n=64",
    "b=1,l=319,h=16,p=64,g=8,n=128",
    "b=2,l=1153,h=6,p=64,g=2,n=128",
    "b=1,l=2111,h=4,p=48,g=1,n=256",
    "b=1,l=8321,h=2,p=64,g=1,n=64",
    "b=1,l=705,h=3,p=64,g=1,n=320",
];

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
    let made = generate(&problem, 1, Pattern::Model);
    let oracle = Oracle::forward(&problem, &made);
    let trial = gpu.trial(&problem, &made, Placement::Exact);
    let mut failures: Vec<(Candidate, Failure)> = Vec::new();
    for (kernel, chosen) in forward_configs(&problem, gpu.device.facts(), subset()).unwrap() {
        let ran = run_forward_configs(
            &gpu.device,
            &gpu.jit,
            &gpu.stream,
            &trial,
            &oracle,
            &chosen,
            &|| {},
        );
        say(&format!("{problem}  {:18} {ran}", kernel.name()));
        let crashed = ran.crashed();
        failures.extend(ran.failures);
        if crashed {
            break;
        }
    }
    none_failed(&problem.to_string(), &failures);
}

fn none_failed(problem: &str, failures: &[(Candidate, Failure)]) {
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
    every_config_is_right_in_bf16_in_two_slices_of_dstate: 9, Bf16;
    every_config_is_right_in_f16_one_token_past_the_chunk: 0, F16;
    every_config_is_right_in_f16_one_token_short_of_the_chunk_with_3_groups: 1, F16;
    every_config_is_right_in_f16_at_full_chunks_with_8_groups_and_headdim_80: 2, F16;
    every_config_is_right_in_f16_at_one_token_with_dstate_256: 3, F16;
    every_config_is_right_in_f16_with_more_work_than_blocks: 4, F16;
    every_config_is_right_in_f16_with_8_groups_and_a_tail_of_63: 5, F16;
    every_config_is_right_in_f16_with_segments_up_to_1024: 6, F16;
    every_config_is_right_in_f16_in_two_slices_of_dstate: 9, F16;
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
            let check = |candidate: &Candidate| {
                let Candidate::Step(config) = candidate else {
                    panic!("a step's candidates are steps")
                };
                let load = LoadedStep::load(&gpu.device, &gpu.jit, &problem, config);
                oracle.check(&trial.run_twice(&load.map_err(|e| failure_of(&e))?, &gpu.stream)?)
            };
            let target = Target::Step(problem.clone());
            let facts = gpu.device.facts();
            let ran = run_all(&gpu.jit, facts, &target, &chosen, check, &|| {});
            say(&format!("{problem}  state_update       {ran}"));
            none_failed(&problem.to_string(), &ran.failures);
        }
    }
}
