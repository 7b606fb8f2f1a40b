//! Every option of the operator on the GPU, at the default config and a few others, against the float64 oracle: outputs
//! poisoned, twice bit-equal, canaries whole. Tests are named after the rows of the list of publicly reported faults.
//!
//! Needs a GPU: prints `SKIPPED: no CUDA device` without one, and fails instead if MAMBA2_REQUIRE_GPU=1.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;

use common::{Gpu, gpu, is_fatal};
use mamba2_cuda::{DeviceTensor, LoadedForward, LoadedStep};
use mamba2_reference::{
    ErrorReport, Generated, Pattern, StepRefInputs, Values, generate, generate_packed,
    generate_step, recurrence, step,
};
use mamba2_spec::{
    Dtype, ForwardInputs, ForwardOutputs, Problem, StepOutputs, StepProblem, StrategyConfig,
    TensorMeta, rules,
};
use mamba2_tuner::gpu::{Oracle, Placement, StepTrial, decode, failure_of, place};
use mamba2_tuner::space::Space;
use mamba2_tuner::{Candidate, Failure, Target};

fn problem(text: &str) -> Problem {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// The default, the defaults of other chunk sizes and layouts, and the last config of every kernel there.
fn some_configs(space: &Space) -> Vec<StrategyConfig> {
    let mut configs = Vec::new();
    if let Candidate::Strategy(default) = space.default {
        configs.push(default);
    }
    for (i, assembly) in space.assemblies.iter().enumerate() {
        let pick = |candidates: &Vec<Candidate>| {
            if i % 2 == 0 {
                candidates.last().copied()
            } else {
                candidates.first().copied()
            }
        };
        let kernels: Vec<_> = assembly
            .parts
            .iter()
            .filter_map(pick)
            .flat_map(|c| c.kernels())
            .collect();
        configs.extend(assembly.assemble(&kernels));
    }
    configs.dedup();
    configs
}

/// One body for every test here.
fn check_made(
    gpu: &Gpu,
    problem: &Problem,
    made: &Generated,
    placements: &[Placement],
    configs: &[StrategyConfig],
) {
    let oracle = Oracle::forward(problem, made);
    let mut poisoned = made.clone();
    poisoned.poison_tail(problem);
    let candidates: Vec<Candidate> = configs.iter().map(|c| Candidate::Strategy(*c)).collect();
    let compiled = gpu.compile(&Target::Forward(problem.clone()), &candidates);
    let mut faults = Vec::new();
    for placement in placements {
        let trial = gpu.trial(problem, &poisoned, *placement);
        for (config, compiled) in configs.iter().zip(&compiled) {
            let result = compiled
                .clone()
                .and_then(|()| gpu.check(&trial, &oracle, config));
            if let Err(failure) = result {
                assert!(
                    !is_fatal(&failure),
                    "{problem}, {placement:?}, {config}: {failure}"
                );
                faults.push(format!("{problem}, {placement:?}, {config}: {failure}"));
            }
        }
    }
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

fn check(gpu: &Gpu, text: &str, pattern: Pattern) {
    let problem = problem(text);
    let made = generate(&problem, 3, pattern);
    check_made(
        gpu,
        &problem,
        &made,
        &[Placement::Exact],
        &some_configs(&gpu.space(&problem)),
    );
}

fn check_default(gpu: &Gpu, text: &str, pattern: Pattern, placement: Placement) {
    let problem = problem(text);
    let made = generate(&problem, 3, pattern);
    let default = rules::default_strategy(&problem, gpu.device.facts()).unwrap();
    check_made(gpu, &problem, &made, &[placement], &[default]);
}

/// Tokens `range` of a problem of one row.
fn slice(
    made: &Generated,
    problem: &Problem,
    range: std::ops::Range<usize>,
    initial: Option<Values>,
) -> Generated {
    let p = problem;
    let cut = |values: &Values, width: usize| {
        let part = range.start * width..range.end * width;
        match values {
            Values::Bf16(v) => Values::Bf16(v[part].to_vec()),
            Values::F16(v) => Values::F16(v[part].to_vec()),
            Values::F32(v) => Values::F32(v[part].to_vec()),
            Values::I32(v) => Values::I32(v[part].to_vec()),
        }
    };
    Generated {
        x: cut(&made.x, p.nheads * p.headdim),
        dt: cut(&made.dt, p.nheads),
        b: cut(&made.b, p.ngroups * p.dstate),
        c: cut(&made.c, p.ngroups * p.dstate),
        z: made.z.as_ref().map(|z| cut(z, p.nheads * p.headdim)),
        initial_states: initial.or_else(|| made.initial_states.clone()),
        cu_seqlens: None,
        ..made.clone()
    }
}

fn f32_values(bytes: &[u8]) -> Values {
    Values::F32(
        bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
    )
}

#[test]
fn n1_every_tail_of_every_chunk_size_is_masked() {
    let Some(gpu) = gpu() else { return };
    for q in [64, 128, 256] {
        for l in [1, q - 1, q, q + 1, 2 * q - 1, 200, 257] {
            check_default(
                &gpu,
                &format!("b=2,l={l},h=4,p=64,g=2,n=64,q={q}"),
                Pattern::Plain,
                Placement::Exact,
            );
        }
    }
    let refused = rules::default_strategy(
        &problem("b=1,l=200,h=4,p=64,g=1,n=64,q=50"),
        gpu.device.facts(),
    );
    assert!(refused.unwrap_err().to_string().contains("64, 128 or 256"));
}

#[test]
fn n4_the_running_sum_of_decays_is_never_cut_to_16_bits() {
    let Some(gpu) = gpu() else { return };
    for dtype in ["bf16", "f16", "f32"] {
        check(
            &gpu,
            &format!("b=1,l=600,h=4,p=64,g=1,n=64,dtype={dtype}"),
            Pattern::StrongDecay,
        );
    }
}

#[test]
fn n4_tokens_with_dt_zero_beside_dt_of_1000_keep_decay_1() {
    let Some(gpu) = gpu() else { return };
    for dtype in ["bf16", "f32"] {
        check(
            &gpu,
            &format!("b=1,l=200,h=4,p=64,g=1,n=64,dtype={dtype}"),
            Pattern::HalfZero,
        );
    }
}

#[test]
fn n5_the_error_of_long_inputs_does_not_grow_with_the_number_of_chunks() {
    let Some(gpu) = gpu() else { return };
    for q in [64, 256] {
        check_default(
            &gpu,
            &format!("b=1,l=16384,h=2,p=32,g=1,n=64,q={q}"),
            Pattern::WeakDecay,
            Placement::Exact,
        );
    }
}

#[test]
fn n6_initial_states_count_whatever_the_batch() {
    let Some(gpu) = gpu() else { return };
    for b in [1, 2] {
        for l in [1, 40, 200] {
            check_default(
                &gpu,
                &format!("b={b},l={l},h=4,p=64,g=1,n=64"),
                Pattern::StateOnly,
                Placement::Exact,
            );
        }
    }
}

#[test]
fn n8_final_states_of_packed_sequences_are_those_of_stand_alone_runs() {
    let Some(gpu) = gpu() else { return };
    for lens in [
        &[500usize, 700, 900][..],
        &[256, 300, 400],
        &[1, 0, 1, 64, 65, 0, 63],
    ] {
        let mut offsets = vec![0i32];
        lens.iter()
            .for_each(|len| offsets.push(offsets.last().unwrap() + *len as i32));
        // A padded tail of 5 tokens, which holds NaN.
        let total = *offsets.last().unwrap() as usize + 5;
        let problem = problem(&format!(
            "b=1,l={total},h=4,p=64,g=2,n=64,packed={}",
            lens.len()
        ));
        let made = generate_packed(&problem, 3, Pattern::Model, &offsets);
        check_made(
            &gpu,
            &problem,
            &made,
            &[Placement::Exact],
            &some_configs(&gpu.space(&problem)),
        );
    }
}

#[test]
fn packed_sequences_work_with_every_option_and_thousands_of_them() {
    let Some(gpu) = gpu() else { return };
    check(
        &gpu,
        "b=1,l=700,h=6,p=64,g=3,n=128,packed=9,z=1,d=hp,bias=1,softplus=1,limit=0.001:0.1",
        Pattern::Model,
    );
    check(
        &gpu,
        "b=1,l=700,h=6,p=64,g=3,n=128,packed=9,init=none,final=bf16,dtype=f16",
        Pattern::Model,
    );
    check_default(
        &gpu,
        "b=1,l=6000,h=2,p=32,g=1,n=32,packed=3000",
        Pattern::Plain,
        Placement::Exact,
    );
    check_default(
        &gpu,
        "b=1,l=100,h=2,p=32,g=1,n=32,packed=1,dtype=f32",
        Pattern::Plain,
        Placement::Exact,
    );
}

#[test]
fn n10_heads_map_to_groups_in_blocks() {
    let Some(gpu) = gpu() else { return };
    for (h, g) in [(24, 3), (8, 4), (8, 8), (15, 5)] {
        check_default(
            &gpu,
            &format!("b=1,l=130,h={h},p=32,g={g},n=32"),
            Pattern::GroupConstant,
            Placement::Exact,
        );
        check(
            &gpu,
            &format!("b=1,l=130,h={h},p=32,g={g},n=32"),
            Pattern::Model,
        );
    }
}

#[test]
fn n11_states_are_carried_forward_and_no_token_changes_an_earlier_one() {
    let Some(gpu) = gpu() else { return };
    check(
        &gpu,
        "b=1,l=512,h=2,p=64,g=1,n=64,init=none",
        Pattern::Impulse,
    );
    let problem = problem("b=1,l=512,h=2,p=64,g=1,n=64");
    let made = generate(&problem, 3, Pattern::Model);
    let mut changed = made.clone();
    let Values::Bf16(x) = &mut changed.x else {
        panic!("bf16")
    };
    let row = problem.nheads * problem.headdim;
    x[400 * row..401 * row].fill(half::bf16::from_f32(3.0));
    for config in some_configs(&gpu.space(&problem)) {
        let run = |made: &Generated| {
            gpu.run(&gpu.trial(&problem, made, Placement::Exact), &config)
                .unwrap()
                .out
        };
        let (before, after) = (run(&made), run(&changed));
        let split = 400 * row * 2;
        assert_eq!(
            before[..split],
            after[..split],
            "{config}: an earlier token changed"
        );
        assert_ne!(
            before[split..],
            after[split..],
            "{config}: token 400 had no effect"
        );
    }
}

#[test]
fn n12_continuing_from_a_saved_state_gives_the_one_shot_answer() {
    let Some(gpu) = gpu() else { return };
    for (dtype, piece) in [("bf16", 64), ("bf16", 100), ("f32", 37), ("f32", 1)] {
        let total = if piece == 1 { 70 } else { 256 };
        let whole = problem(&format!(
            "b=1,l={total},h=4,p=64,g=2,n=64,dtype={dtype},z=1"
        ));
        let made = generate(&whole, 3, Pattern::Model);
        let oracle = Oracle::forward(&whole, &made);
        let mut out = Vec::new();
        let mut state = None;
        let mut at = 0;
        while at < total {
            let end = (at + piece).min(total);
            let part = Problem {
                seqlen: end - at,
                ..whole.clone()
            };
            let trial = gpu.trial(
                &part,
                &slice(&made, &whole, at..end, state.take()),
                Placement::Exact,
            );
            let run = gpu
                .run(
                    &trial,
                    &rules::default_strategy(&part, gpu.device.facts()).unwrap(),
                )
                .unwrap();
            out.extend(run.out);
            state = Some(f32_values(&run.states));
            at = end;
        }
        let states = state.unwrap().to_le_bytes();
        oracle
            .check(&mamba2_tuner::gpu::Run { out, states })
            .unwrap_or_else(|f| panic!("{dtype}, pieces of {piece}: {f}"));
    }
}

#[test]
fn n12_the_error_does_not_depend_on_where_a_run_is_cut() {
    let Some(gpu) = gpu() else { return };
    const LENGTH: usize = 200;
    let whole = problem("b=1,l=200,h=4,p=64,g=2,n=64,z=1");
    let made = generate(&whole, 3, Pattern::Model);
    let want = recurrence(&whole, &made.reference());
    let run = |range: std::ops::Range<usize>, initial: Option<Values>| {
        let part = Problem {
            seqlen: range.len(),
            ..whole.clone()
        };
        let config = rules::default_strategy(&part, gpu.device.facts()).unwrap();
        let inputs = slice(&made, &whole, range, initial);
        gpu.run(&gpu.trial(&part, &inputs, Placement::Exact), &config)
            .unwrap()
    };
    let errors = |out: &[u8], states: &[u8]| {
        [
            ErrorReport::compare(&decode(out, Dtype::Bf16), &want.out).relative_frobenius,
            ErrorReport::compare(&decode(states, Dtype::F32), &want.final_states)
                .relative_frobenius,
        ]
    };
    let once = run(0..LENGTH, None);
    let once = errors(&once.out, &once.states);
    for k in 0..=LENGTH {
        let head = run(0..k, None);
        let tail = run(k..LENGTH, Some(f32_values(&head.states)));
        let cut = errors(&[head.out, tail.out].concat(), &tail.states);
        for (cut, once) in cut.iter().zip(&once) {
            assert!(
                *cut <= 1.5 * once,
                "cut at {k}: {cut:.2e}, in one run {once:.2e}"
            );
        }
    }
}

#[test]
fn n13_dt_goes_through_bias_softplus_and_clamp_in_this_order() {
    let Some(gpu) = gpu() else { return };
    for limit in ["0:inf", "0.001:0.1", "0:0"] {
        for dtype in ["bf16", "f32"] {
            check(
                &gpu,
                &format!(
                    "b=1,l=200,h=4,p=64,g=1,n=64,dtype={dtype},bias=1,softplus=1,limit={limit}"
                ),
                Pattern::RawDt,
            );
        }
    }
    check(
        &gpu,
        "b=1,l=200,h=4,p=64,g=1,n=64,softplus=1",
        Pattern::RawDt,
    );
    check(
        &gpu,
        "b=1,l=200,h=4,p=64,g=1,n=64,dtype=f32,bias=1,limit=0:0.5",
        Pattern::RawDt,
    );
}

#[test]
fn n14_prefill_and_decode_agree() {
    let Some(gpu) = gpu() else { return };
    let whole = problem("b=1,l=131,h=8,p=64,g=2,n=128,z=1,bias=1,softplus=1");
    let made = generate(&whole, 3, Pattern::Model);
    let want = recurrence(&whole, &made.reference());
    let head = Problem {
        seqlen: 130,
        ..whole.clone()
    };
    let trial = gpu.trial(&head, &slice(&made, &whole, 0..130, None), Placement::Exact);
    let run = gpu
        .run(
            &trial,
            &rules::default_strategy(&head, gpu.device.facts()).unwrap(),
        )
        .unwrap();
    let tail = slice(&made, &whole, 130..131, Some(f32_values(&run.states)));
    let mut problem = StepProblem::new(1, 8, 64, 2, 128);
    (problem.z, problem.dt_bias, problem.dt_softplus) = (true, true, true);
    let mut one = generate_step(&problem, 1, Pattern::Model);
    (one.x, one.dt, one.a, one.b, one.c, one.d) = (tail.x, tail.dt, tail.a, tail.b, tail.c, tail.d);
    (one.z, one.dt_bias, one.state) = (tail.z, tail.dt_bias, f32_values(&run.states));
    let decoded = run_step(&gpu, &problem, &one, Placement::Exact).unwrap();
    let row = whole.nheads * whole.headdim;
    let report = ErrorReport::compare(&decode(&decoded.out, Dtype::Bf16), &want.out[130 * row..]);
    assert!(report.within(3e-3), "{report}");
    let states = ErrorReport::compare(&decode(&decoded.states, Dtype::F32), &want.final_states);
    assert!(states.within(2.5e-3), "{states}");
}

#[test]
fn n15_f32_is_f32_unless_tf32_is_asked_for() {
    let Some(gpu) = gpu() else { return };
    for pattern in [Pattern::Plain, Pattern::Model, Pattern::WeakDecay] {
        check(&gpu, "b=1,l=520,h=1,p=64,g=1,n=128,dtype=f32", pattern);
    }
    check(
        &gpu,
        "b=1,l=520,h=4,p=64,g=1,n=128,dtype=f32,tf32=1",
        Pattern::Model,
    );
}

#[test]
fn n16_slices_of_a_fused_projection_give_the_bits_of_contiguous_copies() {
    let Some(gpu) = gpu() else { return };
    for text in [
        "b=2,l=150,h=6,p=64,g=3,n=64,z=1,d=hp,align=16",
        "b=2,l=150,h=6,p=64,g=3,n=64,z=1,d=hp,align=1",
        "b=2,l=150,h=6,p=80,g=2,n=128,dtype=f32,dt_dtype=bf16,align=1",
        "b=1,l=150,h=4,p=64,g=1,n=64,packed=4,z=1,dtype=f16,align=1",
    ] {
        let problem = problem(text);
        let mut made = generate(&problem, 3, Pattern::Model);
        let odd = problem.alignment == mamba2_spec::Alignment::Element;
        let all = [Placement::Exact, Placement::Fused, Placement::FusedOdd];
        let placements = if odd { &all[..] } else { &all[..2] };
        let configs = some_configs(&gpu.space(&problem));
        check_made(&gpu, &problem, &made, placements, &configs);
        made.poison_tail(&problem);
        for config in &configs {
            let run = |placement: &Placement| {
                gpu.run(&gpu.trial(&problem, &made, *placement), config)
                    .unwrap()
            };
            let runs: Vec<_> = placements.iter().map(run).collect();
            assert!(
                runs.iter().all(|r| *r == runs[0]),
                "{problem}, {config}: views and copies differ"
            );
        }
    }
}

#[test]
fn c2_slots_far_into_a_large_state_pool_are_written_and_no_other() {
    let Some(gpu) = gpu() else { return };
    // 2049 slots of 2^20 elements: slot 2048 starts at element 2^31.
    let mut problem = StepProblem::new(1, 64, 128, 1, 128);
    (problem.slots, problem.indices, problem.d) = (2049, true, mamba2_spec::DKind::None);
    let mut small = problem.clone();
    (small.slots, small.indices) = (1, false);
    let mut made = generate_step(&small, 1, Pattern::Model);
    made.state = Values::zeros(Dtype::F32, 1 << 20);
    made.state_batch_indices = Some(vec![2048]);
    let inputs = place::step(&gpu.device, &problem, &made, Placement::Exact).unwrap();
    let state = gpu
        .device
        .alloc(2049 << 22)
        .expect("8.6 GB of device memory");
    state.fill(&gpu.stream, 0).unwrap();
    let out = gpu.device.alloc(64 * 128 * 2).unwrap();
    let view = |buffer, dtype, shape: &[usize]| {
        DeviceTensor::new(buffer, 0, TensorMeta::contiguous(Some(dtype), shape)).unwrap()
    };
    let outputs = StepOutputs {
        state: view(&state, Dtype::F32, &[2049, 64, 128, 128]),
        out: view(&out, Dtype::Bf16, &[1, 1, 64, 128]),
    };
    let config = rules::default_step(&problem, gpu.device.facts()).unwrap();
    LoadedStep::load(&gpu.device, &gpu.jit, &problem, &config)
        .unwrap()
        .enqueue(&gpu.stream, &inputs, &outputs)
        .unwrap();
    gpu.stream.synchronize().unwrap();
    let reference = StepRefInputs {
        state_batch_indices: None,
        ..made.reference()
    };
    let want = step(&small, &reference);
    let slot = |i: usize| {
        let mut values = vec![0f32; 1 << 20];
        state.read(i << 22, &mut values).unwrap();
        values
    };
    let got: Vec<f64> = slot(2048).iter().map(|v| f64::from(*v)).collect();
    let report = ErrorReport::compare(&got, &want.state);
    assert!(report.within(2.5e-3), "{report}");
    for other in [0, 1, 1024, 2047] {
        assert!(
            slot(other).iter().all(|v| *v == 0.0),
            "slot {other} was written"
        );
    }
}

#[test]
fn c2_results_do_not_depend_on_which_shape_came_first() {
    let Some(gpu) = gpu() else { return };
    // The large one is that of the report: (26, 32768, 384), d_state 256.
    let shapes = [
        "b=1,l=70,h=6,p=64,g=1,n=256",
        "b=26,l=32768,h=6,p=64,g=1,n=256",
    ];
    let trials = shapes.map(|text| {
        let problem = problem(text);
        // One row, repeated: a third of a billion numbers take long to make.
        let mut made = generate(
            &Problem {
                batch: 1,
                ..problem.clone()
            },
            1,
            Pattern::Model,
        );
        for (values, repeats) in [
            (&mut made.x, problem.batch),
            (&mut made.b, problem.batch),
            (&mut made.c, problem.batch),
            (&mut made.dt, problem.batch),
        ] {
            repeat(values, repeats);
        }
        if let Some(states) = &mut made.initial_states {
            repeat(states, problem.batch);
        }
        gpu.trial(&problem, &made, Placement::Exact)
    });
    // Modules are dropped with the call that loaded them, so each order starts from nothing.
    let run = |i: usize| {
        let config = rules::default_strategy(&trials[i].problem, gpu.device.facts()).unwrap();
        gpu.run(&trials[i], &config).unwrap()
    };
    let large_alone = run(1);
    let small_after_large = run(0);
    let large_after_small = run(1);
    assert!(
        large_alone == large_after_small,
        "the large shape after the small one"
    );
    assert!(small_after_large == run(0), "the small shape again");
    // Rows of the batch are the same inputs: a wrong offset far in shows against the first.
    let row = large_alone.out.len() / 26;
    for (i, other) in large_alone.out.chunks_exact(row).enumerate() {
        assert!(other == &large_alone.out[..row], "row {i}");
    }
}

#[test]
fn c2_rows_more_than_2_to_the_31_elements_apart_are_read_and_written_where_they_are() {
    let Some(gpu) = gpu() else { return };
    const APART_ELEMS: usize = (1 << 31) + 8;
    let problem = problem("b=2,l=150,h=4,p=64,g=2,n=64");
    let made = generate(&problem, 1, Pattern::Model);
    let trial = gpu.trial(&problem, &made, Placement::Exact);
    let tokens = [2, 150, 4, 64];
    let groups = [2, 150, 2, 64];
    let far = |values: &Values, shape: [usize; 4]| {
        let bytes = values.to_le_bytes();
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let buffer = gpu
            .device
            .alloc(APART_ELEMS * 2 + second.len())
            .expect("4.3 GB of device memory");
        buffer.write(0, first).unwrap();
        buffer.write(APART_ELEMS * 2, second).unwrap();
        let strides = [APART_ELEMS, shape[2] * shape[3], shape[3], 1];
        let meta = TensorMeta::strided(Some(Dtype::Bf16), &shape, &strides);
        let tensor = DeviceTensor::new(&buffer, 0, meta).unwrap();
        (buffer, tensor)
    };
    let inputs = ForwardInputs {
        x: far(&made.x, tokens).1,
        b: far(&made.b, groups).1,
        c: far(&made.c, groups).1,
        ..trial.call().0.clone()
    };
    for config in rules::agreement_defaults(&problem, gpu.device.facts()) {
        let want = gpu.run(&trial, &config).unwrap().out;
        let (buffer, out) = far(&Values::poison(Dtype::Bf16, want.len() / 2), tokens);
        let loaded = LoadedForward::load(&gpu.device, &gpu.jit, &problem, &config).unwrap();
        let workspace = gpu
            .device
            .alloc(loaded.plan().workspace.total_bytes)
            .unwrap();
        let outputs = ForwardOutputs {
            out,
            ..trial.call().1
        };
        loaded
            .enqueue(&gpu.stream, &inputs, &outputs, &workspace)
            .unwrap();
        gpu.stream.synchronize().unwrap();
        let mut got = vec![0u8; want.len()];
        let (first, second) = got.split_at_mut(want.len() / 2);
        buffer.read(0, first).unwrap();
        buffer.read(APART_ELEMS * 2, second).unwrap();
        assert!(got == want, "{config}");
    }
}

/// `times` copies, one after the other.
fn repeat(values: &mut Values, times: usize) {
    match values {
        Values::Bf16(v) => *v = v.repeat(times),
        Values::F16(v) => *v = v.repeat(times),
        Values::F32(v) => *v = v.repeat(times),
        Values::I32(v) => *v = v.repeat(times),
    }
}

#[test]
fn c7_every_combination_of_optional_tensors_works_on_exact_allocations() {
    let Some(gpu) = gpu() else { return };
    for bits in 0..32u32 {
        let on = |bit: u32, yes: &'static str, no: &'static str| {
            if bits >> bit & 1 == 1 { yes } else { no }
        };
        let options = [
            on(0, "init=f32", "init=none"),
            on(1, "final=f32", "final=none"),
            on(2, "d=h", "d=none"),
            on(3, "z=1", "z=0"),
            on(4, "bias=1", "bias=0"),
        ]
        .join(",");
        for l in [1, 65, 1026] {
            check_default(
                &gpu,
                &format!("b=1,l={l},h=4,p=64,g=2,n=64,{options}"),
                Pattern::Model,
                Placement::Exact,
            );
        }
    }
    check_default(
        &gpu,
        "b=1,l=4099,h=2,p=64,g=1,n=128",
        Pattern::Model,
        Placement::Exact,
    );
}

#[test]
fn n5_states_and_dt_of_every_dtype_are_honoured() {
    let Some(gpu) = gpu() else { return };
    for dtype in ["bf16", "f16", "f32"] {
        for states in ["bf16", "f16", "f32"] {
            check(
                &gpu,
                &format!(
                    "b=2,l=150,h=4,p=64,g=2,n=64,dtype={dtype},dt_dtype={states},init={states},final={states}"
                ),
                Pattern::Model,
            );
        }
    }
}

#[test]
fn a2_every_headdim_and_dstate_runs() {
    let Some(gpu) = gpu() else { return };
    for (p, n) in [
        (1, 1),
        (3, 5),
        (8, 8),
        (33, 17),
        (48, 20),
        (80, 96),
        (96, 200),
        (100, 33),
        (256, 512),
        (255, 511),
    ] {
        for dtype in ["bf16", "f16", "f32"] {
            let text = format!("b=3,l=140,h=8,p={p},g=2,n={n},dtype={dtype},z=1,align=1");
            check_default(&gpu, &text, Pattern::Model, Placement::Exact);
            check_default(&gpu, &text, Pattern::Model, Placement::FusedOdd);
        }
        if p % 8 == 0 && n % 8 == 0 {
            check(
                &gpu,
                &format!("b=1,l=140,h=2,p={p},g=1,n={n},align=16"),
                Pattern::Model,
            );
        }
    }
}

#[test]
fn empty_batches_and_empty_sequences_leave_the_initial_state() {
    let Some(gpu) = gpu() else { return };
    for text in [
        "b=2,l=0,h=4,p=64,g=1,n=64",
        "b=2,l=0,h=4,p=64,g=1,n=64,init=none",
        "b=0,l=70,h=4,p=64,g=1,n=64",
        "b=0,l=0,h=4,p=64,g=1,n=64",
        "b=1,l=0,h=4,p=64,g=1,n=64,packed=3",
        "b=1,l=70,h=4,p=64,g=1,n=64,packed=0",
    ] {
        let problem = problem(text);
        let made = generate(&problem, 3, Pattern::Model);
        let default = rules::default_strategy(&problem, gpu.device.facts()).unwrap();
        check_made(&gpu, &problem, &made, &[Placement::Exact], &[default]);
    }
}

#[test]
fn no_grid_axis_overflows_when_batch_times_nheads_passes_65535() {
    let Some(gpu) = gpu() else { return };
    check_default(
        &gpu,
        "b=1,l=3,h=66000,p=8,g=1,n=8",
        Pattern::Model,
        Placement::Exact,
    );
    check_default(
        &gpu,
        "b=66000,l=3,h=1,p=8,g=1,n=8",
        Pattern::Model,
        Placement::Exact,
    );
    check_default(
        &gpu,
        "b=3,l=66,h=22000,p=8,g=2,n=8,dtype=f32",
        Pattern::Model,
        Placement::Exact,
    );
}

/// Two runs of the default decode config.
fn run_step(
    gpu: &Gpu,
    problem: &StepProblem,
    made: &mamba2_reference::GeneratedStep,
    placement: Placement,
) -> Result<mamba2_tuner::gpu::Run, Failure> {
    let trial = StepTrial::new(&gpu.device, &gpu.jit, problem, made, placement)
        .map_err(|e| failure_of(&e))?;
    let config = rules::default_step(problem, gpu.device.facts()).unwrap();
    let loaded =
        LoadedStep::load(&gpu.device, &gpu.jit, problem, &config).map_err(|e| failure_of(&e))?;
    trial.run_twice(&loaded, &gpu.stream)
}

#[test]
fn decode_steps_work_with_every_option_and_touch_no_skipped_row() {
    let Some(gpu) = gpu() else { return };
    let mut faults = Vec::new();
    let base = StepProblem::new(6, 6, 64, 3, 64);
    let mut problems = vec![base.clone()];
    for dtype in Dtype::ALL {
        for state_dtype in Dtype::ALL {
            problems.push(StepProblem {
                dtype,
                dt_dtype: state_dtype,
                state_dtype,
                ..base.clone()
            });
        }
    }
    for d in [mamba2_spec::DKind::None, mamba2_spec::DKind::PerHeaddim] {
        problems.push(StepProblem {
            d,
            z: true,
            dt_bias: true,
            dt_softplus: true,
            ..base.clone()
        });
    }
    problems.push(StepProblem {
        indices: true,
        slots: 11,
        tokens: 4,
        z: true,
        ..base.clone()
    });
    problems.push(StepProblem {
        dt_limit: mamba2_spec::DtLimit {
            min: 0.01,
            max: 0.1,
        },
        ..base.clone()
    });
    for (headdim, dstate) in [(1, 1), (33, 17), (80, 16), (256, 512)] {
        problems.push(StepProblem {
            headdim,
            dstate,
            z: true,
            ..base.clone()
        });
    }
    problems.push(StepProblem {
        batch: 0,
        slots: 0,
        ..base
    });
    for problem in &problems {
        let made = generate_step(problem, 3, Pattern::Model);
        let oracle = Oracle::step(problem, &made);
        let mut first = None;
        for placement in [Placement::Exact, Placement::Fused, Placement::FusedOdd] {
            match run_step(&gpu, problem, &made, placement)
                .and_then(|run| oracle.check(&run).map(|_| run))
            {
                Ok(run) => assert_eq!(
                    *first.get_or_insert(run.clone()),
                    run,
                    "{problem}, {placement:?}: views and copies differ"
                ),
                Err(failure) => faults.push(format!("{problem}, {placement:?}: {failure}")),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
