//! What the commands run. One profile everywhere, so that each crate is built once.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::wheels;

/// The root of the workspace.
pub fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.ancestors()
        .nth(2)
        .expect("xtask should stand two folders below the root")
        .to_path_buf()
}

/// The target folder of this very binary: `<target>/<profile>/xtask`.
fn target() -> Result<PathBuf, String> {
    let exe = std::env::current_exe().map_err(|e| format!("cannot find this executable: {e}"))?;
    exe.ancestors()
        .nth(2)
        .map(PathBuf::from)
        .ok_or_else(|| format!("{}: expected <target>/<profile>/xtask", exe.display()))
}

fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|v| v == "true" || v == "1")
}

struct Steps {
    environment: Vec<(&'static str, OsString)>,
    done: Vec<(&'static str, f64)>,
}

impl Steps {
    fn cargo(&mut self, name: &'static str, arguments: &[&str]) -> Result<(), String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(arguments);
        println!("xtask: {name}");
        let start = Instant::now();
        let status = command
            .current_dir(root())
            .envs(self.environment.clone())
            .status();
        self.done.push((name, start.elapsed().as_secs_f64()));
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{name} failed ({status}): {command:?}")),
            Err(e) => Err(format!("{name}: cannot start {command:?}: {e}")),
        }
    }

    fn summary(&self) {
        println!("xtask: seconds per step");
        for (name, seconds) in &self.done {
            println!("  {seconds:7.1}  {name}");
        }
        println!(
            "  {:7.1}  in all",
            self.done.iter().map(|(_, s)| s).sum::<f64>()
        );
    }
}

/// With what the tests need and this machine lacks. The names of what could not be had, where that is allowed.
fn steps_with_wheels() -> Result<(Steps, Vec<&'static str>), String> {
    type Find = fn(&std::path::Path) -> Result<Vec<(&'static str, String)>, String>;
    const NEEDED: &[(&str, Find)] = &[("NVRTC", wheels::nvrtc), (CXX, wheels::compiler)];
    let start = Instant::now();
    let target = target()?;
    let mut steps = Steps {
        environment: vec![],
        done: vec![],
    };
    let mut missing = vec![];
    for (name, find) in NEEDED {
        match find(&target) {
            Ok(environment) => steps
                .environment
                .extend(environment.into_iter().map(|(k, v)| (k, v.into()))),
            Err(reason) if in_ci() => return Err(format!("CI may skip nothing: {reason}")),
            Err(reason) => {
                eprintln!("xtask: {reason}");
                missing.push(*name);
            }
        }
    }
    steps.done.push((
        "find or fetch NVRTC and a C++ compiler",
        start.elapsed().as_secs_f64(),
    ));
    Ok((steps, missing))
}

/// As the tests call it when they miss it.
const CXX: &str = "a C++ compiler";

/// Through cargo and not by this executable's path: `cargo test --workspace` may have linked xtask anew, and then the file
/// that this process was started from is gone.
const GATE: &[&str] = &["run", "--quiet", "--package", "xtask", "--", "gate-here"];

fn gate_step(steps: &mut Steps, kernels: &[&str]) -> Result<(), String> {
    let name = if kernels.is_empty() {
        "every kernel for every architecture"
    } else {
        "kernels for every architecture"
    };
    steps.cargo(name, &[GATE, kernels].concat())
}

const FMT: &[&str] = &["fmt", "--all", "--check"];
const CLIPPY: &[&str] = &[
    "clippy",
    "--quiet",
    "--workspace",
    "--all-targets",
    "--",
    "-D",
    "warnings",
];

/// `cargo xtask test`.
///
/// # Errors
/// The first step that failed.
pub fn test() -> Result<(), String> {
    let (mut steps, missing) = steps_with_wheels()?;
    steps.cargo("format", FMT)?;
    steps.cargo("lints", CLIPPY)?;
    steps.cargo(
        "tests and documentation examples",
        if missing.contains(&CXX) {
            &[
                "test",
                "--workspace",
                "--no-fail-fast",
                "--exclude",
                "mamba2-emulator",
            ]
        } else {
            &["test", "--workspace", "--no-fail-fast"]
        },
    )?;
    steps
        .environment
        .push(("RUSTDOCFLAGS", "-D warnings".into()));
    steps.cargo(
        "documentation",
        &["doc", "--quiet", "--workspace", "--no-deps"],
    )?;
    if !missing.contains(&"NVRTC") {
        gate_step(&mut steps, &[])?;
    }
    steps.summary();
    if missing.is_empty() {
        println!("xtask: all passed");
    } else {
        println!(
            "xtask: passed, but SKIPPED what needs {}",
            missing.join(" or ")
        );
    }
    Ok(())
}

/// `cargo xtask check`.
///
/// # Errors
/// The first step that failed.
pub fn check() -> Result<(), String> {
    let mut steps = Steps {
        environment: vec![],
        done: vec![],
    };
    steps.cargo("format", FMT)?;
    steps.cargo("lints", CLIPPY)?;
    steps.cargo(
        "architecture and golden headers",
        &["test", "--quiet", "--package", "xtask"],
    )?;
    steps.summary();
    Ok(())
}

/// `cargo xtask carry-over`.
///
/// # Errors
/// As [`crate::carry_over::run`].
pub fn carry_over(side: &str, file: &str) -> Result<(), String> {
    let (mut steps, missing) = steps_with_wheels()?;
    if missing.contains(&"NVRTC") {
        return Err("carry-over needs NVRTC".into());
    }
    let here = ["run", "--quiet", "--package", "xtask", "--"];
    let arguments = ["carry-over-here", side, file];
    steps.cargo(
        "kernels of shipped records",
        &[&here[..], &arguments].concat(),
    )
}

/// `cargo xtask gate`, for some kernels or, if none is named, for all.
///
/// # Errors
/// What the gate found, or that there is no NVRTC.
pub fn gate(kernels: &[&str]) -> Result<(), String> {
    let (mut steps, missing) = steps_with_wheels()?;
    if missing.contains(&"NVRTC") {
        return Err("the gate needs NVRTC".into());
    }
    gate_step(&mut steps, kernels)
}
