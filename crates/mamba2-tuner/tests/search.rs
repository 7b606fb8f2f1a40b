//! The search against a scripted device: ranking, cuts, ties, failures, resume, shards. No GPU.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::sync::atomic::{AtomicUsize, Ordering};

use mamba2_spec::{DeviceFacts, Kernel, StepProblem, StrategyConfig, rules};
use mamba2_tuner::fake::{Act, Call, FakeExecutor, Rule, Script};
use mamba2_tuner::space::{Assembly, Space};
use mamba2_tuner::{
    Candidate, Check, Choice, Executor, FailureKind, Hopeless, MemorySink, Outcome, Policy, Shard,
    Silent, Sink, Stage, Stored, Target, TuneReport, TunerError, run_job, tune_space, tune_step,
    tune_target,
};

fn target() -> Target {
    Target::Forward("b=2,l=300,h=4,p=64,g=1,n=64".parse().unwrap())
}

fn rule(matches: impl Into<String>, act: Act) -> Rule {
    Rule {
        matches: matches.into(),
        act,
    }
}

fn scripted(rules: Vec<Rule>) -> FakeExecutor {
    FakeExecutor::new(Script {
        rules,
        ..Script::default()
    })
}

fn tune(executor: &FakeExecutor, sink: &MemorySink) -> TuneReport {
    tune_target(&target(), executor, sink, &Silent, &Policy::default()).unwrap()
}

fn space(executor: &FakeExecutor) -> Space {
    Space::of(&target(), executor.device(), None).unwrap()
}

fn parts(space: &Space) -> Vec<Candidate> {
    space
        .assemblies
        .iter()
        .flat_map(|a| &a.parts)
        .flatten()
        .copied()
        .collect()
}

/// The fastest of each kernel for one (chunk_size, layout), by the script's true times.
fn best_possible(executor: &FakeExecutor) -> f64 {
    let of_part = |part: &Vec<Candidate>| {
        part.iter()
            .map(|c| executor.true_us(c))
            .fold(f64::INFINITY, f64::min)
    };
    let of_assembly = |a: &Assembly| a.parts.iter().map(of_part).sum::<f64>();
    space(executor)
        .assemblies
        .iter()
        .map(of_assembly)
        .fold(f64::INFINITY, f64::min)
}

#[test]
fn the_fastest_combination_of_all_kernels_wins_and_every_candidate_was_measured() {
    let executor = scripted(vec![]);
    let sink = MemorySink::default();
    let report = tune(&executor, &sink);
    let best = best_possible(&executor);
    let chosen = report.choice.summary.median_us;
    assert!(
        chosen < best * 1.01,
        "{chosen} us is not within the noise of {best} us"
    );
    let measured = executor.measured();
    for candidate in parts(&space(&executor)) {
        assert!(
            measured.contains(&candidate.to_string()),
            "{candidate} was not measured"
        );
    }
    assert_eq!(
        sink.choice(executor.device(), &target()),
        Some(report.choice)
    );
}

#[test]
fn every_candidate_is_compiled_and_verified_before_it_is_measured() {
    let executor = scripted(vec![]);
    tune(&executor, &MemorySink::default());
    let calls = executor.calls();
    for (i, call) in calls.iter().enumerate() {
        if let Call::Measure(name) = call {
            let before = &calls[..i];
            assert!(
                before.contains(&Call::Compile(name.clone())),
                "{name} was measured before it was compiled"
            );
            assert!(
                before.contains(&Call::Verify(name.clone(), Check::Twin)),
                "{name} was measured before it was verified"
            );
        }
    }
}

#[test]
fn finalists_are_checked_on_the_shape_itself_against_the_default() {
    let executor = scripted(vec![]);
    let report = tune(&executor, &MemorySink::default());
    let default = space(&executor).default;
    for finalist in &report.finalists {
        let check = Call::Verify(
            finalist.candidate.clone(),
            Check::RealShape { against: default },
        );
        assert!(executor.calls().contains(&check), "{}", finalist.candidate);
    }
}

