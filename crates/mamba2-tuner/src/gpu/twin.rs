//! Small problems that compile to the same kernels as a large one: same headdim, dstate, dtypes, options. Heads are launch arguments, of
//! which a twin has few: models that differ only in heads share their twins.

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

/// Of a chain: in each of up to four blocks more chunks than a ring of up to four holds, so that its stages are filled anew, as in long sequences.
const CHAIN_TOKENS: usize = 4 * 5 * 64 - 27;

/// Heads per group of a twin: the fewest, 8 or more, that leave the same remainder by 8 and are not a multiple of 3 where the problem's
/// are none; fewer than that stay as they are. At most 23.
///
/// Blocks take 1, 2, 4 or 8 heads, and in one strategy 3. What blocks of 2, 4 or 8 leave over is then the same as in the problem (BLOCK_H
/// of compute_out has to divide them), and blocks of 3 leave something over wherever they do there. From 8 on a group has heads enough
/// for the rules on padding (P08, W03, V02: 6 suffice), and more than one of the blocks that it is split into, of 4 heads at most.
fn heads_per_group(of_problem: usize) -> usize {
    let stands_for = |n: &usize| {
        n % 8 == of_problem % 8 && (!n.is_multiple_of(3) || of_problem.is_multiple_of(3))
    };
    (8..=of_problem).find(stands_for).unwrap_or(of_problem)
}

/// Groups of a twin: more than one where the problem has more, few enough to stay small. Blocks that run across groups (chunk_cumsum's, of
/// up to 8 heads) must not divide all heads if they do not in the problem: two groups stand only for an even number, or are of 8 heads.
fn groups(of_problem: usize, heads_per_group: usize) -> usize {
    let two =
        heads_per_group.is_multiple_of(8) || heads_per_group > 8 && of_problem.is_multiple_of(2);
    of_problem.min(if two { 2 } else { 3 })
}

/// Tokens that a strategy needs to be legal and to have several of everything that it splits a sequence into.
fn tokens(config: &StrategyConfig, large: bool) -> usize {
    let least = if large { FEW_TOKENS } else { TOKENS };
    if let StrategyConfig::Sm90Chain(c) = config {
        // Halves have a stage for each chunk; the last segment has one less, and a ragged one.
        let c = c.chain_forward;
        return match c.halves {
            1 => CHAIN_TOKENS,
            _ => 64 * (c.segments * c.stages) as usize - SEGMENT_TAIL,
        };
    }
    match config.segment().unwrap_or(0) as usize {
        0 => least,
        s if s <= SHORT_SEGMENT => least.max(2 * s + SEGMENT_TAIL),
        s => s + SEGMENT_TAIL,
    }
}

/// The twin of a forward pass for a config. What is legal for the problem is legal for the twin.
pub fn of_forward(problem: &Problem, config: &StrategyConfig) -> Problem {
    let heads_per_group = heads_per_group(problem.heads_per_group());
    let ngroups = groups(problem.ngroups, heads_per_group);
    let nheads = ngroups * heads_per_group;
    let large = nheads * problem.headdim * problem.dstate > LARGE_STATE_ELEMS;
    let mut twin = problem.clone();
    (twin.nheads, twin.ngroups) = (nheads, ngroups);
    let tokens = tokens(config, large);
    // All blocks of a chain run at once, on however small a device: no more sequences than the problem has.
    let most = match config {
        StrategyConfig::Sm90Chain(_) => problem.sequences(),
        _ => usize::MAX,
    };
    // Packed sequences are uneven: the longest of them has several segments.
    twin.seqlen = if problem.packed.is_some() {
        3 * tokens
    } else {
        tokens
    };
    twin.batch = if problem.packed.is_some() || nheads > 16 || tokens > TOKENS {
        1
    } else {
        most.min(2)
    };
    twin.packed = problem.packed.map(|_| most.min(SEQUENCES));
    twin
}

