//! What the commands run. One profile everywhere, so that each crate is built once.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::nvrtc::{self, Found};

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

/// With NVRTC's folder, if one had to be fetched. `None` where there is none and that is allowed.
fn steps_with_nvrtc() -> Result<Option<Steps>, String> {
    let start = Instant::now();
    match nvrtc::find_or_fetch(&target()?) {
        Ok(found) => {
            let environment = match found {
                Found::Installed => vec![],
                Found::Folder(folder) => vec![(nvrtc::PATH_VARIABLE, folder.into_os_string())],
            };
            Ok(Some(Steps {
                environment,
                done: vec![("find or fetch NVRTC", start.elapsed().as_secs_f64())],
            }))
        }
        Err(reason) if in_ci() => Err(format!("CI may skip nothing: {reason}")),
        Err(reason) => {
            eprintln!("xtask: {reason}");
            Ok(None)
        }
    }
}

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
    let found = steps_with_nvrtc()?;
    let has_nvrtc = found.is_some();
    let mut steps = found.unwrap_or(Steps {
        environment: vec![],
        done: vec![],
    });
    steps.cargo("format", FMT)?;
    steps.cargo("lints", CLIPPY)?;
    steps.cargo(
        "tests and documentation examples",
        &["test", "--workspace", "--no-fail-fast"],
    )?;
    steps
        .environment
        .push(("RUSTDOCFLAGS", "-D warnings".into()));
    steps.cargo(
        "documentation",
        &["doc", "--quiet", "--workspace", "--no-deps"],
    )?;
    if has_nvrtc {
        gate_step(&mut steps, &[])?;
    }
    steps.summary();
    if has_nvrtc {
        println!("xtask: all passed");
    } else {
        println!("xtask: passed, but SKIPPED: no NVRTC, so no kernel was compiled");
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

/// `cargo xtask gate`, for some kernels or, if none is named, for all.
///
/// # Errors
/// What the gate found, or that there is no NVRTC.
pub fn gate(kernels: &[&str]) -> Result<(), String> {
    let mut steps = steps_with_nvrtc()?.ok_or("the gate needs NVRTC")?;
    gate_step(&mut steps, kernels)
}
