//! What is searched for a shape: parts that are timed one by one and put together, and wholes that are timed end to end.

use mamba2_spec::parameters::{ChunkCumsum, ComputeOut, FwdPassState};
use mamba2_spec::{
    DeviceFacts, Kernel, KernelConfig, Problem, SpecError, StepProblem, StrategyConfig,
    ThreeKernelConfig, launch, rules,
};

use crate::{Candidate, Target};

/// The search space of a shape.
///
/// A strategy of one kernel is a list of [`Space::whole`]; a strategy of several kernels whose configs are mostly
/// independent is a list of [`Assembly`], which costs the sum of the kernels' configs and not their product.
#[derive(Clone, Debug)]
pub struct Space {
    /// The untuned config. It is always measured.
    pub default: Candidate,
    /// Strategies made of parts.
    pub assemblies: Vec<Assembly>,
    /// Strategies measured end to end.
    pub whole: Vec<Candidate>,
    /// Parts of the space that were left out although legal, and why.
    pub left_out: Vec<String>,
}

/// Kernels that run one after the other. Any config of one goes with any config of the others.
#[derive(Clone, Debug)]
pub struct Assembly {
    /// What the kernels agree on, as in `chunk_size=128,layout=bht`.
    pub name: String,
    /// For each kernel its candidates, the one nearest to the default first.
    pub parts: Vec<Vec<Candidate>>,
}

impl Space {
    /// The space of a shape on a device, without what needs more than `memory_bytes` of workspace.
    ///
    /// # Errors
    /// [`SpecError`] if the shape is refused or nothing fits the device.
    pub fn of(
        target: &Target,
        device: &DeviceFacts,
        memory_bytes: Option<u64>,
    ) -> Result<Space, SpecError> {
        match target {
            Target::Forward(problem) => Space::forward(problem, device, memory_bytes),
            Target::Step(problem) => Space::step(problem, device),
        }
    }

    fn forward(
        problem: &Problem,
        device: &DeviceFacts,
        memory_bytes: Option<u64>,
    ) -> Result<Space, SpecError> {
        let default = rules::default_strategy(problem, device)?;
        let mut space = Space {
            default: Candidate::Strategy(default),
            assemblies: Vec::new(),
            whole: Vec::new(),
            left_out: Vec::new(),
        };
        // One arm for each strategy: a fused kernel adds its own legal configs to `space.whole`.
        let StrategyConfig::ThreeKernel(default) = default;
        three_kernel(problem, device, &default, memory_bytes, &mut space);
        Ok(space)
    }

    fn step(problem: &StepProblem, device: &DeviceFacts) -> Result<Space, SpecError> {
        let default = rules::default_step(problem, device)?;
        let whole = rules::legal_step_configs(problem, device)
            .into_iter()
            .map(Candidate::Step)
            .collect();
        Ok(Space {
            default: Candidate::Step(default),
            assemblies: Vec::new(),
            whole,
            left_out: Vec::new(),
        })
    }

    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.assemblies
            .iter()
            .flat_map(|a| &a.parts)
            .map(Vec::len)
            .sum::<usize>()
            + self.whole.len()
    }

    /// True if there is nothing to search.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the three kernels must agree on (rule S01).
fn shared(config: &KernelConfig) -> (u32, u32) {
    match config {
        KernelConfig::ChunkCumsum(c) => (c.chunk_size, c.layout),
        KernelConfig::FwdPassState(c) => (c.chunk_size, c.layout),
        KernelConfig::ComputeOut(c) => (c.chunk_size, c.layout),
        KernelConfig::StateUpdate(_) => (0, 0),
    }
}

/// Number of parameters in which two configs of one kernel differ.
fn distance(a: &KernelConfig, b: &KernelConfig) -> usize {
    a.constants()
        .iter()
        .zip(b.constants())
        .filter(|(a, b)| a.1 != b.1)
        .count()
}

/// The default config of a problem for a given (chunk_size, layout): per kernel the legal config nearest to `default`.
///
/// `None` if one of the kernels has no legal config there.
pub fn companion(
    problem: &Problem,
    device: &DeviceFacts,
    default: &ThreeKernelConfig,
    pair: (u32, u32),
) -> Option<ThreeKernelConfig> {
    let nearest = |kernel: Kernel, wanted: KernelConfig| {
        rules::legal_kernel_configs(kernel, problem, device)
            .into_iter()
            .filter(|c| shared(c) == pair)
            .min_by_key(|c| distance(c, &wanted))
    };
    let (chunk_size, layout) = pair;
    let cumsum = ChunkCumsum {
        chunk_size,
        layout,
        ..default.chunk_cumsum
    };
    let state = FwdPassState {
        chunk_size,
        layout,
        ..default.fwd_pass_state
    };
    let out = ComputeOut {
        chunk_size,
        layout,
        ..default.compute_out
    };
    assemble(&[
        nearest(Kernel::ChunkCumsum, KernelConfig::ChunkCumsum(cumsum))?,
        nearest(Kernel::FwdPassState, KernelConfig::FwdPassState(state))?,
        nearest(Kernel::ComputeOut, KernelConfig::ComputeOut(out))?,
    ])
}

