//! The two oracles against each other, and the generator.
#![allow(clippy::unwrap_used)]

use mamba2_reference::{ErrorReport, Pattern, chunked, generate, generate_step, recurrence, step};
use mamba2_spec::{DKind, DtLimit, Dtype, Problem, StepProblem};
use proptest::prelude::*;

fn agree(problem: &Problem, seed: u64, pattern: Pattern, chunk_size: usize) {
    let inputs = generate(problem, seed, pattern).reference();
    let (one, two) = (
        recurrence(problem, &inputs),
        chunked(problem, &inputs, chunk_size),
    );
    for (name, one, two) in [
        ("out", &one.out, &two.out),
        ("final_states", &one.final_states, &two.final_states),
    ] {
        let report = ErrorReport::compare(two, one);
        assert!(
            report.within(1e-11),
            "{name} of {problem}, {pattern:?}, chunks of {chunk_size}: {report}"
        );
    }
}

#[test]
fn the_two_oracles_agree_on_every_pattern() {
    let mut problem = Problem::new(2, 300, 6, 5, 3, 7).with_dtype(Dtype::F32);
    problem.z = true;
    problem.dt_bias = true;
    problem.d = DKind::PerHeaddim;
    for pattern in Pattern::ALL {
        for softplus in [false, true] {
            problem.dt_softplus = softplus;
            for chunk_size in [1, 16, 50, 256, 4096] {
                agree(&problem, 11, pattern, chunk_size);
            }
        }
    }
}

