//! First pass: every candidate by itself, then the near ties of each group again.

use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, SyncSender};

use super::{Entry, Group, Search};
use crate::executor::{Check, Compiled, Compiling, Failure, Rounds};
use crate::phases::Phase;
use crate::sink::{Hopeless, Outcome, Stage};
use crate::space::Space;
use crate::stats::four_digits;
use crate::{Candidate, TunerError};

/// A candidate that was compiled, and the group it competes in.
struct Ready {
    group: usize,
    candidate: Candidate,
    compiled: Result<Compiled, Failure>,
}

/// What the first look at a candidate is held against.
struct Bounds {
    /// Of each group.
    best: Vec<Option<f64>>,
    /// Of all whole passes.
    whole: Option<f64>,
    cut_factor: f64,
}

impl Bounds {
    /// Why a candidate of `group` that takes `us` needs no more samples; `None` if it does. Its strategy takes at least as long.
    fn hopeless(&self, group: usize, us: f64) -> Option<Hopeless> {
        let is_behind = |best: Option<f64>| best.is_some_and(|best| us > best * self.cut_factor);
        if is_behind(self.best[group]) {
            Some(Hopeless::InGroup)
        } else if is_behind(self.whole) {
            Some(Hopeless::InAll)
        } else {
            None
        }
    }
}

