//! The search with the real tuning database behind it. No GPU.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::process::{Command, Stdio};

use mamba2_spec::StepProblem;
use mamba2_tunedb::{CacheDir, DEFAULT_WAIT, LocalDb, TuneKey};
use mamba2_tuner::fake::{Act, FakeExecutor, Rule, Script};
use mamba2_tuner::{
    Candidate, DbSink, Executor, FailureKind, Policy, Silent, Target, tune_step, tune_target,
};

fn target() -> Target {
    Target::Forward("b=1,l=100,h=2,p=32,g=1,n=32".parse().unwrap())
}

fn db(directory: &std::path::Path) -> LocalDb {
    LocalDb::in_cache(&CacheDir::fixed(directory)).unwrap()
}

fn scripted() -> FakeExecutor {
    let rules = vec![Rule {
        matches: "compute_out(chunk_size=64".into(),
        act: Act::Fails(FailureKind::Spill),
    }];
    FakeExecutor::new(Script {
        rules,
        noise: 0.01,
        ..Script::default()
    })
}

#[test]
fn a_tuned_shape_is_a_record_that_the_launcher_finds_and_a_second_process_measures_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let Target::Forward(problem) = target() else {
        panic!("a forward shape")
    };
    let executor = scripted();
    let first = tune_target(
        &target(),
        &executor,
        &DbSink::new(db(directory.path())),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    let snapshot = db(directory.path()).snapshot().unwrap().unwrap();
    let record = snapshot
        .get(&TuneKey::forward(&problem, executor.device()))
        .unwrap()
        .unwrap();
    assert_eq!(
        Candidate::Strategy(record.strategy().unwrap()),
        first.choice.candidate
    );
    assert_eq!(record.evidence.median_us, first.choice.summary.median_us);
    assert_eq!(record.evidence.rejected as usize, first.choice.rejected);
    assert!(record.evidence.rejected > 0 && record.evidence.candidates > record.evidence.rejected);
    // Another sink is another process: it knows only what is on disk.
    let again = scripted();
    let second = tune_target(
        &target(),
        &again,
        &DbSink::new(db(directory.path())),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    assert_eq!(again.calls(), vec![]);
    assert_eq!(second.choice, first.choice);
    assert_eq!(second.failures, first.failures);
}

#[test]
fn the_measurement_policy_is_stored_with_every_result_and_another_policy_measures_anew() {
    let directory = tempfile::tempdir().unwrap();
    let Target::Forward(problem) = target() else {
        panic!("a forward shape")
    };
    let tune = |executor: &FakeExecutor, policy: &Policy| {
        let sink = DbSink::new(db(directory.path()));
        tune_target(&target(), executor, &sink, &Silent, policy).unwrap()
    };
    let policy = Policy::default();
    let executor = scripted();
    tune(&executor, &policy);
    let key = TuneKey::forward(&problem, executor.device());
    let stored = || {
        let snapshot = db(directory.path()).snapshot().unwrap().unwrap();
        snapshot.get(&key).unwrap().unwrap().evidence.policy
    };
    assert_eq!(stored(), policy.measurement());
    let timings = || db(directory.path()).timings(&[key], DEFAULT_WAIT).unwrap();
    let measured =
        |t: &mamba2_tunedb::Timing| matches!(t.outcome, mamba2_tunedb::Outcome::Measured { .. });
    assert!(timings().iter().any(measured));
    for timing in timings().iter().filter(|t| measured(t)) {
        assert!(
            timing.policy.starts_with(&policy.measurement()),
            "{timing:?}"
        );
    }
    // Times taken in another way do not compare: they are all taken again. Failures do not depend on it.
    let other = Policy {
        samples: policy.samples + 2,
        ..policy
    };
    let again = scripted();
    let report = tune(&again, &other);
    assert_eq!(stored(), other.measurement());
    assert_eq!(report.counts.stored, report.counts.failed);
    assert!(report.counts.failed > 0);
}

#[test]
fn a_decode_step_is_stored_and_found_too() {
    let directory = tempfile::tempdir().unwrap();
    let problem = StepProblem::new(4, 8, 64, 1, 128);
    let executor = scripted();
    let sink = DbSink::new(db(directory.path()));
    let report = tune_step(&problem, &executor, &sink, &Silent, &Policy::default()).unwrap();
    let snapshot = db(directory.path()).snapshot().unwrap().unwrap();
    let record = snapshot
        .get(&TuneKey::step(&problem, executor.device()))
        .unwrap()
        .unwrap();
    assert_eq!(
        Candidate::Step(record.step_config().unwrap()),
        report.choice.candidate
    );
}

#[test]
fn a_store_that_another_process_holds_does_not_stop_the_job() {
    let directory = tempfile::tempdir().unwrap();
    let held = db(directory.path()).open_store(DEFAULT_WAIT).unwrap();
    drop(held);
    let sink = DbSink::new(db(directory.path()));
    tune_target(&target(), &scripted(), &sink, &Silent, &Policy::default()).unwrap();
    // While nothing is measured no lock is held: another writer gets in at once.
    db(directory.path())
        .open_store(std::time::Duration::from_millis(200))
        .unwrap();
}

#[test]
fn t3_a_job_killed_in_the_middle_loses_nothing_that_was_stored() {
    let directory = tempfile::tempdir().unwrap();
    let whole = scripted();
    let policy = Policy {
        batch: 30,
        ..Policy::default()
    };
    let undisturbed = tempfile::tempdir().unwrap();
    let sink = DbSink::new(db(undisturbed.path()));
    let wanted = tune_target(&target(), &whole, &sink, &Silent, &policy).unwrap();
    let total = whole.measured().len();
    let mut measured = 0;
    // Each run dies at a later measurement; the last one gets through.
    for die_at in [50u64, 90, 200] {
        let script = Script {
            die_at_measurement: Some(die_at),
            rules: scripted_rules(),
            noise: 0.01,
            ..Script::default()
        };
        let status = Command::new(env!("CARGO_BIN_EXE_mamba2-tuner-fake-worker"))
            .args([
                serde_json::to_string(&script).unwrap(),
                directory.path().display().to_string(),
                "30".into(),
                target().to_string(),
            ])
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(!status.success(), "the job should have been killed");
        measured += die_at as usize;
    }
    let last = scripted();
    let report = tune_target(
        &target(),
        &last,
        &DbSink::new(db(directory.path())),
        &Silent,
        &policy,
    )
    .unwrap();
    assert!(report.counts.stored > 0);
    // Only the batch in hand and the one being stored are measured again: three deaths cost at most six batches, each candidate twice.
    let again = measured + last.measured().len();
    assert!(
        again <= total + 3 * 2 * 2 * 30,
        "{again} measurements against {total} of an undisturbed job"
    );
    assert!((report.choice.summary.median_us / wanted.choice.summary.median_us - 1.0).abs() < 0.03);
}

fn scripted_rules() -> Vec<Rule> {
    vec![Rule {
        matches: "compute_out(chunk_size=64".into(),
        act: Act::Fails(FailureKind::Spill),
    }]
}
