//! Caches that another version of this program filled, and what outlives a change of templates, compiler or driver.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use common::{block_h, config, database, device, evidence, problem, provenance, record};
use mamba2_tunedb::{
    Bundle, DEFAULT_WAIT, FailureStage, Ladder, Outcome, Record, Snapshot, Tier, Timing,
    TuneDbError, TuneKey, config_text, ops,
};
use serde_json::json;

fn look_up(cache: &mamba2_tunedb::CacheDir) -> mamba2_tunedb::Answer {
    Ladder::builder()
        .cache(cache)
        .build()
        .look_up(&problem(4, 4096), &device())
        .unwrap()
}

#[test]
fn t7_a_renamed_parameter_or_removed_value_is_a_miss_until_the_next_tune_overwrites_it() {
    type Change = fn(&mut Record);
    let changes: [(&str, Change); 4] = [
        ("renamed parameter", |r| {
            r.config["chunk_cumsum"]["heads_per_block"] = json!(4)
        }),
        ("removed value", |r| {
            r.config["chunk_cumsum"]["block_h"] = json!(3)
        }),
        ("kernel that is gone", |r| {
            r.config["chunk_scan"] = json!({ "warps": 4 })
        }),
        ("strategy that is gone", |r| {
            r.config["strategy"] = json!("two_kernel")
        }),
    ];
    for (what, change) in changes {
        let (_dir, cache, db) = database();
        let mut old = record(4, 4096, 8);
        change(&mut old);
        db.commit(&[old, record(4, 64, 8)], &[], DEFAULT_WAIT)
            .unwrap();
        let answer = look_up(&cache);
        assert_eq!(
            (answer.tier, answer.warnings.len()),
            (Tier::Default, 1),
            "{what}: {:?}",
            answer.warnings
        );
        let other = Ladder::builder()
            .cache(&cache)
            .build()
            .look_up(&problem(4, 64), &device())
            .unwrap();
        assert_eq!(other.tier, Tier::Local, "{what}: good entries live on");
        db.commit(&[record(4, 4096, 2)], &[], DEFAULT_WAIT).unwrap();
        assert_eq!(
            (look_up(&cache).tier, block_h(&look_up(&cache).config)),
            (Tier::Local, 2),
            "{what}"
        );
    }
}

#[test]
fn t7_a_parameter_added_since_takes_its_default() {
    let (_dir, cache, db) = database();
    let mut old = record(4, 4096, 8);
    old.config["compute_out"]
        .as_object_mut()
        .unwrap()
        .remove("stages")
        .unwrap();
    db.commit(&[old], &[], DEFAULT_WAIT).unwrap();
    assert_eq!(
        (look_up(&cache).tier, look_up(&cache).config),
        (Tier::Local, config(&problem(4, 4096), 8))
    );
}

#[test]
fn t7_a_config_that_breaks_todays_rules_is_refused_with_the_rule() {
    let (_dir, cache, db) = database();
    let mut illegal = record(4, 4096, 8);
    illegal.config["compute_out"]["layout"] = json!("bth");
    db.commit(&[illegal], &[], DEFAULT_WAIT).unwrap();
    let answer = look_up(&cache);
    assert_eq!(answer.tier, Tier::Default);
    assert!(answer.warnings[0].contains("S01"), "{:?}", answer.warnings);
}

