//! Small problems that compile to the same kernels as a large one: same headdim, dstate, heads per group, dtypes, options.

use mamba2_spec::{Problem, StepProblem, StrategyConfig};

/// Tokens of a twin: several chunks of every size, and a ragged tail.
const TOKENS: usize = 2 * 256 + 37;
/// The same for twins with large states, whose oracle would take seconds: two chunks of 256 are still passed through.
const FEW_TOKENS: usize = 256 + 37;
const LARGE_STATE_ELEMS: usize = 1 << 20;
const SEQUENCES: usize = 6;
/// Rows of a decode step's twin: not a multiple of anything; and where a row's state is large, so that downloading and comparing it
/// with the oracle would cost more than the step on the real shape. Of four rows with indices one is skipped.
const ROWS: usize = 7;
const FEW_ROWS: usize = 4;
const LARGE_ROW_ELEMS: usize = 1 << 18;
/// Behind the last whole segment of a strategy that splits sequences: a chunk and a ragged one.
const SEGMENT_TAIL: usize = 64 + 37;
/// Up to here a twin has three segments, so that a state passes through one; longer ones have two.
const SHORT_SEGMENT: usize = 1024;

/// Groups of a twin: more than one where the problem has more, few enough to stay small.
fn groups(ngroups: usize, heads_per_group: usize) -> usize {
    let most = match heads_per_group {
        0..=8 => 3,
        9..=32 => 2,
        _ => 1,
    };
    ngroups.min(most)
}

/// Tokens that a strategy needs to be legal and to have several of everything that it splits a sequence into.
fn tokens(config: &StrategyConfig, large: bool) -> usize {
    let least = if large { FEW_TOKENS } else { TOKENS };
    match config.segment().unwrap_or(0) as usize {
        0 => least,
        s if s <= SHORT_SEGMENT => least.max(2 * s + SEGMENT_TAIL),
        s => s + SEGMENT_TAIL,
    }
}

/// The twin of a forward pass for a config.
pub fn of_forward(problem: &Problem, config: &StrategyConfig) -> Problem {
    let heads_per_group = problem.heads_per_group();
    let ngroups = groups(problem.ngroups, heads_per_group);
    let nheads = ngroups * heads_per_group;
    let large = nheads * problem.headdim * problem.dstate > LARGE_STATE_ELEMS;
    let mut twin = problem.clone();
    (twin.nheads, twin.ngroups) = (nheads, ngroups);
    let tokens = tokens(config, large);
    // Packed sequences are uneven: the longest of them has several segments.
    twin.seqlen = if problem.packed.is_some() {
        3 * tokens
    } else {
        tokens
    };
    twin.batch = if problem.packed.is_some() || nheads > 16 || tokens > TOKENS {
        1
    } else {
        2
    };
    twin.packed = problem.packed.map(|_| SEQUENCES);
    twin
}

/// The twin of a decode step.
pub fn of_step(problem: &StepProblem) -> StepProblem {
    let heads_per_group = problem.nheads / problem.ngroups;
    let mut twin = problem.clone();
    twin.ngroups = groups(problem.ngroups, heads_per_group);
    twin.nheads = twin.ngroups * heads_per_group;
    let row = twin.nheads * twin.headdim * twin.dstate;
    let rows = if row > LARGE_ROW_ELEMS {
        FEW_ROWS
    } else {
        ROWS
    };
    twin.batch = problem.batch.min(rows);
    twin.slots = if problem.indices {
        twin.batch + 2
    } else {
        twin.batch
    };
    twin
}

#[cfg(test)]
mod tests {
    use super::*;
    use mamba2_kernels::render;
    use mamba2_spec::{Arch, DeviceFacts, rules};

    #[test]
    fn a_twin_compiles_to_the_same_text_as_the_problem() {
        let device = DeviceFacts::assumed(Arch(90));
        for shape in [
            "b=4,l=16384,h=8,p=64,g=1,n=128",
            "b=1,l=8192,h=128,p=80,g=8,n=128,dtype=f16,z=1,softplus=1,bias=1",
            "b=1,l=4096,h=80,p=64,g=1,n=256,packed=3,init=none",
            "b=2,l=100,h=5,p=33,g=5,n=17,align=1,dtype=f32",
        ] {
            let problem: Problem = shape.parse().unwrap();
            for config in rules::agreement_defaults(&problem, &device) {
                let twin = of_forward(&problem, &config);
                twin.check().unwrap();
                rules::check_strategy(&config, &twin, &device)
                    .unwrap_or_else(|e| panic!("{shape}: {config}: {e}"));
                for kernel in config.kernels() {
                    let text = |p: &Problem| render(&kernel, p, &device).source.config_header;
                    assert_eq!(text(&problem), text(&twin), "{shape}");
                }
            }
        }
    }

    #[test]
    fn a_twin_has_several_chunks_and_a_ragged_tail_at_every_chunk_size() {
        for shape in [
            "b=1,l=1,h=8,p=64,g=1,n=128",
            "b=1,l=1,h=128,p=256,g=1,n=512",
        ] {
            let twin = of_forward(
                &shape.parse().unwrap(),
                &StrategyConfig::ThreeKernel(Default::default()),
            );
            for chunk_size in [64, 128, 256] {
                assert!(
                    twin.seqlen > chunk_size && !twin.seqlen.is_multiple_of(chunk_size),
                    "{twin}"
                );
            }
        }
    }
}
