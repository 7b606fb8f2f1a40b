//! Cases whose expected values were made by a program that shares nothing with this project.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Results, assert_close, run};
use half::{bf16, f16};
use mamba2_reference::{Generated, RefOutputs, Values};
use mamba2_spec::{ChunkSize, DKind, DtLimit, Dtype, Problem};
use safetensors::SafeTensors;

struct Case {
    problem: Problem,
    inputs: Generated,
    want: RefOutputs,
}

fn load(bytes: &[u8]) -> Case {
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let file = SafeTensors::deserialize(bytes).unwrap();
    let option = |name: &str| header.metadata().as_ref().unwrap()[name].clone();
    let tensor = |name: &str| file.tensor(name).ok().map(|t| values(t.dtype(), t.data()));
    let shape = |name: &str| file.tensor(name).unwrap().shape().to_vec();
    let (x, b) = (shape("x"), shape("B"));
    let mut problem = Problem::new(x[0], x[1], x[2], x[3], b[2], b[3]);
    let inputs = Generated {
        x: tensor("x").unwrap(),
        dt: tensor("dt").unwrap(),
        a: tensor("A").unwrap(),
        b: tensor("B").unwrap(),
        c: tensor("C").unwrap(),
        d: tensor("D"),
        z: tensor("z"),
        dt_bias: tensor("dt_bias"),
        initial_states: tensor("initial_states"),
        cu_seqlens: tensor("cu_seqlens").map(|v| match v {
            Values::I32(v) => v,
            other => panic!("cu_seqlens of {other:?}"),
        }),
    };
    problem.dtype = inputs.x.dtype().unwrap();
    problem.dt_dtype = inputs.dt.dtype().unwrap();
    problem.d = match inputs.d.as_ref().map(|_| shape("D").len()) {
        None => DKind::None,
        Some(1) => DKind::PerHead,
        Some(_) => DKind::PerHeaddim,
    };
    (problem.z, problem.dt_bias) = (inputs.z.is_some(), inputs.dt_bias.is_some());
    problem.dt_softplus = option("dt_softplus") == "true";
    let limit = option("dt_limit");
    let (min, max) = limit.split_once(',').unwrap();
    problem.dt_limit = DtLimit {
        min: min.parse().unwrap(),
        max: max.parse().unwrap(),
    };
    problem.initial_states = inputs.initial_states.as_ref().and_then(Values::dtype);
    problem.packed = inputs.cu_seqlens.as_ref().map(|cu| cu.len() - 1);
    problem.chunk_size = ChunkSize::Fixed(option("chunk_size").parse().unwrap());
    let expected = |name: &str| tensor(name).unwrap().to_f64();
    let want = RefOutputs {
        out: expected("expected_out"),
        final_states: expected("expected_final_states"),
    };
    Case {
        problem,
        inputs,
        want,
    }
}

fn values(dtype: safetensors::Dtype, data: &[u8]) -> Values {
    let two = || data.chunks_exact(2).map(|v| [v[0], v[1]]);
    let four = || data.chunks_exact(4).map(|v| [v[0], v[1], v[2], v[3]]);
    match dtype {
        safetensors::Dtype::BF16 => Values::Bf16(two().map(bf16::from_le_bytes).collect()),
        safetensors::Dtype::F16 => Values::F16(two().map(f16::from_le_bytes).collect()),
        safetensors::Dtype::F32 => Values::F32(four().map(f32::from_le_bytes).collect()),
        safetensors::Dtype::I32 => Values::I32(four().map(i32::from_le_bytes).collect()),
        other => panic!("unexpected dtype {other:?}"),
    }
}

fn check(bytes: &[u8]) {
    let Case {
        mut problem,
        inputs,
        want,
    } = load(bytes);
    let own_chunks = problem.chunk_size;
    for chunk_size in [own_chunks, ChunkSize::Tuned, ChunkSize::Fixed(50)] {
        problem.chunk_size = chunk_size;
        let results: Results = run(&problem, &inputs);
        assert_close(&problem, &inputs, &results, &want);
    }
    // The oracles themselves against the same file, which stores float32.
    for oracle in [
        mamba2_reference::recurrence(&problem, &inputs.reference()),
        mamba2_reference::chunked(&problem, &inputs.reference(), 64),
    ] {
        for (got, want) in [
            (&oracle.out, &want.out),
            (&oracle.final_states, &want.final_states),
        ] {
            let report = mamba2_reference::ErrorReport::compare(got, want);
            assert!(report.within(1e-7), "{problem}: {report}");
        }
    }
    assert_eq!(problem.final_states, Some(Dtype::F32));
}

#[test]
fn handed_basic() {
    check(include_bytes!("data/basic.safetensors"));
}

#[test]
fn handed_one_token() {
    check(include_bytes!("data/one_token.safetensors"));
}

#[test]
fn handed_shorter_than_chunk() {
    check(include_bytes!("data/shorter_than_chunk.safetensors"));
}

#[test]
fn handed_packed() {
    check(include_bytes!("data/packed.safetensors"));
}

#[test]
fn handed_strong_decay() {
    check(include_bytes!("data/strong_decay.safetensors"));
}
