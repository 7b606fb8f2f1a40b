//! Two promises of the CPU backend, checked in one run; exits 1 if one is broken.
//!
//! 1. `b=1,l=4096,h=24,p=64,g=1,n=128` in float32 takes at most 3 times as long as plain products of the same library with the
//!    same number of operations, on the same threads. Operations are counted as few as the chunked form can do with
//!    (`mamba2_spec::limit`: C B^T once for each group, causal halves), not as many as the backend does.
//! 2. Time grows linearly with seqlen from 1024 to 65536: no time per token is more than 10 % from their median.
//!
//! Times are the least of several runs, which is what a busy machine disturbs least.

mod common;

use std::time::Instant;

use common::Forward;
use mamba2_spec::limit::Limit;
use ndarray::Array2;
use ndarray::linalg::general_mat_mul;
use rayon::prelude::*;

const SHAPE: &str = "b=1,l=4096,h=24,p=64,g=1,n=128,dtype=f32";
const SIDE: usize = 512;
const MOST_TIMES: f64 = 3.0;
const MOST_OFF: f64 = 0.10;

/// Wall time, and processor time of all threads (0 where the system does not tell it).
#[derive(Clone, Copy, Debug)]
struct Seconds {
    wall: f64,
    busy: f64,
}

fn least_seconds(runs: usize, mut work: impl FnMut()) -> Seconds {
    let mut least = Seconds {
        wall: f64::INFINITY,
        busy: f64::INFINITY,
    };
    for _ in 0..runs {
        let (start, before) = (Instant::now(), processor_seconds());
        work();
        least.wall = least.wall.min(start.elapsed().as_secs_f64());
        least.busy = least.busy.min(processor_seconds() - before);
    }
    least
}

/// Linux counts nanoseconds on a processor for every thread.
fn processor_seconds() -> f64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let nanoseconds = |thread: std::fs::DirEntry| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    threads.flatten().filter_map(nanoseconds).sum::<f64>() * 1e-9
}

/// Seconds that all threads together need for one operation of SIDE^3 products.
fn seconds_per_flop() -> Seconds {
    const EACH: usize = 8;
    let threads = rayon::current_num_threads();
    let mut operands: Vec<[Array2<f32>; 3]> = (0..threads)
        .map(|t| {
            [1, 2, 3].map(|k| {
                Array2::from_shape_fn((SIDE, SIDE), |(i, j)| ((i * k + j + t) % 7) as f32 - 3.0)
            })
        })
        .collect();
    let seconds = least_seconds(10, || {
        operands.par_iter_mut().for_each(|[a, b, c]| {
            for _ in 0..EACH {
                general_mat_mul(1.0, a, b, 0.0, c);
            }
        });
    });
    let flops = (threads * EACH * 2 * SIDE.pow(3)) as f64;
    Seconds {
        wall: seconds.wall / flops,
        busy: seconds.busy / flops,
    }
}

fn main() {
    // `cargo test --benches` passes this; it wants to know that the benchmark runs, not how fast.
    let only_try = std::env::args().any(|arg| arg == "--test");
    let runs = if only_try { 1 } else { 15 };
    let mut ok = true;

    let mut call = Forward::new(SHAPE.parse().expect("shape should parse"));
    let flops = Limit::of(&call.problem).flops;
    let per_flop = seconds_per_flop();
    let seconds = least_seconds(runs, || call.run());
    println!(
        "{SHAPE}: {:.1} ms; {:.2} GFLOP of plain products: {:.1} ms ({:.1} GFLOP/s, {} threads); ratio {:.2} (at most {MOST_TIMES}), by processor time {:.2}",
        seconds.wall * 1e3,
        flops * 1e-9,
        flops * per_flop.wall * 1e3,
        1e-9 / per_flop.wall,
        rayon::current_num_threads(),
        seconds.wall / (flops * per_flop.wall),
        seconds.busy / (flops * per_flop.busy),
    );
    ok &= seconds.wall <= MOST_TIMES * flops * per_flop.wall;

    let lengths = if only_try {
        vec![1024]
    } else {
        vec![1024, 2048, 4096, 8192, 16384, 32768, 65536]
    };
    let mut per_token = Vec::new();
    for l in lengths {
        let shape = format!("b=1,l={l},h=24,p=64,g=1,n=128,dtype=f32");
        let mut call = Forward::new(shape.parse().expect("shape should parse"));
        let seconds = least_seconds((runs * 8192 / l).clamp(3, 15), || call.run());
        per_token.push((
            l,
            Seconds {
                wall: seconds.wall / l as f64,
                busy: seconds.busy / l as f64,
            },
        ));
    }
    let median = Seconds {
        wall: median(&per_token, |t| t.wall),
        busy: median(&per_token, |t| t.busy),
    };
    for (l, t) in per_token {
        let (off, off_busy) = (t.wall / median.wall - 1.0, t.busy / median.busy - 1.0);
        println!(
            "l={l:6}: {:.3} us per token, {:+.1} % from the median (at most {:.0}); processor time {:.3} us, {:+.1} %",
            t.wall * 1e6,
            off * 100.0,
            MOST_OFF * 100.0,
            t.busy * 1e6,
            off_busy * 100.0
        );
        ok &= off.abs() <= MOST_OFF;
    }
    if !ok && !only_try {
        eprintln!("a promise is broken, or the machine is busy: processor times show which");
        std::process::exit(1);
    }
}

fn median(per_token: &[(usize, Seconds)], of: impl Fn(&Seconds) -> f64) -> f64 {
    let mut sorted: Vec<f64> = per_token.iter().map(|(_, t)| of(t)).collect();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
