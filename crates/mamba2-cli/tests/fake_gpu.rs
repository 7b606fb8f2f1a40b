//! `mamba2 bench` with a driver made for tests (mamba2-cuda's tests/fake_cuda.c): every replay takes 250 us there, kernels do
//! nothing, and a call costs the host what it costs without the driver's own work.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use std::process::Command;

use common::{Bench, Done};
use mamba2::{Alignment, Arch, CUBIN_DIRECTORY, CacheDir, CubinCache, DeviceFacts, Ladder};
use mamba2_cuda::{CompileOptions, Compiled, Cubin, KernelIdentity, KernelKey, NvrtcVersion};
use mamba2_kernels::{Source, Tool, render, render_step};
use mamba2_spec::{Problem, StepProblem};
use serde_json::Value;

const FORWARD: &str = "b=2,l=300,h=4,p=64,g=2,n=128,z=1";
const STEP: &str = "b=5,h=4,p=64,g=2,n=128";
/// The state of STEP, read and written: 5 * 4 * 64 * 128 f32 values.
const STEP_BYTES: f64 = 2.0 * 655_360.0;

/// What the fake says its first device is.
fn facts() -> DeviceFacts {
    DeviceFacts {
        arch: Arch(90),
        sm_count: 132,
        shared_memory_optin_bytes: 227 * 1024,
        l2_bytes: 50 << 20,
        name: "Fake 0".into(),
    }
}

struct Fake(Bench);

impl Fake {
    fn new() -> Fake {
        let bench = Bench::new();
        let source = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../mamba2-cuda/tests/fake_cuda.c"
        );
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"])
            .args([bench.path("libcuda.so.1").as_os_str(), source.as_ref()])
            .status()
            .expect("cc, which Rust needs too");
        assert!(status.success());
        // The name that is tried first, so that a driver of this machine cannot come before the fake.
        std::fs::copy(bench.path("libcuda.so.1"), bench.path("libcuda.so")).unwrap();
        let fake = Fake(bench);
        // What times are held against.
        fake.cache(&Tool::Copy.render(facts().arch));
        // Of a decode step, of a kernel without and of one with tensor maps.
        for parameter_bytes in [296, 424, 1088] {
            fake.cache(&Tool::Nothing(parameter_bytes).render(facts().arch));
        }
        fake
    }

    fn bench(&self, arguments: &[&str]) -> Done {
        let mut command = self.0.command();
        command
            .env("LD_LIBRARY_PATH", self.0.folder.path())
            // One thread: the fake's log is not for several.
            .env("RAYON_NUM_THREADS", "1")
            .args(["bench", "--backend", "cuda", "--json", "-"])
            .args(arguments);
        Done::of(command.output().unwrap())
    }

    fn ladder(&self) -> Ladder {
        Ladder::builder()
            .cache(&CacheDir::fixed(self.0.path("cache")))
            .templates(mamba2_kernels::template_digest)
            .build()
    }

    /// Puts made-up kernels into the cache, as an earlier process would have put compiled ones.
    fn cache(&self, source: &Source) {
        let identity = KernelIdentity::of(source, facts().arch, CompileOptions::default());
        let nvrtc = NvrtcVersion {
            major: 13,
            minor: 0,
        };
        CubinCache::new(self.0.path("cache").join(CUBIN_DIRECTORY)).put(&Cubin {
            key: KernelKey { identity, nvrtc },
            compiled: Compiled {
                cubin: b"code".to_vec(),
                log: String::new(),
                resources: None,
                target: facts().arch,
            },
        });
    }

    fn cache_forward(&self, text: &str) {
        let problem: Problem = text.parse().unwrap();
        let any = Problem {
            alignment: Alignment::Element,
            ..problem.clone()
        };
        for problem in [problem, any] {
            let config = self.ladder().look_up(&problem, &facts()).unwrap().config;
            for kernel in config.kernels() {
                self.cache(&render(&kernel, &problem, &facts()));
            }
        }
    }

    fn cache_step(&self, problem: &StepProblem) {
        let config = self
            .ladder()
            .look_up_step(problem, &facts())
            .unwrap()
            .config;
        self.cache(&render_step(&config, problem, &facts()));
    }
}

fn number(row: &Value, key: &str) -> f64 {
    row[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key} of {row}"))
}

