//! Whether the nearest match can be trusted: its config beside the default, measured on shapes it was not tuned for.

use std::fmt::Write;
use std::time::Instant;

use mamba2_tunedb::{Answer, Ladder, Shard, Tier, TuneDbError};
use serde::Serialize;

use crate::job::share;
use crate::report::FailedShape;
use crate::search::{Finals, Search};
use crate::space::Space;
use crate::{Candidate, Executor, MemorySink, Policy, Progress, Summary, Target, TunerError};

/// What the nearest match is worth on a shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No record is near enough: the default speaks, so nothing can be lost.
    NoneNear,
    /// The nearest record holds the very config that is the default here.
    Default,
    /// Faster than the default, in two measurements, each time by more than its noise.
    Faster,
    /// The difference is within the noise, or two measurements disagree about it.
    Tie,
    /// Slower than the default, in two measurements, each time by more than its noise.
    Slower,
    /// It cannot be used for the shape.
    Failed(String),
}

/// A shape that was looked up as if it had never been tuned.
#[derive(Clone, Debug, Serialize)]
pub struct HeldOut {
    /// The shape, as its string.
    pub shape: String,
    /// The verdict.
    pub verdict: Verdict,
    /// How far the record is, in [`mamba2_tunedb::NEAREST_BOUND`]'s unit; `None` without one.
    pub distance: Option<f64>,
    /// Key of the record.
    pub record: Option<String>,
    /// Times of the record's config, if it was measured.
    pub nearest: Option<Summary>,
    /// Times of the default in the same rounds.
    pub default: Option<Summary>,
}

impl HeldOut {
    /// Time of the nearest record's config over that of the default.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.nearest?.median_us / self.default?.median_us)
    }
}

/// What came of a list of held-out shapes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HoldOutReport {
    /// Shapes that were looked at, in the order of the list.
    pub shapes: Vec<HeldOut>,
    /// Shapes that could not be measured, and why.
    pub failed: Vec<FailedShape>,
    /// Shapes of other shards.
    pub other_shards: usize,
    /// Wall-clock time. Unit: seconds.
    pub seconds: f64,
}

impl HoldOutReport {
    /// Shapes on which the nearest match loses to the default or cannot be used.
    pub fn losses(&self) -> Vec<&HeldOut> {
        let is_loss = |s: &&HeldOut| matches!(s.verdict, Verdict::Slower | Verdict::Failed(_));
        self.shapes.iter().filter(is_loss).collect()
    }

    /// A table of one line a shape, for a terminal.
    pub fn table(&self) -> String {
        let width = self.shapes.iter().map(|s| s.shape.len()).max().unwrap_or(0);
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{:width$}  {:>8}  {:>10}  {:>10}  {:>6}  verdict",
            "shape", "distance", "nearest us", "default us", "ratio"
        );
        let number = |n: Option<f64>, digits: usize| {
            n.map_or_else(|| "-".into(), |n| format!("{n:.digits$}"))
        };
        for s in &self.shapes {
            let verdict = match &s.verdict {
                Verdict::NoneNear => "no record near, the default speaks".to_string(),
                Verdict::Default => "the default's own config".into(),
                Verdict::Faster => "faster".into(),
                Verdict::Tie => "within the noise".into(),
                Verdict::Slower => "SLOWER".into(),
                Verdict::Failed(reason) => format!("FAILED: {reason}"),
            };
            let _ = writeln!(
                text,
                "{:width$}  {:>8}  {:>10}  {:>10}  {:>6}  {verdict}",
                s.shape,
                number(s.distance, 2),
                number(s.nearest.map(|n| n.median_us), 1),
                number(s.default.map(|d| d.median_us), 1),
                number(s.ratio(), 3),
            );
        }
        for failed in &self.failed {
            let _ = writeln!(
                text,
                "{:width$}  not measured: {}",
                failed.shape, failed.reason
            );
        }
        let _ = writeln!(
            text,
            "{} shapes held out, on {} of them the nearest match loses to the default, {:.1} s",
            self.shapes.len(),
            self.losses().len(),
            self.seconds
        );
        text
    }

    /// Everything, as JSON.
    ///
    /// # Errors
    /// Only if a time is not a number, which [`Summary`] rules out.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }
}

