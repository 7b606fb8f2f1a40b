//! The check of the nearest match, against a scripted device: what it claims, and what it refuses to claim. No GPU.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use mamba2_spec::StepProblem;
use mamba2_tunedb::{CacheDir, Ladder, LocalDb};
use mamba2_tuner::fake::{Act, FakeExecutor, Rule, Script};
use mamba2_tuner::space::Space;
use mamba2_tuner::{
    DbSink, Executor, FailureKind, HoldOutReport, Policy, Shard, Silent, Target, Verdict,
    run_hold_out, tune_target,
};

fn shape(l: usize) -> Target {
    Target::Forward(format!("b=1,l={l},h=2,p=32,g=1,n=32").parse().unwrap())
}

/// A database with one tuned shape of 4096 tokens.
struct Tuned {
    directory: tempfile::TempDir,
}

/// What a forward pass of that shape lends to one of 6000 tokens.
fn lent(tuned: &Tuned) -> String {
    let Target::Forward(problem) = shape(6000) else {
        unreachable!()
    };
    let device = FakeExecutor::default();
    let answer = tuned.ladder().held_out(&problem, device.device()).unwrap();
    assert!(answer.distance > 0.0, "the record should say something");
    answer.config.to_string()
}

impl Tuned {
    fn new(target: &Target) -> Tuned {
        let directory = tempfile::tempdir().unwrap();
        let db = LocalDb::in_cache(&CacheDir::fixed(directory.path())).unwrap();
        let device = FakeExecutor::default().device().clone();
        let rules = match (target, shape(6000)) {
            (Target::Forward(tuned), Target::Forward(near)) => {
                Rule::lending(tuned, &near, &device).unwrap()
            }
            _ => Vec::new(),
        };
        let executor = FakeExecutor::new(Script {
            rules,
            ..Script::default()
        });
        let report = tune_target(
            target,
            &executor,
            &DbSink::new(db),
            &Silent,
            &Policy::default(),
        );
        let chosen = report.unwrap().choice.candidate;
        assert_ne!(
            chosen,
            Space::default_of(target, executor.device()).unwrap(),
            "the script should favour another config than the default"
        );
        Tuned { directory }
    }

    fn ladder(&self) -> Ladder {
        Ladder::builder()
            .cache(&CacheDir::fixed(self.directory.path()))
            .build()
    }

    fn hold_out(&self, targets: &[Target], executor: &FakeExecutor) -> HoldOutReport {
        let ladder = self.ladder();
        let policy = Policy::default();
        run_hold_out(targets, Shard::ALL, &[executor], &ladder, &Silent, &policy).unwrap()
    }
}

fn scripted(noise: f64, rules: Vec<(String, Act)>) -> FakeExecutor {
    let rules = rules
        .into_iter()
        .map(|(matches, act)| Rule { matches, act })
        .collect();
    FakeExecutor::new(Script {
        rules,
        noise,
        ..Script::default()
    })
}

#[test]
fn p6_the_nearest_config_is_measured_beside_the_default_and_the_ratio_is_told() {
    let tuned = Tuned::new(&shape(4096));
    let default = Space::default_of(&shape(6000), FakeExecutor::default().device()).unwrap();
    let times = |nearest: f64| {
        vec![
            (lent(&tuned), Act::Takes(nearest)),
            (default.to_string(), Act::Takes(100.0)),
        ]
    };
    for (nearest, verdict) in [
        (80.0, Verdict::Faster),
        (99.5, Verdict::Tie),
        (100.5, Verdict::Tie),
        (130.0, Verdict::Slower),
    ] {
        let executor = scripted(0.002, times(nearest));
        let report = tuned.hold_out(&[shape(6000)], &executor);
        let held = &report.shapes[0];
        assert_eq!(held.verdict, verdict, "{held:?}");
        assert!(
            (held.ratio().unwrap() - nearest / 100.0).abs() < 0.01,
            "{held:?}"
        );
        assert!(held.record.as_ref().unwrap().contains("l=4096"), "{held:?}");
        assert!((held.distance.unwrap() - (6000f64 / 4096.0).log2()).abs() < 1e-9);
        assert_eq!(
            report.losses().len(),
            usize::from(verdict == Verdict::Slower)
        );
        assert_eq!(
            report.table().contains("SLOWER"),
            verdict == Verdict::Slower
        );
        // A claim takes two measurements that agree.
        let rounds = executor
            .measured()
            .iter()
            .filter(|m| **m == default.to_string())
            .count();
        let claims = matches!(verdict, Verdict::Faster | Verdict::Slower);
        assert_eq!(
            rounds,
            if claims {
                2
            } else {
                1 + Policy::default().tie_rounds as usize
            },
            "{verdict:?}"
        );
    }
}

