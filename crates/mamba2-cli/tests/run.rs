//! `mamba2 run`, `demo`, `bench` and `step` on the CPU.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use common::{Bench, Case, DSTATE, HEADDIM, NHEADS, SEQLEN, bf16s, f32s, i32s, noise, read_f32};

/// Every option at once.
fn rich() -> Case {
    let mut case = Case::forward();
    case.set("D", f32s(&[NHEADS, HEADDIM], noise));
    case.set("z", f32s(&[1, SEQLEN, NHEADS, HEADDIM], |i| noise(i + 31)));
    case.set("dt_bias", f32s(&[NHEADS], noise));
    case.set("initial_states", f32s(&[3, NHEADS, HEADDIM, DSTATE], noise));
    case.set("cu_seqlens", i32s(&[0, 7, 7, 20]));
    case.option("dt_softplus", "true");
    case.option("dt_limit", "0.001,0.7");
    case.option("name", "rich");
    case
}

#[test]
fn a_file_is_computed_checked_and_written() {
    let bench = Bench::new();
    let done = bench
        .run_case(&rich(), &["-o", "out.safetensors", "--check"])
        .ok();
    assert!(
        done.stdout.contains("out")
            && done.stdout.contains("relative error")
            && done.stdout.contains("max error"),
        "{done:?}"
    );
    assert!(done.stdout.contains("the float64 recurrence"), "{done:?}");
    let (shape, out) = read_f32(&bench.path("out.safetensors"), "out");
    assert_eq!(shape, [1, SEQLEN, NHEADS, HEADDIM]);
    assert!(out.iter().any(|v| *v != 0.0) && out.iter().all(|v| v.is_finite()));
    let (shape, states) = read_f32(&bench.path("out.safetensors"), "final_states");
    assert_eq!(shape, [3, NHEADS, HEADDIM, DSTATE]);
    // The empty sequence keeps its state.
    let size = NHEADS * HEADDIM * DSTATE;
    assert!((0..size).all(|i| states[size + i] == noise(size + i)));
}

