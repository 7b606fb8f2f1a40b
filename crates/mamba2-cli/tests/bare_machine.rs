//! A machine without GPU, driver, compiler, home or writable disk: everything that needs none of them works, the rest says
//! what is missing, and nothing panics (reports A4 and I2).
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use common::{Bench, Case, Done};

#[test]
fn a4_help_doctor_and_database_commands_work() {
    let bench = Bench::new();
    for arguments in [
        vec!["--help"],
        vec!["--version"],
        vec!["run", "--help"],
        vec!["demo", "--help"],
        vec!["bench", "--help"],
        vec!["tune", "--help"],
        vec!["step", "--help"],
        vec!["explain", "--help"],
        vec!["render", "--help"],
        vec!["db", "--help"],
        vec!["doctor"],
        vec!["db", "list"],
        vec!["db", "list", "--json"],
        vec!["db", "path"],
        vec!["db", "verify"],
        vec![
            "explain",
            "--arch",
            "90",
            "--shape",
            "b=1,l=4096,h=80,p=64,g=1,n=128",
        ],
    ] {
        let done = bench.run(&arguments).ok();
        assert!(!done.stdout.is_empty(), "{arguments:?}");
    }
    assert!(
        !bench.path("cache").exists(),
        "looking should write nothing"
    );
}

#[test]
fn doctor_names_what_is_missing() {
    let bench = Bench::new();
    let done = bench.run(&["doctor"]).ok();
    assert!(
        done.stdout.contains("nvrtc         MISSING") && done.stdout.contains("/nonexistent/nvrtc"),
        "{done:?}"
    );
    assert!(done.stdout.contains("cpu           ok"), "{done:?}");
    let json = bench.run(&["doctor", "--json"]).ok().json();
    assert!(
        json["nvrtc"]["error"]
            .as_str()
            .unwrap()
            .contains("/nonexistent/nvrtc")
    );
}

#[test]
fn i2_cuda_on_a_machine_without_it_is_exit_code_3_in_one_line() {
    let bench = Bench::new();
    bench.write("in.safetensors", &Case::forward().to_bytes());
    for arguments in [
        vec!["demo", "--backend", "cuda"],
        vec![
            "run",
            "in.safetensors",
            "--backend",
            "cuda",
            "-o",
            "out.safetensors",
        ],
        vec![
            "bench",
            "--backend",
            "cuda",
            "--shape",
            "b=1,l=4,h=1,p=4,g=1,n=4",
        ],
        vec![
            "run",
            "in.safetensors",
            "--check",
            "--every-config",
            "--backend",
            "cuda",
        ],
        vec!["tune", "--shape", "b=1,l=64,h=1,p=64,g=1,n=64"],
        vec!["explain", "--shape", "b=1,l=64,h=1,p=64,g=1,n=64"],
    ] {
        let done = bench.run(&arguments);
        assert_eq!(done.code, 3, "{arguments:?}: {done:?}");
        assert_eq!(
            done.stderr.trim_end().lines().count(),
            1,
            "{arguments:?}: {done:?}"
        );
        // A way out is only named to commands that have it.
        let computes = matches!(arguments[0], "demo" | "run" | "bench");
        assert_eq!(
            done.stderr.contains("--backend cpu"),
            computes && !arguments.contains(&"--every-config"),
            "{arguments:?}: {done:?}"
        );
    }
    assert!(!bench.path("out.safetensors").exists());
}

#[test]
fn i2_the_cpu_works_without_any_environment() {
    let bench = Bench::new();
    bench.write("in.safetensors", &Case::forward().to_bytes());
    let mut command = bench.command();
    command
        .env_clear()
        .args(["run", "in.safetensors", "--backend", "cpu", "--check"]);
    Done::of(command.output().unwrap()).ok();
    let mut command = bench.command();
    command.env_clear().args(["db", "path"]);
    let done = Done::of(command.output().unwrap()).ok();
    assert!(
        done.stdout.starts_with("none") && done.stdout.contains("HOME"),
        "{done:?}"
    );
}

#[test]
fn an_unwritable_cache_directory_stops_nothing() {
    let bench = Bench::new();
    bench.write("in.safetensors", &Case::forward().to_bytes());
    // A file where the directory should be is unwritable for every user.
    bench.write("taken", b"");
    for cache in ["/proc/mamba2-cannot-be-here", "taken"] {
        let mut command = bench.command();
        command.env("MAMBA2_CACHE_DIR", bench.path(cache));
        command.args(["run", "in.safetensors", "--backend", "cpu", "--check"]);
        Done::of(command.output().unwrap()).ok();
        let mut command = bench.command();
        command
            .env("MAMBA2_CACHE_DIR", bench.path(cache))
            .args(["db", "list"]);
        Done::of(command.output().unwrap());
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    use std::process::Stdio;
    let bench = Bench::new();
    let mut child = bench
        .command()
        .args(["render", "--kernel", "compute_out"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn a_malformed_mode_variable_is_named() {
    let bench = Bench::new();
    bench.write("in.safetensors", &Case::forward().to_bytes());
    let mut command = bench.command();
    command
        .env("MAMBA2_MODE", "fastest")
        .args(["run", "in.safetensors", "--backend", "cpu"]);
    let done = Done::of(command.output().unwrap());
    assert_eq!(done.code, 2, "{done:?}");
    assert!(
        done.stderr
            .contains("MAMBA2_MODE: expected replay, tune or default-only, got \"fastest\""),
        "{done:?}"
    );
}
