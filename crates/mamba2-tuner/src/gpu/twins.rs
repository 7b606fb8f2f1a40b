//! Twins on the device, each with its oracle and with what was found right on it.

use std::collections::HashMap;

use mamba2_cuda::{CudaError, Device, Jit};
use mamba2_reference::{generate, generate_step};
use rayon::prelude::*;

use super::place::Placement;
use super::trial::{ForwardTrial, Oracle, StepTrial};
use super::{PATTERN, SEED, twin};
use crate::executor::Verified;
use crate::{Candidate, Target};

/// Twins of earlier shapes are kept while all of them take at most this much of the device: those of a sweep over lengths for a handful of
/// models do, and no shape lacks it. What was found on those that go is kept.
const KEPT_BYTES: u64 = 2 << 30;

/// The small problems on which candidates are verified, of this shape and of earlier ones, and what was found on them.
#[derive(Default)]
pub struct Twins {
    made: Vec<Twin>,
    /// Whole configs that were right on a twin. Problem and config decide all that is compiled and launched, so another shape with the same
    /// twin need not run them again, nor make the twin.
    right: Vec<(Target, HashMap<Candidate, Verified>)>,
}

/// A small problem on the device.
pub struct Twin {
    /// The problem.
    pub problem: Target,
    /// Its inputs and outputs.
    pub trial: Trial,
    /// Its right answer.
    pub oracle: Oracle,
}

/// Inputs and outputs of either kind of problem.
pub enum Trial {
    /// Of a forward pass.
    Forward(ForwardTrial),
    /// Of a decode step.
    Step(StepTrial),
}

/// The twin of a shape that serves a candidate; strategies that split sequences need longer ones. `None` if the candidate is for another
/// kind of shape.
pub fn twin_of(target: &Target, candidate: &Candidate) -> Option<Target> {
    match (target, candidate) {
        (
            Target::Forward(problem),
            Candidate::Kernel { within, .. } | Candidate::Strategy(within),
        ) => Some(Target::Forward(twin::of_forward(problem, within))),
        (Target::Step(problem), Candidate::Step(_)) => Some(Target::Step(twin::of_step(problem))),
        _ => None,
    }
}

/// What a twin is made of, before anything of it is on the device.
enum Made {
    Forward(mamba2_spec::Problem, mamba2_reference::Generated),
    Step(mamba2_spec::StepProblem, mamba2_reference::GeneratedStep),
}

impl Made {
    fn of(problem: &Target) -> (Made, Oracle) {
        match problem {
            Target::Forward(p) => {
                let mut made = generate(p, SEED, PATTERN);
                let oracle = Oracle::forward(p, &made);
                made.poison_tail(p);
                (Made::Forward(p.clone(), made), oracle)
            }
            Target::Step(p) => {
                let made = generate_step(p, SEED, PATTERN);
                let oracle = Oracle::step(p, &made);
                (Made::Step(p.clone(), made), oracle)
            }
        }
    }

    fn trial(&self, device: &Device, jit: &Jit) -> Result<Trial, CudaError> {
        Ok(match self {
            Made::Forward(p, made) => {
                Trial::Forward(ForwardTrial::new(device, jit, p, made, Placement::Exact)?)
            }
            Made::Step(p, made) => {
                Trial::Step(StepTrial::new(device, jit, p, made, Placement::Exact)?)
            }
        })
    }
}

/// Which twins stay, oldest first, beside the needed ones (which do in any case) in so many bytes.
fn staying(twins: &[Target], needed: &[Target], bytes: u64) -> Vec<bool> {
    let of_needed: u64 = needed.iter().map(Target::tensor_bytes).sum();
    let mut room = bytes.saturating_sub(of_needed);
    let mut stay: Vec<bool> = Vec::with_capacity(twins.len());
    for twin in twins.iter().rev() {
        let size = twin.tensor_bytes();
        let is_needed = needed.contains(twin);
        stay.push(is_needed || size <= room);
        if !is_needed {
            room = room.saturating_sub(size);
        }
    }
    stay.reverse();
    stay
}