#[test]
fn out_has_the_dtype_of_x_and_states_are_float32() {
    let bench = Bench::new();
    let mut case = Case::forward();
    case.set("x", bf16s(&[1, SEQLEN, NHEADS, HEADDIM], noise));
    case.set("B", bf16s(&[1, SEQLEN, common::NGROUPS, DSTATE], noise));
    case.set("C", bf16s(&[1, SEQLEN, common::NGROUPS, DSTATE], noise));
    bench
        .run_case(&case, &["-o", "out.safetensors", "--check"])
        .ok();
    let bytes = std::fs::read(bench.path("out.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        file.tensor("out").unwrap().dtype(),
        safetensors::Dtype::BF16
    );
    assert_eq!(
        file.tensor("final_states").unwrap().dtype(),
        safetensors::Dtype::F32
    );
    assert_eq!(file.names().len(), 2);
}

#[test]
fn json_is_one_object_with_the_result_of_the_check() {
    let bench = Bench::new();
    let json = bench.run_case(&rich(), &["--check", "--json"]).ok().json();
    assert_eq!(json["passed"], true);
    assert_eq!(json["backend"], "cpu");
    assert_eq!(json["check"][0]["tensor"], "out");
    assert!(json["check"][0]["relative_error"].as_f64().unwrap() < 1e-5);
    assert!(json["shape"].as_str().unwrap().contains("packed=3"));
}

#[test]
fn expected_values_in_the_file_are_what_counts() {
    let bench = Bench::new();
    let mut case = rich();
    bench.run_case(&case, &["-o", "right.safetensors"]).ok();
    let (shape, out) = read_f32(&bench.path("right.safetensors"), "out");
    case.set("expected_out", f32s(&shape, |i| out[i]));
    let done = bench.run_case(&case, &["--check"]).ok();
    assert!(
        done.stdout.contains("the expected values of the file"),
        "{done:?}"
    );
    // One element in a few hundred that is off by one.
    case.set(
        "expected_out",
        f32s(&shape, |i| out[i] + if i == 40 { 1.0 } else { 0.0 }),
    );
    let done = bench.run_case(&case, &["--check", "-o", "wrong.safetensors"]);
    assert_eq!(done.code, 1, "{done:?}");
    assert!(
        done.stderr.contains("check failed: out: relative error"),
        "{done:?}"
    );
    assert!(
        done.stdout.contains("FAILED") && done.stdout.contains("element 40"),
        "{done:?}"
    );
    case.set(
        "expected_out",
        f32s(&shape, |i| if i == 3 { f32::NAN } else { out[i] }),
    );
    assert_eq!(
        bench.run_case(&case, &["--check"]).code,
        1,
        "NaN should be equal to nothing"
    );
}

/// The answer does not depend on the chunk size, whoever names it.
#[test]
fn chunk_sizes_that_are_no_powers_of_two_give_the_same_answer() {
    let bench = Bench::new();
    let mut case = rich();
    case.option("chunk_size", "64");
    for n in ["1", "5", "16", "21", "50", "4096"] {
        bench.run_case(&case, &["--check", "--chunk-size", n]).ok();
    }
}

#[test]
fn an_existing_output_is_replaced_whole() {
    let bench = Bench::new();
    bench.write("out.safetensors", &[1; 100_000]);
    bench
        .run_case(&Case::forward(), &["-o", "out.safetensors"])
        .ok();
    read_f32(&bench.path("out.safetensors"), "out");
}

#[test]
fn the_demo_passes_on_the_cpu_and_says_so() {
    let bench = Bench::new();
    let done = bench
        .run(&["demo", "--shape", "b=2,l=100,h=4,p=16,g=2,n=16"])
        .ok();
    assert!(
        done.stdout.contains("on cpu") && done.stdout.contains("ok"),
        "{done:?}"
    );
    assert!(done.stderr.contains("computing on the CPU"), "{done:?}");
    assert_eq!(done.stderr.trim_end().lines().count(), 1, "{done:?}");
    let json = bench
        .run(&[
            "demo",
            "--shape",
            "b=1,l=64,h=2,p=8,g=1,n=8,dtype=f32,packed=3",
            "--json",
        ])
        .ok()
        .json();
    assert_eq!(json["passed"], true);
}

#[test]
fn bench_writes_every_sample() {
    let bench = Bench::new();
    let shape = "b=1,l=64,h=2,p=16,g=1,n=16";
    let done = bench
        .run(&[
            "bench",
            "--backend",
            "cpu",
            "--shape",
            shape,
            "--samples",
            "4",
            "--json",
            "b.json",
        ])
        .ok();
    assert!(done.stdout.contains("median us"), "{done:?}");
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(bench.path("b.json")).unwrap()).unwrap();
    assert_eq!(json["rows"][0]["samples_us"].as_array().unwrap().len(), 4);
    assert!(json["rows"][0]["median_us"].as_f64().unwrap() > 0.0);
    let step = "step:b=3,h=2,p=16,g=1,n=16,slots=4";
    let json = bench
        .run(&["bench", "--backend", "cpu", "--shape", step, "--json", "-"])
        .ok()
        .json();
    assert!(json["rows"][0]["median_us"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_step_advances_the_named_slot_and_leaves_the_others() {
    let bench = Bench::new();
    let case = Case::step();
    bench.write("in.safetensors", &case.to_bytes());
    let done = bench
        .run(&[
            "step",
            "in.safetensors",
            "--backend",
            "cpu",
            "--check",
            "-o",
            "next.safetensors",
        ])
        .ok();
    assert!(
        done.stdout.contains("state") && done.stdout.contains("ok"),
        "{done:?}"
    );
    let (shape, state) = read_f32(&bench.path("next.safetensors"), "state");
    assert_eq!(shape, [3, NHEADS, HEADDIM, DSTATE]);
    let size = NHEADS * HEADDIM * DSTATE;
    // Row 0 has slot 2, row 1 has none.
    assert!((0..2 * size).all(|i| state[i] == noise(i)));
    assert!((2 * size..3 * size).any(|i| state[i] != noise(i)));
    let (_, out) = read_f32(&bench.path("next.safetensors"), "out");
    assert!(
        out[NHEADS * HEADDIM..].iter().all(|v| *v == 0.0),
        "a skipped row has no output"
    );
}

/// Prefill by `run`, then decode by `step`, gives what one long `run` gives.
#[test]
fn prefill_then_decode_is_one_long_run() {
    let bench = Bench::new();
    let case = Case::forward();
    bench.run_case(&case, &["-o", "long.safetensors"]).ok();
    let (_, long_states) = read_f32(&bench.path("long.safetensors"), "final_states");
    let (_, long_out) = read_f32(&bench.path("long.safetensors"), "out");
    let cut = SEQLEN - 1;
    let row = |name: &str| case.tensors[name].bytes.len() / SEQLEN;
    let part = |name: &'static str, from: usize, to: usize| {
        let t = &case.tensors[name];
        let mut shape = t.shape.clone();
        shape[1] = to - from;
        common::Tensor {
            dtype: t.dtype,
            shape,
            bytes: t.bytes[from * row(name)..to * row(name)].to_vec(),
        }
    };
    let mut prefill = Case::default();
    let mut decode = Case::default();
    for name in ["x", "dt", "B", "C"] {
        prefill.set(name, part(name, 0, cut));
        decode.set(name, part(name, cut, SEQLEN));
    }
    for half in [&mut prefill, &mut decode] {
        half.set("A", f32s(&[NHEADS], |i| -1.0 - 5.0 * i as f32));
    }
    bench
        .run_case(&prefill, &["-o", "prefill.safetensors"])
        .ok();
    let (_, states) = read_f32(&bench.path("prefill.safetensors"), "final_states");
    decode.set("state", f32s(&[1, NHEADS, HEADDIM, DSTATE], |i| states[i]));
    bench.write("decode.safetensors", &decode.to_bytes());
    bench
        .run(&[
            "step",
            "decode.safetensors",
            "--backend",
            "cpu",
            "-o",
            "next.safetensors",
        ])
        .ok();
    let (_, state) = read_f32(&bench.path("next.safetensors"), "state");
    let (_, out) = read_f32(&bench.path("next.safetensors"), "out");
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(close(&state, &long_states));
    assert!(close(&out, &long_out[cut * NHEADS * HEADDIM..]));
}

#[test]
fn every_config_is_refused_where_there_is_one_config_or_no_device_or_no_check() {
    let bench = Bench::new();
    let case = Case::forward();
    let done = bench.run_case(&case, &["--check", "--every-config"]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("one config"), "{done:?}");
    let done = bench.run_case(&case, &["--every-config"]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("--check"), "{done:?}");
}

/// Reference cases that were made without looking at this project's code.
#[test]
fn the_handed_cases_pass() {
    let bench = Bench::new();
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../mamba2-cpu/tests/data");
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    names.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    assert!(names.len() >= 5);
    for path in names {
        let done = bench
            .run(&["run", path.to_str().unwrap(), "--backend", "cpu", "--check"])
            .ok();
        assert!(
            done.stdout.contains("the expected values of the file"),
            "{done:?}"
        );
    }
}
