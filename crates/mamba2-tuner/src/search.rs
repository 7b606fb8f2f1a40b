//! The search: screen every candidate, refine near ties, put the best together, decide in interleaved finals.

use std::collections::BTreeMap;
use std::time::Instant;

use mamba2_spec::{Problem, StepProblem};
use sha2::{Digest, Sha256};

use crate::choose::{choose, ties_with_best};
use crate::executor::{Check, Executor, Failure, FailureKind, Rounds};
use crate::report::{self, TuneReport};
use crate::sink::{Choice, Outcome, Sink, Stage, Stored};
use crate::space::{Assembly, Space};
use crate::stats::four_digits;
use crate::{Candidate, Policy, Progress, Summary, Target, TunerError};

/// Finds, verifies and stores the fastest config of a forward pass.
///
/// # Errors
/// [`TunerError`]: the problem is refused, the device or the store is lost, or every candidate failed. Results up to then
/// are stored.
pub fn tune(
    problem: &Problem,
    executor: &dyn Executor,
    sink: &dyn Sink,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<TuneReport, TunerError> {
    tune_target(
        &Target::Forward(problem.clone()),
        executor,
        sink,
        progress,
        policy,
    )
}

/// Finds, verifies and stores the fastest config of a decode step.
///
/// # Errors
/// As [`tune`].
pub fn tune_step(
    problem: &StepProblem,
    executor: &dyn Executor,
    sink: &dyn Sink,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<TuneReport, TunerError> {
    tune_target(
        &Target::Step(problem.clone()),
        executor,
        sink,
        progress,
        policy,
    )
}

/// [`tune`] or [`tune_step`].
///
/// # Errors
/// As [`tune`].
pub fn tune_target(
    target: &Target,
    executor: &dyn Executor,
    sink: &dyn Sink,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<TuneReport, TunerError> {
    target.check()?;
    let for_workspace = executor
        .memory_bytes()
        .map(|bytes| bytes.saturating_sub(target.tensor_bytes()));
    let space = Space::of(target, executor.device(), for_workspace)?;
    tune_space(target, &space, executor, sink, progress, policy)
}

/// Searches a given space: all of a shape's, or the part that somebody wants to look at.
///
/// # Errors
/// As [`tune`].
pub fn tune_space(
    target: &Target,
    space: &Space,
    executor: &dyn Executor,
    sink: &dyn Sink,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<TuneReport, TunerError> {
    let started = Instant::now();
    let search = Search {
        target,
        shape: target.to_string(),
        executor,
        sink,
        progress,
        policy,
    };
    let mut groups = search.screen(space)?;
    search.refine(&mut groups)?;
    let ranked = ranking(space, &groups, policy);
    let finals = search.finals(&space.default, &ranked, &groups)?;
    let failed = groups
        .iter()
        .flat_map(|g| &g.entries)
        .chain(&finals.rejected)
        .filter_map(Entry::failure);
    let rejected = failed.clone().count();
    let Some(winner) = choose(&finals.times, &space.default, policy.noise_floor) else {
        let first = failed
            .clone()
            .next()
            .map_or_else(|| "there were no candidates".into(), ToString::to_string);
        return Err(TunerError::NothingWorks {
            target: search.shape,
            failed: rejected,
            first,
        });
    };
    let default = finals
        .times
        .iter()
        .find(|(c, _)| *c == space.default)
        .map(|(_, s)| *s);
    let (candidate, summary) = finals.times[winner];
    let choice = Choice {
        candidate,
        conditions: executor.conditions(&candidate),
        measurement: policy.measurement(),
        summary,
        default,
        max_error: finals.errors.get(&candidate).copied().unwrap_or(0.0),
        candidates: groups.iter().map(|g| g.entries.len()).sum(),
        rejected,
        quiet: default.unwrap_or(summary).relative_spread() <= policy.quiet_spread,
    };
    sink.put_choice(executor.device(), target, &choice)?;
    let report = report::make(
        target,
        space,
        executor.device(),
        policy,
        groups,
        finals,
        choice,
        started.elapsed(),
    );
    for warning in &report.warnings {
        progress.warn(warning);
    }
    Ok(report)
}

/// A candidate with its result.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub candidate: Candidate,
    pub outcome: Outcome,
    /// True if the result is from an earlier run.
    pub stored: bool,
}

impl Entry {
    pub fn failure(&self) -> Option<&Failure> {
        match &self.outcome {
            Outcome::Failed(failure) => Some(failure),
            Outcome::Timed { .. } => None,
        }
    }

    /// Median of a candidate that is still in the race.
    pub fn median_us(&self) -> Option<f64> {
        match &self.outcome {
            Outcome::Timed {
                stage: Stage::Cut, ..
            }
            | Outcome::Failed(_) => None,
            Outcome::Timed {
                stage:
                    Stage::Final {
                        screened_us: Some(us),
                        ..
                    },
                ..
            } => Some(*us),
            Outcome::Timed { summary, .. } => Some(summary.median_us),
        }
    }
}

/// Candidates that compete with each other.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub name: String,
    pub entries: Vec<Entry>,
}

impl Group {
    /// Entries still in the race, fastest first; equal times in the fixed order.
    fn ranked(&self) -> Vec<&Entry> {
        let mut timed: Vec<(&Entry, f64)> = self
            .entries
            .iter()
            .filter_map(|e| Some((e, e.median_us()?)))
            .collect();
        timed.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.candidate.cmp(&b.0.candidate)));
        timed.into_iter().map(|(entry, _)| entry).collect()
    }
}

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

