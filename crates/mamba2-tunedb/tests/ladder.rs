//! The look-up ladder: which tier speaks, and when.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use common::{
    block_h, config, config_f32, database, device, evidence, problem, problem_f32, record,
    record_f32,
};
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{Arch, DeviceFacts, StepProblem, StrategyConfig, rules};
use mamba2_tunedb::{
    Committed, DEFAULT_WAIT, Evidence, Ladder, Mode, Record, Shipped, Tier, write_text,
};

fn shipped(records: Vec<Record>) -> Shipped {
    Shipped::from_texts([("sm80-108sm.json".into(), write_text(records).unwrap())])
}

#[test]
fn a_commit_is_seen_by_the_next_process_as_local() {
    let (_dir, cache, db) = database();
    assert_eq!(
        db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap(),
        Committed::Store
    );
    let ladder = Ladder::builder().cache(&cache).build();
    let answer = ladder.look_up(&problem(4, 4096), &device()).unwrap();
    assert_eq!(
        (answer.tier, answer.distance, block_h(&answer.config)),
        (Tier::Local, 0.0, 8)
    );
    assert_eq!(answer.record.unwrap().evidence.median_us, 100.0);
    assert!(answer.warnings.is_empty() && !answer.stale);
    assert!(ladder.snapshot_digest().is_some());
}

#[test]
fn tiers_speak_in_the_order_of_the_design() {
    let (_dir, cache, db) = database();
    db.commit(&[record_f32(4, 4096, 8)], &[], DEFAULT_WAIT)
        .unwrap();
    let build = |with_cache: bool, mode: Mode| {
        let builder = Ladder::builder()
            .shipped(shipped(vec![record_f32(4, 4096, 2), record_f32(1, 512, 2)]))
            .mode(mode);
        if with_cache {
            builder.cache(&cache).build()
        } else {
            builder.build()
        }
    };
    let of = |ladder: &Ladder, b, l| {
        let answer = ladder.look_up(&problem_f32(b, l), &device()).unwrap();
        (
            answer.tier,
            if answer.tier == Tier::Default {
                0
            } else {
                block_h(&answer.config)
            },
        )
    };
    let ladder = build(true, Mode::Replay);
    assert_eq!(of(&ladder, 4, 4096), (Tier::Local, 8));
    assert_eq!(of(&ladder, 1, 512), (Tier::Shipped, 2));
    assert_eq!(of(&ladder, 4, 5000), (Tier::LocalNearest, 8));
    assert_eq!(of(&ladder, 1, 700), (Tier::ShippedNearest, 2));
    assert_eq!(of(&ladder, 64, 64), (Tier::Default, 0));
    assert_eq!(of(&build(false, Mode::Replay), 4, 4096), (Tier::Shipped, 2));
    assert_eq!(
        of(&build(true, Mode::DefaultOnly), 4, 4096),
        (Tier::Default, 0)
    );
    assert_eq!(
        of(
            &build(true, Mode::Pinned(config_f32(&problem_f32(4, 4096), 4))),
            4,
            4096
        ),
        (Tier::Override, 4)
    );
    let pinned = Ladder::builder()
        .cache(&cache)
        .pin(
            &problem_f32(4, 4096),
            &device(),
            config_f32(&problem_f32(4, 4096), 1),
        )
        .build();
    assert_eq!(of(&pinned, 4, 4096), (Tier::Override, 1));
    assert_eq!(of(&pinned, 4, 8192), (Tier::LocalNearest, 8));
}

