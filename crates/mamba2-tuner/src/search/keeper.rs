use crate::executor::Executor;
use crate::sink::{Outcome, Sink, Stored};
use crate::{Candidate, Policy, Target, TunerError};

/// Reads and writes the results of one search. Any thread may use it.
#[derive(Clone, Copy)]
pub(crate) struct Keeper<'a> {
    pub target: &'a Target,
    pub executor: &'a dyn Executor,
    pub sink: &'a dyn Sink,
    pub policy: &'a Policy,
}

impl Keeper<'_> {
    /// The stored result of a candidate, if template, compiler, driver and (for timings) policy are still the same.
    pub fn stored(&self, candidate: &Candidate) -> Result<Option<Outcome>, TunerError> {
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

    /// Stores results, but for failures that may not last.
    pub fn store(&self, results: &[(Candidate, Outcome)]) -> Result<(), TunerError> {
        let lasting = |(_, outcome): &&(Candidate, Outcome)| !matches!(outcome, Outcome::Failed(f) if !f.kind.is_lasting());
        let stored = |(candidate, outcome): &(Candidate, Outcome)| {
            let measurement = match outcome {
                Outcome::Timed { .. } => self.policy.measurement(),
                Outcome::Failed(_) => String::new(),
            };
            let stored = Stored {
                conditions: self.executor.conditions(candidate),
                measurement,
                outcome: outcome.clone(),
            };
            (*candidate, stored)
        };
        let results: Vec<(Candidate, Stored)> =
            results.iter().filter(lasting).map(stored).collect();
        if results.is_empty() {
            return Ok(());
        }
        self.sink
            .put_results(self.executor.device(), self.target, &results)
    }
}
