//! What bad input gets: exit code 2, one line that names the tensor or key, what was expected and what came, and no file.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use common::{Bench, Case, DSTATE, HEADDIM, NGROUPS, NHEADS, SEQLEN, bf16s, f32s, i32s, noise};

/// Runs a damaged case and checks the message.
fn refused(change: impl Fn(&mut Case), parts: &[&str]) {
    let bench = Bench::new();
    let mut case = Case::forward();
    change(&mut case);
    let done = bench.run_case(&case, &["-o", "out.safetensors"]);
    assert_eq!(done.code, 2, "{done:?}");
    assert_eq!(
        done.stdout, "",
        "nothing should be reported of a refused call"
    );
    assert_eq!(
        done.stderr.trim_end().lines().count(),
        1,
        "one line: {done:?}"
    );
    for part in parts.iter().chain(&["in.safetensors"]) {
        assert!(
            done.stderr.contains(part),
            "{part:?} is not in {:?}",
            done.stderr
        );
    }
    assert!(!bench.path("out.safetensors").exists());
    assert_eq!(
        std::fs::read_dir(bench.folder.path()).unwrap().count(),
        1,
        "only the input should be there"
    );
}

#[test]
fn a_wrong_shape_names_the_tensor_and_both_shapes() {
    refused(
        |c| c.set("dt", f32s(&[1, SEQLEN, NHEADS + 1], noise)),
        &["dt: expected", "[1, 21, 4]", "[1, 21, 5]"],
    );
    refused(
        |c| c.set("A", f32s(&[NHEADS - 1], noise)),
        &["A: expected [nheads] = [4], got [3]"],
    );
    refused(
        |c| c.set("C", f32s(&[1, SEQLEN, NGROUPS, DSTATE + 1], noise)),
        &["C: expected", "[1, 21, 2, 5]", "[1, 21, 2, 6]"],
    );
    refused(
        |c| c.set("D", f32s(&[NHEADS, HEADDIM + 1], noise)),
        &["D: expected [nheads, headdim]"],
    );
    refused(
        |c| c.set("D", f32s(&[1, 1, NHEADS], noise)),
        &["D: expected [nheads] = [4], got [1, 1, 4]"],
    );
    refused(
        |c| c.set("z", f32s(&[1, SEQLEN - 1, NHEADS, HEADDIM], noise)),
        &["z: expected"],
    );
    refused(
        |c| c.set("initial_states", f32s(&[2, NHEADS, HEADDIM, DSTATE], noise)),
        &["initial_states: expected", "got [2, 4, 6, 5]"],
    );
    refused(
        |c| c.set("x", f32s(&[SEQLEN, NHEADS, HEADDIM], noise)),
        &["x: expected four axes [batch, seqlen, nheads, headdim]"],
    );
    refused(
        |c| c.set("x", f32s(&[1, 1, SEQLEN, NHEADS, HEADDIM], noise)),
        &["x: expected at most 4 axes"],
    );
    refused(
        |c| c.set("expected_out", f32s(&[1, SEQLEN, NHEADS, 1], noise)),
        &["expected_out: expected"],
    );
}

#[test]
fn a_wrong_dtype_names_the_tensor_and_both_dtypes() {
    refused(
        |c| c.set("B", bf16s(&[1, SEQLEN, NGROUPS, DSTATE], noise)),
        &["B: expected dtype f32, got bf16"],
    );
    refused(
        |c| c.set("A", bf16s(&[NHEADS], noise)),
        &["A: expected dtype f32, got bf16"],
    );
    refused(|c| c.set("x", i32s(&[1, 2, 3])), &["x: expected four axes"]);
    refused(
        |c| {
            let x = c.tensors.get_mut("x").unwrap();
            x.dtype = safetensors::Dtype::I32;
        },
        &["x: expected dtype bf16, f16 or f32, got i32"],
    );
    refused(
        |c| {
            let x = c.tensors.get_mut("x").unwrap();
            x.dtype = safetensors::Dtype::U32;
        },
        &["x: expected dtype bf16, f16, f32 or i32, got U32"],
    );
    refused(
        |c| c.set("cu_seqlens", f32s(&[2], |i| (SEQLEN * i) as f32)),
        &["cu_seqlens: expected dtype i32"],
    );
}