#[test]
fn p6_no_difference_is_claimed_that_the_noise_could_have_made() {
    let tuned = Tuned::new(&shape(4096));
    let default = Space::default_of(&shape(6000), FakeExecutor::default().device()).unwrap();
    // 3 % apart, and samples that scatter by 30 %.
    let rules = vec![
        (lent(&tuned), Act::Takes(103.0)),
        (default.to_string(), Act::Takes(100.0)),
    ];
    let report = tuned.hold_out(&[shape(6000)], &scripted(0.3, rules));
    assert_eq!(report.shapes[0].verdict, Verdict::Tie, "{report:?}");
}

#[test]
fn p6_beyond_the_bound_the_default_speaks_and_nothing_is_measured() {
    let tuned = Tuned::new(&shape(4096));
    let executor = FakeExecutor::default();
    // Too far, and the tuned shape itself: held out, it has no neighbour.
    let report = tuned.hold_out(&[shape(4096), shape(4096)], &executor);
    for held in &report.shapes {
        assert_eq!(held.verdict, Verdict::NoneNear, "{held:?}");
    }
    assert_eq!(executor.calls(), vec![]);
}

#[test]
fn p6_a_nearest_config_that_is_wrong_on_the_shape_is_a_loss_with_its_reason() {
    let tuned = Tuned::new(&shape(4096));
    for act in [
        Act::Fails(FailureKind::Spill),
        Act::WrongOnRealShape,
        Act::Crash,
    ] {
        let executor = scripted(0.0, vec![(lent(&tuned), act)]);
        let report = tuned.hold_out(&[shape(6000)], &executor);
        assert_eq!(report.losses().len(), 1, "{report:?}");
        assert!(report.table().contains("FAILED: "), "{}", report.table());
        assert!(report.table().contains("scripted"), "{}", report.table());
    }
    // A default that fails leaves nothing to compare with: that shape is not measured, the others are.
    let default = Space::default_of(&shape(6000), FakeExecutor::default().device()).unwrap();
    let executor = scripted(
        0.0,
        vec![(default.to_string(), Act::Fails(FailureKind::Wrong))],
    );
    let report = tuned.hold_out(&[shape(6000), shape(9000)], &executor);
    assert_eq!((report.shapes.len(), report.failed.len()), (1, 1));
    assert!(
        report.failed[0]
            .reason
            .contains("the default config failed: wrong: scripted"),
        "{report:?}"
    );
}

#[test]
fn p6_decode_steps_are_held_out_too_and_the_check_stores_nothing() {
    let target = Target::Step(StepProblem::new(16, 8, 64, 1, 128));
    let tuned = Tuned::new(&target);
    let files = || {
        let folder = tuned.directory.path().join("tunedb-1");
        std::fs::read(folder.join("snapshot")).unwrap()
    };
    let before = files();
    let near = Target::Step(StepProblem::new(24, 8, 64, 1, 128));
    let report = tuned.hold_out(std::slice::from_ref(&near), &FakeExecutor::default());
    assert_eq!(report.shapes[0].verdict, Verdict::Faster, "{report:?}");
    assert_eq!(files(), before);
    let again = tuned.hold_out(&[near], &FakeExecutor::default());
    assert_eq!(again.shapes[0].verdict, Verdict::Faster, "{again:?}");
    let json: serde_json::Value = serde_json::from_str(&again.to_json().unwrap()).unwrap();
    assert_eq!(json["shapes"][0]["verdict"], "faster");
}
