//! What a key holds, and what it must not.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::collections::HashMap;

use common::{database, device, problem, record};
use mamba2_spec::{
    Alignment, Arch, ChunkSize, DKind, DeviceFacts, DtLimit, Dtype, Kernel, Precision, Problem,
    StepProblem,
};
use mamba2_tunedb::{DEFAULT_WAIT, Ladder, NEAREST_BOUND, Tier, TuneKey, tuning_shape};

/// Every field of Problem flipped once, by name. The exhaustive pattern makes a new field a compile error here.
fn flips() -> Vec<(&'static str, Problem)> {
    let base = problem(4, 4096);
    let Problem {
        batch: _,
        seqlen: _,
        nheads: _,
        headdim: _,
        ngroups: _,
        dstate: _,
        dtype: _,
        dt_dtype: _,
        d: _,
        z: _,
        dt_bias: _,
        dt_softplus: _,
        dt_limit: _,
        initial_states: _,
        final_states: _,
        packed: _,
        chunk_size: _,
        precision: _,
        alignment: _,
    } = base.clone();
    let mut all = Vec::new();
    let mut flip = |name, change: &dyn Fn(&mut Problem)| {
        let mut flipped = base.clone();
        change(&mut flipped);
        assert_ne!(flipped, base, "{name}");
        all.push((name, flipped));
    };
    flip("batch", &|p| p.batch = 5);
    flip("seqlen", &|p| p.seqlen = 4097);
    flip("nheads", &|p| p.nheads = 16);
    flip("headdim", &|p| p.headdim = 63);
    flip("ngroups", &|p| p.ngroups = 2);
    flip("dstate", &|p| p.dstate = 127);
    flip("dtype f16", &|p| p.dtype = Dtype::F16);
    flip("dtype f32", &|p| p.dtype = Dtype::F32);
    flip("dt_dtype", &|p| p.dt_dtype = Dtype::F32);
    flip("d none", &|p| p.d = DKind::None);
    flip("d per headdim", &|p| p.d = DKind::PerHeaddim);
    flip("z", &|p| p.z = true);
    flip("dt_bias", &|p| p.dt_bias = true);
    flip("dt_softplus", &|p| p.dt_softplus = true);
    flip("dt_limit", &|p| {
        p.dt_limit = DtLimit {
            min: 0.001,
            max: 0.1,
        }
    });
    flip("no initial_states", &|p| p.initial_states = None);
    flip("initial_states f16", &|p| {
        p.initial_states = Some(Dtype::F16)
    });
    flip("no final_states", &|p| p.final_states = None);
    flip("final_states bf16", &|p| p.final_states = Some(Dtype::Bf16));
    flip("packed", &|p| (p.batch, p.packed) = (1, Some(4)));
    flip("packed by more", &|p| (p.batch, p.packed) = (1, Some(5)));
    flip("chunk_size", &|p| p.chunk_size = ChunkSize::Fixed(64));
    flip("chunk_size 128", &|p| p.chunk_size = ChunkSize::Fixed(128));
    flip("alignment", &|p| p.alignment = Alignment::Element);
    all
}

#[test]
fn t10_each_flip_of_a_field_changes_the_key_on_disk() {
    let mut seen = HashMap::from([(
        TuneKey::forward(&problem(4, 4096), &device()).to_string(),
        "base",
    )]);
    for (name, flipped) in flips() {
        let key = TuneKey::forward(&flipped, &device());
        if let Some(other) = seen.insert(key.to_string(), name) {
            panic!("{name} and {other} share {key}");
        }
    }
    let base = problem(4, 4096);
    for kernel in [
        Kernel::ChunkCumsum,
        Kernel::FwdPassState,
        Kernel::ComputeOut,
    ] {
        assert!(
            seen.insert(
                TuneKey::kernel(kernel, &base, &device()).to_string(),
                "kernel"
            )
            .is_none()
        );
    }
}

