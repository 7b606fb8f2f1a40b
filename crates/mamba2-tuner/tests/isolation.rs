//! Hangs, crashes and deaths of a real worker process that follows a script. No GPU.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::ops::ControlFlow;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mamba2_tuner::fake::{Act, Rule, Script};
use mamba2_tuner::worker::RemoteExecutor;
use mamba2_tuner::{
    Candidate, Compiling, Executor, MemorySink, Policy, Silent, Target, TunerError, tune_target,
};

const HANGS: &str = "chunk_cumsum(chunk_size=64,layout=bht,block_h=1)";
const CRASHES: &str = "chunk_cumsum(chunk_size=64,layout=bht,block_h=2)";
const CRASHES_IN_MEASURE: &str = "chunk_cumsum(chunk_size=64,layout=bht,block_h=8)";

fn target() -> Target {
    Target::Forward("b=1,l=100,h=2,p=32,g=1,n=32".parse().unwrap())
}

fn rule(matches: &str, act: Act) -> Rule {
    Rule {
        matches: matches.into(),
        act,
    }
}

fn start(script: &Script, timeout: Duration) -> Result<RemoteExecutor, TunerError> {
    let script = serde_json::to_string(script).unwrap();
    let launch = move |_role: &_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mamba2-tuner-fake-worker"));
        command.arg(&script);
        command
    };
    RemoteExecutor::start(Box::new(launch), 0, None, timeout)
}

#[test]
fn a_candidate_that_hangs_or_crashes_its_process_costs_itself_only() {
    let rules = vec![
        rule(HANGS, Act::Hang),
        rule(CRASHES, Act::Crash),
        rule(CRASHES_IN_MEASURE, Act::CrashInMeasure),
    ];
    let script = Script {
        rules,
        for_real: true,
        ..Script::default()
    };
    let executor = start(&script, Duration::from_millis(400)).unwrap();
    let report = tune_target(
        &target(),
        &executor,
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    let failure = |kind: &str| report.failures.iter().find(|f| f.kind == kind).unwrap();
    assert_eq!(
        (failure("hang").count, failure("hang").candidate.as_str()),
        (1, HANGS)
    );
    assert_eq!(failure("crash").count, 2);
    assert!(
        failure("crash").reason.contains("signal"),
        "{}",
        failure("crash").reason
    );
    assert_eq!(report.counts.failed, 3);
    assert!(
        report.counts.measured > 100,
        "everything else was measured: {:?}",
        report.counts
    );
}

#[test]
fn a_candidate_that_crashes_its_compiler_costs_itself_only() {
    let script = Script {
        rules: vec![rule(CRASHES, Act::CrashInCompile)],
        for_real: true,
        ..Script::default()
    };
    let executor = start(&script, Duration::from_secs(20)).unwrap();
    let space = mamba2_tuner::space::Space::of(&target(), executor.device(), None).unwrap();
    let candidates: Vec<Candidate> = space.assemblies[0]
        .parts
        .iter()
        .flatten()
        .copied()
        .collect();
    let results = executor.compile_all(&target(), &candidates).unwrap();
    let failed: Vec<String> = candidates
        .iter()
        .zip(&results)
        .filter(|(_, r)| r.is_err())
        .map(|(c, _)| c.to_string())
        .collect();
    assert_eq!(failed, [CRASHES]);
    let alone = executor.compile_all(&target(), &candidates[1..2]).unwrap();
    assert_eq!(alone[0].is_err(), candidates[1].to_string() == CRASHES);
}

#[test]
fn whoever_breaks_off_a_compilation_hears_no_more_and_the_next_one_is_served() {
    let script = Script {
        compile_ms: 20,
        ..Script::default()
    };
    let executor = start(&script, Duration::from_secs(20)).unwrap();
    let space = mamba2_tuner::space::Space::of(&target(), executor.device(), None).unwrap();
    let candidates = &space.assemblies[0].parts[1];
    let heard = AtomicUsize::new(0);
    let tell = |step| match step {
        Compiling::Done(..) if heard.fetch_add(1, Ordering::SeqCst) == 1 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    executor.compile(&target(), candidates, &tell).unwrap();
    assert_eq!(heard.load(Ordering::SeqCst), 2);
    let next = executor.compile_all(&target(), &candidates[..3]).unwrap();
    assert!(next.iter().all(Result::is_ok));
}

#[test]
fn the_choice_through_a_worker_is_the_choice_without_one() {
    let script = Script {
        noise: 0.01,
        ..Script::default()
    };
    let remote = start(&script, Duration::from_secs(20)).unwrap();
    let through = tune_target(
        &target(),
        &remote,
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    let local = mamba2_tuner::fake::FakeExecutor::new(script);
    let direct = tune_target(
        &target(),
        &local,
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    assert_eq!(through.choice, direct.choice);
    assert_eq!(remote.device(), local.device());
}

#[test]
fn a_worker_that_cannot_start_is_an_error_with_its_own_words() {
    let mut script = Script::default();
    script.device.name = "refuses to start".into();
    let error = start(&script, Duration::from_secs(5))
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("scripted refusal"), "{error}");
}

#[test]
fn a_missing_worker_binary_is_an_error() {
    let launch = |_role: &_| Command::new("/no/such/worker");
    let error = RemoteExecutor::start(Box::new(launch), 0, None, Duration::from_secs(1))
        .err()
        .unwrap();
    assert!(matches!(error, TunerError::Device(_)), "{error}");
}

#[test]
fn a_dropped_executor_leaves_no_process_even_if_its_worker_hangs() {
    let script = Script {
        rules: vec![rule("(", Act::Hang)],
        for_real: true,
        ..Script::default()
    };
    let executor = start(&script, Duration::from_millis(200)).unwrap();
    let started = Instant::now();
    let candidate = mamba2_tuner::space::Space::of(&target(), executor.device(), None)
        .unwrap()
        .default;
    let verified = executor
        .verify(&target(), &candidate, mamba2_tuner::Check::Twin)
        .unwrap();
    assert_eq!(verified.unwrap_err().kind, mamba2_tuner::FailureKind::Hang);
    drop(executor);
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "{:?}",
        started.elapsed()
    );
}
