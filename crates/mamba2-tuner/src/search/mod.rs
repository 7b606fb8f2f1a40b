//! The search: screen every candidate, refine near ties, put the best together, decide in interleaved finals.

mod entry;
mod finals;
mod keeper;
mod ranking;
mod screen;

use std::time::Instant;

use mamba2_spec::{Problem, StepProblem};

pub(crate) use self::entry::{Entry, Group};
pub(crate) use self::finals::Finals;
use self::keeper::Keeper;
use self::ranking::ranking;
use crate::choose::choose;
use crate::executor::{Check, Executor, Failure, FailureKind, Rounds, Verified};
use crate::phases::{Clock, Phase};
use crate::report::{self, TuneReport};
use crate::sink::{Choice, Outcome, Sink};
use crate::space::Space;
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
    let search = Search::new(target, executor, sink, progress, policy);
    let mut groups = search.screen(space)?;
    search.refine(space, &mut groups)?;
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
    search.clock.time(Phase::Storing, || {
        sink.put_choice(executor.device(), target, &choice)
    })?;
    let phases = search.clock.phases();
    let report = report::make(
        target,
        space,
        executor.device(),
        policy,
        groups,
        finals,
        choice,
        report::Took {
            all: started.elapsed(),
            phases,
        },
    );
    tracing::info!(
        shape = %report.shape,
        candidates = report.counts.candidates,
        seconds = report.seconds,
        phases = %phases.text(),
        "tuned"
    );
    for warning in &report.warnings {
        progress.warn(warning);
    }
    Ok(report)
}

pub(crate) struct Search<'a> {
    target: &'a Target,
    shape: String,
    executor: &'a dyn Executor,
    keeper: Keeper<'a>,
    progress: &'a dyn Progress,
    policy: &'a Policy,
    clock: Clock,
}

impl<'a> Search<'a> {
    pub fn new(
        target: &'a Target,
        executor: &'a dyn Executor,
        sink: &'a dyn Sink,
        progress: &'a dyn Progress,
        policy: &'a Policy,
    ) -> Search<'a> {
        Search {
            target,
            shape: target.to_string(),
            executor,
            keeper: Keeper {
                target,
                executor,
                sink,
                policy,
            },
            progress,
            policy,
            clock: Clock::default(),
        }
    }

    /// Stores results and waits until they are kept.
    fn store(&self, results: &[(Candidate, Outcome)]) -> Result<(), TunerError> {
        self.clock
            .time(Phase::Storing, || self.keeper.store(results))
    }

    fn verify(
        &self,
        candidate: &Candidate,
        check: Check,
    ) -> Result<Result<Verified, Failure>, TunerError> {
        let phase = match check {
            Check::Twin => Phase::VerifyingTwin,
            Check::RealShape { .. } => Phase::VerifyingShape,
        };
        self.clock.time(phase, || {
            self.executor.verify(self.target, candidate, check)
        })
    }

    fn measure(
        &self,
        phase: Phase,
        candidates: impl Iterator<Item = Candidate>,
        rounds: Rounds,
    ) -> Result<Vec<Result<Summary, Failure>>, TunerError> {
        let candidates: Vec<Candidate> = candidates.collect();
        if candidates.is_empty() {
            return Ok(Vec::new());
        }
        let samples = self.clock.time(phase, || {
            self.executor.measure(self.target, &candidates, rounds)
        })?;
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