fn problems() -> impl Strategy<Value = Problem> {
    let sizes = (
        0usize..3,
        0usize..150,
        1usize..4,
        1usize..4,
        1usize..9,
        1usize..9,
    );
    let options = (
        any::<[bool; 5]>(),
        0usize..3,
        0usize..4,
        proptest::option::of(0usize..7),
        0usize..3,
    );
    (sizes, options).prop_map(
        |((b, l, groups, per_group, p, n), (flags, d, limit, packed, dtype))| {
            let batch = if packed.is_some() { 1 } else { b };
            let mut problem = Problem::new(batch, l, groups * per_group, p, groups, n)
                .with_dtype(Dtype::ALL[dtype]);
            [problem.z, problem.dt_bias, problem.dt_softplus] = [flags[0], flags[1], flags[2]];
            problem.initial_states = flags[3].then_some(Dtype::F32);
            problem.dt_dtype = if flags[4] { Dtype::F32 } else { problem.dtype };
            problem.d = [DKind::None, DKind::PerHead, DKind::PerHeaddim][d];
            problem.dt_limit = [
                DtLimit::NONE,
                DtLimit {
                    min: 0.001,
                    max: 0.1,
                },
                DtLimit { min: 0.0, max: 0.0 },
                DtLimit::NONE,
            ][limit];
            problem.packed = packed;
            problem
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_two_oracles_agree_on_any_problem(
        problem in problems(), seed in any::<u64>(), pattern in 0..Pattern::ALL.len(), chunk_size in 1usize..70,
    ) {
        agree(&problem, seed, Pattern::ALL[pattern], chunk_size);
    }
}

#[test]
fn one_head_of_one_element_follows_the_formula_by_hand() {
    // h1 = 0.5 * 2 * 3 = 3, y1 = 3 * 5 + 0.25 * 2; h2 = e^-1 * 3 + 1 * 4 * 7, y2 = h2 * 11 + 0.25 * 4.
    let problem: Problem = "b=1,l=2,h=1,p=1,g=1,n=1,dtype=f32,init=none"
        .parse()
        .unwrap();
    let mut inputs = generate(&problem, 0, Pattern::Plain).reference();
    (inputs.x, inputs.dt, inputs.a) = (vec![2.0, 4.0], vec![0.5, 1.0], vec![-1.0]);
    (inputs.b, inputs.c, inputs.d) = (vec![3.0, 7.0], vec![5.0, 11.0], Some(vec![0.25]));
    let h2 = (-1f64).exp() * 3.0 + 28.0;
    for got in [
        recurrence(&problem, &inputs),
        chunked(&problem, &inputs, 2),
        chunked(&problem, &inputs, 1),
    ] {
        let report = ErrorReport::compare(&got.out, &[15.5, h2 * 11.0 + 1.0]);
        assert!(report.within(1e-15), "{report}");
        assert!((got.final_states[0] - h2).abs() < 1e-14);
    }
}

#[test]
fn n13_softplus_is_exact_at_both_ends() {
    let mut problem: Problem = "b=1,l=1,h=1,p=1,g=1,n=1,dtype=f32,init=none,d=none,softplus=1"
        .parse()
        .unwrap();
    let mut inputs = generate(&problem, 0, Pattern::Plain).reference();
    (inputs.x, inputs.a, inputs.b, inputs.c) = (vec![1.0], vec![-1.0], vec![1.0], vec![1.0]);
    let mut y = |dt: f64, problem: &Problem| {
        inputs.dt = vec![dt];
        let both = [
            recurrence(problem, &inputs).out[0],
            chunked(problem, &inputs, 4).out[0],
        ];
        assert!((both[0] - both[1]).abs() <= 1e-15 * both[0].abs());
        both[0]
    };
    assert_eq!(y(90.0, &problem), 90.0);
    assert!((y(-30.0, &problem) / 9.357_622_968_840_175e-14 - 1.0).abs() < 1e-12);
    assert_eq!(y(-900.0, &problem), 0.0);
    problem.dt_limit = DtLimit {
        min: 0.25,
        max: 0.5,
    };
    assert_eq!((y(-30.0, &problem), y(90.0, &problem)), (0.25, 0.5));
}

#[test]
fn steps_equal_the_recurrence_token_by_token() {
    let mut problem: Problem =
        "b=3,l=5,h=4,p=3,g=2,n=6,dtype=f32,z=1,bias=1,softplus=1,d=hp,limit=0.01:0.9"
            .parse()
            .unwrap();
    problem.final_states = Some(Dtype::F32);
    let inputs = generate(&problem, 5, Pattern::Plain).reference();
    let want = recurrence(&problem, &inputs);
    let mut one = StepProblem::new(3, 4, 3, 2, 6);
    one.tokens = 5;
    (one.z, one.dt_bias, one.dt_softplus, one.d, one.dt_limit) =
        (true, true, true, problem.d, problem.dt_limit);
    let mut step_inputs = generate_step(&one, 0, Pattern::Plain).reference();
    step_inputs.state = inputs.initial_states.clone().unwrap();
    (step_inputs.x, step_inputs.dt, step_inputs.a) = (inputs.x, inputs.dt, inputs.a);
    (step_inputs.b, step_inputs.c, step_inputs.d) = (inputs.b, inputs.c, inputs.d);
    (step_inputs.z, step_inputs.dt_bias) = (inputs.z, inputs.dt_bias);
    let got = step(&one, &step_inputs);
    assert!(ErrorReport::compare(&got.out, &want.out).within(1e-14));
    assert!(ErrorReport::compare(&got.state, &want.final_states).within(1e-14));
}

#[test]
fn a_skipped_row_touches_no_slot() {
    let mut problem = StepProblem::new(2, 1, 2, 1, 2);
    (problem.indices, problem.slots) = (true, 3);
    let mut inputs = generate_step(&problem, 1, Pattern::Plain).reference();
    inputs.state_batch_indices = Some(vec![-1, 2]);
    let got = step(&problem, &inputs);
    assert_eq!(got.state[..8], inputs.state[..8]);
    assert_ne!(got.state[8..], inputs.state[8..]);
    assert_eq!(got.out[..2], [0.0, 0.0]);
}

#[test]
fn the_generator_repeats_itself_and_differs_by_seed() {
    let problem = Problem::new(1, 20, 4, 8, 2, 8);
    let make = |seed| generate(&problem, seed, Pattern::Plain);
    assert_eq!(make(3), make(3));
    assert_ne!(make(3).x, make(4).x);
    assert_ne!(make(3).b, make(3).c);
}

#[test]
fn generated_activations_look_normal() {
    let mut problem = Problem::new(1, 1000, 8, 16, 1, 16).with_dtype(Dtype::F32);
    problem.z = true;
    let z = generate(&problem, 1, Pattern::Plain).z.unwrap().to_f64();
    let mean = z.iter().sum::<f64>() / z.len() as f64;
    let variance = z.iter().map(|v| v * v).sum::<f64>() / z.len() as f64 - mean * mean;
    assert!(
        mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02,
        "mean {mean}, variance {variance}"
    );
}

#[test]
fn poison_covers_the_padded_tail_and_nothing_else() {
    let problem: Problem = "b=1,l=40,h=2,p=3,g=1,n=4,packed=3,z=1".parse().unwrap();
    let mut inputs = generate(&problem, 2, Pattern::Plain);
    let used = *inputs.cu_seqlens.as_ref().unwrap().last().unwrap() as usize;
    assert!(used < 40);
    inputs.poison_tail(&problem);
    for (values, width) in [
        (&inputs.x, 6),
        (inputs.z.as_ref().unwrap(), 6),
        (&inputs.dt, 2),
        (&inputs.b, 4),
        (&inputs.c, 4),
    ] {
        let values = values.to_f64();
        assert!(
            values[..used * width].iter().all(|v| v.is_finite())
                && values[used * width..].iter().all(|v| v.is_nan())
        );
    }
}
