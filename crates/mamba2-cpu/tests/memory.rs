//! C8: memory must not grow with the number of chunks. Alone in its binary, because it watches the process.
#![allow(clippy::unwrap_used)]

mod common;

use common::f32_problem;
use mamba2_cpu::scratch_bytes;
use mamba2_reference::{Pattern, generate};
use mamba2_spec::{ChunkSize, Problem};

#[test]
fn c8_scratch_is_stated_and_does_not_grow_with_the_length() {
    let of = |l: usize, q: u32| {
        let problem: Problem = format!("b=1,l={l},h=64,p=64,g=1,n=128,q={q}")
            .parse()
            .unwrap();
        scratch_bytes(&problem)
    };
    // Elsewhere: 128 GiB of chunk states at a million tokens.
    assert_eq!(of(1 << 20, 16), of(1 << 10, 16));
    let threads = rayon::current_num_threads();
    assert!(
        of(1 << 20, 16) < threads * (8 << 20),
        "{} bytes on {threads} threads",
        of(1 << 20, 16)
    );
    assert!(of(1 << 20, 4096) < threads * (64 << 20));
}

/// Highest resident size of this process so far, in bytes; `None` where the system does not say.
fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<usize>()
        .ok()
        .map(|kib| kib << 10)
}

#[test]
fn c8_the_process_grows_by_no_more_than_the_stated_scratch() {
    // Chunk states would take 16384 / 16 * 8 * 32 * 64 * 4 bytes = 64 MiB.
    let mut problem = f32_problem("b=1,l=16384,h=8,p=32,g=1,n=64");
    problem.chunk_size = ChunkSize::Fixed(16);
    let inputs = generate(&problem, 1, Pattern::Plain);
    let mut results = common::Results::poisoned(&problem);
    let mut outputs = mamba2_spec::ForwardOutputs {
        out: common::view_mut(&mut results.out, &common::token_shape(&problem)),
        final_states: results
            .final_states
            .as_mut()
            .map(|v| common::view_mut(v, &common::state_shape(&problem))),
    };
    let before = peak_bytes();
    mamba2_cpu::forward(&problem, &common::inputs(&problem, &inputs), &mut outputs).unwrap();
    match (before, peak_bytes()) {
        (Some(before), Some(after)) => {
            // Stacks and buffers of the thread pool and of the products come on top.
            let allowed = scratch_bytes(&problem) + (16 << 20);
            assert!(
                after - before <= allowed,
                "grew by {} bytes, {allowed} allowed",
                after - before
            );
        }
        _ => println!("SKIPPED: this system has no /proc/self/status"),
    }
}
