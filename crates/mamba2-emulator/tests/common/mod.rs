//! A strategy, run and compared with the float64 recurrence.
#![allow(dead_code)] // each test file uses its part

use mamba2_emulator::{Compiler, Emulator, Timing};
use mamba2_reference::{Bounds, ErrorReport, Pattern, generate, recurrence};
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