#[test]
fn hopeless_candidates_are_cut_after_the_first_look() {
    let slow = "compute_out(chunk_size=128,layout=bht,block_h=1";
    let executor = scripted(vec![rule(slow, Act::Takes(1e4))]);
    let sink = MemorySink::default();
    let report = tune(&executor, &sink);
    let of_rule: Vec<Candidate> = parts(&space(&executor))
        .into_iter()
        .filter(|c| c.to_string().starts_with(slow))
        .collect();
    assert!(!of_rule.is_empty());
    for candidate in of_rule {
        let stored = sink
            .result(executor.device(), &target(), &candidate)
            .unwrap()
            .unwrap();
        let cut = matches!(
            stored.outcome,
            Outcome::Timed {
                stage: Stage::Cut(_),
                ..
            }
        );
        // The default of the group is looked at first, when nothing faster is known.
        assert!(
            cut || executor
                .measured()
                .iter()
                .filter(|m| **m == candidate.to_string())
                .count()
                > 1,
            "{candidate}"
        );
    }
    assert!(report.counts.cut > 0);
}

#[test]
fn a_kernel_that_takes_longer_alone_than_another_strategy_altogether_is_cut() {
    // The best of its group, and still hopeless.
    let slow = "compute_out(chunk_size=128";
    let executor = scripted(vec![rule(slow, Act::Takes(1e4))]);
    let sink = MemorySink::default();
    let report = tune(&executor, &sink);
    let (mut cut, mut slow_ones) = (0, 0);
    for candidate in parts(&space(&executor)) {
        let stored = sink.result(executor.device(), &target(), &candidate);
        if let Outcome::Timed {
            stage: Stage::Cut(Hopeless::InAll),
            summary,
            ..
        } = stored.unwrap().unwrap().outcome
        {
            assert_eq!(summary.samples, Policy::default().probe_samples);
            slow_ones += usize::from(candidate.to_string().starts_with(slow));
            cut += 1;
        }
    }
    assert!(slow_ones > 0);
    assert_eq!(report.counts.cut_in_all, cut);
    assert!(!report.chosen.contains(slow));
    let again = scripted(vec![]);
    assert_eq!(tune(&again, &sink).counts.cut_in_all, cut);
    assert_eq!(again.calls(), vec![], "a cut candidate stays cut");
}

#[test]
fn candidates_are_measured_while_others_compile() {
    let policy = Policy {
        batch: 8,
        ..Policy::default()
    };
    let executor = FakeExecutor::new(Script {
        compile_ms: 2,
        ..Script::default()
    });
    tune_target(
        &target(),
        &executor,
        &MemorySink::default(),
        &Silent,
        &policy,
    )
    .unwrap();
    let calls = executor.calls();
    let first = |wanted: fn(&Call) -> bool| calls.iter().position(wanted).unwrap();
    let measured = first(|c| matches!(c, Call::Measure(_)));
    let is_compile = |c: &&Call| matches!(c, Call::Compile(_));
    assert!(calls[..measured].iter().filter(is_compile).count() >= 8);
    assert!(calls[measured..].iter().filter(is_compile).count() > 8);
}

/// Keeps the first results and then nothing more.
struct Full(MemorySink, AtomicUsize);

