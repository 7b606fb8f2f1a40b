//! `mamba2 render` and `explain`: what a config changes is visible, without a GPU.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use common::Bench;

const KERNELS: [&str; 7] = [
    "chunk_cumsum",
    "fwd_pass_state",
    "compute_out",
    "sm90_segment_state",
    "segment_scan",
    "sm90_fused_forward",
    "state_update",
];

#[test]
fn every_parameter_of_every_kernel_changes_the_text() {
    let bench = Bench::new();
    for kernel in KERNELS {
        let list = bench
            .run(&["render", "--kernel", kernel, "--list"])
            .ok()
            .stdout;
        // The rows of the table start in the first column: name, then values between bars.
        for row in list.lines().filter(|l| !l.starts_with(' ')) {
            if row.contains("launch argument") {
                continue; // no constant of the text: all its values share one compiled kernel
            }
            let name = row.split_whitespace().next().unwrap();
            let values = row[name.len()..].split("(default").next().unwrap();
            let texts: std::collections::BTreeSet<String> = values
                .split('|')
                .map(|v| {
                    let config = format!("{name}={}", v.trim());
                    bench
                        .run(&["render", "--kernel", kernel, "--config", &config])
                        .ok()
                        .stdout
                })
                .collect();
            assert_eq!(texts.len(), values.split('|').count(), "{kernel}: {row}");
        }
    }
}

#[test]
fn the_text_holds_the_kernel_and_every_header_it_includes() {
    let bench = Bench::new();
    for kernel in KERNELS {
        let text = bench.run(&["render", "--kernel", kernel]).ok().stdout;
        assert!(text.contains(&format!("// ==== {kernel}.cu")), "{kernel}");
        assert!(text.contains("constexpr int HEADDIM = 64;"), "{kernel}");
        for line in text
            .lines()
            .filter(|l| l.trim_start().starts_with("#include"))
        {
            let name = line.split(['"', '<', '>']).nth(1).unwrap();
            assert!(
                text.contains(&format!("// ==== {name}")),
                "{kernel} includes {name}, which is not in the closed set"
            );
        }
    }
}

#[test]
fn explain_says_config_tier_and_key() {
    let bench = Bench::new();
    let shape = "b=4,l=16384,h=8,p=64,g=1,n=128";
    let done = bench
        .run(&["explain", "--arch", "80", "--shape", shape])
        .ok();
    for part in [
        "tier        default",
        "arch=80",
        "compute_out",
        "workspace",
        "mamba2 tune --shape",
    ] {
        assert!(done.stdout.contains(part), "{part}: {done:?}");
    }
    let json = bench
        .run(&["explain", "--arch", "80", "--shape", shape, "--json"])
        .ok()
        .json();
    assert_eq!(json["tier"], "default");
    assert_eq!(json["config"]["strategy"], "three_kernel");
}

#[test]
fn c8_the_workspace_is_stated_before_anything_is_allocated() {
    let bench = Bench::new();
    // The report: states of all chunks of one long row would be 128 GiB at a chunk of 16.
    let stated = |l: u64| {
        let shape = format!("b=1,l={l},h=64,p=64,g=1,n=128");
        let json = bench
            .run(&["explain", "--arch", "90", "--shape", &shape, "--json"])
            .ok()
            .json();
        json["workspace_bytes"].as_u64().unwrap()
    };
    let (short, long) = (stated(1 << 16), stated(1 << 20));
    // No more than one 16-bit state for every 64 tokens, and what a few floats for each token and head take.
    let most = (1 << 20) / 64 * 64 * 64 * 128 * 2 + (1 << 20) * 64 * 16;
    assert!(short > 0 && short < long, "{short} and {long} bytes");
    assert!(long <= most, "{long} bytes, at most {most}");
}

/// A3: a chosen config can be read, kept and forced. On the CPU there is nothing to force; the file must still be sound.
#[test]
fn a3_an_explained_config_can_be_pinned() {
    let bench = Bench::new();
    let shape = "b=1,l=64,h=2,p=16,g=1,n=16";
    let json = bench
        .run(&["explain", "--arch", "90", "--shape", shape, "--json"])
        .ok()
        .json();
    bench.write("config.json", json["config"].to_string().as_bytes());
    bench
        .run(&[
            "demo",
            "--backend",
            "cpu",
            "--shape",
            shape,
            "--pin",
            "config.json",
        ])
        .ok();
    bench.write("config.json", b"{\"strategy\":\"three_kernel\",\"typo\":1}");
    let done = bench.run(&[
        "demo",
        "--backend",
        "cpu",
        "--shape",
        shape,
        "--pin",
        "config.json",
    ]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(
        done.stderr.contains("config.json: expected a config"),
        "{done:?}"
    );
}