/// For each group the best whole pass that it takes part in, by the best of each group: the sum over the parts of its assembly, or a
/// candidate that is a whole one. `None` where a part has nothing that works.
fn best_passes(space: &Space, best: &[Option<f64>]) -> Vec<Option<f64>> {
    let mut passes = Vec::with_capacity(best.len());
    let mut rest = best;
    for assembly in &space.assemblies {
        let (parts, others) = rest.split_at(assembly.parts.len());
        let sum: Option<f64> = parts.iter().copied().sum();
        passes.resize(passes.len() + parts.len(), sum);
        rest = others;
    }
    passes.extend(rest);
    passes
}

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
                match self.keeper.stored(candidate)? {
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
        self.screen_open(space, &mut groups, &open)?;
        Ok(groups)
    }

    /// Everything compiles in one queue, while the device is busy with what is compiled already. Results of a batch are stored while the
    /// next one is looked at.
    fn screen_open(
        &self,
        space: &Space,
        groups: &mut [Group],
        open: &[(usize, Candidate)],
    ) -> Result<(), TunerError> {
        if open.is_empty() {
            return Ok(());
        }
        let candidates: Vec<Candidate> = open.iter().map(|(_, c)| *c).collect();
        let (executor, target) = (self.executor, self.target);
        let (sender, compiled) = mpsc::channel();
        // The sender goes with the thread, so that the channel ends when nothing more will come.
        let compile = move || {
            executor.compile(target, &candidates, &|step| {
                let Compiling::Done(members, result) = step else {
                    return ControlFlow::Continue(());
                };
                let heard = members
                    .into_iter()
                    .all(|i| sender.send((i, result.clone())).is_ok());
                if heard {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            })
        };
        let keeper = self.keeper;
        // A batch is handed over when the one before is kept: a job that is killed loses two at most.
        let (results, to_store) = mpsc::sync_channel::<Vec<(Candidate, Outcome)>>(0);
        let store = move || to_store.iter().try_for_each(|batch| keeper.store(&batch));
        std::thread::scope(|scope| {
            let compiling = scope.spawn(compile);
            let storing = scope.spawn(store);
            // After an error nobody listens any more, which ends the compilation too.
            let examined = self.examine_all(space, groups, open, compiled, results);
            let stored = self.clock.time(Phase::Storing, || storing.join());
            let stored = stored.expect("a storing thread should not panic");
            let compiled = compiling.join().expect("a compile thread should not panic");
            stored.and(examined).and(compiled)
        })
    }

    /// Takes what is compiled in batches.
    fn examine_all(
        &self,
        space: &Space,
        groups: &mut [Group],
        open: &[(usize, Candidate)],
        compiled: Receiver<(usize, Result<Compiled, Failure>)>,
        to_store: SyncSender<Vec<(Candidate, Outcome)>>,
    ) -> Result<(), TunerError> {
        self.clock
            .time(Phase::Preparing, || self.executor.prepare(self.target))?;
        loop {
            let batch: Vec<Ready> = self.clock.time(Phase::Compiling, || {
                compiled
                    .iter()
                    .take(self.policy.batch.max(1))
                    .map(|(i, compiled)| Ready {
                        group: open[i].0,
                        candidate: open[i].1,
                        compiled,
                    })
                    .collect()
            });
            if batch.is_empty() {
                return Ok(());
            }
            let results = self.examine(space, groups, batch)?;
            let sent = self.clock.time(Phase::Storing, || to_store.send(results));
            if sent.is_err() {
                // Why nothing can be stored any more is told by who stores.
                return Ok(());
            }
        }
    }

    /// Verifies and times one compiled batch, and returns what is to be stored.
    fn examine(
        &self,
        space: &Space,
        groups: &mut [Group],
        batch: Vec<Ready>,
    ) -> Result<Vec<(Candidate, Outcome)>, TunerError> {
        let mut results: Vec<(usize, Candidate, Outcome)> = Vec::new();
        let mut sound: Vec<(usize, Candidate, f64)> = Vec::new();
        let loadable: Vec<Candidate> = batch
            .iter()
            .filter(|ready| ready.compiled.is_ok())
            .map(|ready| ready.candidate)
            .collect();
        self.clock.time(Phase::Loading, || {
            self.executor.load(self.target, &loadable)
        })?;
        for Ready {
            group,
            candidate,
            compiled,
        } in batch
        {
            let verified = match compiled {
                Ok(_) => self.verify(&candidate, Check::Twin)?,
                Err(failure) => Err(failure),
            };
            match verified {
                Ok(verified) => sound.push((group, candidate, four_digits(verified.out_error))),
                Err(failure) => results.push((group, candidate, Outcome::Failed(failure))),
            }
        }
        let mut best = bests(groups);
        let probe = Rounds {
            rounds: 1,
            samples: self.policy.probe_samples,
        };
        let mut probed = Vec::new();
        let probes = self.measure(Phase::Probing, sound.iter().map(|s| s.1), probe)?;
        for ((group, candidate, error), samples) in sound.iter().zip(probes) {
            match samples {
                Ok(summary) => {
                    best[*group] =
                        Some(best[*group].map_or(summary.median_us, |b| b.min(summary.median_us)));
                    probed.push((*group, *candidate, *error, summary));
                }
                Err(failure) => results.push((*group, *candidate, Outcome::Failed(failure))),
            }
        }
        let bounds = Bounds {
            whole: best_passes(space, &best)
                .into_iter()
                .flatten()
                .reduce(f64::min),
            best,
            cut_factor: self.policy.cut_factor,
        };
        let mut run = Vec::new();
        for (group, candidate, out_error, summary) in probed {
            match bounds.hopeless(group, summary.median_us) {
                None => run.push((group, candidate, out_error)),
                Some(why) => results.push((
                    group,
                    candidate,
                    Outcome::Timed {
                        summary,
                        stage: Stage::Cut(why),
                        out_error,
                    },
                )),
            }
        }
        let full = Rounds {
            rounds: 1,
            samples: self.policy.samples,
        };
        let timed = self.measure(Phase::Measuring, run.iter().map(|r| r.1), full)?;
        for ((group, candidate, out_error), samples) in run.into_iter().zip(timed) {
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
        let to_store = results.iter().map(|(_, c, o)| (*c, o.clone())).collect();
        let done = results.len();
        for (group, candidate, outcome) in results {
            groups[group].entries.push(Entry {
                candidate,
                outcome,
                stored: false,
            });
        }
        self.progress.advance(done, fastest(groups));
        Ok(to_store)
    }

    /// Measures the near ties at the head of each group again, interleaved, so that clock drift between batches does not
    /// decide. Groups without a part in any pass that has a chance are left as they are.
    pub fn refine(&self, space: &Space, groups: &mut [Group]) -> Result<(), TunerError> {
        let passes = best_passes(space, &bests(groups));
        let whole = passes.iter().flatten().copied().reduce(f64::min);
        let limit = whole.map_or(f64::INFINITY, |us| us * self.policy.cut_factor);
        let mut changed = Vec::new();
        for (group, pass) in groups.iter_mut().zip(passes) {
            if pass.is_none_or(|us| us > limit) {
                continue;
            }
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
            let times = self.measure(Phase::Refining, near.iter().copied(), rounds)?;
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
        }
        // All at once: a commit takes longer than measuring a group again.
        self.store(&changed)
    }
}

/// Median of the best of each group.
fn bests(groups: &[Group]) -> Vec<Option<f64>> {
    let best = |g: &Group| g.ranked().first().and_then(|e| e.median_us());
    groups.iter().map(best).collect()
}

fn fastest(groups: &[Group]) -> Option<f64> {
    groups
        .iter()
        .filter_map(|g| g.ranked().first().and_then(|e| e.median_us()))
        .reduce(f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Target;
    use mamba2_spec::{Arch, DeviceFacts};

    #[test]
    fn the_best_pass_of_a_group_is_the_sum_of_its_assembly_if_all_parts_are_known() {
        let target = Target::Forward("b=1,l=4096,h=8,p=64,g=1,n=128".parse().unwrap());
        let space = Space::of(&target, &DeviceFacts::assumed(Arch(90)), None).unwrap();
        let parts = space.assemblies[0].parts.len();
        assert!(parts > 1);
        let groups: usize = space.assemblies.iter().map(|a| a.parts.len()).sum();
        let mut best = vec![None; groups + 1];
        best[..parts - 1].fill(Some(10.0));
        assert_eq!(best_passes(&space, &best), vec![None; groups + 1]);
        (best[parts - 1], best[parts], best[groups]) = (Some(5.0), Some(3.0), Some(1.0));
        let passes = best_passes(&space, &best);
        let sum = Some(10.0 * (parts - 1) as f64 + 5.0);
        assert_eq!(passes[..parts], vec![sum; parts]);
        assert_eq!(passes[parts], None, "its other parts are missing");
        assert_eq!(passes[groups], Some(1.0), "a whole one");
    }

    #[test]
    fn a_part_is_hopeless_in_its_group_or_beside_the_best_whole_pass() {
        let bounds = Bounds {
            best: vec![Some(10.0), None],
            whole: Some(20.0),
            cut_factor: 1.5,
        };
        assert_eq!(bounds.hopeless(0, 15.0), None);
        assert_eq!(bounds.hopeless(0, 15.1), Some(Hopeless::InGroup));
        assert_eq!(bounds.hopeless(1, 30.0), None);
        assert_eq!(bounds.hopeless(1, 30.1), Some(Hopeless::InAll));
    }
}