#[test]
fn t10_what_the_key_leaves_out_is_harmless() {
    let key = |p: &Problem| TuneKey::forward(p, &device());
    // Values of the limits are run-time arguments of the kernels.
    let limited = |min, max| Problem {
        dt_limit: DtLimit { min, max },
        ..problem(4, 4096)
    };
    assert_eq!(key(&limited(0.001, 0.1)), key(&limited(0.0, 0.5)));
    // 16-bit inputs ignore the precision of f32 products; f32 inputs do not.
    let tf32 = |dtype| Problem {
        precision: Precision::Tf32,
        ..problem(4, 4096).with_dtype(dtype)
    };
    assert_eq!(key(&tf32(Dtype::Bf16)), key(&problem(4, 4096)));
    assert_ne!(
        key(&tf32(Dtype::F32)),
        key(&problem(4, 4096).with_dtype(Dtype::F32))
    );
    // The number of slots only bounds addresses.
    let step = |slots| StepProblem {
        slots,
        indices: true,
        ..StepProblem::new(64, 80, 64, 1, 128)
    };
    assert_eq!(
        TuneKey::step(&step(64), &device()),
        TuneKey::step(&step(4096), &device())
    );
}

#[test]
fn t10_each_flip_of_a_step_changes_its_key() {
    let base = StepProblem::new(64, 80, 64, 1, 128);
    type Change = fn(&mut StepProblem);
    let flips: [(&str, Change); 15] = [
        ("batch", |p| p.batch = 65),
        ("tokens", |p| p.tokens = 2),
        ("nheads", |p| p.nheads = 40),
        ("headdim", |p| p.headdim = 80),
        ("ngroups", |p| p.ngroups = 8),
        ("dstate", |p| p.dstate = 64),
        ("dtype", |p| p.dtype = Dtype::F16),
        ("dt_dtype", |p| p.dt_dtype = Dtype::F32),
        ("state_dtype", |p| p.state_dtype = Dtype::Bf16),
        ("d", |p| p.d = DKind::PerHeaddim),
        ("z", |p| p.z = true),
        ("dt_bias", |p| p.dt_bias = true),
        ("dt_softplus", |p| p.dt_softplus = true),
        ("dt_limit", |p| p.dt_limit = DtLimit { min: 0.0, max: 1.0 }),
        ("indices", |p| p.indices = true),
    ];
    let mut seen = HashMap::from([(TuneKey::step(&base, &device()).to_string(), "base")]);
    for (name, change) in flips {
        let mut flipped = base.clone();
        change(&mut flipped);
        let key = TuneKey::step(&flipped, &device());
        if let Some(other) = seen.insert(key.to_string(), name) {
            panic!("{name} and {other} share {key}");
        }
        let again: TuneKey = key.to_string().parse().unwrap();
        assert_eq!(
            TuneKey::step(&again.step_problem().unwrap(), &again.device()),
            key,
            "{name}"
        );
    }
}

#[test]
fn a_key_survives_its_text_and_gives_its_problem_back() {
    for (name, flipped) in flips() {
        let key = TuneKey::forward(&flipped, &device());
        let again: TuneKey = key.to_string().parse().unwrap();
        assert_eq!(again, key, "{name}");
        assert_eq!(
            TuneKey::forward(&again.problem().unwrap(), &again.device()),
            key,
            "{name}"
        );
    }
}

#[test]
fn a_key_has_one_spelling() {
    let text = TuneKey::forward(&problem(4, 4096), &device()).to_string();
    for bad in [
        text.replace("b=4", "b=04"),
        text.replace("b=4", "b=+4"),
        text.replace("sms=108,", ""),
        format!("{text},extra=1"),
        format!(" {text}"),
        text.replace("subject=forward", "subject=backward"),
        text.replace("z=0", "z=2"),
        text.replace("s=4", "s=5"),
        String::new(),
    ] {
        assert!(bad.parse::<TuneKey>().is_err(), "{bad}");
    }
    let newer = text.replace("schema=1", "schema=2").parse::<TuneKey>();
    assert!(matches!(
        newer,
        Err(mamba2_tunedb::TuneDbError::Newer { .. })
    ));
}

