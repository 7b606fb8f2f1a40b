//! How long `sm90_fused` takes, by a model: what its default config is chosen by where nothing was tuned.
//!
//! A block takes a start-up and so much for each chunk of 64 tokens; blocks run in order, one a multiprocessor (sums of one warpgroup could run
//! two, which the model leaves out); the sum over segments runs before Y. The numbers are fitted to what the tuner chose for 96 shapes on
//! an H200 (`benches/NOTES.md`, fourth set): of 73 it chooses the same segment and warpgroups. Its times are short of a launch and of what
//! blocks take from each other; only their order counts. Two warpgroups that share a head (dstate above 128) are not of that fit: their chunk was
//! measured beside that of one. `crates/mamba2-tunedb/tests/defaults.rs` holds what comes of it against the shipped records.

use crate::launch::{adds_up, sm90_slices};
use crate::{DeviceFacts, Problem};

/// Of one block, before its first chunk. Unit: us.
const START: f64 = 4.2;
/// segment_scan with its launch, and what each segment adds to it; or adding up few segments in its place. Unit: us.
const SCAN: f64 = 4.8;
const SCAN_OF_SEGMENT: f64 = 0.17;
const ADD: f64 = 1.0;
/// Rows that are looked at one by one; of more, all whole segments come before all last ones.
const ROWS: usize = 8;

/// Time of a chunk in sm90_segment_state and in sm90_fused_forward, for the heads of one block. Unit: us.
fn of_chunk(dstate: usize, warpgroups: u32) -> (f64, f64) {
    match (dstate.next_multiple_of(64), warpgroups) {
        (64, 1) => (0.41, 0.88),
        (64, _) => (0.55, 1.35),
        (128, 1) => (0.51, 1.12),
        (128, _) => (0.74, 1.64),
        (_, 1) => (0.83, 1.82),
        (_, _) => (1.29, 1.98),
    }
}

/// When the last of some blocks is done. Runs of (blocks, time of each) come in order; each block takes the multiprocessor that is free first.
fn makespan(multiprocessors: u64, runs: impl Iterator<Item = (u64, f64)>) -> f64 {
    // (free from, how many), the earliest last.
    let mut free: Vec<(f64, u64)> = vec![(0.0, multiprocessors.max(1))];
    for (mut blocks, time) in runs {
        while blocks > 0 {
            let Some((from, count)) = free.pop() else {
                break;
            };
            if free.is_empty() && blocks >= count {
                let waves = blocks / count;
                blocks -= waves * count;
                free.push((from + waves as f64 * time, count));
                continue;
            }
            let taken = blocks.min(count);
            if count > taken {
                free.push((from, count - taken));
            }
            let until = from + time;
            let at = free.partition_point(|(t, _)| *t > until);
            free.insert(at, (until, taken));
            blocks -= taken;
        }
    }
    free.first().map_or(0.0, |(until, _)| *until)
}

/// Estimate for rows of equal length, split into segments of so many tokens (0: not split), with one head a warpgroup of each kernel. Unit: us.
pub fn fused_us(
    problem: &Problem,
    device: &DeviceFacts,
    segment: u32,
    of_sum: u32,
    of_forward: u32,
) -> f64 {
    let slices = sm90_slices(true, of_forward, problem.dstate);
    let blocks = |warpgroups: u32| {
        (problem.ngroups * problem.heads_per_group().div_ceil(warpgroups as usize)) as u64
    };
    let (sums, blocks) = (blocks(of_sum), blocks(of_forward / slices));
    let (sum_of_chunk, _) = of_chunk(problem.dstate, of_sum);
    let (_, forward_of_chunk) = of_chunk(problem.dstate, of_forward);
    let rows = problem.batch.max(1);
    let chunks = |tokens: usize| tokens.div_ceil(64) as f64;
    let forward = |tokens: usize| START + chunks(tokens) * forward_of_chunk;
    let sum = |tokens: usize| START + chunks(tokens) * sum_of_chunk;
    let multiprocessors = u64::from(device.sm_count);
    let length = match segment as usize {
        0 => problem.seqlen.max(1),
        n => n,
    };
    let segments = problem.seqlen.div_ceil(length).max(1);
    let last = problem.seqlen - (segments - 1) * length;
    let whole = (segments as u64 - 1) * blocks;
    let (times, of_each) = if rows <= ROWS {
        (rows, 1)
    } else {
        (1, rows as u64)
    };
    let row = [
        (of_each * whole, forward(length)),
        (of_each * blocks, forward(last)),
    ];
    let forward = makespan(multiprocessors, (0..times).flat_map(|_| row));
    if segments == 1 {
        return forward;
    }
    let all = (rows as u64 * (segments as u64 - 1) * sums, sum(length));
    let sum = makespan(multiprocessors, std::iter::once(all));
    let between = if adds_up(
        segments,
        problem.dstate.next_multiple_of(64) / slices as usize,
    ) {
        ADD
    } else {
        SCAN + SCAN_OF_SEGMENT * segments as f64
    };
    forward + sum + between
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;

    #[test]
    fn blocks_take_the_multiprocessor_that_is_free_first() {
        let of = |runs: &[(u64, f64)]| makespan(10, runs.iter().copied());
        assert_eq!(of(&[]), 0.0);
        assert_eq!(of(&[(10, 3.0)]), 3.0);
        assert_eq!(of(&[(11, 3.0)]), 6.0);
        // A short last one starts where nobody works.
        assert_eq!(of(&[(8, 3.0), (2, 1.0)]), 3.0);
        assert_eq!(of(&[(12, 3.0), (8, 1.0)]), 6.0);
        assert_eq!(of(&[(12, 3.0), (9, 1.0)]), 6.0);
        assert_eq!(of(&[(20, 3.0), (1, 1.0)]), 7.0);
    }

    #[test]
    fn many_short_rows_are_not_split() {
        let device = DeviceFacts::assumed(Arch(90));
        for batch in [9, 64, 1000, 100_000] {
            let shape = format!("b={batch},l=512,h=16,p=64,g=1,n=128");
            let problem = shape.parse().unwrap();
            let of = |segment| fused_us(&problem, &device, segment, 1, 1);
            assert!(of(0) < of(128), "{shape}: {} {}", of(0), of(128));
        }
    }

    #[test]
    fn longer_sequences_take_longer() {
        let device = DeviceFacts::assumed(Arch(90));
        let of = |l: usize, segment: u32| {
            let shape = format!("b=2,l={l},h=24,p=64,g=1,n=128");
            fused_us(&shape.parse().unwrap(), &device, segment, 2, 2)
        };
        for segment in [0, 512, 2048] {
            assert!(of(16384, segment) > of(8192, segment));
        }
        assert!(
            of(16384, 0) > of(16384, 2048),
            "24 blocks of 132 that may work"
        );
    }
}
