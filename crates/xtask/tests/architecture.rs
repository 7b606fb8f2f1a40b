//! The shape of the workspace: arrows between crates point one way, and `unsafe` lives in one crate.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Crate, and the workspace crates it is built on (dev-dependencies apart). What those are built on lies below it as well.
const ALLOWED: &[(&str, &[&str])] = &[
    ("mamba2-spec", &[]),
    ("mamba2-reference", &["mamba2-spec"]),
    ("mamba2-cpu", &["mamba2-spec"]),
    ("mamba2-kernels", &["mamba2-spec"]),
    ("mamba2-tunedb", &["mamba2-spec"]),
    ("mamba2-cuda", &["mamba2-spec", "mamba2-kernels"]),
    (
        "mamba2-emulator",
        &["mamba2-spec", "mamba2-kernels", "mamba2-reference"],
    ),
    (
        "mamba2",
        &["mamba2-spec", "mamba2-tunedb", "mamba2-cuda", "mamba2-cpu"],
    ),
    (
        "mamba2-tuner",
        &[
            "mamba2-spec",
            "mamba2-reference",
            "mamba2-tunedb",
            "mamba2-cuda",
        ],
    ),
    (
        "mamba2-cli",
        &[
            "mamba2",
            "mamba2-spec",
            "mamba2-reference",
            "mamba2-cpu",
            "mamba2-kernels",
            "mamba2-cuda",
            "mamba2-tunedb",
            "mamba2-tuner",
        ],
    ),
    (
        "xtask",
        &[
            "mamba2-spec",
            "mamba2-kernels",
            "mamba2-cuda",
            "mamba2-tunedb",
            "mamba2-emulator",
        ],
    ),
];

/// The one crate that may use `unsafe`.
const UNSAFE_CRATE: &str = "mamba2-cuda";

fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
            "--offline",
        ])
        .current_dir(xtask::steps::root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap()
}

/// Everything a crate may stand on.
fn below<'a>(allowed: &BTreeMap<&str, &'a [&'a str]>, name: &str) -> BTreeSet<&'a str> {
    let mut all: BTreeSet<&str> = allowed[name].iter().copied().collect();
    for direct in allowed[name] {
        all.extend(below(allowed, direct));
    }
    all
}

#[test]
fn arrows_between_crates_point_one_way() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let packages = packages();
    let names: BTreeSet<&str> = packages.iter().map(|p| text(p, "name")).collect();
    assert_eq!(
        names,
        allowed.keys().copied().collect(),
        "a new crate needs its row in ALLOWED"
    );
    for package in &packages {
        let name = text(package, "name");
        for dependency in package["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|d| d["kind"].is_null())
        {
            let to = text(dependency, "name");
            if names.contains(to) {
                assert!(
                    below(&allowed, name).contains(to),
                    "{name} must not depend on {to}"
                );
            }
        }
    }
}

#[test]
fn dev_dependencies_make_no_cycle_of_production_crates() {
    // Tests may use the oracle and the binaries; nothing may test itself through what stands above it.
    for package in packages() {
        let name = text(&package, "name").to_string();
        for dependency in package["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|d| d["kind"] == "dev")
        {
            let to = text(dependency, "name");
            let above = ALLOWED
                .iter()
                .any(|(other, below)| *other == to && below.contains(&name.as_str()));
            assert!(
                !above || to == "mamba2-reference",
                "{name} tests itself through {to}, which is built on it"
            );
        }
    }
}

#[test]
fn unsafe_is_forbidden_outside_mamba2_cuda() {
    for package in packages() {
        let name = text(&package, "name");
        for target in package["targets"].as_array().unwrap() {
            let root_file = Path::new(text(target, "src_path"));
            let in_src = root_file.parent().is_some_and(|p| p.ends_with("src"));
            if in_src {
                let source = std::fs::read_to_string(root_file).unwrap();
                let forbids = source
                    .lines()
                    .any(|line| line.trim() == "#![forbid(unsafe_code)]");
                assert_eq!(
                    forbids,
                    name != UNSAFE_CRATE,
                    "{}: `#![forbid(unsafe_code)]` belongs in every crate root but {UNSAFE_CRATE}'s",
                    root_file.display()
                );
            }
        }
        // Tests, benchmarks and their helpers too.
        let folder = Path::new(text(&package, "manifest_path")).parent().unwrap();
        for path in rust_files(folder).iter().filter(|_| name != UNSAFE_CRATE) {
            let source = std::fs::read_to_string(path).unwrap();
            let unsafe_line = source.lines().find(|line| has_unsafe_code(line));
            assert_eq!(unsafe_line, None, "{}", path.display());
        }
    }
}

/// True for a line of code, not of comment or text, that opens something unsafe.
fn has_unsafe_code(line: &str) -> bool {
    let code = line.split("//").next().unwrap();
    let code: String = code.split('"').step_by(2).collect();
    [
        "unsafe {",
        "unsafe fn",
        "unsafe impl",
        "unsafe extern",
        "unsafe trait",
    ]
    .iter()
    .any(|opening| code.contains(opening))
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let folder = xtask::steps::root()
        .join("crates")
        .join(UNSAFE_CRATE)
        .join("src");
    let mut blocks = 0;
    for path in rust_files(&folder) {
        let source = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = source.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            if !has_unsafe_code(line)
                || line.contains("unsafe fn")
                || line.contains("unsafe extern")
            {
                continue;
            }
            blocks += 1;
            let explained = lines[i.saturating_sub(6)..=i]
                .iter()
                .any(|l| l.contains("SAFETY:"));
            assert!(
                explained,
                "{}:{}: an unsafe block without a `// SAFETY:` comment",
                path.display(),
                i + 1
            );
        }
    }
    assert!(
        blocks > 0,
        "{UNSAFE_CRATE} should be where the unsafe blocks are"
    );
}

#[test]
fn every_crate_describes_itself_and_denies_missing_docs() {
    for package in packages() {
        let description = package["description"].as_str().unwrap_or("");
        assert!(
            description.len() > 20,
            "{}: the description should say what the crate is for",
            text(&package, "name")
        );
        let manifest = std::fs::read_to_string(text(&package, "manifest_path")).unwrap();
        assert!(
            manifest.contains("[lints]\nworkspace = true"),
            "{} does not take the workspace's lints",
            text(&package, "name")
        );
    }
}

#[test]
fn i7_device_memory_is_allocated_plainly() {
    // Stream-ordered pools are absent on fractional GPUs, and managed memory can hang one: neither is ever asked for.
    let mut allocations = 0;
    for package in packages() {
        let folder = Path::new(text(&package, "manifest_path")).parent().unwrap();
        for path in rust_files(&folder.join("src")) {
            let source = std::fs::read_to_string(&path).unwrap();
            for call in [
                "cuMemAllocAsync",
                "cuMemPool",
                "cuMemAllocManaged",
                "cuMemAllocFromPool",
            ] {
                assert!(!source.contains(call), "{}: {call}", path.display());
            }
            allocations += source.matches("cuMemAlloc_v2").count();
        }
    }
    assert!(allocations > 0, "the plain allocation should be somewhere");
}
