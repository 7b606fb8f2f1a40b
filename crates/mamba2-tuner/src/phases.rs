//! Where the time of a search goes.

use std::cell::RefCell;
use std::time::Instant;

use serde::{Serialize, Serializer, ser::SerializeMap};

/// What the search waits for. Nothing of it overlaps: compiling does overlap with the rest, and only the waiting for it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Inputs and oracles are made.
    Preparing,
    /// Nothing is compiled yet that could be looked at.
    Compiling,
    /// Code is loaded onto the device.
    Loading,
    /// Candidates are checked on the twin.
    VerifyingTwin,
    /// Candidates are checked on the shape itself.
    VerifyingShape,
    /// Candidates are timed for a first look.
    Probing,
    /// Hopeful candidates are timed to the end.
    Measuring,
    /// Near ties are timed again.
    Refining,
    /// Finalists are timed.
    Finals,
    /// Results are kept.
    Storing,
}

impl Phase {
    /// Every phase, in the order in which a candidate goes through them.
    pub const ALL: [Phase; 10] = [
        Phase::Preparing,
        Phase::Compiling,
        Phase::Loading,
        Phase::VerifyingTwin,
        Phase::VerifyingShape,
        Phase::Probing,
        Phase::Measuring,
        Phase::Refining,
        Phase::Finals,
        Phase::Storing,
    ];

    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Preparing => "preparing",
            Phase::Compiling => "waiting_for_compiler",
            Phase::Loading => "loading",
            Phase::VerifyingTwin => "verifying_twin",
            Phase::VerifyingShape => "verifying_shape",
            Phase::Probing => "probing",
            Phase::Measuring => "measuring",
            Phase::Refining => "refining",
            Phase::Finals => "finals",
            Phase::Storing => "storing",
        }
    }
}

/// Seconds of each [`Phase`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phases([f64; Phase::ALL.len()]);

impl Phases {
    /// Seconds of one phase.
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.0[phase as usize]
    }

    /// Seconds of all phases.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    /// Adds what another search took.
    pub fn add(&mut self, other: &Phases) {
        for (mine, other) in self.0.iter_mut().zip(other.0) {
            *mine += other;
        }
    }

    /// The phases that took a twentieth of a second or more, the longest first: `measuring 3.1 s, loading 0.4 s`.
    pub fn text(&self) -> String {
        let mut all: Vec<Phase> = Phase::ALL.to_vec();
        all.retain(|phase| self.seconds(*phase) >= 0.05);
        all.sort_by(|a, b| self.seconds(*b).total_cmp(&self.seconds(*a)));
        let words = all.into_iter().map(|phase| {
            let name = phase.name().replace('_', " ");
            format!("{name} {:.1} s", self.seconds(phase))
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

/// A map from name to seconds.
impl Serialize for Phases {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(Phase::ALL.len()))?;
        for phase in Phase::ALL {
            let milliseconds = (self.seconds(phase) * 1e3).round();
            map.serialize_entry(phase.name(), &(milliseconds / 1e3))?;
        }
        map.end()
    }
}

/// Adds up the time that one thread spends in each phase.
#[derive(Debug, Default)]
pub(crate) struct Clock(RefCell<Phases>);

impl Clock {
    /// Does `work` as part of a phase.
    pub fn time<T>(&self, phase: Phase, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = work();
        self.0.borrow_mut().0[phase as usize] += started.elapsed().as_secs_f64();
        done
    }

    /// What was added up so far.
    pub fn phases(&self) -> Phases {
        *self.0.borrow()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_its_place_and_its_own_name() {
        for (i, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, i);
            assert_eq!(
                Phase::ALL
                    .iter()
                    .filter(|p| p.name() == phase.name())
                    .count(),
                1
            );
        }
    }

    #[test]
    fn the_longest_phases_come_first_in_words_and_short_ones_are_left_out() {
        let mut phases = Phases::default();
        phases.0[Phase::Loading as usize] = 0.44;
        phases.0[Phase::Compiling as usize] = 3.06;
        phases.0[Phase::Storing as usize] = 0.01;
        let mut twice = phases;
        twice.add(&phases);
        assert_eq!(phases.text(), "waiting for compiler 3.1 s, loading 0.4 s");
        assert!((twice.total() - 7.02).abs() < 1e-12);
        let json = serde_json::to_value(phases).unwrap();
        assert_eq!(json["loading"], 0.44);
        assert_eq!(json.as_object().unwrap().len(), Phase::ALL.len());
    }

    #[test]
    fn a_clock_adds_up_what_is_done_in_each_phase() {
        let clock = Clock::default();
        let pause = std::time::Duration::from_millis(5);
        for _ in 0..2 {
            clock.time(Phase::Probing, || std::thread::sleep(pause));
        }
        let phases = clock.phases();
        assert!(phases.seconds(Phase::Probing) >= 0.01);
        assert_eq!(phases.total(), phases.seconds(Phase::Probing));
    }
}
