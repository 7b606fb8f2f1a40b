//! Any problem, any pattern of values, any chunk size: the backend against the recurrence.
#![allow(clippy::unwrap_used)]

mod common;

use common::{
    Gaps, cut, d_shape, data_from, data_mut, decode, gapped, gather, inputs, magnitudes, norm, run,
    spread, state_shape, token_shape, try_step, used,
};
use mamba2_cpu::{HostTensor, HostTensorMut, forward};
use mamba2_reference::{Pattern, Values, generate, generate_step, recurrence};
use mamba2_spec::{
    ChunkSize, DKind, DtLimit, Dtype, ForwardOutputs, Problem, StepProblem, TensorMeta,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Error over the size of the terms (so that cancellation cannot make a sound result look bad), by the dtype of the result.
fn assert_near(
    name: &str,
    problem: &dyn std::fmt::Display,
    got: &Values,
    want: &[f64],
    terms: &[f64],
) {
    // One value may be off by half a unit in the last place; only many together come near the bounds of section 3.
    let tolerance = match got.dtype() {
        Some(Dtype::Bf16) => 3.95e-3,
        Some(Dtype::F16) => 4.95e-4,
        _ => 2e-6,
    };
    // Below float16's normal range (6e-5) values are stored with an absolute error.
    let floor = if got.dtype() == Some(Dtype::F16) {
        6e-8 * (want.len() as f64).sqrt()
    } else {
        0.0
    };
    let got = got.to_f64();
    let error: Vec<f64> = got[..want.len()]
        .iter()
        .zip(want)
        .map(|(a, b)| a - b)
        .collect();
    let (error, scale) = (norm(&error), norm(terms));
    assert!(
        error <= tolerance * scale + floor,
        "{name} of {problem}: error {error:e}, terms {scale:e}"
    );
    assert!(
        got[want.len()..].iter().all(|v| v.is_nan()),
        "{name} of {problem}: the padded tail was written"
    );
}

fn problems() -> impl Strategy<Value = Problem> {
    let sizes = (
        0usize..3,
        0usize..200,
        1usize..4,
        1usize..5,
        1usize..20,
        1usize..20,
    );
    let options = (
        any::<[bool; 3]>(),
        0usize..3,
        0usize..4,
        proptest::option::of(0usize..9),
    );
    let dtypes = (0usize..3, 0usize..3, 0usize..4, 0usize..4);
    let chunk = proptest::option::of(prop_oneof![1u32..80, Just(256u32), Just(4096u32)]);
    (sizes, options, dtypes, chunk).prop_map(
        |(
            (b, l, groups, per_group, p, n),
            (flags, d, limit, packed),
            (dtype, dt, init, last),
            chunk,
        )| {
            let batch = if packed.is_some() { 1 } else { b };
            let mut problem = Problem::new(batch, l, groups * per_group, p, groups, n);
            (problem.dtype, problem.dt_dtype) = (Dtype::ALL[dtype], Dtype::ALL[dt]);
            [problem.z, problem.dt_bias, problem.dt_softplus] = flags;
            problem.d = [DKind::None, DKind::PerHead, DKind::PerHeaddim][d];
            problem.dt_limit = limits()[limit];
            problem.packed = packed;
            (problem.initial_states, problem.final_states) = (state_dtype(init), state_dtype(last));
            problem.chunk_size = chunk.map_or(ChunkSize::Tuned, ChunkSize::Fixed);
            problem
        },
    )
}

fn limits() -> [DtLimit; 4] {
    [
        DtLimit::NONE,
        DtLimit {
            min: 0.001,
            max: 0.1,
        },
        DtLimit { min: 0.0, max: 0.0 },
        DtLimit { min: 0.0, max: 1.0 },
    ]
}

fn state_dtype(i: usize) -> Option<Dtype> {
    Dtype::ALL.get(i).copied()
}

/// float16 overflows on steps of 1000.
fn fits(pattern: Pattern, dtypes: &[Option<Dtype>]) -> bool {
    pattern != Pattern::HalfZero || !dtypes.contains(&Some(Dtype::F16))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, rng_seed: RngSeed::Fixed(20), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_forward_meets_the_recurrence(problem in problems(), seed in any::<u64>(), pattern in 0..Pattern::ALL.len()) {
        let pattern = Pattern::ALL[pattern];
        prop_assume!(fits(pattern, &[Some(problem.dtype), Some(problem.dt_dtype), problem.final_states]));
        let mut inputs = generate(&problem, seed, pattern);
        let reference = inputs.reference();
        let (want, terms) = (recurrence(&problem, &reference), recurrence(&problem, &magnitudes(&reference)));
        inputs.poison_tail(&problem);
        let got = run(&problem, &inputs);
        let used = used(&problem, inputs.cu_seqlens.as_deref());
        assert_near("out", &problem, &got.out, &want.out[..used], &terms.out);
        if let Some(states) = &got.final_states {
            assert_near("final_states", &problem, states, &want.final_states, &terms.final_states);
        }
    }

    #[test]
    fn any_step_meets_the_oracle(
        (batch, tokens, groups, per_group, p, n, extra) in (0usize..5, 1usize..5, 1usize..3, 1usize..4, 1usize..20, 1usize..20, 0usize..5),
        (dtype, dt, state) in (0usize..3, 0usize..3, 0usize..3),
        (flags, d, limit) in (any::<[bool; 4]>(), 0usize..3, 0usize..4),
        (seed, pattern) in (any::<u64>(), 0..Pattern::ALL.len()),
    ) {
        let mut problem = StepProblem::new(batch, groups * per_group, p, groups, n);
        (problem.tokens, problem.slots) = (tokens, batch + extra);
        (problem.dtype, problem.dt_dtype, problem.state_dtype) = (Dtype::ALL[dtype], Dtype::ALL[dt], Dtype::ALL[state]);
        [problem.z, problem.dt_bias, problem.dt_softplus, problem.indices] = flags;
        problem.d = [DKind::None, DKind::PerHead, DKind::PerHeaddim][d];
        problem.dt_limit = limits()[limit];
        let pattern = Pattern::ALL[pattern];
        prop_assume!(fits(pattern, &[Some(problem.dtype), Some(problem.dt_dtype), Some(problem.state_dtype)]));
        let inputs = generate_step(&problem, seed, pattern);
        let mut reference = inputs.reference();
        let want = mamba2_reference::step(&problem, &reference);
        let abs = |v: &mut Vec<f64>| v.iter_mut().for_each(|v| *v = v.abs());
        let r = &mut reference;
        [&mut r.x, &mut r.b, &mut r.c, &mut r.state].into_iter().for_each(abs);
        [&mut r.d, &mut r.z].into_iter().flatten().for_each(abs);
        let terms = mamba2_reference::step(&problem, &reference);
        let (result, state, out) = try_step(&problem, &inputs);
        result.unwrap();
        assert_near("state", &problem, &state, &want.state, &terms.state);
        // Rows that are skipped keep their poison; compare the others.
        let row = tokens * problem.nheads * p;
        let mut got = out.to_f64();
        for i in 0..batch {
            let skipped = inputs.state_batch_indices.as_ref().is_some_and(|indices| indices[i] == -1);
            for v in &mut got[i * row..(i + 1) * row] {
                assert_eq!(v.is_nan(), skipped, "row {i} of {problem}");
                if skipped { *v = 0.0; }
            }
        }
        assert_near("out", &problem, &Values::rounded(problem.dtype, &got), &want.out, &terms.out);
    }
}

/// Tokens of both pieces, row by row.
fn join(problem: &Problem, head: &[f64], tail: &[f64]) -> Values {
    let rows = problem.batch.max(1);
    let (h, t) = (head.len() / rows, tail.len() / rows);
    let all: Vec<f64> = (0..rows)
        .flat_map(|b| [&head[b * h..][..h], &tail[b * t..][..t]].concat())
        .collect();
    Values::rounded(problem.dtype, &all)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, rng_seed: RngSeed::Fixed(21), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn n12_any_run_cut_anywhere_gives_the_one_shot_answer(
        problem in problems(), at in 0.0f64..=1.0, seed in any::<u64>(), pattern in 0..Pattern::ALL.len(),
    ) {
        let pattern = Pattern::ALL[pattern];
        let problem = Problem { packed: None, final_states: Some(Dtype::F32), ..problem };
        prop_assume!(fits(pattern, &[Some(problem.dtype), Some(problem.dt_dtype)]));
        let k = (at * problem.seqlen as f64) as usize;
        let inputs = generate(&problem, seed, pattern);
        let reference = inputs.reference();
        let (want, terms) = (recurrence(&problem, &reference), recurrence(&problem, &magnitudes(&reference)));
        let (p1, head) = cut(&problem, &inputs, 0, k, 0);
        let first = run(&p1, &head);
        let (mut p2, mut tail) = cut(&problem, &inputs, k, problem.seqlen - k, 0);
        (p2.initial_states, tail.initial_states) = (Some(Dtype::F32), first.final_states);
        let second = run(&p2, &tail);
        let out = join(&problem, &first.out.to_f64(), &second.out.to_f64());
        assert_near("out", &problem, &out, &want.out, &terms.out);
        assert_near("final_states", &problem, &second.final_states.unwrap(), &want.final_states, &terms.final_states);
    }

    #[test]
    fn n14_prefill_then_decode_gives_one_long_prefill_however_many_tokens_a_step(
        problem in problems(), last in 1usize..9, tokens_a_step in 2usize..6, seed in any::<u64>(), pattern in 0..Pattern::ALL.len(),
    ) {
        let pattern = Pattern::ALL[pattern];
        let problem = Problem { packed: None, final_states: Some(Dtype::F32), ..problem };
        prop_assume!(fits(pattern, &[Some(problem.dtype), Some(problem.dt_dtype)]));
        let k = problem.seqlen.saturating_sub(last);
        let inputs = generate(&problem, seed, pattern);
        let reference = inputs.reference();
        let (want, terms) = (recurrence(&problem, &reference), recurrence(&problem, &magnitudes(&reference)));
        let (p1, head) = cut(&problem, &inputs, 0, k, 0);
        let prefill = run(&p1, &head);
        let (p2, mut tail) = cut(&problem, &inputs, k, problem.seqlen - k, 0);
        tail.initial_states = prefill.final_states;
        for tokens in [1, tokens_a_step] {
            let (out, states) = decode(&p2, &tail, Dtype::F32, tokens);
            assert_near("out", &problem, &join(&problem, &prefill.out.to_f64(), &out), &want.out, &terms.out);
            assert_near("states", &problem, &Values::rounded(Dtype::F32, &states), &want.final_states, &terms.final_states);
        }
    }

    #[test]
    fn n16_views_with_any_gaps_give_the_bits_of_copies(
        problem in problems(), gaps in proptest::collection::vec((0usize..4, 0usize..4, 0usize..4), 8), seed in any::<u64>(),
    ) {
        let p = &problem;
        let mut g = generate(p, seed, Pattern::Plain);
        g.poison_tail(p);
        let want = run(p, &g);
        let gaps: Vec<Gaps> = gaps.into_iter().map(|(lead, row, token)| Gaps { lead, row, token }).collect();
        let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
        let meta = |i: usize, values: &Values, shape: &[usize]| gapped(values.dtype(), shape, gaps[i]);
        let placed = |i: usize, values: &Values, shape: &[usize]| spread(values, &meta(i, values, shape), gaps[i].lead);
        let x = placed(0, &g.x, &token_shape(p));
        let b = placed(1, &g.b, &group);
        let c = placed(2, &g.c, &group);
        let dt = placed(3, &g.dt, &token_shape(p)[..3]);
        let z = g.z.as_ref().map(|z| placed(4, z, &token_shape(p)));
        let initial = g.initial_states.as_ref().map(|v| placed(5, v, &state_shape(p)));
        fn view<'a>(values: &'a Values, meta: TensorMeta, lead: usize) -> HostTensor<'a> {
            HostTensor::new(meta, data_from(values, lead)).unwrap()
        }
        let mut views = inputs(p, &g);
        views.x = view(&x, meta(0, &g.x, &token_shape(p)), gaps[0].lead);
        views.b = view(&b, meta(1, &g.b, &group), gaps[1].lead);
        views.c = view(&c, meta(2, &g.c, &group), gaps[2].lead);
        views.dt = view(&dt, meta(3, &g.dt, &token_shape(p)[..3]), gaps[3].lead);
        views.z = z.as_ref().map(|z| view(z, meta(4, z, &token_shape(p)), gaps[4].lead));
        views.initial_states = initial.as_ref().map(|v| view(v, meta(5, v, &state_shape(p)), gaps[5].lead));
        let d = g.d.as_ref().map(|d| {
            let meta = gapped(d.dtype(), &d_shape(p.d, p.nheads, p.headdim), gaps[6]);
            (spread(d, &meta, 0), meta)
        });
        views.d = d.as_ref().map(|(d, meta)| view(d, *meta, 0));
        let out_meta = gapped(Some(p.dtype), &token_shape(p), gaps[6]);
        let states_meta = p.final_states.map(|dtype| gapped(Some(dtype), &state_shape(p), gaps[7]));
        let mut out = Values::poison(p.dtype, out_meta.span_elems().unwrap());
        let mut states = states_meta.map(|m| Values::poison(p.final_states.unwrap(), m.span_elems().unwrap()));
        let mut outputs = ForwardOutputs {
            out: HostTensorMut::new(out_meta, data_mut(&mut out)).unwrap(),
            final_states: states.as_mut().map(|v| HostTensorMut::new(states_meta.unwrap(), data_mut(v)).unwrap()),
        };
        forward(p, &views, &mut outputs).unwrap();
        let got = common::Results {
            out: gather(&out, &out_meta),
            final_states: states.map(|v| gather(&v, &states_meta.unwrap())),
        };
        // Values::rounded makes one NaN of all: compare numbers.
        let same = |a: &Values, b: &Values| a.to_f64().iter().zip(b.to_f64()).all(|(a, b)| *a == b || (a.is_nan() && b.is_nan()));
        prop_assert!(same(&got.out, &want.out), "out of {}", p);
        if let Some(states) = &got.final_states {
            prop_assert!(same(states, want.final_states.as_ref().unwrap()), "final_states of {}", p);
        }
    }
}

