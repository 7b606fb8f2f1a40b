//! Every strategy against the float64 recurrence, on shapes that do not fit its tiles, without a GPU.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use common::{check, check_gates, check_on};
use mamba2_emulator::Timing;
use mamba2_reference::Pattern;
use mamba2_spec::launch;
use mamba2_spec::rules::{agreement_defaults, check_strategy};
use mamba2_spec::{Arch, DeviceFacts, Kernel, KernelConfig, Problem, StrategyConfig};

/// The first config of every strategy that takes the problem, with several segments where it splits sequences.
fn strategies(problem: &Problem, device: &DeviceFacts) -> Vec<StrategyConfig> {
    let mut all: Vec<StrategyConfig> = Vec::new();
    for config in agreement_defaults(problem, device) {
        if config.segment() != Some(0) && all.iter().all(|c| c.name() != config.name()) {
            all.push(config);
        }
    }
    all
}

/// Every strategy that takes the shape; `wanted` are their names.
fn every_strategy(shape: &str, wanted: &[&str], timing: Timing) {
    let problem: Problem = shape.parse().unwrap();
    let strategies = strategies(&problem, &DeviceFacts::assumed(Arch(90)));
    let names: Vec<&str> = strategies.iter().map(StrategyConfig::name).collect();
    assert_eq!(names, wanted, "{shape}");
    for strategy in &strategies {
        check(&problem, strategy, timing);
    }
}

const ALL: &[&str] = &[
    "three_kernel",
    "sm90_fused",
    "sm90_swap_fused",
    "sm90_chain",
];

#[test]
fn sequences_that_end_inside_a_chunk() {
    every_strategy("b=2,l=200,h=4,p=64,g=2,n=128", ALL, Timing::Early);
}

#[test]
fn no_decay_beside_whole_decay_and_states_carried_through_all_chunks() {
    let problem: Problem = "b=2,l=200,h=4,p=64,g=2,n=128".parse().unwrap();
    for strategy in strategies(&problem, &DeviceFacts::assumed(Arch(90))) {
        for pattern in [Pattern::HalfZero, Pattern::Impulse, Pattern::GroupConstant] {
            check_on(&problem, &strategy, Timing::Early, pattern);
        }
    }
}

#[test]
fn products_made_as_late_as_their_waits_allow() {
    every_strategy("b=1,l=300,h=3,p=64,g=1,n=128,d=hp", ALL, Timing::Late);
}

#[test]
fn every_option_in_f16_with_tensors_narrower_than_tiles() {
    every_strategy(
        "b=1,l=330,h=3,p=40,g=1,n=24,dtype=f16,dt_dtype=f32,d=hp,z=1,bias=1,softplus=1,limit=0.001:0.1,init=f16,final=bf16",
        ALL,
        Timing::Late,
    );
}

#[test]
fn packed_sequences_with_nan_behind_the_last() {
    every_strategy(
        "b=1,l=500,h=4,p=64,g=2,n=64,packed=6,z=1",
        ALL,
        Timing::Late,
    );
}

#[test]
fn headdim_80_takes_two_heads_a_block_and_any_option() {
    every_strategy(
        "b=1,l=200,h=4,p=80,g=2,n=128,z=1",
        &["three_kernel", "sm90_swap_fused", "sm90_split_fused"],
        Timing::Late,
    );
}

#[test]
fn headdim_128_shares_s_between_its_two_tiles() {
    every_strategy(
        "b=1,l=200,h=2,p=128,g=1,n=128,init=none",
        &["three_kernel", "sm90_swap_fused", "sm90_split_fused"],
        Timing::Late,
    );
}

#[test]
fn dstate_256_and_512() {
    every_strategy("b=1,l=200,h=2,p=64,g=1,n=256", ALL, Timing::Late);
    every_strategy(
        "b=1,l=200,h=1,p=64,g=1,n=512",
        &["three_kernel", "sm90_swap_fused", "sm90_split_fused"],
        Timing::Late,
    );
}

#[test]
fn float32_and_rows_that_start_anywhere() {
    every_strategy(
        "b=2,l=70,h=2,p=33,g=1,n=20,dtype=f32,align=1",
        &["three_kernel"],
        Timing::Early,
    );
}

/// A strategy with some kernels replaced.
fn with(problem: &Problem, strategy: &str, kernels: &[(Kernel, &str)]) -> StrategyConfig {
    let device = DeviceFacts::assumed(Arch(90));
    let configs: Vec<KernelConfig> = kernels
        .iter()
        .map(|(kernel, text)| KernelConfig::from_text(*kernel, text).unwrap())
        .collect();
    agreement_defaults(problem, &device)
        .into_iter()
        .filter(|c| c.name() == strategy)
        .filter_map(|start| configs.iter().try_fold(start, |s, k| s.with_kernel(*k)))
        .find(|c| check_strategy(c, problem, &device).is_ok())
        .unwrap()
}

