//! What the vocabulary promises: texts that read back, tables that agree, rules that leave something legal everywhere.

use mamba2_spec::parameters::{ComputeOut, FwdPassState, Parameters, Sm90ChainForward};
use mamba2_spec::rules::{
    RULES, agreement_defaults, alternatives, check_kernel, check_strategy, default_step,
    default_strategy, default_three_kernel,
};
use mamba2_spec::{
    Alignment, Arch, ChunkSize, DKind, DeviceFacts, DtLimit, Dtype, ForwardInputs, ForwardOutputs,
    Kernel, KernelConfig, Precision, Problem, SpecError, StepProblem, StrategyConfig, TensorMeta,
    check_cu_seqlens, check_forward, launch,
};
use proptest::prelude::*;

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL.to_vec())
}

prop_compose! {
    fn problems()(
        batch in 0usize..5, seqlen in 0usize..5000, groups in 1usize..4, per_group in 1usize..6,
        headdim in 1usize..=256, dstate in 1usize..=512, dtype in dtype(), dt_dtype in dtype(),
        d in prop::sample::select(vec![DKind::None, DKind::PerHead, DKind::PerHeaddim]), flags in any::<[bool; 6]>(),
        initial in prop::option::of(dtype()), finals in prop::option::of(dtype()), packed in prop::option::of(0usize..9),
        chunk in prop::option::of(1u32..=4096)
    ) -> Problem {
        Problem {
            dtype, dt_dtype, d, z: flags[0], dt_bias: flags[1], dt_softplus: flags[2],
            dt_limit: if flags[3] { DtLimit { min: 0.001, max: 0.1 } } else { DtLimit::NONE },
            initial_states: initial, final_states: finals, packed, batch: if packed.is_some() { 1 } else { batch },
            chunk_size: chunk.map_or(ChunkSize::Tuned, ChunkSize::Fixed),
            precision: if flags[4] { Precision::Tf32 } else { Precision::Float32 },
            alignment: if flags[5] { Alignment::Bytes16 } else { Alignment::Element },
            ..Problem::new(batch, seqlen, groups * per_group, headdim, groups, dstate)
        }
    }
}

proptest! {
    #[test]
    fn a_problem_reads_back_from_its_text(problem in problems()) {
        prop_assert_eq!(problem.to_string().parse::<Problem>().unwrap(), problem);
    }

    #[test]
    fn every_problem_has_a_legal_default_on_every_gated_architecture(problem in problems()) {
        for arch in Arch::GATED {
            let device = DeviceFacts::assumed(arch);
            let problem = Problem { chunk_size: ChunkSize::Tuned, ..problem.clone() };
            let config = default_strategy(&problem, &device).unwrap();
            check_strategy(&config, &problem, &device).unwrap();
        }
    }

    #[test]
    fn chunks_of_packed_sequences_fit_their_slots_and_never_meet(
        lengths in prop::collection::vec(0usize..300, 1..20), tail in 0usize..50, chunk_size in prop::sample::select(vec![64usize, 128, 256])
    ) {
        let mut cu = vec![0usize];
        lengths.iter().for_each(|n| cu.push(cu.last().unwrap() + n));
        let seqlen = cu.last().unwrap() + tail;
        let problem = Problem { packed: Some(lengths.len()), batch: 1, ..Problem::new(1, seqlen, 1, 1, 1, 1) };
        // The formula of Problem::chunk_slots and of common/work.cuh.
        let first = |s: usize| cu[s] / chunk_size + s;
        for s in 0..lengths.len() {
            let end = first(s) + lengths[s].div_ceil(chunk_size);
            let limit = if s + 1 < lengths.len() { first(s + 1) } else { problem.chunk_slots(chunk_size) };
            prop_assert!(end <= limit || lengths[s] == 0, "sequence {} ends at {}, {} is the limit", s, end, limit);
        }
    }
}

