//! Where timings, failures and the choice are kept.

use std::collections::BTreeMap;
use std::sync::Mutex;

use mamba2_spec::DeviceFacts;
use serde::{Deserialize, Serialize};

use crate::{Candidate, Conditions, Failure, Summary, Target, TunerError};

/// A store of results per (shape, candidate). Each call is durable when it returns, so a killed job repeats nothing.
pub trait Sink: Sync {
    /// The last result of a candidate, whatever its conditions.
    ///
    /// # Errors
    /// [`TunerError::Store`].
    fn result(
        &self,
        device: &DeviceFacts,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Option<Stored>, TunerError>;

    /// Keeps results, replacing earlier ones of the same candidates.
    ///
    /// # Errors
    /// [`TunerError::Store`]; nothing of this call was kept.
    fn put_results(
        &self,
        device: &DeviceFacts,
        target: &Target,
        results: &[(Candidate, Stored)],
    ) -> Result<(), TunerError>;

    /// Keeps the choice for a shape, for the launcher to find.
    ///
    /// # Errors
    /// [`TunerError::Store`]; an earlier choice is still there.
    fn put_choice(
        &self,
        device: &DeviceFacts,
        target: &Target,
        choice: &Choice,
    ) -> Result<(), TunerError>;
}

/// Result of one candidate under its conditions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// Template, compiler, driver.
    pub conditions: Conditions,
    /// [`crate::Policy::measurement`] of the timing; empty for failures, which do not depend on it.
    pub measurement: String,
    /// The result.
    pub outcome: Outcome,
}

/// What became of a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was right and was timed.
    Timed {
        /// The times.
        summary: Summary,
        /// How far the timing went.
        stage: Stage,
        /// Relative Frobenius error against the float64 oracle.
        out_error: f64,
    },
    /// It cannot win.
    Failed(Failure),
}

/// How far the timing of a candidate went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Cut after the first look.
    Cut(Hopeless),
    /// Fully measured.
    Measured,
    /// Measured again beside its near ties.
    Refined,
    /// Measured in the finals.
    Final {
        /// Names the set of finalists, since their times compare only with each other.
        set: String,
        /// Median before the finals, by which the candidate got there: the same ranking must come out when the job resumes.
        /// `None` for a pass that was put together from kernels. Unit: microseconds.
        screened_us: Option<f64>,
    },
}

/// What a candidate was far behind at the first look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hopeless {
    /// The best of its group.
    InGroup,
    /// The best whole pass, although it is only a part of one.
    InAll,
}

/// The config chosen for a shape, with its evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// A [`Candidate::Strategy`] or [`Candidate::Step`].
    pub candidate: Candidate,
    /// Template, compiler, driver.
    pub conditions: Conditions,
    /// How it was measured.
    pub measurement: String,
    /// Its times.
    pub summary: Summary,
    /// Times of the default config in the same rounds; `None` if the default failed.
    pub default: Option<Summary>,
    /// Relative Frobenius error of its output against the float64 oracle.
    pub max_error: f64,
    /// Candidates that were considered.
    pub candidates: usize,
    /// Candidates that failed.
    pub rejected: usize,
    /// False if the default's own samples scattered so much that the machine was probably not quiet.
    pub quiet: bool,
}

/// A [`Sink`] in memory, for tests and for machines where nothing can be written.
#[derive(Debug, Default)]
pub struct MemorySink {
    results: Mutex<BTreeMap<(String, String), Stored>>,
    choices: Mutex<BTreeMap<String, Choice>>,
}

impl MemorySink {
    /// The choice for a shape.
    pub fn choice(&self, device: &DeviceFacts, target: &Target) -> Option<Choice> {
        self.choices
            .lock()
            .expect("no holder of this lock should panic")
            .get(&shape_key(device, target))
            .cloned()
    }

    /// Number of stored results.
    pub fn results(&self) -> usize {
        self.results
            .lock()
            .expect("no holder of this lock should panic")
            .len()
    }

    /// Takes over what `other` has and this has not, as merging the stores of two shards does.
    pub fn merge(&self, other: &MemorySink) {
        let mut results = self
            .results
            .lock()
            .expect("no holder of this lock should panic");
        for (key, value) in other
            .results
            .lock()
            .expect("no holder of this lock should panic")
            .iter()
        {
            results.entry(key.clone()).or_insert_with(|| value.clone());
        }
        let mut choices = self
            .choices
            .lock()
            .expect("no holder of this lock should panic");
        for (key, value) in other
            .choices
            .lock()
            .expect("no holder of this lock should panic")
            .iter()
        {
            choices.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
}

fn shape_key(device: &DeviceFacts, target: &Target) -> String {
    format!(
        "{}/{}/{}/{target}",
        device.arch, device.sm_count, device.shared_memory_optin_bytes
    )
}

impl Sink for MemorySink {
    fn result(
        &self,
        device: &DeviceFacts,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Option<Stored>, TunerError> {
        let key = (shape_key(device, target), candidate.to_string());
        Ok(self
            .results
            .lock()
            .expect("no holder of this lock should panic")
            .get(&key)
            .cloned())
    }

    fn put_results(
        &self,
        device: &DeviceFacts,
        target: &Target,
        results: &[(Candidate, Stored)],
    ) -> Result<(), TunerError> {
        let mut map = self
            .results
            .lock()
            .expect("no holder of this lock should panic");
        for (candidate, stored) in results {
            map.insert(
                (shape_key(device, target), candidate.to_string()),
                stored.clone(),
            );
        }
        Ok(())
    }

    fn put_choice(
        &self,
        device: &DeviceFacts,
        target: &Target,
        choice: &Choice,
    ) -> Result<(), TunerError> {
        let mut map = self
            .choices
            .lock()
            .expect("no holder of this lock should panic");
        map.insert(shape_key(device, target), choice.clone());
        Ok(())
    }
}
