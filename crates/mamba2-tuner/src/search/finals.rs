//! Last pass: whole passes end to end, beside the default.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::{Entry, Group, Search, timed};
use crate::choose::ties_with_best;
use crate::executor::{Check, Rounds};
use crate::phases::Phase;
use crate::sink::{Outcome, Stage};
use crate::stats::four_digits;
use crate::{Candidate, Summary, TunerError};

/// Result of the finals.
#[derive(Debug, Default)]
pub(crate) struct Finals {
    /// Every finalist that survived, with all its samples' summary.
    pub times: Vec<(Candidate, Summary)>,
    /// Error of each finalist against the oracle.
    pub errors: BTreeMap<Candidate, f64>,
    /// Would-be finalists that failed.
    pub rejected: Vec<Entry>,
    /// True if all of it is from an earlier run.
    pub stored: bool,
}

/// What became of a would-be finalist.
enum Admission {
    Passed { out_error: f64 },
    Rejected(Entry),
}

impl Search<'_> {
    /// Verifies the best candidates on the shape itself and times them, with the default, in interleaved rounds.
    pub fn finals(
        &self,
        default: &Candidate,
        ranked: &[Candidate],
        groups: &[Group],
    ) -> Result<Finals, TunerError> {
        let mut finals = Finals::default();
        let mut against = None;
        let mut entrants = Vec::new();
        let others = ranked.iter().filter(|c| *c != default);
        self.progress
            .stage(&self.shape, "finals", self.policy.finalists + 1, 0);
        for candidate in std::iter::once(default).chain(others) {
            if entrants.len() > self.policy.finalists {
                break;
            }
            match self.admit(candidate, &mut against)? {
                Admission::Passed { out_error } => {
                    finals.errors.insert(*candidate, four_digits(out_error));
                    entrants.push(*candidate);
                }
                Admission::Rejected(entry) => finals.rejected.push(entry),
            }
        }
        let name = set_name(&entrants);
        if let Some(times) = self.stored_finals(&entrants, &name)? {
            finals.times = times;
            finals.stored = true;
            return Ok(finals);
        }
        let mut samples: BTreeMap<Candidate, Vec<f64>> = BTreeMap::new();
        self.final_rounds(&entrants, &mut samples, &mut finals)?;
        for _ in 0..self.policy.tie_rounds {
            finals.times = summaries(&samples);
            let tied = ties_with_best(&finals.times, self.policy.noise_floor);
            if tied.len() < 2 {
                break;
            }
            let tied: Vec<Candidate> = tied.into_iter().map(|i| finals.times[i].0).collect();
            self.final_rounds(&tied, &mut samples, &mut finals)?;
        }
        finals.times = summaries(&samples);
        let timed = finals.times.iter().map(|(candidate, summary)| {
            let out_error = finals.errors.get(candidate).copied().unwrap_or(0.0);
            let screened_us = groups
                .iter()
                .flat_map(|g| &g.entries)
                .find(|e| e.candidate == *candidate)
                .and_then(Entry::median_us);
            let stage = Stage::Final {
                set: name.clone(),
                screened_us,
            };
            (
                *candidate,
                Outcome::Timed {
                    summary: *summary,
                    stage,
                    out_error,
                },
            )
        });
        let failed = finals
            .rejected
            .iter()
            .map(|e| (e.candidate, e.outcome.clone()));
        let results: Vec<(Candidate, Outcome)> = timed.chain(failed).collect();
        self.store(&results)?;
        self.progress.advance(
            entrants.len(),
            finals
                .times
                .iter()
                .map(|(_, s)| s.median_us)
                .reduce(f64::min),
        );
        Ok(finals)
    }

    /// Checks a would-be finalist end to end, or finds that an earlier run did. `against` is the first that passed.
    fn admit(
        &self,
        candidate: &Candidate,
        against: &mut Option<Candidate>,
    ) -> Result<Admission, TunerError> {
        let rejected = |failure, stored| {
            Admission::Rejected(Entry {
                candidate: *candidate,
                outcome: Outcome::Failed(failure),
                stored,
            })
        };
        match self.keeper.stored(candidate)? {
            Some(Outcome::Failed(failure)) => return Ok(rejected(failure, true)),
            Some(Outcome::Timed {
                stage: Stage::Final { .. },
                out_error,
                ..
            }) => {
                against.get_or_insert(*candidate);
                return Ok(Admission::Passed { out_error });
            }
            _ => {}
        }
        let compiled = self.clock.time(Phase::Compiling, || {
            self.executor.compile_all(self.target, &[*candidate])
        })?;
        if let Some(Err(failure)) = compiled.into_iter().next() {
            return Ok(rejected(failure, false));
        }
        let verified = match self.verify(candidate, Check::Twin)? {
            Ok(verified) => verified,
            Err(failure) => return Ok(rejected(failure, false)),
        };
        let standard = against.unwrap_or(*candidate);
        let check = Check::RealShape { against: standard };
        if let Err(failure) = self.verify(candidate, check)? {
            return Ok(rejected(failure, false));
        }
        // Only now: a config that fails on the shape itself must not judge others.
        *against = Some(standard);
        Ok(Admission::Passed {
            out_error: verified.out_error,
        })
    }

    fn final_rounds(
        &self,
        entrants: &[Candidate],
        samples: &mut BTreeMap<Candidate, Vec<f64>>,
        finals: &mut Finals,
    ) -> Result<(), TunerError> {
        let rounds = Rounds {
            rounds: self.policy.final_rounds,
            samples: self.policy.final_samples,
        };
        let results = self.clock.time(Phase::Finals, || {
            self.executor.measure(self.target, entrants, rounds)
        })?;
        for (candidate, result) in entrants.iter().zip(results) {
            match result.and_then(|new| timed(&new).map(|_| new)) {
                Ok(new) => samples.entry(*candidate).or_default().extend(new),
                Err(failure) => {
                    samples.remove(candidate);
                    let outcome = Outcome::Failed(failure);
                    finals.rejected.push(Entry {
                        candidate: *candidate,
                        outcome,
                        stored: false,
                    });
                }
            }
        }
        Ok(())
    }

    /// Times of the same set of finalists from an earlier run.
    fn stored_finals(
        &self,
        entrants: &[Candidate],
        name: &str,
    ) -> Result<Option<Vec<(Candidate, Summary)>>, TunerError> {
        let mut times = Vec::new();
        for candidate in entrants {
            match self.keeper.stored(candidate)? {
                Some(Outcome::Timed {
                    summary,
                    stage: Stage::Final { set, .. },
                    ..
                }) if set == name => {
                    times.push((*candidate, summary));
                }
                _ => return Ok(None),
            }
        }
        times.sort_by_key(|(candidate, _)| *candidate);
        Ok((!times.is_empty()).then_some(times))
    }
}

fn summaries(samples: &BTreeMap<Candidate, Vec<f64>>) -> Vec<(Candidate, Summary)> {
    samples
        .iter()
        .filter_map(|(candidate, samples)| Some((*candidate, Summary::of(samples)?)))
        .collect()
}

/// Names a set of finalists, whatever their order.
fn set_name(candidates: &[Candidate]) -> String {
    let mut names: Vec<String> = candidates.iter().map(ToString::to_string).collect();
    names.sort();
    let digest = Sha256::digest(names.join("\n"));
    digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