struct Search<'a> {
    target: &'a Target,
    shape: String,
    executor: &'a dyn Executor,
    sink: &'a dyn Sink,
    progress: &'a dyn Progress,
    policy: &'a Policy,
}

impl Search<'_> {
    /// Compiles, verifies and times every candidate that has no valid stored result.
    fn screen(&self, space: &Space) -> Result<Vec<Group>, TunerError> {
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
    fn refine(&self, groups: &mut [Group]) -> Result<(), TunerError> {
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

    /// Verifies the best candidates on the shape itself and times them, with the default, in interleaved rounds.
    fn finals(
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
        self.store(results.iter().map(|(c, o)| (c, o)))?;
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
        match self.stored(candidate)? {
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
        let compiled = self.executor.compile(self.target, &[*candidate])?;
        if let Some(Err(failure)) = compiled.into_iter().next() {
            return Ok(rejected(failure, false));
        }
        let verified = match self.executor.verify(self.target, candidate, Check::Twin)? {
            Ok(verified) => verified,
            Err(failure) => return Ok(rejected(failure, false)),
        };
        let standard = against.unwrap_or(*candidate);
        let check = Check::RealShape { against: standard };
        if let Err(failure) = self.executor.verify(self.target, candidate, check)? {
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
        for (candidate, result) in
            entrants
                .iter()
                .zip(self.executor.measure(self.target, entrants, rounds)?)
        {
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
            match self.stored(candidate)? {
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

    /// The stored result of a candidate, if template, compiler, driver and (for timings) policy are still the same.
    fn stored(&self, candidate: &Candidate) -> Result<Option<Outcome>, TunerError> {
        let Some(stored) = self
            .sink
            .result(self.executor.device(), self.target, candidate)?
        else {
            return Ok(None);
        };
        let same_measurement = match stored.outcome {
            Outcome::Timed { .. } => stored.measurement == self.policy.measurement(),
            Outcome::Failed(_) => true,
        };
        let valid = same_measurement && stored.conditions == self.executor.conditions(candidate);
        Ok(valid.then_some(stored.outcome))
    }

    fn store<'b>(
        &self,
        results: impl Iterator<Item = (&'b Candidate, &'b Outcome)>,
    ) -> Result<(), TunerError> {
        let results: Vec<(Candidate, Stored)> = results
            .filter(|(_, outcome)| !matches!(outcome, Outcome::Failed(f) if !f.kind.is_lasting()))
            .map(|(candidate, outcome)| {
                let measurement = match outcome {
                    Outcome::Timed { .. } => self.policy.measurement(),
                    Outcome::Failed(_) => String::new(),
                };
                let conditions = self.executor.conditions(candidate);
                (
                    *candidate,
                    Stored {
                        conditions,
                        measurement,
                        outcome: outcome.clone(),
                    },
                )
            })
            .collect();
        if results.is_empty() {
            return Ok(());
        }
        self.sink
            .put_results(self.executor.device(), self.target, &results)
    }

    fn measure(
        &self,
        candidates: impl Iterator<Item = Candidate>,
        rounds: Rounds,
    ) -> Result<Vec<Result<Summary, Failure>>, TunerError> {
        let candidates: Vec<Candidate> = candidates.collect();
        if candidates.is_empty() {
            return Ok(Vec::new());
        }
        let samples = self.executor.measure(self.target, &candidates, rounds)?;
        Ok(samples
            .into_iter()
            .map(|result| result.and_then(|samples| timed(&samples)))
            .collect())
    }
}

fn timed(samples: &[f64]) -> Result<Summary, Failure> {
    Summary::of(samples)
        .ok_or_else(|| Failure::new(FailureKind::Launch, format!("{samples:?} are not times")))
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

fn fastest(groups: &[Group]) -> Option<f64> {
    groups
        .iter()
        .filter_map(|g| g.ranked().first().and_then(|e| e.median_us()))
        .reduce(f64::min)
}

/// Whole passes in the order in which they should reach the finals.
///
/// The best of each assembly comes first if it is within the cut of the best of all (kernels timed alone do not show what
/// one leaves in the cache for the next), then everything by the sum of its parts.
fn ranking(space: &Space, groups: &[Group], policy: &Policy) -> Vec<Candidate> {
    const TOP: usize = 3;
    let mut groups = groups.iter();
    let mut all: Vec<(f64, Candidate)> = Vec::new();
    let mut firsts: Vec<(f64, Candidate)> = Vec::new();
    for assembly in &space.assemblies {
        let parts: Vec<Vec<&Entry>> = groups
            .by_ref()
            .take(assembly.parts.len())
            .map(|g| g.ranked().into_iter().take(TOP).collect())
            .collect();
        let mut sums = combinations(assembly, &parts);
        sums.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        firsts.extend(sums.first());
        all.extend(sums);
    }
    for group in groups {
        let ranked: Vec<(f64, Candidate)> = group
            .ranked()
            .iter()
            .filter_map(|e| Some((e.median_us()?, e.candidate)))
            .take(TOP * TOP)
            .collect();
        firsts.extend(ranked.first());
        all.extend(ranked);
    }
    let best = all.iter().map(|(us, _)| *us).fold(f64::INFINITY, f64::min);
    firsts.retain(|(us, _)| *us <= best * policy.cut_factor);
    for list in [&mut firsts, &mut all] {
        list.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    }
    let mut order: Vec<Candidate> = Vec::new();
    for (_, candidate) in firsts.into_iter().chain(all) {
        if !order.contains(&candidate) {
            order.push(candidate);
        }
    }
    order
}

/// Every combination of one entry of each part, with the sum of its times.
fn combinations(assembly: &Assembly, parts: &[Vec<&Entry>]) -> Vec<(f64, Candidate)> {
    let mut sums: Vec<(f64, Vec<mamba2_spec::KernelConfig>)> = vec![(0.0, Vec::new())];
    for part in parts {
        sums = sums
            .iter()
            .flat_map(|(sum, kernels)| {
                part.iter().filter_map(move |entry| {
                    let mut kernels = kernels.clone();
                    kernels.extend(entry.candidate.kernels());
                    Some((sum + entry.median_us()?, kernels))
                })
            })
            .collect();
    }
    sums.into_iter()
        .filter_map(|(sum, kernels)| Some((sum, Candidate::Strategy(assembly.assemble(&kernels)?))))
        .collect()
}