#[test]
fn a_decode_row_stands_beside_a_copy_timed_in_the_same_run() {
    let fake = Fake::new();
    fake.cache_step(&STEP.parse().unwrap());
    let json = fake.bench(&["--step", STEP, "--samples", "2"]).ok().json();
    let row = &json["rows"][0];
    assert_eq!(number(row, "median_us"), 250.0);
    assert_eq!(number(row, "empty_kernel_us"), 250.0);
    assert!((number(row, "gb_s") - STEP_BYTES / 250e3).abs() < 1e-6);
    // The copy of 1 GiB takes the fake's 250 us as well.
    assert!((number(row, "copy_gb_s") - 2.0 * 1_073_741_824.0 / 250e3).abs() < 1e-3);
    assert!((number(row, "of_copy") - STEP_BYTES / 2_147_483_648.0).abs() < 1e-9);
}

#[test]
fn the_host_cost_of_a_call_has_a_bound() {
    let fake = Fake::new();
    fake.cache_forward(FORWARD);
    fake.cache_step(&STEP.parse().unwrap());
    let json = fake
        .bench(&[
            "--host-cost",
            "--shape",
            FORWARD,
            "--step",
            STEP,
            "--samples",
            "40",
        ])
        .ok()
        .json();
    assert_eq!(json["rows"].as_array().unwrap().len(), 2);
    for row in json["rows"].as_array().unwrap() {
        println!(
            "{}: {} us, least {} us",
            row["shape"], row["host_us"], row["host_min_us"]
        );
        // 5 us are promised for optimised code on a machine with nothing else to do; the least sample keeps the other load out.
        let bound = if cfg!(debug_assertions) { 25.0 } else { 5.0 };
        assert!(number(row, "host_min_us") < bound, "{row}");
        assert!(number(row, "launches") >= 1.0);
        let launch = number(row, "floor_a_launch_us");
        assert!(launch > 0.0 && launch <= number(row, "host_us"), "{row}");
    }
}

#[test]
fn p1_a_process_that_finds_its_kernels_in_the_cache_starts_within_a_second() {
    let fake = Fake::new();
    let shape = "b=1,l=64,h=2,p=64,g=1,n=64";
    fake.cache_forward(shape);
    let json = fake
        .bench(&["--first-call", "--shape", shape, "--samples", "3"])
        .ok()
        .json();
    let row = &json["rows"][0];
    println!("own {} ms, in all {} ms", row["own_ms"], row["total_ms"]);
    assert!(number(row, "own_ms") < 1000.0, "{row}");
    for process in row["processes"].as_array().unwrap() {
        let report = &process["report"];
        assert_eq!(report["compiled"], 0);
        let parts: f64 = ["cuda_ms", "prepare_ms", "inputs_ms", "call_ms"]
            .iter()
            .map(|part| number(report, part))
            .sum();
        assert!(parts <= number(process, "total_ms"), "{process}");
    }
}

#[test]
fn options_are_held_against_the_plain_shape_with_their_traffic_taken_off() {
    let fake = Fake::new();
    let shape = "b=1,l=64,h=2,p=64,g=1,n=64";
    let done = fake.bench(&["--options", "--shape", shape, "--samples", "1"]);
    assert_eq!(
        done.code, 3,
        "nothing is cached yet, and there is no compiler: {done:?}"
    );
    const PIPELINE: &str = "bias=1,softplus=1,limit=0.001:0.1";
    for options in [
        "d=none",
        "d=h",
        "d=none,z=1",
        &format!("d=none,{PIPELINE}"),
        &format!("z=1,{PIPELINE}"),
    ] {
        fake.cache_forward(&format!("{shape},{options}"));
    }
    let json = fake
        .bench(&["--options", "--shape", shape, "--samples", "1"])
        .ok()
        .json();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    assert!(rows[0]["over_plain"].is_null());
    // Every replay takes 250 us here; z is 64 * 2 * 64 bf16 values more, at the speed of the copy.
    let traffic_us = 64.0 * 2.0 * 64.0 * 2.0 / (2_147_483_648.0 / 250.0);
    for (row, traffic) in rows[1..].iter().zip([0.0, traffic_us, 0.0, traffic_us]) {
        assert!(
            (number(row, "over_plain") - 250.0 / (250.0 + traffic)).abs() < 1e-9,
            "{row}"
        );
    }
}
