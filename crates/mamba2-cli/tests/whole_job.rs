//! A whole tuning job on a scripted device: two shards, killed and resumed, merged, compared, verified, bundled, and replayed on
//! a host without NVRTC. No GPU. The processes that tune are this test program itself, which runs `mamba2 tune` as a library.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, Done};
use mamba2_cuda::{
    CompileOptions, Compiled, Cubin, CubinCache, KernelIdentity, KernelKey, NvrtcVersion,
};
use mamba2_spec::{Kernel, Problem, StrategyConfig};
use mamba2_tunedb::{CacheDir, LocalDb, Snapshot, TuneKey};
use mamba2_tuner::Executor;
use mamba2_tuner::fake::{Act, FakeExecutor, Rule, Script};
use serde_json::Value;

const SHAPES: &str = "[[forward]]\nname = \"small\"\nshape = \"b=1,l=64,h=2,p=32,g=1,n=32\"\nl = [64, 256, 1024, 4096]\n";

/// The templates are today's, so that what it tunes is fresh for this very program.
fn script(delay_ms: u64) -> Script {
    let today = |k: Kernel| (k.name().to_string(), mamba2_kernels::template_digest(k));
    Script {
        templates: Kernel::ALL.map(today).into(),
        rules: vec![Rule {
            matches: "compute_out(chunk_size=64".into(),
            act: Act::Fails(mamba2_tuner::FailureKind::Spill),
        }],
        noise: 0.004,
        delay_ms,
        ..Script::default()
    }
}

const ARGUMENTS: &str = "MAMBA2_TEST_ARGUMENTS";
const SCRIPT: &str = "MAMBA2_TEST_SCRIPT";

/// Not a test: the process that tunes. Does nothing unless it was started as one.
#[test]
fn child_tunes() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    let script: Script = serde_json::from_str(&std::env::var(SCRIPT).unwrap()).unwrap();
    let arguments: Vec<String> = arguments.lines().map(String::from).collect();
    let executor = FakeExecutor::new(script);
    match mamba2_cli::tune_on(&arguments, &[&executor]) {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("mamba2: {error}");
            std::process::exit(if matches!(error, mamba2_cli::CliError::CheckFailed(_)) {
                1
            } else {
                2
            });
        }
    }
}

fn tune_command(bench: &Bench, cache: &str, script: &Script, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child_tunes", "--nocapture"])
        .current_dir(bench.folder.path())
        .env_clear()
        .env("MAMBA2_CACHE_DIR", bench.path(cache))
        .env(ARGUMENTS, arguments.join("\n"))
        .env(SCRIPT, serde_json::to_string(script).unwrap());
    command
}

fn tune(bench: &Bench, cache: &str, script: &Script, arguments: &[&str]) -> Done {
    let output = tune_command(bench, cache, script, arguments).output();
    Done::of(output.unwrap())
}

/// The report, out of what the test harness prints around it.
fn report(done: &Done) -> Value {
    let text = &done.stdout;
    let (from, to) = (text.find('{').unwrap(), text.rfind('}').unwrap());
    serde_json::from_str(&text[from..=to]).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn shapes_of(report: &Value) -> usize {
    report["shapes"].as_array().unwrap().len()
}

fn snapshot(cache: &Path) -> Option<Snapshot> {
    let db = LocalDb::in_cache(&CacheDir::fixed(cache)).unwrap();
    db.snapshot().unwrap()
}

/// Waits until one shape is done, gives the next one a moment, and kills.
fn kill_in_the_middle(mut child: Child, cache: &Path) {
    let started = Instant::now();
    while snapshot(cache).is_none_or(|s| s.is_empty()) {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "no shape was tuned"
        );
        assert!(child.try_wait().unwrap().is_none(), "it ended too early");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(700));
    child.kill().unwrap();
    assert!(
        !child.wait().unwrap().success(),
        "it was done before the kill"
    );
}