#[test]
fn heads_that_are_no_multiple_of_the_groups_are_refused() {
    refused(
        |c| {
            c.set("B", f32s(&[1, SEQLEN, 3, DSTATE], noise));
            c.set("C", f32s(&[1, SEQLEN, 3, DSTATE], noise));
        },
        &["nheads: expected a multiple of ngroups = 3, got 4"],
    );
}

#[test]
fn sizes_beyond_the_operator_are_refused() {
    refused(
        |c| c.set("x", f32s(&[1, 1, NHEADS, 257], noise)),
        &["headdim: expected 1..=256, got 257"],
    );
    refused(
        |c| c.set("B", f32s(&[1, SEQLEN, NGROUPS, 513], noise)),
        &["dstate: expected 1..=512, got 513"],
    );
    refused(
        |c| c.set("B", f32s(&[1, SEQLEN, 0, DSTATE], noise)),
        &["ngroups: expected 1..=4, got 0"],
    );
}

#[test]
fn malformed_offsets_name_the_fault() {
    let end = SEQLEN as i32;
    refused(
        |c| c.set("cu_seqlens", i32s(&[1, end])),
        &["cu_seqlens: expected the first offset to be 0, got 1"],
    );
    refused(
        |c| c.set("cu_seqlens", i32s(&[0, 9, 3, end])),
        &["cu_seqlens: expected non-decreasing offsets, got 3 after 9 at index 2"],
    );
    refused(
        |c| c.set("cu_seqlens", i32s(&[0, end + 1])),
        &["cu_seqlens: expected the last offset to be at most seqlen = 21, got 22"],
    );
    refused(
        |c| c.set("cu_seqlens", i32s(&[0, -4, end])),
        &["cu_seqlens: expected non-decreasing offsets"],
    );
    refused(
        |c| c.set("cu_seqlens", i32s(&[])),
        &["cu_seqlens: expected [sequences + 1] offsets, got none"],
    );
}

/// A1: packed sequences take one state per sequence, not one per row.
#[test]
fn a1_packed_states_of_the_wrong_number_of_sequences_are_refused() {
    refused(
        |c| {
            c.set("cu_seqlens", i32s(&[0, 4, SEQLEN as i32]));
            c.set("initial_states", f32s(&[1, NHEADS, HEADDIM, DSTATE], noise));
        },
        &[
            "initial_states: expected [sequences, nheads, headdim, dstate] = [2, 4, 6, 5], got [1, 4, 6, 5]",
        ],
    );
}

#[test]
fn unreadable_options_name_the_key() {
    refused(
        |c| c.option("dt_limit", "nan,1"),
        &["dt_limit: expected two numbers lo <= hi, neither NaN"],
    );
    refused(|c| c.option("dt_limit", "0,nan"), &["dt_limit"]);
    refused(|c| c.option("dt_limit", "2,1"), &["dt_limit", "2,1"]);
    refused(
        |c| c.option("dt_limit", "0.1"),
        &["dt_limit: expected \"lo,hi\"", "0.1"],
    );
    refused(|c| c.option("dt_limit", "a,b"), &["dt_limit"]);
    refused(
        |c| c.option("dt_softplus", "yes"),
        &["dt_softplus: expected \"true\" or \"false\", got \"yes\""],
    );
    refused(
        |c| c.option("chunk_size", "many"),
        &["chunk_size: expected a whole number of tokens, got \"many\""],
    );
    refused(
        |c| c.option("dt_softpuls", "true"),
        &["metadata: expected only the keys", "dt_softpuls"],
    );
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["x", "dt", "A", "B", "C"] {
        refused(
            |c| {
                c.tensors.remove(name);
            },
            &[&format!("{name}: expected a tensor of this name, got none")],
        );
    }
}