#[test]
fn both_layouts_and_both_operand_orders_of_the_three_kernels() {
    let problem: Problem = "b=1,l=300,h=4,p=64,g=1,n=128".parse().unwrap();
    let strategy = with(
        &problem,
        "three_kernel",
        &[
            (Kernel::ChunkCumsum, "chunk_size=128,layout=bth,block_h=2"),
            (
                Kernel::FwdPassState,
                "chunk_size=128,layout=bth,swap_ab=1,block_state=64,stages=3,warps=8",
            ),
            (
                Kernel::ComputeOut,
                "chunk_size=128,layout=bth,swap_ab=1,block_h=2,block_head=64,persistent=1,occupancy=1,warps=8",
            ),
        ],
    );
    check(&problem, &strategy, Timing::Early);
}

/// Few segments are added up by the forward pass itself, many by segment_scan.
#[test]
fn states_at_segment_starts_with_and_without_a_scan() {
    for (shape, scanned) in [
        ("b=1,l=500,h=3,p=64,g=1,n=64", false),
        ("b=2,l=600,h=2,p=48,g=1,n=64", true),
    ] {
        let problem: Problem = shape.parse().unwrap();
        let segment = "segment=128,warpgroups=2,stages=2";
        let strategy = with(
            &problem,
            "sm90_fused",
            &[
                (Kernel::Sm90SegmentState, segment),
                (Kernel::SegmentScan, "segment=128"),
                (Kernel::Sm90FusedForward, segment),
            ],
        );
        let plan = launch::plan(&strategy, &problem, &DeviceFacts::assumed(Arch(90)));
        assert_eq!(plan.scanned(), scanned, "{shape}");
        check(&problem, &strategy, Timing::Early);
    }
}

#[test]
fn three_warpgroups_of_half_a_head() {
    let problem: Problem = "b=1,l=200,h=3,p=64,g=1,n=128".parse().unwrap();
    let strategy = with(
        &problem,
        "sm90_swap_fused",
        &[
            (
                Kernel::Sm90SwapSegmentState,
                "segment=128,block_head=32,warpgroups=3,stages=2",
            ),
            (
                Kernel::Sm90SwapFusedForward,
                "segment=128,block_head=32,warpgroups=3,stages=2",
            ),
        ],
    );
    check(&problem, &strategy, Timing::Late);
}

#[test]
fn a_chain_whose_segments_do_not_fit_the_ring() {
    let problem: Problem = "b=1,l=700,h=2,p=64,g=1,n=64".parse().unwrap();
    let strategy = with(
        &problem,
        "sm90_chain",
        &[(Kernel::Sm90ChainForward, "segments=4,warpgroups=2,stages=2")],
    );
    check(&problem, &strategy, Timing::Late);
}

/// Halves of a segment that stays in shared memory: ragged ends, one chunk and none in the second half, a segment that is not there, and options.
#[test]
fn a_chain_whose_segments_stay_in_shared_memory() {
    for (shape, config) in [
        (
            "b=2,l=1000,h=2,p=64,g=1,n=128",
            "segments=4,warpgroups=2,stages=4",
        ),
        (
            "b=1,l=530,h=2,p=48,g=2,n=104,z=1,d=hp,bias=1,softplus=1,init=f32,final=f32",
            "segments=4,warpgroups=2,stages=3",
        ),
        (
            "b=1,l=300,h=2,p=40,g=1,n=24,d=none,dtype=f16,init=f16,final=bf16",
            "segments=4,warpgroups=2,stages=2",
        ),
        (
            "b=1,l=193,h=1,p=64,g=1,n=64,init=none",
            "segments=3,warpgroups=2,stages=2",
        ),
        (
            "b=1,l=270,h=1,p=64,g=1,n=72,final=none",
            "segments=4,warpgroups=2,stages=2",
        ),
    ] {
        let problem: Problem = shape.parse().unwrap();
        let config = format!("{config},halves=2");
        let strategy = with(
            &problem,
            "sm90_chain",
            &[(Kernel::Sm90ChainForward, &config)],
        );
        check(&problem, &strategy, Timing::Late);
    }
}

/// Hopper strategies take one reciprocal for the gates of two elements.
#[test]
fn a_gate_without_bounds_stays_with_its_element() {
    let mut seen = Vec::new();
    for shape in [
        "b=1,l=130,h=2,p=64,g=1,n=64,z=1",
        "b=1,l=200,h=3,p=80,g=1,n=64,z=1",
    ] {
        let problem: Problem = shape.parse().unwrap();
        for strategy in strategies(&problem, &DeviceFacts::assumed(Arch(90))) {
            check_gates(&problem, &strategy);
            seen.push(strategy.name());
        }
    }
    for strategy in ALL.iter().chain(&["sm90_split_fused"]) {
        assert!(seen.contains(strategy), "{strategy} of {seen:?}");
    }
}