#[test]
fn t11_every_length_is_answered_by_the_shape_that_tuning_chose_for_it() {
    let (_dir, cache, db) = database();
    let tuned = |n: usize| tuning_shape(&problem(1, n)).seqlen;
    let mut shapes: Vec<usize> = (1..=5000).map(tuned).collect();
    shapes.sort_unstable();
    shapes.dedup();
    assert!(shapes.len() <= 14, "tunings for 5000 lengths: {shapes:?}");
    let records: Vec<_> = shapes.iter().map(|l| record(1, *l, 8)).collect();
    db.commit(&records, &[], DEFAULT_WAIT).unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    for l in 1..=5000 {
        let answer = ladder.look_up(&problem(1, l), &device()).unwrap();
        let found = answer.record.unwrap();
        assert_eq!(
            found.key,
            TuneKey::forward(&tuning_shape(&problem(1, l)), &device()),
            "l = {l}"
        );
        assert!(
            answer.distance <= NEAREST_BOUND / 2.0 + 1e-9,
            "l = {l}: {}",
            answer.distance
        );
        mamba2_spec::rules::check_strategy(&answer.config, &problem(1, l), &device()).unwrap();
    }
}

#[test]
fn p3_many_batches_and_lengths_need_few_tunings() {
    let mut shapes = std::collections::HashSet::new();
    for b in 1..=64 {
        for l in 1000..=1100 {
            shapes.insert(tuning_shape(&problem(b, l)).to_string());
        }
    }
    assert_eq!(shapes.len(), 7, "{shapes:?}");
}

#[test]
fn p6_a_far_key_falls_to_the_default_and_the_distance_is_told() {
    let (_dir, cache, db) = database();
    db.commit(&[record(1, 64, 8)], &[], DEFAULT_WAIT).unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    let tier = |l| ladder.look_up(&problem(1, l), &device()).unwrap().tier;
    assert_eq!(
        (tier(64), tier(65536), tier(129)),
        (Tier::Local, Tier::Default, Tier::Default)
    );
    let near = ladder.look_up(&problem(1, 128), &device()).unwrap();
    assert_eq!((near.tier, near.distance), (Tier::LocalNearest, 1.0));
    // Nothing to compute resembles nothing else.
    assert_eq!(
        (
            tier(0),
            ladder.look_up(&problem(0, 64), &device()).unwrap().tier
        ),
        (Tier::Default, Tier::Default)
    );
}

#[test]
fn p6_a_held_out_problem_is_answered_as_if_it_had_never_been_tuned() {
    let (_dir, cache, db) = database();
    db.commit(
        &[record(4, 4096, 8), record(4, 8192, 2), record(1, 64, 1)],
        &[],
        DEFAULT_WAIT,
    )
    .unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    let ask = |b, l| {
        let answer = ladder.held_out(&problem(b, l), &device()).unwrap();
        let by = answer.record.map(|r| r.key.problem().unwrap().seqlen);
        (answer.tier, answer.distance, by)
    };
    assert_eq!(ask(4, 4096), (Tier::LocalNearest, 1.0, Some(8192)));
    assert_eq!(ask(1, 64), (Tier::Default, 0.0, None));
    // A real look-up is not disturbed.
    let tier = |b, l| ladder.look_up(&problem(b, l), &device()).unwrap().tier;
    assert_eq!((tier(4, 4096), tier(1, 64)), (Tier::Local, Tier::Local));
    let step = StepProblem::new(4, 8, 64, 1, 128);
    let answer = ladder.held_out_step(&step, &device()).unwrap();
    assert_eq!(answer.tier, Tier::Default);
}

#[test]
fn the_nearest_record_wins_and_the_larger_problem_breaks_ties() {
    let (_dir, cache, db) = database();
    db.commit(
        &[record(1, 2048, 1), record(1, 8192, 2), record(1, 6000, 4)],
        &[],
        DEFAULT_WAIT,
    )
    .unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    let seqlen = |l| {
        ladder
            .look_up(&problem(1, l), &device())
            .unwrap()
            .record
            .unwrap()
            .key
            .problem()
            .unwrap()
            .seqlen
    };
    assert_eq!(
        (seqlen(2100), seqlen(5900), seqlen(8000), seqlen(16384)),
        (2048, 6000, 8192, 8192)
    );
    db.commit(&[record(2, 4096, 1), record(8, 4096, 2)], &[], DEFAULT_WAIT)
        .unwrap();
    ladder.reload();
    let tie = ladder.look_up(&problem(4, 4096), &device()).unwrap();
    assert_eq!(tie.record.unwrap().key.problem().unwrap().batch, 8);
}