#[test]
fn a_misspelt_tensor_is_not_ignored() {
    refused(
        |c| c.set("Z", f32s(&[1, SEQLEN, NHEADS, HEADDIM], noise)),
        &["tensors: expected only the names", "\"Z\""],
    );
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let bytes = Case::forward().to_bytes();
    for length in [0, 4, 8, 40, bytes.len() / 2, bytes.len() - 1] {
        let bench = Bench::new();
        bench.write("in.safetensors", &bytes[..length]);
        let done = bench.run(&[
            "run",
            "in.safetensors",
            "--backend",
            "cpu",
            "-o",
            "out.safetensors",
        ]);
        assert_eq!(done.code, 2, "{length} bytes: {done:?}");
        assert!(
            done.stderr
                .contains("in.safetensors: expected a whole safetensors file"),
            "{done:?}"
        );
        assert!(!bench.path("out.safetensors").exists());
    }
}

/// Tensors without elements cost a file nothing, whatever their other axes say.
#[test]
fn a_small_file_that_asks_for_sizes_beyond_any_memory_is_refused() {
    for (batch, named) in [
        (1 << 30, "final_states"),
        (1 << 61, "product can be counted"),
    ] {
        let mut case = Case::forward();
        // More than 47 bits of address: no system gives that, however it overcommits.
        case.set("x", f32s(&[batch, 0, NHEADS, 256], noise));
        case.set("dt", f32s(&[batch, 0, NHEADS], noise));
        case.set("A", f32s(&[NHEADS], noise));
        for name in ["B", "C"] {
            case.set(name, f32s(&[batch, 0, NGROUPS, 512], noise));
        }
        let bench = Bench::new();
        let done = bench.run_case(&case, &[]);
        assert_eq!(done.code, 2, "{done:?}");
        assert!(done.stderr.contains(named), "{done:?}");
    }
}

#[test]
fn a_foreign_file_is_refused() {
    let bench = Bench::new();
    for (name, bytes) in [
        ("text", b"hello, this is no tensor file at all".to_vec()),
        ("ones", vec![0xff; 4096]),
        ("zeros", vec![0; 64]),
    ] {
        bench.write(name, &bytes);
        let done = bench.run(&["run", name, "--backend", "cpu"]);
        assert_eq!(done.code, 2, "{done:?}");
        assert!(
            done.stderr.contains("expected a whole safetensors file"),
            "{done:?}"
        );
    }
    let done = bench.run(&["run", "nowhere.safetensors"]);
    assert_eq!(done.code, 2);
    assert!(
        done.stderr.contains("nowhere.safetensors: cannot read"),
        "{done:?}"
    );
}

