//! A tune that is killed, and killed again: kill -9 at 200 random moments. No GPU.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mamba2_tunedb::{CacheDir, DEFAULT_WAIT, Ladder, LocalDb, Tier, ops};
use mamba2_tuner::fake::{Act, Call, FakeExecutor, Rule, Script};
use mamba2_tuner::{DbSink, Executor, FailureKind, Policy, Silent, Target, tune_target};

const KILLS: usize = 200;
const BATCH: usize = 16;

fn shape(n: usize) -> String {
    format!("b=1,l={},h=2,p=32,g=1,n=32", 100 + n)
}

fn script() -> Script {
    Script {
        rules: vec![Rule {
            matches: "compute_out(chunk_size=64".into(),
            act: Act::Fails(FailureKind::Spill),
        }],
        noise: 0.01,
        ..Script::default()
    }
}

/// What a job said before it ended.
struct Said {
    compiled: Vec<String>,
    stored: Vec<String>,
    finished: bool,
}

/// Runs a job on one shape and kills it after `life`, if it is still there.
fn job(directory: &Path, shape: &str, life: Duration) -> Said {
    let mut child = Command::new(env!("CARGO_BIN_EXE_mamba2-tuner-fake-worker"))
        .arg(serde_json::to_string(&script()).unwrap())
        .arg(directory)
        .arg(BATCH.to_string())
        .arg(shape)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(life);
    // SIGKILL; of no effect on a job that is done.
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    // A line that was cut is no word of the job's.
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let lines = |prefix: &str| {
        whole
            .lines()
            .filter_map(|l| l.strip_prefix(prefix))
            .map(str::to_string)
            .collect()
    };
    Said {
        compiled: lines("compile "),
        stored: lines("stored "),
        finished: output.status.success(),
    }
}

#[test]
fn t3_kill_9_at_200_random_moments_of_a_tune_repeats_nothing_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let cache = CacheDir::fixed(directory.path());
    let db = LocalDb::in_cache(&cache).unwrap();
    let (mut kills, mut finished, mut resumed) = (0, 0, 0);
    let mut stored: BTreeSet<String> = BTreeSet::new();
    let mut state = 7u64;
    let mut runs = 0;
    // Longest life of a job, in milliseconds: on a busy machine it takes longer to get anywhere.
    let mut longest = 80;
    while kills < KILLS {
        runs += 1;
        assert!(runs < 2 * KILLS, "jobs end before they can be killed");
        // Spread over the start, the reading of what is stored, compiling, measuring and committing.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let life = Duration::from_millis(5 + (state >> 33) % longest);
        let said = job(directory.path(), &shape(finished), life);
        let again: Vec<&String> = said
            .compiled
            .iter()
            .filter(|c| stored.contains(*c))
            .collect();
        assert_eq!(again, Vec::<&String>::new(), "after {kills} kills");
        longest = if said.stored.is_empty() {
            longest + 4
        } else {
            (longest - 16).max(40)
        };
        resumed += usize::from(!stored.is_empty() && !said.stored.is_empty());
        stored.extend(said.stored);
        kills += usize::from(!said.finished);
        // A reader, before anybody repaired anything.
        let ladder = Ladder::builder().cache(&cache).build();
        assert_eq!(
            ladder.warnings(),
            Vec::<String>::new(),
            "after {kills} kills"
        );
        if said.finished {
            finished += 1;
            stored.clear();
        }
        if let Some(last) = finished.checked_sub(1) {
            let answer = ladder.look_up(
                &shape(last).parse().unwrap(),
                FakeExecutor::default().device(),
            );
            assert_eq!(answer.unwrap().tier, Tier::Local, "after {kills} kills");
        }
    }
    println!("{runs} runs, {kills} kills, {finished} shapes finished, {resumed} runs went on");
    assert!(resumed > 10, "only {resumed} runs went on from another");
    // The last job, left alone, needs only what is missing.
    let target = Target::Forward(shape(finished).parse().unwrap());
    let last = FakeExecutor::new(script());
    let policy = Policy {
        batch: BATCH,
        ..Policy::default()
    };
    tune_target(&target, &last, &DbSink::new(db.clone()), &Silent, &policy).unwrap();
    for call in last.calls() {
        if let Call::Compile(name) = call {
            assert!(!stored.contains(&name), "{name} was stored");
        }
    }
    for shape_index in 0..=finished {
        let ladder = Ladder::builder().cache(&cache).build();
        let answer = ladder.look_up(&shape(shape_index).parse().unwrap(), last.device());
        assert_eq!(answer.unwrap().tier, Tier::Local, "{shape_index}");
    }
    let verified = ops::verify(&db, DEFAULT_WAIT).unwrap();
    assert_eq!(verified.faults, Vec::<String>::new());
    ops::prune(&db, &ops::PrunePolicy::default(), DEFAULT_WAIT).unwrap();
    assert_eq!(ops::verify(&db, DEFAULT_WAIT).unwrap().leftovers, 0);
}