/// In the cache of a shard, the cubins that its compile worker would have left for the chosen configs.
fn leave_cubins(cache: &Path) {
    let cubins = CubinCache::new(cache.join(mamba2::CUBIN_DIRECTORY));
    for record in snapshot(cache).unwrap().records() {
        let record = record.unwrap();
        for identity in identities(&record.key, &record.strategy().unwrap()) {
            let mut elf = vec![0; 80];
            elf[..9].copy_from_slice(b"\x7fELF\x02\x01\x00\x00\x08");
            (elf[18], elf[49]) = (190, 90);
            cubins.put(&Cubin {
                key: KernelKey {
                    identity,
                    nvrtc: NvrtcVersion {
                        major: 13,
                        minor: 0,
                    },
                },
                compiled: Compiled {
                    cubin: elf,
                    log: String::new(),
                    resources: None,
                    target: record.key.arch(),
                },
            });
        }
    }
}

fn identities(key: &TuneKey, config: &mamba2_spec::StrategyConfig) -> Vec<KernelIdentity> {
    let (problem, device) = (key.problem().unwrap(), key.device());
    let of = |k: &mamba2_spec::KernelConfig| {
        let rendered = mamba2_kernels::render(k, &problem, &device);
        KernelIdentity::of(&rendered, key.arch(), CompileOptions::default())
    };
    config.kernels().iter().map(of).collect()
}

fn db(bench: &Bench, cache: &str, arguments: &[&str]) -> Done {
    let mut command = bench.command();
    command.env("MAMBA2_CACHE_DIR", bench.path(cache));
    Done::of(command.args(arguments).output().unwrap())
}