/// Looks each shape up as if it had never been tuned and measures what the nearest record says beside the default. Stores
/// nothing.
///
/// # Errors
/// [`TunerError::Device`] if every executor is lost before the list is done.
pub fn run_hold_out(
    targets: &[Target],
    shard: Shard,
    executors: &[&dyn Executor],
    ladder: &Ladder,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<HoldOutReport, TunerError> {
    let started = Instant::now();
    let check = |target: &Target, executor: &dyn Executor| {
        hold_out(target, executor, ladder, progress, policy)
    };
    let done = share(targets, shard, executors, progress, check)?;
    Ok(HoldOutReport {
        shapes: done.results,
        failed: done.failed,
        other_shards: done.other_shards,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Config, distance and key of the nearest record.
struct Nearest {
    candidate: Candidate,
    distance: f64,
    key: String,
}

fn nearest(
    target: &Target,
    executor: &dyn Executor,
    ladder: &Ladder,
) -> Result<Option<Nearest>, TunerError> {
    fn of<C>(answer: Answer<C>, candidate: impl Fn(C) -> Candidate) -> Option<Nearest> {
        let record = answer.record.filter(|_| answer.tier != Tier::Default)?;
        Some(Nearest {
            candidate: candidate(answer.config),
            distance: answer.distance,
            key: record.key.to_string(),
        })
    }
    let device = executor.device();
    let refused = |e: TuneDbError| TunerError::Unfit {
        target: target.to_string(),
        reason: e.to_string(),
    };
    Ok(match target {
        Target::Forward(p) => of(
            ladder.held_out(p, device).map_err(refused)?,
            Candidate::Strategy,
        ),
        Target::Step(p) => of(
            ladder.held_out_step(p, device).map_err(refused)?,
            Candidate::Step,
        ),
    })
}

fn hold_out(
    target: &Target,
    executor: &dyn Executor,
    ladder: &Ladder,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<HeldOut, TunerError> {
    target.check()?;
    let default = Space::default_of(target, executor.device())?;
    let mut held = HeldOut {
        shape: target.to_string(),
        verdict: Verdict::NoneNear,
        distance: None,
        record: None,
        nearest: None,
        default: None,
    };
    let Some(near) = nearest(target, executor, ladder)? else {
        return Ok(held);
    };
    (held.distance, held.record) = (Some(near.distance), Some(near.key));
    if same_launches(&near.candidate, &default) {
        held.verdict = Verdict::Default;
        return Ok(held);
    }
    // A difference is claimed only if a second measurement agrees: over a list of shapes, some single one would cross any bound.
    for attempt in 0..2 {
        let finals = measure(target, executor, progress, policy, &default, near.candidate)?;
        let time = |of: &Candidate| {
            let timed = finals.times.iter().find(|(c, _)| c == of);
            timed.map(|(_, summary)| *summary)
        };
        let why = |of: &Candidate| {
            let entry = finals.rejected.iter().find(|e| e.candidate == *of);
            entry
                .and_then(|e| e.failure())
                .map_or_else(|| "no reason recorded".into(), ToString::to_string)
        };
        let Some(of_default) = time(&default) else {
            return Err(TunerError::Unfit {
                target: held.shape,
                reason: format!("the default config failed: {}", why(&default)),
            });
        };
        let Some(of_nearest) = time(&near.candidate) else {
            held.verdict = Verdict::Failed(why(&near.candidate));
            return Ok(held);
        };
        let seen = if of_nearest.ties_with(&of_default, policy.noise_floor) {
            Verdict::Tie
        } else if of_nearest.median_us < of_default.median_us {
            Verdict::Faster
        } else {
            Verdict::Slower
        };
        if attempt == 0 {
            (held.nearest, held.default) = (Some(of_nearest), Some(of_default));
            held.verdict = seen;
        } else if held.verdict != seen {
            held.verdict = Verdict::Tie;
        }
        if held.verdict == Verdict::Tie {
            break;
        }
    }
    Ok(held)
}

/// True if both launch the same: parameters of kernels that are not launched, such as those of a sum over segments where sequences are whole, make
/// no difference that could be measured.
fn same_launches(one: &Candidate, other: &Candidate) -> bool {
    match (one, other) {
        (Candidate::Strategy(one), Candidate::Strategy(other)) => one.kernels() == other.kernels(),
        _ => one == other,
    }
}

/// The finals of a search with one candidate beside the default: checked on the shape itself, interleaved, ties again.
fn measure(
    target: &Target,
    executor: &dyn Executor,
    progress: &dyn Progress,
    policy: &Policy,
    default: &Candidate,
    nearest: Candidate,
) -> Result<Finals, TunerError> {
    // Nothing is read from it, and what is written to it is forgotten: times of the tuning must not stand in for new ones.
    let sink = MemorySink::default();
    Search::new(target, executor, &sink, progress, policy).finals(default, &[nearest], &[])
}

#[cfg(test)]
mod tests {
    use mamba2_spec::{Arch, DeviceFacts, Problem, StrategyConfig, rules};

    use super::*;

    #[test]
    fn a_config_that_differs_in_a_kernel_that_is_not_launched_is_the_same() {
        let device = DeviceFacts::assumed(Arch(90));
        let default = |shape: &str| match rules::default_strategy(
            &shape.parse::<Problem>().unwrap(),
            &device,
        ) {
            Ok(StrategyConfig::Sm90Fused(config)) => config,
            other => panic!("{shape}: {other:?}"),
        };
        for (shape, whole) in [
            ("b=1,l=512,h=128,p=64,g=8,n=128", true),
            ("b=4,l=16384,h=8,p=64,g=1,n=128", false),
        ] {
            let config = default(shape);
            assert_eq!(config.fused_forward.segment == 0, whole, "{shape}");
            let mut other = config;
            other.segment_state.stages = if config.segment_state.stages == 2 {
                3
            } else {
                2
            };
            let of = |c| Candidate::Strategy(StrategyConfig::Sm90Fused(c));
            assert_ne!(of(config), of(other));
            assert_eq!(same_launches(&of(config), &of(other)), whole, "{shape}");
        }
    }
}