/// The twin of a decode step. It has a block for each tile of its few rows: what the kernel of a problem with more rows than a grid can have
/// does behind its first row, only the real shape shows.
pub fn of_step(problem: &StepProblem) -> StepProblem {
    let heads_per_group = heads_per_group(problem.heads_per_group());
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
    use mamba2_kernels::{render, render_step};
    use mamba2_spec::{Arch, DeviceFacts, KernelConfig, rules};

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

    /// Kinds of problem that make different kernels and strategies legal, but for heads and groups.
    const KINDS: [&str; 8] = [
        "b=1,l=16384,p=64,n=128",
        "b=1,l=512,p=64,n=128",
        "b=2,l=900,p=48,n=64",
        "b=2,l=2000,p=64,n=64,dtype=f16,z=1",
        "b=1,l=9000,p=80,n=256",
        "b=1,l=4096,p=160,n=256,packed=1",
        "b=3,l=1000,p=64,n=512,init=none",
        "b=1,l=700,p=33,n=17,align=1,dtype=f32",
    ];

    fn problem(kind: &str, heads_per_group: usize, ngroups: usize) -> Problem {
        let nheads = heads_per_group * ngroups;
        format!("{kind},h={nheads},g={ngroups}").parse().unwrap()
    }

    #[test]
    fn what_is_legal_for_a_problem_is_legal_for_its_twin_and_the_same_text() {
        let mut small = DeviceFacts::assumed(Arch(90));
        small.sm_count = 16;
        let devices = [DeviceFacts::assumed(Arch(90)), small];
        let mut compared = 0;
        for kind in KINDS {
            let heads = (1..=26).chain([31, 32, 33, 80, 128, 250]);
            for (i, heads_per_group) in heads.enumerate() {
                let ngroups = [1, 2, 3, 4, 8, 7][i % 6];
                let problem = problem(kind, heads_per_group, ngroups);
                for device in &devices {
                    let mut seen = Vec::new();
                    for within in rules::agreement_defaults(&problem, device) {
                        let twin = of_forward(&problem, &within);
                        twin.check().unwrap();
                        // The other agreements of a strategy have the same other parameters.
                        let once = !seen.contains(&within.name());
                        seen.push(within.name());
                        let all = within.kernels().into_iter().flat_map(|own| {
                            let others = KernelConfig::space(own.kernel());
                            others.into_iter().filter(move |c| once || *c == own)
                        });
                        for config in all.filter_map(|c| within.with_kernel(c)) {
                            if rules::check_strategy(&config, &problem, device).is_err() {
                                continue;
                            }
                            let twin = of_forward(&problem, &config);
                            rules::check_strategy(&config, &twin, device)
                                .unwrap_or_else(|e| panic!("{problem}, {twin}: {config}: {e}"));
                            for kernel in config.kernels() {
                                let text = |p: &Problem| render(&kernel, p, device).source;
                                assert_eq!(text(&problem), text(&twin), "{problem}, {twin}");
                                compared += 1;
                            }
                        }
                    }
                }
            }
        }
        assert!(compared > 10_000, "{compared}");
    }

    #[test]
    fn heads_that_blocks_do_not_divide_and_blocks_and_groups_beside_others_stay() {
        let within = StrategyConfig::ThreeKernel(Default::default());
        for heads_per_group in 1..=300 {
            for ngroups in 1..=20 {
                let problem = problem(KINDS[0], heads_per_group, ngroups);
                let twin = of_forward(&problem, &within);
                let of_twin = twin.heads_per_group();
                assert!(of_twin <= heads_per_group && of_twin <= 23, "{twin}");
                assert_eq!(of_twin.min(8), heads_per_group.min(8));
                assert_eq!(of_twin % 8, heads_per_group % 8);
                if of_twin.is_multiple_of(3) {
                    assert!(heads_per_group.is_multiple_of(3), "{problem}");
                }
                for block in [2, 4] {
                    assert_eq!(of_twin > block, heads_per_group > block, "{problem}");
                }
                for block in [2, 4, 8] {
                    if twin.nheads.is_multiple_of(block) {
                        assert!(problem.nheads.is_multiple_of(block), "{problem}");
                    }
                }
                assert_eq!(twin.ngroups.min(2), ngroups.min(2));
            }
        }
    }

    #[test]
    fn a_step_and_its_twin_have_the_same_configs_and_texts() {
        let device = DeviceFacts::assumed(Arch(90));
        for (heads_per_group, ngroups) in [(24, 1), (80, 1), (16, 8), (5, 3), (33, 2)] {
            for kind in [
                "b=256,p=64,n=128,bias=1,softplus=1",
                "b=1,p=80,n=256,slots=4,z=1",
                "b=5,p=33,n=20,t=3,state=bf16",
            ] {
                let nheads = heads_per_group * ngroups;
                let shape = format!("{kind},h={nheads},g={ngroups}");
                let problem: StepProblem = shape.parse().unwrap();
                let twin = of_step(&problem);
                assert!(twin.nheads <= 3 * 23 && twin.nheads <= nheads, "{twin}");
                let configs = rules::legal_step_configs(&problem, &device);
                assert_eq!(rules::legal_step_configs(&twin, &device), configs);
                for config in configs {
                    let text = |p: &StepProblem| render_step(&config, p, &device).source;
                    assert_eq!(text(&problem), text(&twin), "{problem}: {config}");
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