#[test]
fn a_config_reads_back_from_json_and_text() {
    let config = FwdPassState {
        chunk_size: 256,
        layout: 1,
        swap_ab: 1,
        ..Default::default()
    };
    let json = serde_json::to_string(&config).unwrap();
    assert!(json.contains(r#""layout":"bth""#), "{json}");
    assert_eq!(serde_json::from_str::<FwdPassState>(&json).unwrap(), config);
    assert_eq!(FwdPassState::from_text(&config.to_text()).unwrap(), config);
    assert!(
        serde_json::from_str::<FwdPassState>(r#"{"chunk_size": 100}"#).is_err(),
        "outside the domain"
    );
    assert!(
        serde_json::from_str::<FwdPassState>(r#"{"chunk": 64}"#).is_err(),
        "no such parameter"
    );
    let missing = serde_json::from_str::<FwdPassState>(r#"{"stages": 2}"#).unwrap();
    assert_eq!(
        missing,
        FwdPassState {
            stages: 2,
            ..Default::default()
        },
        "what a record lacks has the default"
    );
}

#[test]
fn every_row_of_the_table_has_a_default_in_its_domain_and_a_constant_of_its_own() {
    for kernel in Kernel::ALL {
        let rows = KernelConfig::rows(kernel);
        for row in rows {
            assert!(row.domain.contains(&row.default), "{kernel} {}", row.name);
            assert!(
                !row.doc.is_empty() && !row.unit.is_empty(),
                "{kernel} {}",
                row.name
            );
            assert_eq!(
                rows.iter().filter(|r| r.cuda == row.cuda).count(),
                1,
                "{kernel} {}",
                row.name
            );
        }
    }
    assert_eq!(
        ComputeOut::space().len(),
        ComputeOut::ROWS
            .iter()
            .map(|r| r.domain.len())
            .product::<usize>()
    );
}

#[test]
fn rule_numbers_are_unique() {
    let mut ids: Vec<&str> = RULES.iter().map(|r| r.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), RULES.len());
}

#[test]
fn c4_a_config_fits_every_limit_of_shared_memory_or_one_message_says_what_is_missing() {
    for limit_kib in [48usize, 64, 99, 163, 227] {
        for headdim in [64, 128, 256] {
            for dstate in [16, 64, 128, 256, 512] {
                for dtype in Dtype::ALL {
                    let problem = Problem::new(1, 512, 4, headdim, 1, dstate).with_dtype(dtype);
                    let device = DeviceFacts {
                        shared_memory_optin_bytes: limit_kib * 1024,
                        ..DeviceFacts::assumed(Arch(86))
                    };
                    match default_strategy(&problem, &device) {
                        Ok(config) => check_strategy(&config, &problem, &device).unwrap(),
                        Err(SpecError::NoConfig(text)) => {
                            assert!(limit_kib < 99, "{problem} should fit {limit_kib} KiB");
                            for part in [
                                headdim.to_string(),
                                dstate.to_string(),
                                (limit_kib * 1024).to_string(),
                            ] {
                                assert!(text.contains(&part), "{text} should name {part}");
                            }
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        }
    }
    let too_large = Problem::new(1, 512, 4, 512, 1, 64)
        .check()
        .unwrap_err()
        .to_string();
    assert!(
        too_large.contains("headdim") && too_large.contains("256"),
        "{too_large}"
    );
}

#[test]
fn c5_an_old_gpu_is_refused_with_both_compute_capabilities() {
    for arch in [Arch(70), Arch(75)] {
        let error = default_strategy(
            &Problem::new(1, 64, 1, 64, 1, 64),
            &DeviceFacts::assumed(arch),
        )
        .unwrap_err()
        .to_string();
        assert!(
            error.contains("8.0") && error.contains(&format!("{}.{}", arch.0 / 10, arch.0 % 10)),
            "{error}"
        );
        assert!(
            default_step(
                &StepProblem::new(1, 1, 64, 1, 64),
                &DeviceFacts::assumed(arch)
            )
            .is_err()
        );
    }
}

#[test]
fn a_fixed_chunk_size_is_kept_or_refused_by_name() {
    let device = DeviceFacts::assumed(Arch(90));
    for chunk_size in [64, 128, 256] {
        let problem = Problem {
            chunk_size: ChunkSize::Fixed(chunk_size),
            ..Problem::new(1, 512, 4, 64, 1, 128)
        };
        assert_eq!(
            default_strategy(&problem, &device).unwrap().chunk_size(),
            chunk_size
        );
    }
    for chunk_size in [1, 40, 50, 4096] {
        let problem = Problem {
            chunk_size: ChunkSize::Fixed(chunk_size),
            ..Problem::new(1, 512, 4, 64, 1, 128)
        };
        let error = default_strategy(&problem, &device).unwrap_err().to_string();
        assert!(
            error.contains("64, 128 or 256") && error.contains(&chunk_size.to_string()),
            "{error}"
        );
    }
}

#[test]
fn the_default_on_hopper_keeps_states_on_the_chip_and_its_workspace_small() {
    let device = DeviceFacts::assumed(Arch(90));
    let problem: Problem = "b=4,l=16384,h=8,p=64,g=1,n=128".parse().unwrap();
    let config = default_strategy(&problem, &device).unwrap();
    let plan = launch::plan(&config, &problem, &device);
    assert!(matches!(config, StrategyConfig::Sm90Fused(_)), "{config}");
    assert!(
        plan.workspace.total_bytes < 16 << 20,
        "{}",
        plan.workspace.total_bytes
    );
    let three = StrategyConfig::ThreeKernel(default_three_kernel(&problem, &device).unwrap());
    assert!(
        launch::plan(&three, &problem, &device)
            .workspace
            .total_bytes
            > 64 << 20
    );
}

/// The blocks of a chain add up what those before them have stored, with room for so many.
#[test]
fn a_chain_has_no_more_blocks_than_it_can_add_up() {
    let row = &Sm90ChainForward::ROWS[0];
    assert_eq!(row.name, "segments");
    let most = row.domain.iter().max().unwrap();
    assert!(*most as usize <= launch::SEGMENTS_WITHOUT_SCAN);
}

/// Configs that were seen to spill, on an H200 or in NVRTC: legal where they do not, refused by this rule where they do.
#[test]
fn what_spilled_is_refused() {
    let device = DeviceFacts::assumed(Arch(90));
    let compute_out = "chunk_size=256,layout=bht,block_h=1,block_head=32,block_state=64,swap_ab=0,persistent=0,occupancy=2,stages=2,warps=8";
    let state = "chunk_size=64,layout=bht,block_head=128,block_state=64,swap_ab=0,stages=4,warps=4";
    let narrow_state =
        "chunk_size=64,layout=bht,block_head=64,block_state=128,swap_ab=0,stages=2,warps=4";
    let fused = "heads=1,segment=512,warpgroups=1,stages=2";
    let chain = "segments=3,warpgroups=2,stages=2";
    for (kernel, config, fine, spilled, rule) in [
        (
            Kernel::ComputeOut,
            compute_out,
            "p=32,n=128",
            "p=80,n=128",
            "O04",
        ),
        (
            Kernel::ComputeOut,
            compute_out,
            "p=32,n=128",
            "p=33,n=128",
            "O04",
        ),
        (
            Kernel::FwdPassState,
            state,
            "p=128,n=128",
            "p=80,n=128",
            "F06",
        ),
        (
            Kernel::FwdPassState,
            narrow_state,
            "p=64,n=256",
            "p=48,n=256",
            "F06",
        ),
        (
            Kernel::Sm90FusedForward,
            fused,
            "p=48,n=256,dtype=f16",
            "p=48,n=256,init=bf16",
            "P09",
        ),
        (
            Kernel::Sm90ChainForward,
            chain,
            "p=64,n=128,z=1",
            "p=64,n=128,z=1,dtype=f16",
            "K03",
        ),
        (
            Kernel::Sm90ChainForward,
            chain,
            "p=48,n=128",
            "p=48,n=128,packed=3",
            "K03",
        ),
        (
            Kernel::Sm90ChainForward,
            chain,
            "p=64,n=64,dtype=f16",
            "p=64,n=64,dtype=f16,packed=3",
            "K03",
        ),
        (
            Kernel::Sm90ChainForward,
            chain,
            "p=48,n=256,z=1",
            "p=48,n=256,z=1,init=f16",
            "K03",
        ),
        (
            Kernel::Sm90ChainForward,
            chain,
            "p=48,n=256,init=f16",
            "p=48,n=256,init=f16,d=hp",
            "K03",
        ),
    ] {
        let config = KernelConfig::from_text(kernel, config).unwrap();
        let check = |sizes: &str| {
            let problem = format!("b=1,l=1400,h=8,g=1,{sizes}").parse().unwrap();
            check_kernel(&config, &problem, &device)
        };
        check(fine).unwrap_or_else(|e| panic!("{fine}: {e}"));
        match check(spilled) {
            Err(SpecError::Rule { rule: broken, .. }) => assert_eq!(broken, rule, "{spilled}"),
            other => panic!("{kernel} for {spilled}: {other:?}"),
        }
    }
}

/// With more than 128 of dstate two warpgroups share a head: a block has one head, there is room to add up segments, and for 16-bit initial states.
#[test]
fn two_warpgroups_share_a_head_with_a_large_dstate() {
    let device = DeviceFacts::assumed(Arch(90));
    let of = |dstate: u32, warpgroups: u32, init: &str| {
        let problem: Problem = format!("b=2,l=2000,h=8,p=64,g=2,n={dstate},init={init}")
            .parse()
            .unwrap();
        let mut config = match default_fused_of(&problem, &device) {
            StrategyConfig::Sm90Fused(config) => config,
            other => panic!("{other}"),
        };
        config.fused_forward.warpgroups = warpgroups;
        let config = StrategyConfig::Sm90Fused(config).with_segment(512);
        check_strategy(&config, &problem, &device).map(|()| {
            let plan = launch::plan(&config, &problem, &device);
            (plan.launches.last().unwrap().work_items, plan.scanned())
        })
    };
    let heads_and_segments = 2 * 8 * 4;
    assert_eq!(of(128, 2, "f32").unwrap(), (heads_and_segments / 2, false));
    assert_eq!(of(256, 1, "f32").unwrap(), (heads_and_segments, true));
    assert_eq!(of(256, 2, "f32").unwrap(), (heads_and_segments, false));
    assert_eq!(of(256, 2, "f16").unwrap(), (heads_and_segments, false));
    assert!(of(256, 1, "f16").is_err(), "ptxas spills it");
}

fn default_fused_of(problem: &Problem, device: &DeviceFacts) -> StrategyConfig {
    agreement_defaults(problem, device)
        .into_iter()
        .find(|c| matches!(c, StrategyConfig::Sm90Fused(_)))
        .expect("sm90_fused takes the problem")
}

/// Where the shipped records say so, mostly (`mamba2-tunedb` holds the defaults against them).
#[test]
fn chains_are_the_default_where_they_fill_the_gpu() {
    let device = DeviceFacts::assumed(Arch(90));
    for (shape, expected) in [
        ("b=4,l=1024,h=8,p=64,g=1,n=128", Some((4, 2, 2))),
        ("b=4,l=1024,h=8,p=64,g=1,n=128,z=1", Some((4, 1, 1))), // no room for z of a whole segment
        ("b=4,l=1024,h=8,p=64,g=1,n=256", Some((4, 1, 1))),
        ("b=1,l=512,h=24,p=64,g=1,n=128", Some((4, 2, 2))),
        ("b=1,l=512,h=40,p=64,g=1,n=128", Some((3, 2, 2))),
        ("b=1,l=512,h=20,p=64,g=1,n=128", Some((4, 2, 2))),
        ("b=1,l=512,h=16,p=64,g=1,n=128", None),
        ("b=4,l=1024,h=8,p=64,g=8,n=128", Some((4, 2, 2))), // a head a group
        ("b=4,l=1280,h=8,p=64,g=1,n=64", Some((4, 1, 1))),  // five chunks a segment
        ("b=1,l=2048,h=24,p=64,g=1,n=128", Some((4, 1, 1))),
        ("b=1,l=8192,h=80,p=64,g=1,n=128", Some((3, 2, 1))),
        ("b=1,l=2048,h=64,p=64,g=4,n=128", Some((4, 2, 1))),
        ("b=1,l=2048,h=12,p=64,g=1,n=128", None),
        ("b=1,l=2048,h=40,p=64,g=1,n=128", None),
        ("b=1,l=16384,h=80,p=64,g=1,n=128", None),
        ("b=1,l=512,h=80,p=64,g=1,n=128", None),
        ("b=1,l=8192,h=80,p=64,g=1,n=128,packed=1", None),
        ("b=1,l=8192,h=24,p=64,g=1,n=128", None),
    ] {
        let problem: Problem = shape.parse().unwrap();
        let chosen = match default_strategy(&problem, &device).unwrap() {
            StrategyConfig::Sm90Chain(c) => {
                let c = c.chain_forward;
                Some((c.segments, c.warpgroups, c.halves))
            }
            _ => None,
        };
        assert_eq!(chosen, expected, "{shape}");
    }
}

/// Two consumers have room for two stages beside a gate; one, where the default takes it, has room for three as without.
#[test]
fn a_gate_leaves_a_lone_consumer_its_stages() {
    let device = DeviceFacts::assumed(Arch(90));
    for (shape, warpgroups, stages) in [
        ("b=1,l=8192,h=128,p=64,g=8,n=128", 1, 3),
        ("b=1,l=8192,h=128,p=64,g=8,n=128,z=1", 1, 3),
        ("b=8,l=2048,h=80,p=64,g=1,n=128", 2, 3),
        ("b=8,l=2048,h=80,p=64,g=1,n=128,z=1", 2, 2),
    ] {
        match default_strategy(&shape.parse().unwrap(), &device).unwrap() {
            StrategyConfig::Sm90Fused(c) => {
                let c = c.fused_forward;
                assert_eq!((c.warpgroups, c.stages), (warpgroups, stages), "{shape}");
            }
            other => panic!("{shape}: {other:?}"),
        }
    }
}

/// A default is a config of the table: what `explain` prints can be pinned.
#[test]
fn defaults_stay_in_the_domains_of_their_parameters() {
    for sm in [80, 90] {
        let device = DeviceFacts::assumed(Arch(sm));
        for l in [1, 64, 300, 512, 900, 1100, 1280, 1536, 2048, 5000, 20000] {
            for (h, n) in [
                (1, 64),
                (8, 64),
                (24, 64),
                (24, 32),
                (80, 128),
                (128, 256),
                (8, 512),
            ] {
                for options in ["", ",z=1", ",dtype=f16,p=80", ",dtype=f32"] {
                    let problem: Problem = format!("b=1,l={l},h={h},g=1,n={n},p=64{options}")
                        .replace("p=64,dtype=f16,p=80", "dtype=f16,p=80")
                        .parse()
                        .unwrap();
                    for kernel in default_strategy(&problem, &device).unwrap().kernels() {
                        let text = kernel.to_text();
                        let read = KernelConfig::from_text(kernel.kernel(), &text);
                        assert_eq!(read.unwrap(), kernel, "{problem}");
                    }
                }
            }
        }
    }
}

/// Halves of a segment: what each rule about them refuses.
#[test]
fn halves_want_two_consumers_and_a_stage_for_each_chunk() {
    let device = DeviceFacts::assumed(Arch(90));
    for (config, sizes, rule) in [
        ("warpgroups=2,stages=4", "l=1024,n=128", None),
        ("warpgroups=1,stages=4", "l=1024,n=128", Some("K05")),
        ("warpgroups=2,stages=2", "l=512,n=256", Some("K05")),
        ("warpgroups=2,stages=3", "l=1024,n=128", Some("K06")),
        ("warpgroups=2,stages=4", "l=1025,n=128", Some("K06")),
        ("warpgroups=2,stages=2", "l=256,n=128", Some("K06")),
        (
            "warpgroups=2,stages=4",
            "l=1024,n=128,packed=2",
            Some("K06"),
        ),
        ("warpgroups=2,stages=4", "l=1024,n=128,z=1", Some("S03")),
        ("warpgroups=2,stages=4", "l=1024,n=64,z=1", None),
    ] {
        let config = format!("segments=4,halves=2,{config}");
        let config = KernelConfig::from_text(Kernel::Sm90ChainForward, &config).unwrap();
        let problem = format!("b=1,h=8,p=64,g=1,{sizes}").parse().unwrap();
        let broken = match check_kernel(&config, &problem, &device) {
            Err(SpecError::Rule { rule, .. }) => Some(rule),
            other => {
                other.unwrap();
                None
            }
        };
        assert_eq!(broken, rule, "{config:?} for {sizes}");
    }
}

/// A chain's blocks count tokens in 32 bits.
#[test]
fn a_chain_refuses_sequences_whose_segments_it_could_not_count() {
    let device = DeviceFacts::assumed(Arch(90));
    let config =
        KernelConfig::from_text(Kernel::Sm90ChainForward, "segments=2,warpgroups=1,stages=2")
            .unwrap();
    let check = |l: usize| {
        let problem = format!("b=1,l={l},h=1,p=8,g=1,n=8").parse().unwrap();
        check_kernel(&config, &problem, &device)
    };
    check(1 << 30).unwrap();
    match check(3 << 29) {
        Err(SpecError::Rule { rule, .. }) => assert_eq!(rule, "K04"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn alternatives_keep_what_the_kernels_agree_on() {
    let device = DeviceFacts::assumed(Arch(90));
    let problem = Problem::new(2, 4096, 8, 64, 1, 128);
    let starts = agreement_defaults(&problem, &device);
    assert!(
        starts
            .iter()
            .any(|s| matches!(s, StrategyConfig::ThreeKernel(_)))
    );
    assert!(
        starts
            .iter()
            .any(|s| matches!(s, StrategyConfig::Sm90Fused(_)))
    );
    for start in starts {
        check_strategy(&start, &problem, &device).unwrap();
        for kernel in start.kernels() {
            let others = alternatives(&start, kernel.kernel(), &problem, &device);
            assert!(others.contains(&kernel));
            assert!(
                others
                    .iter()
                    .all(|c| start.with_kernel(*c).unwrap().agreement() == start.agreement())
            );
        }
    }
}

#[test]
fn no_grid_overflows_and_nothing_is_launched_for_nothing() {
    let device = DeviceFacts::assumed(Arch(90));
    for shape in [
        "b=70000,l=64,h=64,p=64,g=1,n=128",
        "b=1,l=2000000000,h=1,p=64,g=1,n=64",
        "b=0,l=64,h=4,p=64,g=1,n=64",
        "b=4,l=0,h=4,p=64,g=1,n=64",
    ] {
        let problem: Problem = shape.parse().unwrap();
        for config in agreement_defaults(&problem, &device) {
            let plan = launch::plan(&config, &problem, &device);
            for l in &plan.launches {
                assert!(
                    u64::from(l.grid) <= l.work_items && (l.grid > 0 || l.work_items == 0),
                    "{shape} {l:?}"
                );
            }
            let states = plan.launches.last().map_or(0, |l| l.work_items);
            assert!(
                problem.batch > 0 || states == 0,
                "{shape}: an empty batch launches nothing"
            );
        }
    }
}

#[test]
fn a_step_has_a_block_for_every_tile_of_as_many_rows_as_a_grid_can_have() {
    let device = DeviceFacts::assumed(Arch(90));
    for (shape, grid) in [
        ("b=3,h=80,p=64,g=1,n=128", [320, 3]),
        ("b=65535,h=1,p=64,g=1,n=16", [4, 65535]),
        ("b=65536,h=1,p=64,g=1,n=16", [4, 65535]),
        ("b=0,h=8,p=64,g=1,n=16", [0, 1]),
        ("b=1,h=1048576,p=256,g=1,n=1", [1 << 24, 1]),
    ] {
        let problem: StepProblem = shape.parse().unwrap();
        let config = default_step(&problem, &device).unwrap();
        let l = launch::step_launch(&config, &problem, &device);
        assert_eq!([l.grid, l.grid_y], grid, "{shape}: {config}");
        assert_eq!(l.blocks() == l.work_items, problem.batch < 65536, "{shape}");
    }
}

fn metas(problem: &Problem) -> (ForwardInputs<TensorMeta>, ForwardOutputs<TensorMeta>) {
    let p = problem;
    let t = |dtype: Dtype, shape: &[usize]| TensorMeta::contiguous(Some(dtype), shape);
    let tokens = [p.batch, p.seqlen, p.nheads, p.headdim];
    let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
    let state = [p.sequences(), p.nheads, p.headdim, p.dstate];
    (
        ForwardInputs {
            x: t(p.dtype, &tokens),
            dt: t(p.dt_dtype, &tokens[..3]),
            a: t(Dtype::F32, &[p.nheads]),
            b: t(p.dtype, &group),
            c: t(p.dtype, &group),
            d: Some(t(Dtype::F32, &[p.nheads])),
            z: None,
            dt_bias: None,
            initial_states: p.initial_states.map(|d| t(d, &state)),
            cu_seqlens: p.packed.map(|n| TensorMeta::contiguous(None, &[n + 1])),
        },
        ForwardOutputs {
            out: t(p.dtype, &tokens),
            final_states: p.final_states.map(|d| t(d, &state)),
        },
    )
}

#[test]
fn a2_a_wrong_tensor_is_named_with_what_was_expected_and_what_came() {
    let problem = Problem::new(2, 4096, 8, 64, 1, 128);
    let (good, outputs) = metas(&problem);
    check_forward(&problem, &good, &outputs).unwrap();
    let says = |inputs: ForwardInputs<TensorMeta>, parts: &[&str]| {
        let text = check_forward(&problem, &inputs, &outputs)
            .unwrap_err()
            .to_string();
        for part in parts {
            assert!(text.contains(part), "{text} should say {part}");
        }
    };
    let b = TensorMeta::contiguous(Some(Dtype::Bf16), &[2, 4096, 1, 64]);
    says(
        ForwardInputs { b, ..good.clone() },
        &["B: expected [batch, seqlen, ngroups, dstate] = [2, 4096, 1, 128], got [2, 4096, 1, 64]"],
    );
    let x = TensorMeta::contiguous(Some(Dtype::F16), &[2, 4096, 8, 64]);
    says(
        ForwardInputs { x, ..good.clone() },
        &["x: expected dtype bf16, got f16"],
    );
    let c = TensorMeta::strided(
        Some(Dtype::Bf16),
        &[2, 4096, 1, 128],
        &[4096 * 256, 256, 256, 2],
    );
    says(
        ForwardInputs { c, ..good.clone() },
        &["C: expected a contiguous innermost axis"],
    );
    says(
        ForwardInputs {
            d: None,
            ..good.clone()
        },
        &["D: the problem says it is present"],
    );
    says(
        ForwardInputs {
            z: Some(good.x),
            ..good.clone()
        },
        &["z: the problem says it is absent"],
    );
    let overlapping = TensorMeta::strided(Some(Dtype::Bf16), &[2, 4096, 8, 64], &[0, 512, 64, 1]);
    let text = check_forward(
        &problem,
        &good,
        &ForwardOutputs {
            out: overlapping,
            ..outputs.clone()
        },
    )
    .unwrap_err()
    .to_string();
    assert!(
        text.contains("out: expected an output whose elements do not overlap"),
        "{text}"
    );
}

#[test]
fn a1_packed_states_and_offsets_have_one_form() {
    let problem = Problem {
        packed: Some(3),
        ..Problem::new(1, 200, 4, 64, 1, 64)
    };
    let (good, outputs) = metas(&problem);
    check_forward(&problem, &good, &outputs).unwrap();
    let batch_form = Some(TensorMeta::contiguous(Some(Dtype::F32), &[1, 4, 64, 64]));
    let text = check_forward(
        &problem,
        &ForwardInputs {
            initial_states: batch_form,
            ..good.clone()
        },
        &outputs,
    )
    .unwrap_err()
    .to_string();
    assert!(
        text.contains("[sequences, nheads, headdim, dstate] = [3, 4, 64, 64], got [1, 4, 64, 64]"),
        "{text}"
    );
    let text = check_forward(
        &problem,
        &ForwardInputs {
            cu_seqlens: None,
            ..good
        },
        &outputs,
    )
    .unwrap_err()
    .to_string();
    assert!(text.contains("cu_seqlens"), "{text}");
    assert!(check_cu_seqlens(&[0, 10, 10, 200], 200).is_ok());
    assert!(
        check_cu_seqlens(&[0, 10, 10, 150], 200).is_ok(),
        "a padded tail"
    );
    for (offsets, part) in [
        (&[10, 20][..], "first offset"),
        (&[0, 20, 10], "non-decreasing"),
        (&[0, 201], "at most seqlen"),
        (&[], "none"),
        (&[0, -5], "non-decreasing"),
    ] {
        let text = check_cu_seqlens(offsets, 200).unwrap_err().to_string();
        assert!(text.contains(part), "{offsets:?}: {text}");
    }
}

#[test]
fn nan_limits_and_uneven_groups_are_refused_by_name() {
    let mut problem = Problem::new(1, 8, 15, 8, 4, 8);
    assert!(
        problem
            .check()
            .unwrap_err()
            .to_string()
            .contains("multiple of ngroups = 4")
    );
    problem.nheads = 16;
    problem.dt_limit = DtLimit {
        min: f32::NAN,
        max: 1.0,
    };
    assert!(
        problem
            .check()
            .unwrap_err()
            .to_string()
            .contains("dt_limit")
    );
    problem.dt_limit = DtLimit { min: 1.0, max: 0.0 };
    assert!(problem.check().is_err());
    assert!(
        "b=1,l=8,h=4,p=8,g=1"
            .parse::<Problem>()
            .unwrap_err()
            .to_string()
            .contains('n')
    );
    assert!(
        "b=1,l=8,h=4,p=8,g=1,n=8,colour=1"
            .parse::<Problem>()
            .unwrap_err()
            .to_string()
            .contains("colour")
    );
}

#[test]
fn the_search_of_a_shape_is_exhaustive_and_still_a_matter_of_minutes() {
    let device = DeviceFacts::assumed(Arch(90));
    for shape in [
        "b=4,l=16384,h=8,p=64,g=1,n=128",
        "b=2,l=257,h=4,p=64,g=1,n=128",
        "b=1,l=8192,h=128,p=80,g=8,n=128",
        "b=1,l=256,h=4,p=64,g=1,n=256,dtype=f32",
    ] {
        let problem: Problem = shape.parse().unwrap();
        let counts: Vec<(Kernel, usize)> = Kernel::ALL
            .into_iter()
            .filter(|k| *k != Kernel::StateUpdate)
            .map(|k| {
                let starts = agreement_defaults(&problem, &device);
                (
                    k,
                    starts
                        .iter()
                        .map(|s| alternatives(s, k, &problem, &device).len())
                        .sum(),
                )
            })
            .collect();
        let all: usize = counts.iter().map(|(_, n)| n).sum();
        println!("{shape}: {all} {counts:?}");
        assert!((100..=2200).contains(&all), "{shape}: {counts:?}");
    }
}