#[test]
fn the_limits_of_headdim_and_dstate_run() {
    for (headdim, dstate) in [
        (1, 1),
        (256, 512),
        (1, 512),
        (256, 1),
        (80, 96),
        (48, 20),
        (33, 257),
    ] {
        for chunk_size in [ChunkSize::Tuned, ChunkSize::Fixed(7)] {
            let mut problem = Problem::new(1, 70, 2, headdim, 1, dstate).with_dtype(Dtype::F32);
            problem.chunk_size = chunk_size;
            common::check(&problem, &generate(&problem, 1, Pattern::Plain));
        }
    }
}

#[test]
fn empty_sequences_hand_their_state_on() {
    for text in [
        "b=3,l=0,h=4,p=5,g=2,n=6",
        "b=0,l=10,h=4,p=5,g=2,n=6",
        "b=1,l=10,h=4,p=5,g=2,n=6,packed=0",
        "b=1,l=0,h=4,p=5,g=2,n=6,packed=3",
    ] {
        let problem = common::f32_problem(text);
        let inputs = generate(&problem, 1, Pattern::Plain);
        let got = run(&problem, &inputs);
        assert_eq!(got.final_states, inputs.initial_states, "{text}");
        let mut without: Problem = problem.clone();
        without.initial_states = None;
        let got = run(&without, &generate(&without, 1, Pattern::Plain));
        assert!(
            got.final_states.unwrap().to_f64().iter().all(|v| *v == 0.0),
            "{text}"
        );
    }
}

#[test]
fn growing_states_are_computed_too() {
    let problem = common::f32_problem("b=1,l=100,h=2,p=3,g=1,n=4");
    let mut inputs = generate(&problem, 1, Pattern::Plain);
    inputs.a = Values::F32(vec![0.05, 0.2]);
    common::check(&problem, &inputs);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let problem = common::f32_problem("b=1,l=150,h=24,p=20,g=2,n=30,z=1");
    let inputs = generate(&problem, 9, Pattern::Plain);
    let with = |threads: usize| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap()
            .install(|| run(&problem, &inputs))
    };
    let one = with(1);
    for threads in [2, 3, 16] {
        assert!(with(threads).same_bits(&one), "{threads} threads");
    }
}
