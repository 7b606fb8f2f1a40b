//! What a search and a job found: a table for people, JSON for programs, one HTML file for both.

mod html;
mod table;

use std::collections::BTreeMap;
use std::time::Duration;

use mamba2_spec::DeviceFacts;
use serde::Serialize;

use crate::executor::Failure;
use crate::phases::Phases;
use crate::search::{Entry, Finals, Group};
use crate::sink::{Choice, Hopeless, Outcome, Stage};
use crate::space::Space;
use crate::{Candidate, Policy, Target};

/// What the search of one shape found.
#[derive(Clone, Debug, Serialize)]
pub struct TuneReport {
    /// The shape, as its string.
    pub shape: String,
    /// The shape.
    #[serde(skip)]
    pub target: Target,
    /// The device.
    pub device: DeviceFacts,
    /// How candidates were measured.
    pub policy: Policy,
    /// What was chosen.
    pub choice: Choice,
    /// The chosen config as people read it.
    pub chosen: String,
    /// True if the default config was chosen.
    pub default_chosen: bool,
    /// The least time the hardware allows, in microseconds, where its ceilings are known.
    pub limit_us: Option<f64>,
    /// Finalists, fastest first: text, median and spread in microseconds.
    pub finalists: Vec<Timed>,
    /// Groups of candidates that competed.
    pub groups: Vec<GroupReport>,
    /// Failures by kind.
    pub failures: Vec<FailureReport>,
    /// Parts of the space that were left out, and why.
    pub left_out: Vec<String>,
    /// How many of what.
    pub counts: Counts,
    /// Wall-clock time of the search. Unit: seconds.
    pub seconds: f64,
    /// Where it went.
    pub phases: Phases,
    /// What a person should know.
    pub warnings: Vec<String>,
}

impl TuneReport {
    /// Time of the default over the time of the choice; `None` if the default failed.
    pub fn speedup(&self) -> Option<f64> {
        self.choice
            .default
            .map(|d| d.median_us / self.choice.summary.median_us)
    }
}

/// A timed candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timed {
    /// The candidate's text.
    pub candidate: String,
    /// Median. Unit: microseconds.
    pub median_us: f64,
    /// Interquartile range. Unit: microseconds.
    pub spread_us: f64,
}

/// Candidates that competed with each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupReport {
    /// Kernel and what it agrees on with the others.
    pub name: String,
    /// Every candidate that was timed, also the cut ones, fastest first.
    pub timed: Vec<Timed>,
    /// How many of them were cut after the first look.
    pub cut: usize,
    /// Failed.
    pub failed: usize,
}

/// Failures of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailureReport {
    /// Name of the kind.
    pub kind: &'static str,
    /// How many.
    pub count: usize,
    /// One that failed so.
    pub candidate: String,
    /// Its reason.
    pub reason: String,
}

/// How many candidates became what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// All.
    pub candidates: usize,
    /// Their result is from an earlier run.
    pub stored: usize,
    /// Measured to the end.
    pub measured: usize,
    /// Cut after the first look.
    pub cut: usize,
    /// Those of the cut ones that were not far behind their group, but took longer alone than another strategy's whole pass.
    pub cut_in_all: usize,
    /// Failed, in the finals too.
    pub failed: usize,
}

/// A job over a list of shapes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct JobReport {
    /// Shapes that were tuned.
    pub shapes: Vec<TuneReport>,
    /// Shapes that could not be tuned, and why.
    pub failed: Vec<FailedShape>,
    /// Shapes of other shards.
    pub other_shards: usize,
    /// Wall-clock time of the job. Unit: seconds.
    pub seconds: f64,
}

/// A shape that could not be tuned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailedShape {
    /// The shape, as its string.
    pub shape: String,
    /// Why.
    pub reason: String,
}

impl JobReport {
    /// Where the time of all shapes went.
    pub fn phases(&self) -> Phases {
        let mut all = Phases::default();
        self.shapes.iter().for_each(|s| all.add(&s.phases));
        all
    }

    /// A table of one line a shape, for a terminal.
    pub fn table(&self) -> String {
        table::of(self)
    }

    /// Everything, as JSON.
    ///
    /// # Errors
    /// Only if a time is not a number, which [`crate::Summary`] rules out.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }

    /// One self-contained HTML file: no script, no network, figures as inline SVG.
    pub fn to_html(&self) -> String {
        html::of(self)
    }
}

/// `12.3 s (measuring 3.1 s, loading 0.4 s)`.
fn time_text(seconds: f64, phases: &Phases) -> String {
    match phases.text() {
        text if text.is_empty() => format!("{seconds:.1} s"),
        text => format!("{seconds:.1} s ({text})"),
    }
}

/// Above this share of failures something is wrong with the set-up and not with single candidates.
const MANY_FAILURES: f64 = 0.2;

