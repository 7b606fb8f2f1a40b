//! The decode kernel against the float64 oracle: vectors and single elements, one token and several, skipped rows, several passes.

#![allow(clippy::unwrap_used)]

use mamba2_emulator::{Compiler, Emulator};
use mamba2_reference::{Bounds, ErrorReport, Pattern, generate_step, step};
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::rules::{check_step_config, legal_step_configs};
use mamba2_spec::{Arch, DeviceFacts, StepProblem};

fn check(shape: &str, config: &StateUpdate) {
    check_in_rounds(shape, config, None);
}

/// `rows`: those that the grid has blocks for, if fewer than there are.
fn check_in_rounds(shape: &str, config: &StateUpdate, rows: Option<usize>) {
    let problem: StepProblem = shape.parse().unwrap();
    let device = DeviceFacts::assumed(Arch(90));
    check_step_config(config, &problem, &device).unwrap();
    let inputs = generate_step(&problem, 7, Pattern::Model);
    let emulator = Emulator::new(
        Compiler::find().unwrap(),
        concat!(env!("CARGO_TARGET_TMPDIR"), "/emulator"),
    );
    let (out, state) = emulator
        .step_in_rounds(config, &problem, &inputs, &device, rows)
        .unwrap_or_else(|e| panic!("{problem}: {config}: {e}"));
    let want = step(&problem, &inputs.reference());
    let bounds = Bounds::of_step(&problem);
    let report = ErrorReport::compare(&state.to_f64(), &want.state);
    assert!(
        report.within(bounds.states),
        "{problem}: {config}: state {report}"
    );
    let out = out.to_f64();
    let row = problem.tokens * problem.nheads * problem.headdim;
    for i in 0..problem.batch {
        let of_row = i * row..(i + 1) * row;
        let skipped = matches!(&inputs.state_batch_indices, Some(indices) if indices[i] < 0);
        if skipped {
            assert!(out[of_row].iter().all(|v| v.is_nan()), "{problem}: row {i}");
            continue;
        }
        let report = ErrorReport::compare(&out[of_row.clone()], &want.out[of_row]);
        assert!(
            report.within(bounds.out),
            "{problem}: {config}: out {report}"
        );
    }
}

fn config(block_head: u32, row_threads: u32, warps: u32) -> StateUpdate {
    StateUpdate {
        block_head,
        row_threads,
        warps,
    }
}

#[test]
fn configs_of_one_pass_and_of_many_at_the_shape_that_models_have() {
    let shape = "b=2,h=4,p=64,g=2,n=128,bias=1,softplus=1";
    let device = DeviceFacts::assumed(Arch(90));
    let legal = legal_step_configs(&shape.parse().unwrap(), &device);
    for config in legal.iter().step_by(7) {
        check(shape, config);
    }
}

#[test]
fn every_pair_of_dtypes() {
    for dtype in ["bf16", "f16", "f32"] {
        for state in ["bf16", "f16", "f32"] {
            let shape = format!("b=3,h=4,p=64,g=1,n=64,dtype={dtype},state={state},z=1,d=hp");
            check(&shape, &config(32, 8, 2));
        }
    }
}

#[test]
fn several_tokens_and_every_option() {
    for config in [config(16, 8, 4), config(32, 8, 1), config(8, 16, 1)] {
        check(
            "b=5,h=6,p=48,g=3,n=128,t=3,slots=9,z=1,d=hp,bias=1,softplus=1,limit=0.001:0.1",
            &config,
        );
    }
}

#[test]
fn skipped_rows_are_left_alone_with_one_token_too() {
    check("b=5,h=2,p=64,g=1,n=128,slots=9,z=1", &config(64, 16, 2));
}

#[test]
fn a_grid_too_small_for_all_rows_takes_them_in_rounds() {
    let shape = "b=5,h=3,p=48,g=3,n=64,slots=9,bias=1,softplus=1";
    check_in_rounds(shape, &config(32, 8, 4), Some(2));
    let unaligned = "b=5,h=2,p=20,g=1,n=17,t=2";
    check_in_rounds(unaligned, &config(16, 8, 1), Some(1));
}

#[test]
fn sizes_that_fill_no_vector_and_rows_that_are_not_aligned() {
    for shape in [
        "b=2,h=2,p=33,g=2,n=20",
        "b=2,h=3,p=33,g=1,n=17,t=2",
        "b=2,h=2,p=20,g=2,n=36,state=bf16",
        "b=1,h=2,p=80,g=1,n=100,dtype=f32",
    ] {
        for config in [config(16, 8, 1), config(16, 16, 2)] {
            check(shape, &config);
        }
    }
}

#[test]
fn a_state_too_large_to_be_held_twice() {
    for config in [config(8, 4, 1), config(16, 8, 2), config(64, 32, 8)] {
        check("b=1,h=2,p=64,g=1,n=512,z=1", &config);
        check("b=1,h=2,p=64,g=1,n=256,state=f16,dtype=f32", &config);
    }
}
