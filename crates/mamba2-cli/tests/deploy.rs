//! The job files of `deploy/`, run by a shell with a stand-in for `mamba2`: what they start, save and bring back.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop
#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Writes each call down, leaves a file in the cache when it tunes, and takes its time if told so.
const MAMBA2: &str = r#"#!/bin/sh
echo "$*" >> "$LOG"
case "$1 $2" in
  "tune --shapes") : > "$MAMBA2_CACHE_DIR/timings"; if [ -n "${SLOW:-}" ]; then exec /bin/sleep 30; fi ;;
  "db export") : > "$4" ;;
esac
"#;

struct Cluster {
    folder: tempfile::TempDir,
}

impl Cluster {
    fn new() -> Cluster {
        let cluster = Cluster {
            folder: tempfile::tempdir().unwrap(),
        };
        for name in ["bin", "out", "cache"] {
            std::fs::create_dir(cluster.path(name)).unwrap();
        }
        // The loop of the Kubernetes job sleeps a minute at a time.
        let sleep = "#!/bin/sh\nexec /bin/sleep 0.05\n";
        for (name, text) in [("bin/mamba2", MAMBA2), ("bin/sleep", sleep)] {
            std::fs::write(cluster.path(name), text).unwrap();
            let executable = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(cluster.path(name), executable).unwrap();
        }
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", self.path("bin").display()),
            )
            .env("LOG", self.path("log"))
            .current_dir(self.folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Sends SIGTERM once it tunes, as a scheduler that wants its node back.
    fn terminate(&self, child: Child) -> Output {
        let started = Instant::now();
        while !self.log().contains("tune ") {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        let kill = Command::new("kill")
            .args(["-TERM", &child.id().to_string()])
            .status();
        assert!(kill.unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "it should not wait for the tuner: {output:?}"
        );
        output
    }
}

fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy")
        .join(name)
}

#[test]
fn a_slurm_task_saves_what_it_has_when_its_node_is_taken_and_goes_on_elsewhere() {
    let cluster = Cluster::new();
    let task = |node: &str| {
        let mut command = cluster.command("bash");
        command
            .arg(deploy("slurm/tune.sbatch"))
            .arg("shapes.toml")
            .env("SLURM_ARRAY_TASK_ID", "3")
            .env("SLURM_ARRAY_JOB_ID", "77")
            .env("SLURM_TMPDIR", cluster.path(node))
            .env("MAMBA2_TUNE_OUT", cluster.path("out"));
        command
    };
    let killed = cluster.terminate(task("node-1").env("SLOW", "1").spawn().unwrap());
    assert_eq!(killed.status.code(), Some(143), "{killed:?}");
    for saved in ["out/shard-3.json", "out/cache-3.tar"] {
        assert!(cluster.path(saved).exists(), "{saved}");
    }
    let done = task("node-2").output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert!(
        cluster.path("node-2/mamba2-77-3/timings").exists(),
        "the timings of the first node are brought back"
    );
    let call = "tune --shapes shapes.toml --resume\n";
    assert_eq!(cluster.log().matches(call).count(), 2, "{}", cluster.log());
    let exported = cluster.log().matches("db export -o").count();
    assert_eq!(exported, 2, "{}", cluster.log());
}

/// The container's script, and the number that the job and the variable must agree on.
fn kubernetes() -> (String, String, String) {
    let text = std::fs::read_to_string(deploy("kubernetes/tune-job.yaml")).unwrap();
    let script = text
        .split("args:\n            - |\n")
        .nth(1)
        .and_then(|rest| rest.split("\n          env:").next())
        .unwrap();
    let script: Vec<&str> = script
        .lines()
        .map(|line| line.strip_prefix("              ").unwrap_or(line))
        .collect();
    let after = |label: &str| {
        let rest = text.split(label).nth(1).unwrap();
        rest.lines()
            .next()
            .unwrap()
            .trim()
            .trim_matches('"')
            .to_string()
    };
    (
        script.join("\n"),
        after("completions:"),
        after("- name: JOB_COMPLETIONS\n              value:"),
    )
}

#[test]
fn a_kubernetes_pod_exports_while_it_works_and_takes_its_last_export_up_again() {
    let (script, completions, variable) = kubernetes();
    assert_eq!(completions, variable, "the shard count is told twice");
    let cluster = Cluster::new();
    let script = script.replace("/out/", &format!("{}/", cluster.path("out").display()));
    let pod = || {
        let mut command = cluster.command("sh");
        command
            .args(["-euc", &script])
            .env("JOB_COMPLETION_INDEX", "5")
            .env("JOB_COMPLETIONS", &completions)
            .env("MAMBA2_CACHE_DIR", cluster.path("cache"));
        command
    };
    let evicted = cluster.terminate(pod().env("SLOW", "1").spawn().unwrap());
    assert_eq!(evicted.status.code(), Some(143), "{evicted:?}");
    assert!(cluster.path("out/shard-5.json").exists());
    assert!(!cluster.log().contains("db import"), "{}", cluster.log());
    let done = pod().output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let log = cluster.log();
    let second: Vec<&str> = log
        .lines()
        .skip_while(|l| !l.starts_with("db import"))
        .collect();
    assert!(second[0].ends_with("out/shard-5.json"), "{log}");
    assert_eq!(
        second[1], "tune --shapes /shapes/shapes.toml --resume",
        "{log}"
    );
    assert!(second.last().unwrap().starts_with("db export -o"), "{log}");
}