#[test]
fn t12_the_product_name_is_no_identity_and_a_slice_is_another_gpu() {
    let facts = |name: &str, sm_count| DeviceFacts {
        name: name.into(),
        sm_count,
        ..device()
    };
    let key = |d: &DeviceFacts| TuneKey::forward(&problem(4, 4096), d);
    // SXM, NVL, H200 and a power-capped card: the same silicon tunes alike.
    assert_eq!(
        key(&facts("NVIDIA H100 80GB HBM3", 132)),
        key(&facts("NVIDIA H200 (350 W)", 132))
    );
    assert_ne!(
        key(&facts("NVIDIA H100 PCIe", 114)),
        key(&facts("NVIDIA H200", 132))
    );
    assert_ne!(
        key(&facts("NVIDIA H200 MIG 3g.71gb", 60)),
        key(&facts("NVIDIA H200", 132))
    );
    let less_memory = DeviceFacts {
        shared_memory_optin_bytes: 99 * 1024,
        ..device()
    };
    assert_ne!(key(&less_memory), key(&device()));
    assert_ne!(
        key(&DeviceFacts {
            arch: Arch(100),
            ..device()
        }),
        key(&device())
    );
}

#[test]
fn t12_another_gpu_answers_only_when_asked_and_says_so() {
    let (_dir, cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let pcie = DeviceFacts {
        sm_count: 114,
        ..device()
    };
    let silent = Ladder::builder()
        .cache(&cache)
        .build()
        .look_up(&problem(4, 4096), &pcie)
        .unwrap();
    assert_eq!((silent.tier, silent.other_device), (Tier::Default, false));
    let asked = Ladder::builder().cache(&cache).other_device(true).build();
    let answer = asked.look_up(&problem(4, 4096), &pcie).unwrap();
    assert_eq!(
        (answer.tier, answer.other_device),
        (Tier::LocalNearest, true)
    );
    assert_eq!(
        asked.look_up(&problem(4, 4096), &device()).unwrap().tier,
        Tier::Local
    );
    let hopper = DeviceFacts::assumed(Arch(90));
    assert_eq!(
        asked.look_up(&problem(4, 4096), &hopper).unwrap().tier,
        Tier::Default
    );
}

#[test]
fn a_family_is_the_same_from_every_source() {
    let (dir, cache, db) = database();
    let records = [record(1, 64, 1), record(10, 640, 2), record(4, 4096, 8)];
    db.commit(&records, &[], DEFAULT_WAIT).unwrap();
    let mut packed = problem(1, 4096);
    packed.packed = Some(7);
    let key = TuneKey::forward(&problem(4, 5000), &device());
    let expected: Vec<TuneKey> = {
        let mut keys: Vec<String> = records.iter().map(|r| r.key.to_string()).collect();
        keys.sort();
        keys.iter().map(|text| text.parse().unwrap()).collect()
    };
    assert_eq!(
        db.snapshot().unwrap().unwrap().family(&key).unwrap(),
        expected
    );
    assert_eq!(
        db.open_store(DEFAULT_WAIT).unwrap().family(&key).unwrap(),
        expected
    );
    let path = dir.path().join("b.mamba2bundle");
    mamba2_tunedb::Bundle::write(&path, "", records.to_vec(), []).unwrap();
    assert_eq!(
        mamba2_tunedb::Bundle::open(&path)
            .unwrap()
            .family(&key)
            .unwrap(),
        expected
    );
    let text = mamba2_tunedb::write_text(records).unwrap();
    assert_eq!(
        mamba2_tunedb::TextRecords::new("text", text)
            .unwrap()
            .family(&key),
        expected
    );
    let none = TuneKey::forward(&packed, &device());
    assert_eq!(
        db.snapshot().unwrap().unwrap().family(&none).unwrap(),
        vec![]
    );
    assert_eq!(
        Ladder::builder()
            .cache(&cache)
            .build()
            .look_up(&packed, &device())
            .unwrap()
            .tier,
        Tier::Default
    );
}