impl Twins {
    /// Makes the twins that are to be run, those of them that are not there yet: the twins of whole configs of a shape that are not known
    /// to be right.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn make(
        &mut self,
        device: &Device,
        jit: &Jit,
        target: &Target,
        wholes: &[Candidate],
    ) -> Result<(), CudaError> {
        let needed = self.to_run(target, wholes);
        self.make_room(&needed);
        let missing: Vec<Target> = needed
            .into_iter()
            .filter(|problem| self.made.iter().all(|t| t.problem != *problem))
            .collect();
        let made: Vec<(Target, (Made, Oracle))> = missing
            .into_par_iter()
            .map(|problem| {
                let made = Made::of(&problem);
                (problem, made)
            })
            .collect();
        for (problem, (made, oracle)) in made {
            self.made.push(Twin {
                problem,
                trial: made.trial(device, jit)?,
                oracle,
            });
        }
        Ok(())
    }

    /// The twins of whole configs that are not known to be right on theirs, each once.
    fn to_run(&self, target: &Target, wholes: &[Candidate]) -> Vec<Target> {
        let mut once: Vec<Target> = Vec::new();
        for whole in wholes {
            match twin_of(target, whole) {
                Some(twin) if self.found(&twin, whole).is_none() && !once.contains(&twin) => {
                    once.push(twin);
                }
                _ => {}
            }
        }
        once
    }

    /// Lets the oldest go that are not needed, until the needed ones can be kept.
    fn make_room(&mut self, needed: &[Target]) {
        let others: Vec<Target> = self.made.iter().map(|t| t.problem.clone()).collect();
        let stay = staying(&others, needed, KEPT_BYTES);
        let mut stays = stay.into_iter();
        self.made.retain(|_| stays.next() == Some(true));
    }

    /// Gives the memory of all of them back. What was found stays.
    pub fn release(&mut self) {
        self.made.clear();
    }

    /// The twin that is this problem, if it is made.
    pub fn get(&self, problem: &Target) -> Option<&Twin> {
        self.made.iter().find(|t| t.problem == *problem)
    }

    /// What was found of a whole config that is known to be right on a twin.
    pub fn found(&self, problem: &Target, whole: &Candidate) -> Option<Verified> {
        let (_, right) = self.right.iter().find(|(twin, _)| twin == problem)?;
        right.get(whole).copied()
    }

    /// Notes that a whole config is right on a twin.
    pub fn note(&mut self, problem: &Target, whole: Candidate, verified: Verified) {
        let known = self.right.iter().position(|(twin, _)| twin == problem);
        let at = known.unwrap_or_else(|| {
            self.right.push((problem.clone(), HashMap::new()));
            self.right.len() - 1
        });
        self.right[at].1.insert(whole, verified);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Space;
    use mamba2_kernels::render;
    use mamba2_spec::{Arch, DeviceFacts, Kernel, Problem, rules};

    fn forward(shape: &str) -> Problem {
        shape.parse().unwrap()
    }

    /// Every twin that the candidates of a shape need, each once.
    fn twins_of(target: &Target, device: &DeviceFacts) -> Vec<Target> {
        let wholes: Vec<Candidate> = match target {
            Target::Forward(problem) => rules::agreement_defaults(problem, device)
                .into_iter()
                .map(Candidate::Strategy)
                .collect(),
            Target::Step(problem) => {
                vec![Candidate::Step(
                    rules::default_step(problem, device).unwrap(),
                )]
            }
        };
        Twins::default().to_run(target, &wholes)
    }

    #[test]
    fn twins_on_which_all_is_known_to_be_right_are_not_made() {
        let device = DeviceFacts::assumed(Arch(90));
        let first = Target::Forward(forward(SWEEP[0]));
        let same = Target::Forward(forward("b=3,l=9000,h=48,p=64,g=1,n=128"));
        let wholes: Vec<Candidate> = rules::agreement_defaults(&forward(SWEEP[0]), &device)
            .into_iter()
            .map(Candidate::Strategy)
            .collect();
        let mut twins = Twins::default();
        let all = twins.to_run(&first, &wholes);
        assert_eq!(twins.to_run(&same, &wholes), all, "heads do not matter");
        for whole in &wholes {
            let twin = twin_of(&first, whole).unwrap();
            assert_eq!(twins.found(&twin, whole), None);
            twins.note(&twin, *whole, Verified::default());
            twins.release();
            assert_eq!(twins.found(&twin, whole), Some(Verified::default()));
        }
        assert!(twins.to_run(&same, &wholes).is_empty());
    }

    /// Shapes of a sweep over lengths and batches, all long enough for every strategy.
    const SWEEP: [&str; 3] = [
        "b=4,l=16384,h=8,p=64,g=1,n=128",
        "b=1,l=65536,h=8,p=64,g=1,n=128",
        "b=2,l=20001,h=8,p=64,g=1,n=128",
    ];

    #[test]
    fn shapes_that_differ_in_length_and_batch_share_their_twins() {
        let device = DeviceFacts::assumed(Arch(90));
        let of = |shape: &str| twins_of(&Target::Forward(forward(shape)), &device);
        let first = of(SWEEP[0]);
        assert!(first.len() > 1);
        for shape in SWEEP {
            // Which segments are offered depends on the length; the twin of one does not.
            let twins = of(shape);
            assert!(twins.len() > first.len() / 2, "{shape}");
            assert!(twins.iter().all(|twin| first.contains(twin)), "{shape}");
        }
        let other = of("b=4,l=16384,h=8,p=64,g=1,n=64");
        assert!(other.iter().all(|twin| !first.contains(twin)));
    }

    #[test]
    fn models_of_all_sizes_and_their_splits_share_their_twins() {
        let device = DeviceFacts::assumed(Arch(90));
        let mut all: Vec<Target> = Vec::new();
        for model in [24, 32, 48, 64, 80] {
            for ranks in [1, 2, 4, 8] {
                let heads = model / ranks;
                let shape = format!("b=1,l=4096,h={heads},p=64,g=1,n=128,bias=1,softplus=1");
                for twin in twins_of(&Target::Forward(forward(&shape)), &device) {
                    if !all.contains(&twin) {
                        all.push(twin);
                    }
                }
            }
        }
        let mut heads: Vec<usize> = all
            .iter()
            .filter_map(|twin| match twin {
                Target::Forward(p) => Some(p.nheads),
                Target::Step(_) => None,
            })
            .collect();
        heads.sort_unstable();
        heads.dedup();
        // 14 numbers of heads make these.
        assert_eq!(heads, [3, 4, 6, 8, 10, 12, 20]);
        let bytes: u64 = all.iter().map(Target::tensor_bytes).sum();
        assert!(bytes <= KEPT_BYTES, "{bytes}");
    }

    #[test]
    fn kernels_of_shapes_that_differ_in_length_and_batch_are_the_same_text() {
        let device = DeviceFacts::assumed(Arch(90));
        let problems = SWEEP.map(forward);
        for kernel in Kernel::ALL {
            for config in rules::legal_kernel_configs(kernel, &problems[0], &device) {
                let text = |p: &Problem| render(&config, p, &device).source;
                let first = text(&problems[0]);
                for problem in &problems[1..] {
                    assert_eq!(text(problem), first, "{problem}: {config:?}");
                }
            }
        }
    }

    #[test]
    fn the_oldest_twins_go_first_and_those_that_are_needed_stay() {
        let of = |n: usize| Target::Forward(forward(&format!("b=1,l=549,h=8,p=64,g=1,n={n}")));
        let twins = [of(16), of(32), of(64), of(128)];
        let size = |i: usize| twins[i].tensor_bytes();
        let two = size(0) + size(3);
        let needed = std::slice::from_ref(&twins[0]);
        assert_eq!(staying(&twins, needed, u64::MAX), [true; 4]);
        assert_eq!(staying(&twins, needed, two), [true, false, false, true]);
        assert_eq!(staying(&twins, needed, 0), [true, false, false, false]);
        assert_eq!(staying(&[], needed, two), [false; 0]);
    }

    #[test]
    fn four_states_of_a_sweep_over_lengths_are_kept() {
        let device = DeviceFacts::assumed(Arch(90));
        let of = |n: usize| {
            let shape = format!("b=4,l=16384,h=8,p=64,g=1,n={n}");
            twins_of(&Target::Forward(forward(&shape)), &device)
        };
        let all: Vec<Target> = [64, 128, 256, 512].into_iter().flat_map(of).collect();
        let bytes: u64 = all.iter().map(Target::tensor_bytes).sum();
        assert!(bytes <= KEPT_BYTES, "{bytes}");
    }

    #[test]
    fn every_candidate_of_a_shape_has_its_twin() {
        let device = DeviceFacts::assumed(Arch(90));
        for target in [
            Target::Forward(forward(SWEEP[0])),
            Target::Step("b=3,h=8,p=64,g=1,n=128".parse().unwrap()),
        ] {
            let space = Space::of(&target, &device, None).unwrap();
            let twins = twins_of(&target, &device);
            let parts = space.assemblies.iter().flat_map(|a| &a.parts).flatten();
            for candidate in parts.chain(&space.whole).chain([&space.default]) {
                let twin = twin_of(&target, candidate).unwrap();
                assert!(twins.contains(&twin), "{candidate}: {twin}");
            }
        }
    }
}