#[test]
fn an_output_that_cannot_be_written_leaves_nothing() {
    let bench = Bench::new();
    let done = bench.run_case(&Case::forward(), &["-o", "no/such/folder/out.safetensors"]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(
        done.stderr.contains("out.safetensors: cannot write"),
        "{done:?}"
    );
    // An existing folder of that name is not replaced, and the half-made neighbour is gone.
    std::fs::create_dir(bench.path("taken")).unwrap();
    let done = bench.run_case(&Case::forward(), &["-o", "taken"]);
    assert_eq!(done.code, 2, "{done:?}");
    let names: Vec<String> = std::fs::read_dir(bench.folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        names.iter().all(|n| !n.starts_with(".mamba2-")),
        "{names:?}"
    );
}

#[test]
fn a_chunk_size_out_of_range_is_refused() {
    for n in ["0", "4097"] {
        let bench = Bench::new();
        let done = bench.run_case(&Case::forward(), &["--chunk-size", n]);
        assert_eq!(done.code, 2, "{done:?}");
        assert!(
            done.stderr.contains("chunk_size: expected 1..=4096"),
            "{done:?}"
        );
    }
}

/// A2: hidden rules are said in the caller's words, without a GPU.
#[test]
fn a2_shapes_on_the_command_line_are_explained_in_the_callers_words() {
    let bench = Bench::new();
    for (shape, part) in [
        (
            "b=1,l=10,h=6,p=48,g=4,n=20",
            "nheads: expected a multiple of ngroups = 4, got 6",
        ),
        (
            "b=1,l=10,h=6,p=300,g=1,n=20",
            "headdim: expected 1..=256, got 300",
        ),
        ("b=1,l=10,h=6,p=48", "b, l, h, p, g and n"),
        ("b=1,l=10,h=6,p=48,g=1,n=20,zz=1", "zz: expected one of"),
        ("b=1,b=2", "each key once"),
        ("b=1,l=10,h=6,p=48,g=1,n=20,q=48", "chunk_size"),
        ("nonsense", "key=value"),
    ] {
        let done = bench.run(&["explain", "--arch", "90", "--shape", shape]);
        assert_eq!(done.code, 2, "{shape}: {done:?}");
        assert!(done.stderr.contains(part), "{shape}: {done:?}");
    }
    bench
        .run(&[
            "explain",
            "--arch",
            "90",
            "--shape",
            "b=1,l=10,h=6,p=48,g=1,n=20",
        ])
        .ok();
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let bench = Bench::new();
    for arguments in [
        vec!["run"],
        vec!["frobnicate"],
        vec!["bench"],
        vec!["bench", "--step", "batch=1,nheads=1"],
        vec![
            "bench",
            "--step",
            "batch=0,nheads=1,headdim=1,ngroups=1,dstate=1",
        ],
        vec![
            "bench",
            "--step",
            "batch=1,nheads=1,headdim=1,ngroups=1,dstate=1,seqlen=9",
        ],
        vec!["bench", "--sweep", "no_such"],
        vec!["bench", "--sweep", "decode", "--host-cost", "--first-call"],
        vec!["tune"],
        vec!["run", "in", "--backend", "gpu"],
        vec!["render", "--kernel", "no_such_kernel"],
        vec!["render", "--kernel", "compute_out", "--config", "stages=99"],
        vec!["render", "--kernel", "compute_out", "--config", "no_such=1"],
        vec![
            "explain",
            "--shape",
            "b=1,l=1,h=1,p=1,g=1,n=1",
            "--arch",
            "70",
        ],
        vec!["db", "show", "nonsense"],
        vec!["db", "import", "nowhere.json"],
        vec!["db", "diff", "nowhere.json"],
        vec!["tune", "--shapes", "nowhere.toml"],
    ] {
        let done = bench.run(&arguments);
        assert_eq!(done.code, 2, "{arguments:?}: {done:?}");
        assert!(!done.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_step_file_is_checked_as_well() {
    let bench = Bench::new();
    for (change, part) in [
        (
            Box::new(|c: &mut Case| c.set("state", f32s(&[3, NHEADS, HEADDIM], noise)))
                as Box<dyn Fn(&mut Case)>,
            "state: expected four axes",
        ),
        (
            Box::new(|c: &mut Case| c.set("state_batch_indices", i32s(&[0]))),
            "state_batch_indices: expected [batch] = [2], got [1]",
        ),
        (
            Box::new(|c: &mut Case| c.set("state_batch_indices", i32s(&[0, 3]))),
            "state_batch_indices",
        ),
        (
            Box::new(|c: &mut Case| c.set("x", f32s(&[4, 1, NHEADS, HEADDIM], noise))),
            "expected",
        ),
        (
            Box::new(|c: &mut Case| drop(c.tensors.remove("state"))),
            "state: expected a tensor of this name, got none",
        ),
    ] {
        let mut case = Case::step();
        change(&mut case);
        bench.write("in.safetensors", &case.to_bytes());
        let done = bench.run(&[
            "step",
            "in.safetensors",
            "--backend",
            "cpu",
            "-o",
            "out.safetensors",
        ]);
        assert_eq!(done.code, 2, "{part}: {done:?}");
        assert!(done.stderr.contains(part), "{part}: {done:?}");
        assert!(!bench.path("out.safetensors").exists());
    }
}