/// One strategy of three kernels' configs; `None` unless there is exactly one of each.
pub fn assemble(kernels: &[KernelConfig]) -> Option<ThreeKernelConfig> {
    match kernels {
        [
            KernelConfig::ChunkCumsum(chunk_cumsum),
            KernelConfig::FwdPassState(fwd_pass_state),
            KernelConfig::ComputeOut(compute_out),
        ] => Some(ThreeKernelConfig {
            chunk_cumsum: *chunk_cumsum,
            fwd_pass_state: *fwd_pass_state,
            compute_out: *compute_out,
        }),
        _ => None,
    }
}

fn three_kernel(
    problem: &Problem,
    device: &DeviceFacts,
    default: &ThreeKernelConfig,
    memory_bytes: Option<u64>,
    space: &mut Space,
) {
    const KERNELS: [Kernel; 3] = [
        Kernel::ChunkCumsum,
        Kernel::FwdPassState,
        Kernel::ComputeOut,
    ];
    let legal = KERNELS.map(|kernel| rules::legal_kernel_configs(kernel, problem, device));
    let mut pairs: Vec<(u32, u32)> = legal[0].iter().map(shared).collect();
    pairs.sort_unstable();
    pairs.dedup();
    for pair in pairs {
        let Some(within) = companion(problem, device, default, pair) else {
            continue;
        };
        let name = format!(
            "chunk_size={},layout={}",
            pair.0,
            ChunkCumsum {
                layout: pair.1,
                ..Default::default()
            }
            .layout_name()
        );
        let bytes = launch::plan(&StrategyConfig::ThreeKernel(within), problem, device)
            .workspace
            .total_bytes as u64;
        if memory_bytes.is_some_and(|limit| bytes > limit) {
            space.left_out.push(format!(
                "{name}: its workspace of {bytes} bytes does not fit the device"
            ));
            continue;
        }
        let own = [
            KernelConfig::ChunkCumsum(within.chunk_cumsum),
            KernelConfig::FwdPassState(within.fwd_pass_state),
            KernelConfig::ComputeOut(within.compute_out),
        ];
        let parts = legal.iter().enumerate().map(|(i, configs)| {
            let others = configs
                .iter()
                .filter(|c| shared(c) == pair && **c != own[i]);
            std::iter::once(&own[i])
                .chain(others)
                .filter_map(|config| {
                    let mut kernels = own;
                    kernels[i] = *config;
                    Some(Candidate::Kernel {
                        kernel: KERNELS[i],
                        within: StrategyConfig::ThreeKernel(assemble(&kernels)?),
                    })
                })
                .collect()
        });
        space.assemblies.push(Assembly {
            name,
            parts: parts.collect(),
        });
    }
}

trait LayoutName {
    fn layout_name(&self) -> String;
}

impl LayoutName for ChunkCumsum {
    fn layout_name(&self) -> String {
        use mamba2_spec::parameters::Parameters;
        let row = Self::ROWS.iter().find(|r| r.name == "layout");
        row.map_or_else(|| self.layout.to_string(), |r| r.display(self.layout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mamba2_spec::Arch;

    fn headline() -> Problem {
        "b=4,l=16384,h=8,p=64,g=1,n=128".parse().unwrap()
    }

    #[test]
    fn every_legal_config_of_every_kernel_is_in_the_space_once() {
        let (problem, device) = (headline(), DeviceFacts::assumed(Arch(90)));
        let space = Space::of(&Target::Forward(problem.clone()), &device, None).unwrap();
        let mut got: Vec<String> = space
            .assemblies
            .iter()
            .flat_map(|a| &a.parts)
            .flatten()
            .map(ToString::to_string)
            .collect();
        let count = got.len();
        got.sort();
        got.dedup();
        assert_eq!(got.len(), count, "no candidate twice");
        let legal: usize = [
            Kernel::ChunkCumsum,
            Kernel::FwdPassState,
            Kernel::ComputeOut,
        ]
        .map(|k| rules::legal_kernel_configs(k, &problem, &device).len())
        .iter()
        .sum();
        assert_eq!(count, legal);
        for candidate in space.assemblies.iter().flat_map(|a| &a.parts).flatten() {
            let Candidate::Kernel { within, .. } = candidate else {
                panic!("parts are kernels")
            };
            rules::check_strategy(within, &problem, &device).unwrap();
        }
    }

    #[test]
    fn c8_a_chunk_size_whose_workspace_does_not_fit_is_not_offered() {
        let (problem, device) = (headline(), DeviceFacts::assumed(Arch(90)));
        let target = Target::Forward(problem.clone());
        let default = rules::default_strategy(&problem, &device).unwrap();
        let bytes = launch::plan(&default, &problem, &device)
            .workspace
            .total_bytes as u64;
        let space = Space::of(&target, &device, Some(bytes)).unwrap();
        assert!(
            space
                .assemblies
                .iter()
                .all(|a| !a.name.starts_with("chunk_size=64")),
            "half the chunk, twice the states"
        );
        assert!(
            space
                .assemblies
                .iter()
                .any(|a| a.name.starts_with("chunk_size=128"))
        );
        assert!(
            space
                .left_out
                .iter()
                .any(|text| text.contains("chunk_size=64") && text.contains("bytes")),
            "{:?}",
            space.left_out
        );
    }
}
