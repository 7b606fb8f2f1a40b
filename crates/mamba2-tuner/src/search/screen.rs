//! First pass: every candidate by itself, then the near ties of each group again.

use super::{Entry, Group, Search};
use crate::executor::{Check, Failure, Rounds};
use crate::sink::{Outcome, Stage};
use crate::space::Space;
use crate::stats::four_digits;
use crate::{Candidate, TunerError};

impl Search<'_> {
    /// Compiles, verifies and times every candidate that has no valid stored result.
    pub fn screen(&self, space: &Space) -> Result<Vec<Group>, TunerError> {
        let parts = space.assemblies.iter().flat_map(|a| {
            a.parts.iter().map(|candidates| {
                let kernel = candidates
                    .first()
                    .map_or_else(String::new, |c| format!("{} ", c.kernels()[0].kernel()));
                (format!("{kernel}{}", a.name), candidates)
            })
        });
        let whole = (!space.whole.is_empty()).then(|| ("end to end".to_string(), &space.whole));
        let mut groups = Vec::new();
        let mut open: Vec<(usize, Candidate)> = Vec::new();
        let mut stored_count = 0;
        for (index, (name, candidates)) in parts.chain(whole).enumerate() {
            let mut entries = Vec::new();
            for candidate in candidates {
                match self.stored(candidate)? {
                    Some(outcome) => {
                        stored_count += 1;
                        entries.push(Entry {
                            candidate: *candidate,
                            outcome,
                            stored: true,
                        });
                    }
                    None => open.push((index, *candidate)),
                }
            }
            groups.push(Group { name, entries });
        }
        self.progress.stage(
            &self.shape,
            "candidates",
            open.len() + stored_count,
            stored_count,
        );
        self.screen_open(&mut groups, &open)?;
        Ok(groups)
    }

    /// The next batch compiles on the CPU while the device is busy with this one.
    fn screen_open(
        &self,
        groups: &mut [Group],
        open: &[(usize, Candidate)],
    ) -> Result<(), TunerError> {
        let batches: Vec<&[(usize, Candidate)]> = open.chunks(self.policy.batch.max(1)).collect();
        let compile = |batch: &[(usize, Candidate)]| {
            let candidates: Vec<Candidate> = batch.iter().map(|(_, c)| *c).collect();
            self.executor.compile(self.target, &candidates)
        };
        let Some(first) = batches.first() else {
            return Ok(());
        };
        let mut compiled = compile(first)?;
        for (i, batch) in batches.iter().enumerate() {
            let (done, next) = std::thread::scope(|scope| {
                let next = batches
                    .get(i + 1)
                    .map(|batch| scope.spawn(|| compile(batch)));
                let done = self.examine(groups, batch, std::mem::take(&mut compiled));
                (
                    done,
                    next.map(|handle| handle.join().expect("a compile thread should not panic")),
                )
            });
            done?;
            compiled = next.transpose()?.unwrap_or_default();
        }
        Ok(())
    }

    /// Verifies and times one compiled batch; every result is stored before the next batch starts.
    fn examine(
        &self,
        groups: &mut [Group],
        batch: &[(usize, Candidate)],
        compiled: Vec<Result<crate::Compiled, Failure>>,
    ) -> Result<(), TunerError> {
        let mut results: Vec<(usize, Candidate, Outcome)> = Vec::new();
        let mut sound: Vec<(usize, Candidate, f64)> = Vec::new();
        for ((group, candidate), compiled) in batch.iter().zip(compiled) {
            let verified = match compiled {
                Ok(_) => self.executor.verify(self.target, candidate, Check::Twin)?,
                Err(failure) => Err(failure),
            };
            match verified {
                Ok(verified) => sound.push((*group, *candidate, four_digits(verified.out_error))),
                Err(failure) => results.push((*group, *candidate, Outcome::Failed(failure))),
            }
        }
        let mut best: Vec<Option<f64>> = groups
            .iter()
            .map(|g| g.ranked().first().and_then(|e| e.median_us()))
            .collect();
        let probe = Rounds {
            rounds: 1,
            samples: self.policy.probe_samples,
        };
        let mut hopeful = Vec::new();
        for ((group, candidate, error), samples) in sound
            .iter()
            .zip(self.measure(sound.iter().map(|s| s.1), probe)?)
        {
            match samples {
                Ok(summary) => {
                    best[*group] =
                        Some(best[*group].map_or(summary.median_us, |b| b.min(summary.median_us)));
                    hopeful.push((*group, *candidate, *error, summary));
                }
                Err(failure) => results.push((*group, *candidate, Outcome::Failed(failure))),
            }
        }
        let (run, cut): (Vec<_>, Vec<_>) =
            hopeful.into_iter().partition(|(group, _, _, summary)| {
                best[*group].is_none_or(|best| summary.median_us <= best * self.policy.cut_factor)
            });
        for (group, candidate, out_error, summary) in cut {
            results.push((
                group,
                candidate,
                Outcome::Timed {
                    summary,
                    stage: Stage::Cut,
                    out_error,
                },
            ));
        }
        let full = Rounds {
            rounds: 1,
            samples: self.policy.samples,
        };
        let timed = self.measure(run.iter().map(|r| r.1), full)?;
        for ((group, candidate, out_error, _), samples) in run.into_iter().zip(timed) {
            let outcome = match samples {
                Ok(summary) => Outcome::Timed {
                    summary,
                    stage: Stage::Measured,
                    out_error,
                },
                Err(failure) => Outcome::Failed(failure),
            };
            results.push((group, candidate, outcome));
        }
        self.store(
            results
                .iter()
                .map(|(_, candidate, outcome)| (candidate, outcome)),
        )?;
        let done = results.len();
        for (group, candidate, outcome) in results {
            groups[group].entries.push(Entry {
                candidate,
                outcome,
                stored: false,
            });
        }
        self.progress.advance(done, fastest(groups));
        Ok(())
    }

    /// Measures the near ties at the head of each group again, interleaved, so that clock drift between batches does not
    /// decide.
    pub fn refine(&self, groups: &mut [Group]) -> Result<(), TunerError> {
        for group in groups {
            let ranked = group.ranked();
            let Some(best) = ranked.first().and_then(|e| e.median_us()) else {
                continue;
            };
            let near: Vec<Candidate> = ranked
                .iter()
                .take_while(|e| {
                    e.median_us()
                        .is_some_and(|us| us <= best * (1.0 + self.policy.near_tie))
                })
                .take(self.policy.refine_top)
                .map(|e| e.candidate)
                .collect();
            // Once is enough: another go with the same candidates would only roll the dice again, and a resumed job would
            // never come to rest.
            let refined = |e: &Entry| {
                matches!(
                    &e.outcome,
                    Outcome::Timed {
                        stage: Stage::Refined | Stage::Final { .. },
                        ..
                    }
                )
            };
            let seen = group.entries.iter().all(|e| e.stored) && group.entries.iter().any(refined);
            if near.len() < 2 || seen {
                continue;
            }
            let rounds = Rounds {
                rounds: self.policy.final_rounds,
                samples: self.policy.probe_samples,
            };
            let times = self.measure(near.iter().copied(), rounds)?;
            let mut changed = Vec::new();
            for (candidate, time) in near.iter().zip(times) {
                let Some(entry) = group.entries.iter_mut().find(|e| e.candidate == *candidate)
                else {
                    continue;
                };
                match (time, &mut entry.outcome) {
                    (Ok(new), Outcome::Timed { summary, stage, .. }) => {
                        (*summary, *stage) = (new, Stage::Refined)
                    }
                    (Err(failure), outcome) => *outcome = Outcome::Failed(failure),
                    (Ok(_), Outcome::Failed(_)) => {}
                }
                entry.stored = false;
                changed.push((entry.candidate, entry.outcome.clone()));
            }
            self.store(changed.iter().map(|(c, o)| (c, o)))?;
        }
        Ok(())
    }
}

fn fastest(groups: &[Group]) -> Option<f64> {
    groups
        .iter()
        .filter_map(|g| g.ranked().first().and_then(|e| e.median_us()))
        .reduce(f64::min)
}
