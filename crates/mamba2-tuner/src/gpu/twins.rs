//! Twins on the device, each with its oracle and with what was found right on it.

use std::collections::HashMap;

use mamba2_cuda::{CudaError, Device, Jit};
use mamba2_reference::{generate, generate_step};
use mamba2_spec::{DeviceFacts, rules};
use rayon::prelude::*;

use super::place::Placement;
use super::trial::{ForwardTrial, Oracle, StepTrial};
use super::{PATTERN, SEED, twin};
use crate::executor::Verified;
use crate::{Candidate, Target};

/// Twins of earlier shapes are kept while all of them take at most this much of the device: those of a sweep over lengths for a handful of
/// models do, and no shape lacks it.
const KEPT_BYTES: u64 = 2 << 30;

/// The small problems on which candidates are verified, of this shape and of earlier ones.
#[derive(Default)]
pub struct Twins(Vec<Twin>);

/// A small problem on the device.
pub struct Twin {
    /// The problem.
    pub problem: Target,
    /// Its inputs and outputs.
    pub trial: Trial,
    /// Its right answer.
    pub oracle: Oracle,
    /// Whole configs that were right here. Problem and config decide all that is compiled and launched, so another shape with the same
    /// twin need not run them again.
    pub right: HashMap<Candidate, Verified>,
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

/// Every twin that the candidates of a shape need, each once.
fn twins_of(target: &Target, device: &DeviceFacts) -> Vec<Target> {
    let all = match target {
        Target::Forward(problem) => rules::agreement_defaults(problem, device)
            .iter()
            .map(|config| Target::Forward(twin::of_forward(problem, config)))
            .collect(),
        Target::Step(problem) => vec![Target::Step(twin::of_step(problem))],
    };
    let mut once: Vec<Target> = Vec::new();
    for twin in all {
        if !once.contains(&twin) {
            once.push(twin);
        }
    }
    once
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
    /// Makes the twins of a shape that are not there yet.
    ///
    /// # Errors
    /// [`CudaError`], also for lack of memory.
    pub fn make(&mut self, device: &Device, jit: &Jit, target: &Target) -> Result<(), CudaError> {
        let needed = twins_of(target, device.facts());
        self.make_room(&needed);
        let missing: Vec<Target> = needed
            .into_iter()
            .filter(|problem| self.0.iter().all(|t| t.problem != *problem))
            .collect();
        let made: Vec<(Target, (Made, Oracle))> = missing
            .into_par_iter()
            .map(|problem| {
                let made = Made::of(&problem);
                (problem, made)
            })
            .collect();
        for (problem, (made, oracle)) in made {
            self.0.push(Twin {
                problem,
                trial: made.trial(device, jit)?,
                oracle,
                right: HashMap::new(),
            });
        }
        Ok(())
    }

    /// Lets the oldest go that are not needed, until the needed ones can be kept.
    fn make_room(&mut self, needed: &[Target]) {
        let others: Vec<Target> = self.0.iter().map(|t| t.problem.clone()).collect();
        let stay = staying(&others, needed, KEPT_BYTES);
        let mut stays = stay.into_iter();
        self.0.retain(|_| stays.next() == Some(true));
    }

    /// The twin that is this problem.
    pub fn get(&mut self, problem: &Target) -> Option<&mut Twin> {
        self.0.iter_mut().find(|t| t.problem == *problem)
    }

    /// True if a whole config is known to be right on a twin.
    pub fn is_right(&self, problem: &Target, whole: &Candidate) -> bool {
        let twin = self.0.iter().find(|t| t.problem == *problem);
        twin.is_some_and(|t| t.right.contains_key(whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Space;
    use mamba2_kernels::render;
    use mamba2_spec::{Arch, Kernel, Problem};

    fn forward(shape: &str) -> Problem {
        shape.parse().unwrap()
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
