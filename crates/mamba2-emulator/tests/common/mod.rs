//! A strategy, run and compared with the float64 recurrence.
#![allow(dead_code)] // each test file uses its part

use mamba2_emulator::{Compiler, Emulator, Timing};
use mamba2_reference::{Bounds, ErrorReport, Pattern, Values, generate, recurrence};
use mamba2_spec::rules::check_strategy;
use mamba2_spec::{Arch, DeviceFacts, Problem, StrategyConfig};

fn emulator() -> Emulator {
    Emulator::new(
        Compiler::find().unwrap(),
        concat!(env!("CARGO_TARGET_TMPDIR"), "/emulator"),
    )
}

/// Panics with what is wrong.
pub fn check(problem: &Problem, strategy: &StrategyConfig, timing: Timing) {
    check_on(problem, strategy, timing, Pattern::Plain);
}

/// As [`check`], with inputs of a pattern.
pub fn check_on(problem: &Problem, strategy: &StrategyConfig, timing: Timing, pattern: Pattern) {
    let device = DeviceFacts::assumed(Arch(90));
    check_strategy(strategy, problem, &device).unwrap();
    let mut inputs = generate(problem, 11, pattern);
    inputs.poison_tail(problem);
    let got = emulator()
        .forward(strategy, problem, &inputs, &device, timing)
        .unwrap_or_else(|e| panic!("{problem}: {strategy}: {e}"));
    let wanted = recurrence(problem, &inputs.reference());
    let bounds = Bounds::of(problem);
    let out = got.out.to_f64();
    let used = inputs
        .cu_seqlens
        .as_ref()
        .map_or(problem.batch * problem.seqlen, |cu| {
            *cu.last().unwrap() as usize
        })
        * problem.nheads
        * problem.headdim;
    let report = ErrorReport::compare(&out[..used], &wanted.out[..used]);
    assert!(
        report.relative_frobenius <= bounds.out,
        "{problem}: {strategy}: out {report:?}"
    );
    assert!(
        out[used..].iter().all(|v| v.is_nan()),
        "{problem}: {strategy}: stored past the last sequence"
    );
    if let Some(states) = got.final_states {
        let report = ErrorReport::compare(&states.to_f64(), &wanted.final_states);
        assert!(
            report.relative_frobenius <= bounds.states,
            "{problem}: {strategy}: final states {report:?}"
        );
    }
}

/// Every seventh gate is not a number, infinite or far out, so that whoever works on two at once has each kind beside a plain one, in either place.
/// Panics if a plain one's output is touched, or theirs is not what the gate makes of it.
pub fn check_gates(problem: &Problem, strategy: &StrategyConfig) {
    const ODD: [f64; 7] = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -3e38,
        -100.0,
        -60.0,
        90.0,
    ];
    let device = DeviceFacts::assumed(Arch(90));
    check_strategy(strategy, problem, &device).unwrap();
    let mut inputs = generate(problem, 11, Pattern::Plain);
    let mut z = inputs.z.as_ref().unwrap().to_f64();
    for (i, at) in (3..z.len()).step_by(7).enumerate() {
        z[at] = ODD[i % ODD.len()];
    }
    inputs.z = Some(Values::rounded(problem.dtype, &z));
    let wanted = recurrence(problem, &inputs.reference()).out;
    let got = emulator()
        .forward(strategy, problem, &inputs, &device, Timing::Early)
        .unwrap_or_else(|e| panic!("{problem}: {strategy}: {e}"))
        .out
        .to_f64();
    let mut plain = (Vec::new(), Vec::new());
    for (i, (gate, (got, wanted))) in z.iter().zip(got.iter().zip(&wanted)).enumerate() {
        let place =
            || format!("{problem}: {strategy}: element {i}, gate {gate}: {got}, not {wanted}");
        if gate.is_nan() {
            assert!(got.is_nan(), "{}", place());
        } else if *gate == f64::INFINITY {
            assert!(!got.is_finite(), "{}", place());
        } else if *gate <= -60.0 && gate.is_finite() {
            assert!(got.abs() < 1e-12, "{}", place());
        } else if gate.is_finite() {
            assert!(got.is_finite(), "{}", place());
            plain.0.push(*got);
            plain.1.push(*wanted);
        }
    }
    let report = ErrorReport::compare(&plain.0, &plain.1);
    assert!(
        report.relative_frobenius <= Bounds::of(problem).out,
        "{problem}: {strategy}: {report:?}"
    );
}