/// How long a search took.
pub(crate) struct Took {
    pub all: Duration,
    pub phases: Phases,
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn make(
    target: &Target,
    space: &Space,
    device: &DeviceFacts,
    policy: &Policy,
    groups: Vec<Group>,
    finals: Finals,
    choice: Choice,
    took: Took,
) -> TuneReport {
    let entries = || groups.iter().flat_map(|g| &g.entries);
    let failures = failures(entries().chain(&finals.rejected));
    let cut = entries().filter(|e| cut_by(e).is_some()).count();
    let in_all = |e: &&Entry| cut_by(e) == Some(Hopeless::InAll);
    let failed_in_screen = entries().filter(|e| e.failure().is_some()).count();
    let counts = Counts {
        candidates: entries().count(),
        stored: entries().filter(|e| e.stored).count(),
        measured: entries().count() - cut - failed_in_screen,
        cut,
        cut_in_all: entries().filter(in_all).count(),
        failed: failures.iter().map(|f| f.count).sum(),
    };
    let mut finalists: Vec<Timed> = finals
        .times
        .iter()
        .map(|(c, s)| timed(c, s.median_us, s.spread_us))
        .collect();
    finalists.sort_by(|a, b| a.median_us.total_cmp(&b.median_us));
    let warnings = warnings(target, space, &counts, &failures, &finals, &choice);
    TuneReport {
        shape: target.to_string(),
        target: target.clone(),
        device: device.clone(),
        policy: policy.clone(),
        chosen: choice.candidate.to_string(),
        default_chosen: choice.candidate == space.default,
        limit_us: target.limit_us(device),
        finalists,
        groups: groups.iter().map(group_report).collect(),
        failures,
        left_out: space.left_out.clone(),
        counts,
        seconds: took.all.as_secs_f64(),
        phases: took.phases,
        warnings,
        choice,
    }
}

fn timed(candidate: &Candidate, median_us: f64, spread_us: f64) -> Timed {
    Timed {
        candidate: candidate.to_string(),
        median_us,
        spread_us,
    }
}

fn cut_by(entry: &Entry) -> Option<Hopeless> {
    match &entry.outcome {
        Outcome::Timed {
            stage: Stage::Cut(why),
            ..
        } => Some(*why),
        _ => None,
    }
}

fn group_report(group: &Group) -> GroupReport {
    let of_entry = |e: &Entry| match &e.outcome {
        Outcome::Timed { summary, .. } => {
            Some(timed(&e.candidate, summary.median_us, summary.spread_us))
        }
        Outcome::Failed(_) => None,
    };
    let mut timed: Vec<Timed> = group.entries.iter().filter_map(of_entry).collect();
    timed.sort_by(|a, b| a.median_us.total_cmp(&b.median_us));
    GroupReport {
        name: group.name.clone(),
        cut: group.entries.iter().filter(|e| cut_by(e).is_some()).count(),
        failed: group.entries.len() - timed.len(),
        timed,
    }
}

fn failures<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<FailureReport> {
    let mut kinds: BTreeMap<&'static str, FailureReport> = BTreeMap::new();
    for (entry, failure) in entries.filter_map(|e| Some((e, e.failure()?))) {
        let of_kind = kinds
            .entry(failure.kind.name())
            .or_insert_with(|| first_of_kind(entry, failure));
        of_kind.count += 1;
    }
    kinds.into_values().collect()
}

fn first_of_kind(entry: &Entry, failure: &Failure) -> FailureReport {
    FailureReport {
        kind: failure.kind.name(),
        count: 0,
        candidate: entry.candidate.to_string(),
        reason: failure.reason.clone(),
    }
}

fn warnings(
    target: &Target,
    space: &Space,
    counts: &Counts,
    failures: &[FailureReport],
    finals: &Finals,
    choice: &Choice,
) -> Vec<String> {
    let mut warnings = Vec::new();
    if counts.failed as f64 > MANY_FAILURES * counts.candidates as f64
        && let Some(worst) = failures.iter().max_by_key(|f| f.count)
    {
        warnings.push(format!(
            "{target}: {} of {} candidates failed, most of them by {}: {}",
            counts.failed, counts.candidates, worst.kind, worst.reason
        ));
    }
    if choice.default.is_none() {
        let reason = finals
            .rejected
            .iter()
            .find(|e| e.candidate == space.default)
            .and_then(Entry::failure);
        let reason = reason.map_or_else(|| "no reason recorded".into(), ToString::to_string);
        warnings.push(format!("{target}: the default config failed ({reason}); the choice could not be compared with it"));
    }
    if !choice.quiet {
        warnings.push(format!(
            "{target}: times scatter by {:.0} %; other work on this GPU? The record is marked as low confidence",
            100.0 * choice.default.unwrap_or(choice.summary).relative_spread()
        ));
    }
    warnings.extend(
        space
            .left_out
            .iter()
            .map(|text| format!("{target}: left out {text}")),
    );
    warnings
}
