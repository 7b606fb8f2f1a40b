//! t
mod common;
use common::check;
use mamba2_emulator::Timing;
use mamba2_spec::rules::default_strategy;
use mamba2_spec::{Arch, DeviceFacts, Problem};
#[test]
fn t() {
    let problem: Problem = std::env::var("SHAPE").unwrap().parse().unwrap();
    let s = default_strategy(&problem, &DeviceFacts::assumed(Arch(90))).unwrap();
    eprintln!("{s}");
    check(&problem, &s, Timing::Early);
}
