//! What is searched for a shape: parts that are timed one by one and put together, and wholes that are timed end to end.

use mamba2_spec::{
    DeviceFacts, Kernel, KernelConfig, Problem, SpecError, StepProblem, StrategyConfig, launch,
    rules,
};

use crate::{Candidate, Target};

/// The search space of a shape.
///
/// A decode step is a list of [`Space::whole`]. A strategy of several kernels whose configs are mostly independent is one
/// [`Assembly`] for each way its kernels can agree, which costs the sum of the kernels' configs and not their product.
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
    /// Strategy and what its kernels agree on, as in `three_kernel chunk_size=128,layout=bht`.
    pub name: String,
    /// The starting point: each kernel's config nearest to the default.
    pub within: StrategyConfig,
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

    /// The untuned config of a shape.
    ///
    /// # Errors
    /// As [`Space::of`].
    pub fn default_of(target: &Target, device: &DeviceFacts) -> Result<Candidate, SpecError> {
        Ok(match target {
            Target::Forward(p) => Candidate::Strategy(rules::default_strategy(p, device)?),
            Target::Step(p) => Candidate::Step(rules::default_step(p, device)?),
        })
    }

    fn forward(
        problem: &Problem,
        device: &DeviceFacts,
        memory_bytes: Option<u64>,
    ) -> Result<Space, SpecError> {
        let mut space = Space {
            default: Candidate::Strategy(rules::default_strategy(problem, device)?),
            assemblies: Vec::new(),
            whole: Vec::new(),
            left_out: Vec::new(),
        };
        let legal = Kernel::ALL.map(|kernel| rules::legal_kernel_configs(kernel, problem, device));
        let legal: Vec<KernelConfig> = legal.into_iter().flatten().collect();
        for within in rules::agreement_defaults(problem, device) {
            let name = format!("{} {}", within.name(), within.agreement());
            let bytes = launch::plan(&within, problem, device).workspace.total_bytes as u64;
            if memory_bytes.is_some_and(|limit| bytes > limit) {
                space.left_out.push(format!(
                    "{name}: its workspace of {bytes} bytes does not fit the device"
                ));
                continue;
            }
            space
                .assemblies
                .push(Assembly::new(name, within, &legal, problem, device));
        }
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

impl Assembly {
    /// Every legal config of every kernel of `within` that keeps what the kernels agree on.
    fn new(
        name: String,
        within: StrategyConfig,
        legal: &[KernelConfig],
        problem: &Problem,
        device: &DeviceFacts,
    ) -> Assembly {
        let part = |own: KernelConfig| {
            let others = legal
                .iter()
                .copied()
                .filter(|c| c.kernel() == own.kernel() && *c != own);
            let candidate = |config| {
                let within = within.with_kernel(config)?;
                rules::check_strategy(&within, problem, device).ok()?;
                Some(Candidate::Kernel {
                    kernel: own.kernel(),
                    within,
                })
            };
            std::iter::once(own)
                .chain(others)
                .filter_map(candidate)
                .collect()
        };
        let parts = within.kernels().into_iter().map(part).collect();
        Assembly {
            name,
            within,
            parts,
        }
    }

    /// The strategy with the given kernels' configs; `None` if one of them is not a kernel of it.
    pub fn assemble(&self, kernels: &[KernelConfig]) -> Option<StrategyConfig> {
        kernels
            .iter()
            .try_fold(self.within, |within, kernel| within.with_kernel(*kernel))
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
        for assembly in &space.assemblies {
            let mut own: Vec<_> = assembly.parts.iter().flatten().collect();
            let count = own.len();
            own.sort();
            own.dedup();
            assert_eq!(own.len(), count, "{}: no candidate twice", assembly.name);
        }
        // segment_scan is part of two strategies, and measured in both.
        let mut got: Vec<String> = space
            .assemblies
            .iter()
            .flat_map(|a| &a.parts)
            .flatten()
            .map(ToString::to_string)
            .collect();
        got.sort();
        got.dedup();
        let legal: usize = Kernel::ALL
            .map(|k| rules::legal_kernel_configs(k, &problem, &device).len())
            .iter()
            .sum();
        assert_eq!(got.len(), legal);
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
        let chunk_128 = "b=4,l=16384,h=8,p=64,g=1,n=128,q=128".parse().unwrap();
        let default = rules::default_strategy(&chunk_128, &device).unwrap();
        let bytes = launch::plan(&default, &problem, &device)
            .workspace
            .total_bytes as u64;
        let space = Space::of(&target, &device, Some(bytes)).unwrap();
        assert!(
            space
                .assemblies
                .iter()
                .all(|a| !a.name.contains("chunk_size=64")),
            "half the chunk, twice the states"
        );
        assert!(
            space
                .assemblies
                .iter()
                .any(|a| a.name.contains("chunk_size=128"))
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