/// A record says something of another length only if its parameters were worth something, and never how long a segment is there.
#[test]
fn a_near_record_lends_its_parameters_and_not_its_segments() {
    let hopper = DeviceFacts::assumed(Arch(90));
    let bf16 = |seqlen| mamba2_spec::Problem::new(4, seqlen, 8, 64, 1, 128);
    let default = |seqlen| rules::default_strategy(&bf16(seqlen), &hopper).unwrap();
    let look_up = |seqlen, tuned: &StrategyConfig, gain: f64| {
        let mut evidence = evidence(100.0, 1_700_000_000);
        evidence.default_median_us = Some(100.0 * gain);
        evidence.built_with.template_digest = vec!["t1"; tuned.kernels().len()].join("+");
        let record = Record::forward(&bf16(16384), &hopper, tuned, evidence);
        let ladder = Ladder::builder()
            .shipped(Shipped::from_texts([(
                "sm90-132sm.json".into(),
                write_text(vec![record]).unwrap(),
            )]))
            .templates(|_| "t1".into())
            .build();
        ladder.look_up(&bf16(seqlen), &hopper).unwrap()
    };
    let StrategyConfig::Sm90Fused(mut tuned) = default(16384) else {
        panic!("expected the fused strategy, got {}", default(16384));
    };
    tuned.fused_forward.stages = 2;
    let tuned = StrategyConfig::Sm90Fused(tuned);
    assert_ne!(default(16384).segment(), default(8192).segment());
    let answer = look_up(8192, &tuned, 1.5);
    assert_eq!((answer.tier, answer.stale), (Tier::ShippedNearest, false));
    let StrategyConfig::Sm90Fused(lent) = answer.config else {
        panic!("expected the record's strategy, got {}", answer.config);
    };
    assert_eq!(lent.fused_forward.stages, 2);
    assert_eq!(Some(lent.fused_forward.segment), default(8192).segment());
    // Measured with one kernel, lent to three: still what today's templates were measured with.
    let whole = look_up(8192, &tuned.with_segment(0), 1.5);
    assert_eq!((whole.config, whole.stale), (answer.config, false));
    // No gain, or another strategy, whose crossing with this one is not known: the record says nothing.
    let three = rules::default_three_kernel(&bf16(16384), &hopper).unwrap();
    for (tuned, gain) in [(tuned, 1.01), (StrategyConfig::ThreeKernel(three), 1.5)] {
        let answer = look_up(8192, &tuned, gain);
        assert_eq!(
            (answer.tier, answer.config),
            (Tier::Default, default(8192)),
            "{tuned}"
        );
        assert!(answer.warnings.is_empty(), "{:?}", answer.warnings);
    }
}

#[test]
fn an_illegal_pin_gives_the_default_and_says_so() {
    let mut fixed = problem(4, 4096);
    fixed.chunk_size = mamba2_spec::ChunkSize::Fixed(64);
    let ladder = Ladder::builder()
        .mode(Mode::Pinned(config(&problem(4, 4096), 4)))
        .build();
    let answer = ladder.look_up(&fixed, &device()).unwrap();
    assert_eq!(answer.tier, Tier::Default);
    assert!(answer.warnings[0].contains("S02"), "{:?}", answer.warnings);
}

#[test]
fn a_fresh_shipped_record_wins_over_a_stale_local_one() {
    let (_dir, cache, db) = database();
    let mut stale = record(4, 4096, 8);
    stale.evidence.built_with.template_digest = "t0".into();
    db.commit(&[stale], &[], DEFAULT_WAIT).unwrap();
    let look_up = |records| {
        let ladder = Ladder::builder()
            .cache(&cache)
            .shipped(shipped(records))
            .templates(|_| "t1".into())
            .build();
        ladder.look_up(&problem(4, 4096), &device()).unwrap()
    };
    let mut fresh = record(4, 4096, 2);
    fresh.evidence.built_with.template_digest = "t1+t1+t1".into();
    let answer = look_up(vec![fresh]);
    assert_eq!((answer.tier, answer.stale), (Tier::Shipped, false));
    let answer = look_up(vec![]);
    assert_eq!(
        (answer.tier, answer.stale, block_h(&answer.config)),
        (Tier::Local, true, 8)
    );
}

#[test]
fn what_a_process_learned_answers_without_any_directory() {
    let ladder = Ladder::builder().build();
    assert_eq!(
        ladder.look_up(&problem(2, 333), &device()).unwrap().tier,
        Tier::Default
    );
    ladder.learn(record(2, 333, 4));
    assert_eq!(
        ladder.look_up(&problem(2, 333), &device()).unwrap().tier,
        Tier::Local
    );
}

#[test]
fn steps_have_their_own_records() {
    let (_dir, cache, db) = database();
    let step = StepProblem::new(64, 80, 64, 1, 128);
    let tuned = StateUpdate {
        block_head: 32,
        row_threads: 16,
        warps: 4,
    };
    mamba2_spec::rules::check_step_config(&tuned, &step, &device()).unwrap();
    db.commit(
        &[Record::step(&step, &device(), &tuned, Evidence::default())],
        &[],
        DEFAULT_WAIT,
    )
    .unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    let answer = ladder.look_up_step(&step, &device()).unwrap();
    assert_eq!((answer.tier, answer.config), (Tier::Local, tuned));
    let near = ladder
        .look_up_step(&StepProblem::new(100, 80, 64, 1, 128), &device())
        .unwrap();
    assert_eq!(near.tier, Tier::LocalNearest);
    assert!((near.distance - (100f64 / 64.0).log2()).abs() < 1e-12);
}