#[test]
fn the_whole_job_runs_is_killed_resumed_merged_verified_bundled_and_replayed_without_nvrtc() {
    let bench = Bench::new();
    bench.write("shapes.toml", SHAPES.as_bytes());
    let tune_shard = |shard: &str| {
        vec!["--shapes", "shapes.toml", "--json", "--shard", shard]
            .into_iter()
            .map(String::from)
            .collect::<Vec<_>>()
    };
    let arguments = |shard: &str, more: &[&str]| {
        let mut all = tune_shard(shard);
        all.extend(more.iter().map(ToString::to_string));
        all
    };
    let run = |shard: &str, cache: &str, more: &[&str]| {
        let all = arguments(shard, more);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        tune(&bench, cache, &script(0), &all)
    };

    // Shard 0 is killed in the middle of its second shape, and resumed.
    let all = arguments("0/2", &[]);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let child = tune_command(&bench, "shard-0", &script(3), &all)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    kill_in_the_middle(child, &bench.path("shard-0"));
    assert_eq!(snapshot(&bench.path("shard-0")).unwrap().len(), 1);
    let resumed = run("0/2", "shard-0", &["--resume", "--report", "report.html"]).ok();
    assert!(
        resumed.stderr.contains("1 of 4 shapes to tune here"),
        "{resumed:?}"
    );
    let resumed = report(&resumed);
    assert_eq!(shapes_of(&resumed), 1);
    let counts = &resumed["shapes"][0]["counts"];
    assert!(
        counts["stored"].as_u64().unwrap() > 0,
        "what was stored before the kill is used: {counts}"
    );
    assert!(counts["failed"].as_u64().unwrap() > 0, "{counts}");
    let html = std::fs::read_to_string(bench.path("report.html")).unwrap();
    assert!(html.contains("</html>") && !html.contains("http"), "{html}");
    // Nothing is left to do.
    let idle = run("0/2", "shard-0", &["--resume"]).ok();
    assert_eq!(shapes_of(&report(&idle)), 0);
    // Without --resume the shapes are gone through, and nothing is measured.
    let again = report(&run("0/2", "shard-0", &[]).ok());
    assert_eq!(shapes_of(&again), 2);
    for shape in again["shapes"].as_array().unwrap() {
        assert_eq!(shape["counts"]["stored"], shape["counts"]["candidates"]);
    }

    // Shard 1 is undisturbed; it takes its number from the scheduler.
    let output = tune_command(
        &bench,
        "shard-1",
        &script(0),
        &["--shapes", "shapes.toml", "--json"],
    )
    .env("SLURM_ARRAY_TASK_ID", "8")
    .env("SLURM_ARRAY_TASK_MIN", "7")
    .env("SLURM_ARRAY_TASK_COUNT", "2")
    .output();
    let second = Done::of(output.unwrap()).ok();
    assert!(
        second.stderr.contains("shard 1/2 (Slurm array)"),
        "{second:?}"
    );
    let second = report(&second);
    assert_eq!(
        (shapes_of(&second), &second["other_shards"]),
        (2, &Value::from(2))
    );
    for shard in ["shard-0", "shard-1"] {
        leave_cubins(&bench.path(shard));
    }

    // Merged, in both orders, it is the same; and the same as one undisturbed job.
    db(&bench, "all", &["db", "merge", "shard-0", "shard-1"]).ok();
    db(&bench, "other", &["db", "merge", "shard-1", "shard-0"]).ok();
    let merged = snapshot(&bench.path("all")).unwrap();
    assert_eq!(merged.len(), 4);
    assert_eq!(
        merged.digest(),
        snapshot(&bench.path("other")).unwrap().digest()
    );
    tune(&bench, "alone", &script(0), &["--shapes", "shapes.toml"]).ok();
    for cache in ["all", "alone"] {
        let file = format!("{cache}.json");
        db(&bench, cache, &["db", "export", "-o", &file]).ok();
    }
    let difference = db(
        &bench,
        "all",
        &["db", "diff", "all.json", "alone.json", "--json"],
    )
    .ok();
    for fault in difference.json()["differences"].as_array().unwrap() {
        // A near tie may fall otherwise in a job that was killed; a shape may not be missing.
        assert_eq!(fault["difference"], "config", "{fault}");
        let (l, r) = (fault["left_us"].as_f64(), fault["right_us"].as_f64());
        assert!((l.unwrap() / r.unwrap() - 1.0).abs() < 0.03, "{fault}");
    }
    let verified = db(&bench, "all", &["db", "verify", "--json"]).ok().json();
    assert_eq!(
        (&verified["records"], &verified["bundles"]),
        (&4.into(), &0.into())
    );
    assert!(
        verified["timings"].as_u64().unwrap() > 400,
        "timings merge too"
    );

    // A bundle of records and cubins.
    for shard in ["shard-0", "shard-1"] {
        let from = bench.path(shard).join(mamba2::CUBIN_DIRECTORY);
        let to = bench.path("all").join(mamba2::CUBIN_DIRECTORY);
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(from).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    let bundled = db(
        &bench,
        "all",
        &["db", "bundle", "-o", "all.mamba2bundle", "--json"],
    );
    let bundled = bundled.ok().json();
    assert_eq!(bundled["records"], 4);
    assert!(bundled["kernels"].as_u64().unwrap() > 0, "{bundled}");

    // A host that has neither compiler nor cache answers from it, with every kernel that the answers need.
    let host = bench.path("host");
    db(&bench, "host", &["db", "import", "all.mamba2bundle"]).ok();
    let ladder = mamba2::Ladder::builder()
        .cache(&CacheDir::fixed(&host))
        .templates(mamba2_kernels::template_digest)
        .build();
    let device = FakeExecutor::new(script(0)).device().clone();
    for l in [64, 256, 1024, 4096] {
        let shape = format!("b=1,l={l},h=2,p=32,g=1,n=32");
        let explained = db(
            &bench,
            "host",
            &["explain", "--arch", "90", "--shape", &shape, "--json"],
        );
        let explained = explained.ok().json();
        assert_eq!(
            (&explained["tier"], &explained["stale"]),
            (&"bundle".into(), &false.into())
        );
        let problem: Problem = shape.parse().unwrap();
        let answer = ladder.look_up(&problem, &device).unwrap();
        assert_eq!(
            explained["config"],
            serde_json::to_value(answer.config).unwrap()
        );
        for identity in identities(&TuneKey::forward(&problem, &device), &answer.config) {
            let bundle = &ladder.bundles()[0];
            let has = |text: &String| {
                KernelKey::from_text(text).is_ok_and(|key| key.identity == identity)
            };
            let name = bundle.cubin_keys().unwrap().into_iter().find(has);
            let name =
                name.unwrap_or_else(|| panic!("{shape}: no {} in the bundle", identity.kernel));
            assert!(
                bundle.cubin(&name, device.arch).unwrap().is_some(),
                "{shape}"
            );
        }
    }
    let clean = db(&bench, "host", &["db", "verify", "--json"]).ok().json();
    assert_eq!(clean["bundles"], 1);
    assert!(
        !host.join("tunedb-1/store").exists(),
        "replay makes no store"
    );
}

#[test]
fn p1_a_second_process_measures_nothing_and_p6_held_out_shapes_are_told_with_their_distance() {
    let bench = Bench::new();
    let shape = "b=1,l=4096,h=2,p=32,g=1,n=32";
    let near = "b=1,l=6000,h=2,p=32,g=1,n=32";
    let mut first = script(0);
    let (tuned, held) = (shape.parse().unwrap(), near.parse().unwrap());
    let lending = Rule::lending(&tuned, &held, &first.device).unwrap();
    first.rules.extend(lending);
    tune(&bench, "cache", &first, &["--shape", shape]).ok();
    let again = tune(&bench, "cache", &first, &["--shape", shape, "--json"]).ok();
    let counts = &report(&again)["shapes"][0]["counts"];
    assert_eq!(counts["stored"], counts["candidates"]);
    let before = snapshot(&bench.path("cache")).unwrap();

    // What the nearest match gives, measured beside the default: the record's parameters with segments of this length.
    let lent = db(
        &bench,
        "cache",
        &["explain", "--arch", "90", "--shape", near, "--json"],
    )
    .ok();
    let lent: Value = serde_json::from_str(&lent.stdout).unwrap();
    let lent: StrategyConfig = serde_json::from_value(lent["config"].clone()).unwrap();
    let takes = |us: f64| {
        let mut script = script(0);
        script.rules.insert(
            0,
            Rule {
                matches: lent.to_string(),
                act: Act::Takes(us),
            },
        );
        script
    };
    let arguments = ["--shape", near, "--hold-out", "--json"];
    let held = report(&tune(&bench, "cache", &takes(1.0), &arguments).ok());
    assert_eq!(held["shapes"][0]["verdict"], "faster", "{held}");
    let explained = db(
        &bench,
        "cache",
        &["explain", "--arch", "90", "--shape", near],
    )
    .ok();
    let wanted = format!(
        "tier        local nearest, distance {:.2} from ",
        (6000f64 / 4096.0).log2()
    );
    assert!(explained.stdout.contains(&wanted), "{explained:?}");
    assert!(explained.stdout.contains("l=4096"), "{explained:?}");
    let after = snapshot(&bench.path("cache")).unwrap();
    assert_eq!(before.digest(), after.digest(), "the check stores nothing");

    // Where it loses, the command says so with exit code 1.
    let lost = tune(
        &bench,
        "cache",
        &takes(1e4),
        &["--shape", near, "--hold-out"],
    );
    assert_eq!(lost.code, 1, "{lost:?}");
    assert!(
        lost.stdout.contains("SLOWER") && lost.stderr.contains("1 of 1 shapes"),
        "{lost:?}"
    );
}

/// Eight processes of the command at once on one cache, and this process with the library.
#[test]
fn t1_eight_commands_and_the_library_at_once_on_one_cache_all_finish() {
    let bench = Bench::new();
    let shape = |i: usize| format!("b={i},l=64,h=2,p=32,g=1,n=32");
    let record = |i: usize| {
        let (problem, device): (Problem, _) = (
            shape(i).parse().unwrap(),
            mamba2_spec::DeviceFacts::assumed(mamba2_spec::Arch(90)),
        );
        let config = mamba2_spec::rules::default_strategy(&problem, &device).unwrap();
        mamba2_tunedb::Record::forward(&problem, &device, &config, Default::default())
    };
    let children: Vec<Child> = (1..=8)
        .map(|i| {
            let name = format!("{i}.json");
            let text = mamba2_tunedb::write_text([record(i)]).unwrap();
            bench.write(&name, text.as_bytes());
            bench
                .command()
                .args(["db", "import", &name])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let cache: PathBuf = bench.path("cache");
    let db = LocalDb::in_cache(&CacheDir::fixed(&cache)).unwrap();
    for i in 9..=12 {
        db.commit(&[record(i)], &[], mamba2_tunedb::DEFAULT_WAIT)
            .unwrap();
    }
    for child in children {
        Done::of(child.wait_with_output().unwrap()).ok();
    }
    let listed = bench.run(&["db", "list"]).ok().stdout;
    let found = (1..=12).filter(|i| listed.contains(&format!(",b={i},")));
    assert_eq!(
        listed.lines().filter(|l| l.starts_with("local")).count(),
        12,
        "{listed}"
    );
    assert_eq!(found.count(), 12, "{listed}");
    bench.run(&["db", "verify"]).ok();
}
