//! Every legal config of every kernel, in the strategy it belongs to. An hour or more on two cores, so it runs only when asked for:
//!
//! `cargo test --release -p mamba2-emulator --test every_config -- --ignored`
//!
//! `MAMBA2_EMULATOR_SHAPE` gives one shape instead of the list here, `MAMBA2_EMULATOR_STRATEGY` one strategy, and
//! `MAMBA2_EMULATOR_SUBSET=n` takes every n-th config.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use std::collections::BTreeSet;

use common::check;
use mamba2_emulator::Timing;
use mamba2_spec::rules::{agreement_defaults, alternatives};
use mamba2_spec::{Arch, DeviceFacts, Problem, StrategyConfig};
use rayon::prelude::*;

const SHAPES: &[&str] = &[
    "b=1,l=257,h=4,p=64,g=2,n=128",
    "b=1,l=200,h=3,p=80,g=1,n=64",
    "b=1,l=200,h=2,p=32,g=2,n=256",
];

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Each legal config of each kernel once, in the first strategy that takes it.
fn strategies(problem: &Problem, device: &DeviceFacts) -> Vec<StrategyConfig> {
    let only = variable("MAMBA2_EMULATOR_STRATEGY");
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    for start in agreement_defaults(problem, device) {
        if only.as_deref().is_some_and(|name| name != start.name()) {
            continue;
        }
        for own in start.kernels() {
            for config in alternatives(&start, own.kernel(), problem, device) {
                if seen.insert(config) {
                    all.extend(start.with_kernel(config));
                }
            }
        }
    }
    all
}

#[test]
#[ignore = "an hour or more: every config is compiled; see the top of the file"]
fn every_legal_config_meets_the_recurrence() {
    let device = DeviceFacts::assumed(Arch(90));
    let subset: usize = variable("MAMBA2_EMULATOR_SUBSET").map_or(1, |n| n.parse().unwrap());
    let one = variable("MAMBA2_EMULATOR_SHAPE");
    let shapes: Vec<&str> = one.as_deref().map_or(SHAPES.to_vec(), |shape| vec![shape]);
    let mut count = 0;
    for shape in shapes {
        let problem: Problem = shape.parse().unwrap();
        let all = strategies(&problem, &device);
        let taken: Vec<&StrategyConfig> = all.iter().step_by(subset).collect();
        assert!(!taken.is_empty(), "{shape}: no config");
        println!("{shape}: {} of {} configs", taken.len(), all.len());
        taken
            .par_iter()
            .for_each(|strategy| check(&problem, strategy, Timing::Late));
        count += taken.len();
    }
    println!("{count} configs");
}