#[test]
fn t7_metadata_of_a_newer_program_is_kept_and_blocks_nothing() {
    let (_dir, cache, db) = database();
    let mut newer = record(4, 4096, 8);
    newer
        .extra
        .insert("power_limit_w".into(), json!({ "z": 1, "a": [700] }));
    db.commit(&[newer.clone()], &[], DEFAULT_WAIT).unwrap();
    assert_eq!(look_up(&cache).tier, Tier::Local);
    let text = ops::export(&ops::list(&db).unwrap())
        .unwrap()
        .0
        .remove("sm80-108sm.json")
        .unwrap();
    assert!(
        text.contains(r#""power_limit_w":{"a":[700],"z":1}"#),
        "{text}"
    );
    db.commit(&[record(4, 2048, 8)], &[], DEFAULT_WAIT).unwrap();
    assert_eq!(
        db.snapshot()
            .unwrap()
            .unwrap()
            .get(&newer.key)
            .unwrap()
            .unwrap()
            .extra,
        newer.extra
    );
}

#[test]
fn t7_a_changed_template_marks_only_its_own_entries_stale() {
    use mamba2_spec::{Kernel, StepProblem, rules};
    let (_dir, cache, db) = database();
    let made_with = |mut record: Record, digest: &str| {
        record.evidence.built_with.template_digest = digest.into();
        record
    };
    let step = StepProblem::new(64, 80, 64, 1, 128);
    let config = rules::default_step(&step, &device()).unwrap();
    let of_step = Record::step(&step, &device(), &config, evidence(9.0, 0));
    db.commit(
        &[
            made_with(record(4, 4096, 8), "t1+t1+t1"),
            made_with(record(4, 64, 8), "t1+t1+t2"),
            made_with(of_step, "t1"),
        ],
        &[],
        DEFAULT_WAIT,
    )
    .unwrap();
    // compute_out, the last of the three kernels, was changed.
    let ladder = Ladder::builder()
        .cache(&cache)
        .templates(|kernel| {
            if kernel == Kernel::ComputeOut {
                "t2"
            } else {
                "t1"
            }
            .into()
        })
        .build();
    let stale = |l| ladder.look_up(&problem(4, l), &device()).unwrap().stale;
    assert_eq!((stale(4096), stale(64)), (true, false));
    let answer = ladder.look_up_step(&step, &device()).unwrap();
    assert_eq!((answer.tier, answer.stale), (Tier::Local, false));
}

#[test]
fn t7_one_more_candidate_costs_only_its_own_measurement() {
    let (_dir, _cache, db) = database();
    let key = TuneKey::forward(&problem(4, 4096), &device());
    let measured = |h, us| {
        let outcome = Outcome::Measured {
            median_us: us,
            spread_us: 0.1,
            samples: 9,
            max_error: 1e-3,
        };
        Timing::new(
            key,
            &config(&problem(4, 4096), h),
            outcome,
            provenance("t1"),
        )
    };
    db.commit(&[], &[measured(1, 5.0), measured(2, 4.0)], DEFAULT_WAIT)
        .unwrap();
    db.commit(&[], &[measured(4, 3.0)], DEFAULT_WAIT).unwrap();
    let known = db.timings(&[key], DEFAULT_WAIT).unwrap();
    let has = |h| {
        known.iter().any(|t| {
            t.config_text() == config_text(&config(&problem(4, 4096), h))
                && t.is_current(&provenance("t1"))
        })
    };
    assert_eq!([has(1), has(2), has(4), has(8)], [true, true, true, false]);
    let shown = ops::show(&db, &key, DEFAULT_WAIT).unwrap();
    assert_eq!(shown.timings[0].outcome, measured(4, 3.0).outcome);
}

#[test]
fn p7_a_failure_is_kept_with_its_reason_and_tried_again_only_after_a_change() {
    let (_dir, _cache, db) = database();
    let key = TuneKey::forward(&problem(4, 4096), &device());
    let reason = "ptxas: 12 bytes spill stores";
    let outcome = Outcome::Failed {
        stage: FailureStage::Spill,
        reason: reason.into(),
    };
    db.commit(
        &[],
        &[Timing::new(
            key,
            &config(&problem(4, 4096), 1),
            outcome.clone(),
            provenance("t1"),
        )],
        DEFAULT_WAIT,
    )
    .unwrap();
    let kept = &db.timings(&[key], DEFAULT_WAIT).unwrap()[0];
    assert_eq!(kept.outcome, outcome);
    assert!(kept.is_current(&provenance("t1")));
    let mut changed = [provenance("t2"), provenance("t1"), provenance("t1")];
    changed[1].nvrtc = "13.1".into();
    changed[2].driver = "13.1".into();
    assert!(changed.iter().all(|now| !kept.is_current(now)));
}

#[test]
fn p4_a_noisy_record_gives_way_to_a_calm_one_in_a_merge() {
    let (_dir, _cache, db) = database();
    let mut noisy = record(4, 4096, 8);
    noisy.evidence.noisy = true;
    noisy.evidence.date_unix_s += 1000;
    let store = db.open_store(DEFAULT_WAIT).unwrap();
    assert!(store.merge(&noisy).unwrap());
    assert!(store.merge(&record(4, 4096, 2)).unwrap());
    assert!(!store.merge(&noisy).unwrap());
}

#[test]
fn t15_records_merged_in_any_order_give_the_same_digest() {
    let mut other = record(4, 4096, 2);
    other.evidence = evidence(90.0, 1_700_000_000);
    let records = [
        record(4, 4096, 8),
        other,
        record(1, 64, 1),
        record(2, 128, 1),
    ];
    let digest = |order: [usize; 4]| {
        let (_dir, _cache, db) = database();
        let store = db.open_store(DEFAULT_WAIT).unwrap();
        for i in order {
            store.merge(&records[i]).unwrap();
        }
        store.commit().unwrap();
        db.snapshot().unwrap().unwrap().digest()
    };
    let first = digest([0, 1, 2, 3]);
    assert_eq!(
        [digest([3, 2, 1, 0]), digest([1, 3, 0, 2])],
        [first.clone(), first]
    );
}

#[test]
fn t15_another_process_that_tunes_does_not_change_answers_under_way() {
    let (_dir, cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    let (digest, near) = (
        ladder.snapshot_digest(),
        ladder.look_up(&problem(4, 5000), &device()).unwrap(),
    );
    db.commit(&[record(4, 4096, 2), record(4, 6000, 2)], &[], DEFAULT_WAIT)
        .unwrap();
    assert_eq!(
        block_h(&ladder.look_up(&problem(4, 4096), &device()).unwrap().config),
        8
    );
    assert_eq!(
        ladder.look_up(&problem(4, 6000), &device()).unwrap().tier,
        Tier::LocalNearest
    );
    assert_eq!(
        (
            ladder.snapshot_digest(),
            ladder.look_up(&problem(4, 5000), &device()).unwrap()
        ),
        (digest, near)
    );
    ladder.reload();
    assert_eq!(
        block_h(&ladder.look_up(&problem(4, 4096), &device()).unwrap().config),
        2
    );
}

#[test]
fn a_clock_that_goes_back_does_not_keep_the_older_record() {
    let (_dir, cache, db) = database();
    let dated = |h, date| {
        let mut dated = record(4, 4096, h);
        dated.evidence.date_unix_s = date;
        dated
    };
    db.commit(&[dated(8, 2_000_000_000)], &[], DEFAULT_WAIT)
        .unwrap();
    db.commit(&[dated(2, 1_000_000_000)], &[], DEFAULT_WAIT)
        .unwrap();
    assert_eq!(block_h(&look_up(&cache).config), 2);
    // The same through a part file, while another process has the store.
    let store = db.open_store(DEFAULT_WAIT).unwrap();
    let committed = db
        .commit(&[dated(4, 500)], &[], std::time::Duration::ZERO)
        .unwrap();
    assert!(matches!(committed, mamba2_tunedb::Committed::Part(_)));
    assert_eq!(block_h(&look_up(&cache).config), 4);
    drop(store);
    drop(db.open_store(DEFAULT_WAIT).unwrap());
    assert_eq!(block_h(&look_up(&cache).config), 4);
}

#[test]
fn a_newer_store_is_left_alone_and_its_snapshot_answers() {
    let (_dir, cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let newer = sled::open(db.store_path()).unwrap();
    newer.insert("mamba2-tunedb", "2").unwrap();
    newer.insert("something", "new").unwrap();
    newer.flush().unwrap();
    drop(newer);
    // The seal would only say that sled's files changed.
    std::fs::remove_file(db.root().join("store.seal")).unwrap();
    for _ in 0..2 {
        assert!(matches!(
            db.open_store(DEFAULT_WAIT),
            Err(TuneDbError::Newer { got: 2, .. })
        ));
        assert!(matches!(
            db.commit(&[record(5, 4096, 8)], &[], DEFAULT_WAIT),
            Err(TuneDbError::Newer { .. })
        ));
    }
    assert_eq!(look_up(&cache).tier, Tier::Local);
    assert!(!db.root().join("store.damaged-1").exists());
    let still = sled::open(db.store_path()).unwrap();
    assert_eq!(still.get("something").unwrap().unwrap(), "new");
}

#[test]
fn newer_texts_bundles_and_parts_are_named_and_left_alone() {
    let (dir, _cache, db) = database();
    let text = mamba2_tunedb::write_text([record(4, 4096, 8)]).unwrap();
    let newer_text = text.replacen("\"version\":1", "\"version\":2", 1);
    assert_ne!(text, newer_text);
    let bundle = dir.path().join("b.mamba2bundle");
    Bundle::write(&bundle, "", [record(4, 4096, 8)], []).unwrap();
    let mut newer_bundle = std::fs::read(&bundle).unwrap();
    newer_bundle[8] = 2;
    for (name, bytes) in [
        ("records.json", newer_text.into_bytes()),
        ("b.mamba2bundle", newer_bundle),
    ] {
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        assert!(
            matches!(
                ops::import(&db, &path, DEFAULT_WAIT),
                Err(TuneDbError::Newer { got: 2, .. })
            ),
            "{name}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{name}");
    }
    // A part that a newer program left waits for a newer program, and stops nobody.
    std::fs::create_dir_all(db.parts_path()).unwrap();
    let part = db.parts_path().join("host-1-00.part");
    std::fs::write(&part, "mamba2-tunedb part 2 0011\nwhatever\n").unwrap();
    for _ in 0..2 {
        db.commit(&[record(5, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
        assert!(part.exists());
    }
    assert_eq!(db.snapshot().unwrap().unwrap().len(), 1);
}

#[test]
fn a_newer_snapshot_stops_writers_and_not_readers() {
    let (_dir, cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let mut bytes = std::fs::read(db.snapshot_path()).unwrap();
    bytes[8] = 2;
    std::fs::write(db.snapshot_path(), &bytes).unwrap();
    assert!(matches!(
        Snapshot::open(&db.snapshot_path()),
        Err(TuneDbError::Newer { got: 2, .. })
    ));
    assert!(matches!(
        db.open_store(DEFAULT_WAIT),
        Err(TuneDbError::Newer { .. })
    ));
    assert_eq!(std::fs::read(db.snapshot_path()).unwrap(), bytes);
    let ladder = Ladder::builder().cache(&cache).build();
    assert!(
        ladder.warnings()[0].contains("newer"),
        "{:?}",
        ladder.warnings()
    );
    // Its entries may mean something else; the default computes.
    assert!(matches!(
        ladder.look_up(&problem(4, 4096), &device()).unwrap().tier,
        Tier::Default | Tier::Local
    ));
}
