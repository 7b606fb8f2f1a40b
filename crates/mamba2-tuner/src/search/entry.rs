use crate::Candidate;
use crate::executor::Failure;
use crate::sink::{Outcome, Stage};

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
                stage: Stage::Cut(_),
                ..
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
    pub fn ranked(&self) -> Vec<&Entry> {
        let mut timed: Vec<(&Entry, f64)> = self
            .entries
            .iter()
            .filter_map(|e| Some((e, e.median_us()?)))
            .collect();
        timed.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.candidate.cmp(&b.0.candidate)));
        timed.into_iter().map(|(entry, _)| entry).collect()
    }
}