impl Sink for Full {
    fn result(
        &self,
        device: &DeviceFacts,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Option<Stored>, TunerError> {
        self.0.result(device, target, candidate)
    }

    fn put_results(
        &self,
        device: &DeviceFacts,
        target: &Target,
        results: &[(Candidate, Stored)],
    ) -> Result<(), TunerError> {
        if self.1.fetch_add(1, Ordering::SeqCst) > 0 {
            return Err(TunerError::Store("no space left".into()));
        }
        self.0.put_results(device, target, results)
    }

    fn put_choice(&self, _: &DeviceFacts, _: &Target, _: &Choice) -> Result<(), TunerError> {
        Err(TunerError::Store("no space left".into()))
    }
}

#[test]
fn a_search_that_cannot_store_stops_compiling_too() {
    let policy = Policy {
        batch: 8,
        ..Policy::default()
    };
    let executor = FakeExecutor::new(Script {
        compile_ms: 2,
        ..Script::default()
    });
    let sink = Full(MemorySink::default(), AtomicUsize::new(0));
    let error = tune_target(&target(), &executor, &sink, &Silent, &policy).unwrap_err();
    assert!(matches!(error, TunerError::Store(_)), "{error}");
    let is_compile = |c: &&Call| matches!(c, Call::Compile(_));
    let compiled = executor.calls().iter().filter(is_compile).count();
    let all = parts(&space(&executor)).len();
    assert!(compiled < all, "{compiled} of {all}");
}

#[test]
fn t15_the_default_wins_when_nothing_is_faster_by_more_than_the_noise() {
    // Every candidate of a kernel takes the same time but for half a percent.
    let executor = FakeExecutor::new(Script {
        noise: 0.004,
        // Whole strategies are written strategy:kernel(...);...
        rules: vec![rule(":", Act::Takes(300.0))],
        ..Script::default()
    });
    let report = tune(&executor, &MemorySink::default());
    assert!(report.default_chosen, "{}", report.chosen);
}

#[test]
fn near_ties_are_measured_again() {
    let executor = FakeExecutor::new(Script {
        noise: 0.004,
        // Whole strategies are written strategy:kernel(...);...
        rules: vec![rule(":", Act::Takes(300.0))],
        ..Script::default()
    });
    tune(&executor, &MemorySink::default());
    let default = space(&executor).default.to_string();
    let times = executor
        .measured()
        .iter()
        .filter(|m| **m == default)
        .count();
    assert_eq!(times, 1 + Policy::default().tie_rounds as usize);
}

#[test]
fn p5_the_winner_is_the_same_or_within_3_percent_over_noisy_runs() {
    let mut winners = Vec::new();
    for salt in 0..5 {
        // Another delay between batches: another order of noise, since samples depend on the count of calls.
        let policy = Policy {
            batch: 17 + salt,
            ..Policy::default()
        };
        let executor = FakeExecutor::new(Script {
            noise: 0.03,
            ..Script::default()
        });
        let report = tune_target(
            &target(),
            &executor,
            &MemorySink::default(),
            &Silent,
            &policy,
        )
        .unwrap();
        winners.push(executor.true_us(&report.choice.candidate));
    }
    let best = winners.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(winners.iter().all(|us| *us <= 1.03 * best), "{winners:?}");
}

#[test]
fn p6_the_choice_is_never_slower_than_the_default_and_the_default_is_always_measured() {
    let fast_default = rules::default_strategy(
        &"b=2,l=300,h=4,p=64,g=1,n=64".parse().unwrap(),
        FakeExecutor::default().device(),
    );
    let name = fast_default.unwrap().to_string();
    // Parts look fast, but put together nothing beats the default.
    let executor = scripted(vec![
        rule(name, Act::Takes(10.0)),
        rule("three_kernel", Act::Takes(11.0)),
    ]);
    let report = tune(&executor, &MemorySink::default());
    assert!(report.default_chosen);
    assert_eq!(report.choice.default.unwrap().median_us, 10.0);
}

#[test]
fn a_wrong_spilling_unstable_or_overwriting_candidate_cannot_win_however_fast() {
    for kind in [
        FailureKind::Compile,
        FailureKind::Spill,
        FailureKind::Wrong,
        FailureKind::Unstable,
        FailureKind::OutOfBounds,
    ] {
        let executor = scripted(vec![
            rule("fwd_pass_state(chunk_size=64", Act::Fails(kind)),
            rule("compute_out(chunk_size=64", Act::Takes(0.001)),
        ]);
        let report = tune(&executor, &MemorySink::default());
        assert!(
            !report.chosen.contains("chunk_size=64"),
            "{kind:?}: {}",
            report.chosen
        );
        let failure = report
            .failures
            .iter()
            .find(|f| f.kind == kind.name())
            .unwrap();
        assert!(failure.count > 0 && failure.reason == "scripted");
    }
}

#[test]
fn a_candidate_that_is_wrong_only_on_the_real_shape_cannot_win() {
    let executor = scripted(vec![rule("warps=8;compute_out", Act::WrongOnRealShape)]);
    let report = tune(&executor, &MemorySink::default());
    assert!(
        !report.chosen.contains("warps=8;compute_out"),
        "{}",
        report.chosen
    );
}

#[test]
fn hangs_and_crashes_cost_one_candidate_each() {
    let executor = scripted(vec![
        rule(
            "chunk_cumsum(chunk_size=64,layout=bht,block_h=1)",
            Act::Hang,
        ),
        rule(
            "chunk_cumsum(chunk_size=64,layout=bht,block_h=2)",
            Act::Crash,
        ),
        rule(
            "chunk_cumsum(chunk_size=64,layout=bht,block_h=8)",
            Act::CrashInMeasure,
        ),
    ]);
    let report = tune(&executor, &MemorySink::default());
    let count = |kind: FailureKind| {
        report
            .failures
            .iter()
            .find(|f| f.kind == kind.name())
            .map_or(0, |f| f.count)
    };
    assert_eq!(
        (count(FailureKind::Hang), count(FailureKind::Crash)),
        (1, 2)
    );
    assert_eq!(report.counts.candidates, parts(&space(&executor)).len());
}

#[test]
fn p7_many_failures_are_warned_about_with_their_share_and_first_reason() {
    let executor = scripted(vec![
        rule(
            "compute_out(chunk_size=256",
            Act::Fails(FailureKind::Compile),
        ),
        rule(
            "compute_out(chunk_size=64",
            Act::Fails(FailureKind::Compile),
        ),
        rule(
            "fwd_pass_state(chunk_size=64",
            Act::Fails(FailureKind::Compile),
        ),
        rule(
            "fwd_pass_state(chunk_size=256",
            Act::Fails(FailureKind::Compile),
        ),
    ]);
    let report = tune(&executor, &MemorySink::default());
    assert!(
        report
            .warnings
            .iter()
            .any(|w| w.contains("candidates failed") && w.contains("scripted")),
        "{:?}",
        report.warnings
    );
}

#[test]
fn p7_failures_are_not_retried_until_template_compiler_or_driver_changes() {
    let rules = || {
        vec![rule(
            "compute_out(chunk_size=64",
            Act::Fails(FailureKind::Compile),
        )]
    };
    let sink = MemorySink::default();
    tune(&scripted(rules()), &sink);
    let again = scripted(rules());
    tune(&again, &sink);
    assert_eq!(again.calls(), vec![], "nothing is repeated");
    for change in [0, 1, 2] {
        let mut script = Script {
            rules: rules(),
            ..Script::default()
        };
        let field = match change {
            0 => &mut script.conditions.template_digest,
            1 => &mut script.conditions.nvrtc,
            _ => &mut script.conditions.driver,
        };
        field.push_str(" new");
        let changed = FakeExecutor::new(script);
        tune(&changed, &sink);
        let retried = |c: &Call| matches!(c, Call::Compile(name) if name.starts_with("compute_out(chunk_size=64"));
        assert!(changed.calls().iter().any(retried), "change {change}");
        sink_reset(&sink);
    }
}

/// Puts the results of the unchanged conditions back.
fn sink_reset(sink: &MemorySink) {
    tune(
        &scripted(vec![rule(
            "compute_out(chunk_size=64",
            Act::Fails(FailureKind::Compile),
        )]),
        sink,
    );
}

#[test]
fn p8_lack_of_memory_is_not_held_against_a_candidate_for_ever() {
    let sink = MemorySink::default();
    tune(
        &scripted(vec![rule(
            "compute_out(chunk_size=64",
            Act::Fails(FailureKind::OutOfMemory),
        )]),
        &sink,
    );
    let again = scripted(vec![]);
    tune(&again, &sink);
    assert!(
        again
            .measured()
            .iter()
            .any(|m| m.starts_with("compute_out(chunk_size=64"))
    );
}

#[test]
fn adding_candidates_measures_only_the_new_ones_and_the_finals_they_reach() {
    let sink = MemorySink::default();
    let executor = scripted(vec![]);
    let full = space(&executor);
    let mut part = full.clone();
    let new: Vec<Candidate> = part.assemblies[0].parts[2].split_off(1);
    assert!(!new.is_empty());
    tune_space(
        &target(),
        &part,
        &executor,
        &sink,
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    let second = scripted(vec![]);
    tune_space(
        &target(),
        &full,
        &second,
        &sink,
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    let kernels: Vec<String> = second
        .measured()
        .into_iter()
        .filter(|m| !m.starts_with("three_kernel"))
        .collect();
    let names: Vec<String> = new.iter().map(ToString::to_string).collect();
    let head = full.assemblies[0].parts[2][0].to_string();
    assert!(
        kernels.iter().all(|m| names.contains(m) || *m == head),
        "old candidates were measured again: {kernels:?}"
    );
    assert!(names.iter().all(|n| kernels.contains(n)));
}

/// Names of the candidates of single kernels that were compiled.
fn compiled_kernels(executor: &FakeExecutor) -> Vec<String> {
    let of_kernel = |call| match call {
        Call::Compile(name) if !name.contains(':') => Some(name),
        _ => None,
    };
    executor.calls().into_iter().filter_map(of_kernel).collect()
}

#[test]
fn t7_a_changed_template_measures_only_the_candidates_of_its_kernel() {
    let sink = MemorySink::default();
    let first = scripted(vec![]);
    tune(&first, &sink);
    let script = |kernel: &str| Script {
        templates: [(kernel.to_string(), "t2".to_string())].into(),
        ..Script::default()
    };
    let second = FakeExecutor::new(script("fwd_pass_state"));
    tune(&second, &sink);
    let again = compiled_kernels(&second);
    let of_kernel: Vec<String> = compiled_kernels(&first)
        .into_iter()
        .filter(|name| name.starts_with("fwd_pass_state("))
        .collect();
    assert!(!of_kernel.is_empty());
    assert_eq!(again, of_kernel);
}

#[test]
fn t7_a_strategy_that_is_new_measures_only_its_own_kernels() {
    let sink = MemorySink::default();
    let full = space(&scripted(vec![]));
    let is_new = |a: &Assembly| !a.name.starts_with("three_kernel");
    let mut before = full.clone();
    before.assemblies.retain(|a| !is_new(a));
    let tune = |space: &Space, executor: &FakeExecutor| {
        tune_space(
            &target(),
            space,
            executor,
            &sink,
            &Silent,
            &Policy::default(),
        )
        .unwrap()
    };
    let first = scripted(vec![]);
    tune(&before, &first);
    let second = scripted(vec![]);
    tune(&full, &second);
    let known = compiled_kernels(&first);
    let new = compiled_kernels(&second);
    assert!(!new.is_empty(), "the space should have another strategy");
    assert!(
        new.iter().all(|name| !known.contains(name)),
        "compiled again: {:?}",
        new.iter().find(|name| known.contains(name))
    );
}

/// Stores what it is given until `left` calls, then refuses, as a killed process stores nothing more.
struct DyingSink<'a> {
    inner: &'a MemorySink,
    left: std::sync::atomic::AtomicI64,
}

impl Sink for DyingSink<'_> {
    fn result(
        &self,
        device: &mamba2_spec::DeviceFacts,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Option<mamba2_tuner::Stored>, TunerError> {
        self.inner.result(device, target, candidate)
    }

    fn put_results(
        &self,
        device: &mamba2_spec::DeviceFacts,
        target: &Target,
        results: &[(Candidate, mamba2_tuner::Stored)],
    ) -> Result<(), TunerError> {
        if self.left.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) <= 0 {
            return Err(TunerError::Store("killed".into()));
        }
        self.inner.put_results(device, target, results)
    }

    fn put_choice(
        &self,
        device: &mamba2_spec::DeviceFacts,
        target: &Target,
        choice: &mamba2_tuner::Choice,
    ) -> Result<(), TunerError> {
        self.inner.put_choice(device, target, choice)
    }
}

#[test]
fn a_killed_job_resumes_at_any_point_without_repeating_what_is_stored() {
    let whole = scripted(vec![]);
    let policy = Policy {
        batch: 40,
        ..Policy::default()
    };
    let undisturbed =
        tune_target(&target(), &whole, &MemorySink::default(), &Silent, &policy).unwrap();
    for commits in [0, 1, 3, 7, 12, 20] {
        let sink = MemorySink::default();
        let dying = DyingSink {
            inner: &sink,
            left: commits.into(),
        };
        let killed = tune_target(&target(), &scripted(vec![]), &dying, &Silent, &policy);
        let survived = killed.is_ok();
        // A set: segment_scan is part of two strategies.
        let stored: std::collections::BTreeSet<String> = parts(&space(&whole))
            .into_iter()
            .filter(|c| sink.result(whole.device(), &target(), c).unwrap().is_some())
            .map(|c| c.to_string())
            .collect();
        assert!(survived || stored.len() <= 40 * commits as usize);
        let resumed = scripted(vec![]);
        let report = tune_target(&target(), &resumed, &sink, &Silent, &policy).unwrap();
        let compiled: Vec<Call> = resumed.calls();
        let repeated = stored
            .iter()
            .filter(|name| compiled.contains(&Call::Compile((*name).clone())))
            .count();
        assert_eq!(repeated, 0, "after {commits} commits");
        assert_eq!(
            report.choice.candidate, undisturbed.choice.candidate,
            "after {commits} commits"
        );
    }
}

#[test]
fn a_finished_shape_is_not_touched_again_and_gives_the_same_choice() {
    let sink = MemorySink::default();
    let first = tune(&scripted(vec![]), &sink);
    let executor = scripted(vec![]);
    let second = tune(&executor, &sink);
    assert_eq!(executor.calls(), vec![]);
    assert_eq!(first.choice, second.choice);
    assert_eq!(second.counts.stored, second.counts.candidates);
}

#[test]
fn two_shards_together_do_the_whole_list_once_and_merge_to_the_same_choices() {
    let targets: Vec<Target> = [100, 200, 300]
        .map(|l| Target::Forward(format!("b=1,l={l},h=2,p=32,g=1,n=32").parse().unwrap()))
        .to_vec();
    let executor = scripted(vec![]);
    let job = |shard: Shard, sink: &MemorySink| {
        run_job(
            &targets,
            shard,
            &[&executor],
            sink,
            &Silent,
            &Policy::default(),
        )
        .unwrap()
    };
    let (alone, first, second) = (
        MemorySink::default(),
        MemorySink::default(),
        MemorySink::default(),
    );
    let whole = job(Shard::ALL, &alone);
    let halves = [
        job("0/2".parse().unwrap(), &first),
        job("1/2".parse().unwrap(), &second),
    ];
    assert_eq!(
        (
            whole.shapes.len(),
            halves[0].shapes.len(),
            halves[1].shapes.len()
        ),
        (3, 2, 1)
    );
    assert_eq!((halves[0].other_shards, halves[1].other_shards), (1, 2));
    first.merge(&second);
    for target in &targets {
        assert_eq!(
            first.choice(executor.device(), target).unwrap().candidate,
            alone.choice(executor.device(), target).unwrap().candidate
        );
    }
    assert_eq!(first.results(), alone.results());
}

#[test]
fn a_shape_that_cannot_be_tuned_costs_only_itself() {
    let good = target();
    let bad = Target::Forward("b=1,l=64,h=2,p=32,g=1,n=32,q=100".parse().unwrap());
    let sink = MemorySink::default();
    let job = run_job(
        &[bad, good],
        Shard::ALL,
        &[&scripted(vec![])],
        &sink,
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    assert_eq!((job.shapes.len(), job.failed.len()), (1, 1));
    assert!(
        job.failed[0].reason.contains("chunk_size"),
        "{}",
        job.failed[0].reason
    );
}

#[test]
fn several_gpus_share_the_list() {
    let targets: Vec<Target> = (1..7)
        .map(|l| Target::Forward(format!("b=1,l={l},h=1,p=32,g=1,n=32").parse().unwrap()))
        .collect();
    let (a, b) = (
        FakeExecutor::new(Script {
            delay_ms: 1,
            ..Script::default()
        }),
        FakeExecutor::new(Script {
            delay_ms: 1,
            ..Script::default()
        }),
    );
    let job = run_job(
        &targets,
        Shard::ALL,
        &[&a, &b],
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    assert_eq!(job.shapes.len(), targets.len());
    let shapes: Vec<&str> = job.shapes.iter().map(|s| s.shape.as_str()).collect();
    let listed: Vec<String> = targets.iter().map(ToString::to_string).collect();
    assert_eq!(shapes, listed, "reported in the order of the list");
    assert!(!a.calls().is_empty() && !b.calls().is_empty());
}

#[test]
fn when_nothing_works_nothing_is_stored_as_tuned_and_the_error_says_why() {
    let executor = scripted(vec![rule("(", Act::Fails(FailureKind::Wrong))]);
    let sink = MemorySink::default();
    let error = tune_target(&target(), &executor, &sink, &Silent, &Policy::default()).unwrap_err();
    assert!(
        matches!(error, TunerError::NothingWorks { .. }) && error.to_string().contains("scripted"),
        "{error}"
    );
    assert_eq!(sink.choice(executor.device(), &target()), None);
}

#[test]
fn a_failing_default_is_warned_about_and_the_first_sound_finalist_is_the_standard() {
    let default = space(&FakeExecutor::default()).default;
    let executor = scripted(vec![rule(
        default.to_string(),
        Act::Fails(FailureKind::Wrong),
    )]);
    let report = tune(&executor, &MemorySink::default());
    assert!(report.choice.default.is_none());
    assert!(
        report
            .warnings
            .iter()
            .any(|w| w.contains("the default config failed")),
        "{:?}",
        report.warnings
    );
    let against_default = Check::RealShape { against: default };
    assert!(
        !executor
            .calls()
            .iter()
            .any(|c| matches!(c, Call::Verify(_, check) if *check == against_default))
    );
}

#[test]
fn p4_a_machine_that_is_not_quiet_marks_the_record() {
    let executor = FakeExecutor::new(Script {
        noise: 0.5,
        ..Script::default()
    });
    let report = tune(&executor, &MemorySink::default());
    assert!(!report.choice.quiet);
    assert!(report.warnings.iter().any(|w| w.contains("low confidence")));
}

#[test]
fn the_decode_step_is_tuned_like_any_other_kernel() {
    let executor = scripted(vec![]);
    let sink = MemorySink::default();
    let problem = StepProblem::new(4, 8, 64, 1, 128);
    let report = tune_step(&problem, &executor, &sink, &Silent, &Policy::default()).unwrap();
    let legal = rules::legal_step_configs(&problem, executor.device());
    assert_eq!(report.counts.candidates, legal.len());
    let best = legal
        .iter()
        .map(|c| executor.true_us(&Candidate::Step(*c)))
        .fold(f64::INFINITY, f64::min);
    assert!(report.choice.summary.median_us <= 1.01 * best);
    let again = scripted(vec![]);
    tune_step(&problem, &again, &sink, &Silent, &Policy::default()).unwrap();
    assert_eq!(
        again.calls(),
        vec![],
        "a resumed step repeats nothing either"
    );
}

#[test]
fn a_strategy_measured_end_to_end_competes_with_the_assembled_ones() {
    let executor = scripted(vec![rule(
        "three_kernel:chunk_cumsum(chunk_size=256,layout=bth,block_h=8)",
        Act::Takes(1.0),
    )]);
    let mut space = space(&executor);
    let mut config = rules::default_three_kernel(
        &"b=2,l=300,h=4,p=64,g=1,n=64,q=256".parse().unwrap(),
        executor.device(),
    )
    .unwrap();
    (config.chunk_cumsum.layout, config.chunk_cumsum.block_h) = (1, 8);
    (config.fwd_pass_state.layout, config.compute_out.layout) = (1, 1);
    let fused = Candidate::Strategy(StrategyConfig::ThreeKernel(config));
    space
        .assemblies
        .retain(|a| a.name.contains("three_kernel") && !a.name.contains("256"));
    space.whole = vec![fused];
    let report = tune_space(
        &target(),
        &space,
        &executor,
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    assert_eq!(report.choice.candidate, fused);
    assert!(parts(&space).iter().all(|c| matches!(
        c,
        Candidate::Kernel {
            kernel: Kernel::ChunkCumsum | Kernel::FwdPassState | Kernel::ComputeOut,
            ..
        }
    )));
}
