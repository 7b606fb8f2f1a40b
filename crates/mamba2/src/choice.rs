use std::sync::Arc;

use mamba2_spec::StrategyConfig;
use mamba2_tunedb::{Answer, Record, Tier};

/// Which config a plan runs with, and who chose it.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice<C = StrategyConfig> {
    /// The config; `None` on the CPU backend, which has nothing to tune.
    pub config: Option<C>,
    /// Who spoke; `None` on the CPU backend.
    pub tier: Option<Tier>,
    /// How far the record's problem is, 0 for an exact match: the largest |log2 ratio| of its sizes to the problem's.
    pub distance: f64,
    /// The record that spoke.
    pub record: Option<Arc<Record>>,
    /// True if the record was made with other kernel templates than today's.
    pub stale: bool,
    /// Records that were passed over, and why.
    pub warnings: Vec<String>,
}

impl<C> Choice<C> {
    pub(crate) fn cpu() -> Choice<C> {
        Choice {
            config: None,
            tier: None,
            distance: 0.0,
            record: None,
            stale: false,
            warnings: Vec::new(),
        }
    }

    pub(crate) fn of(answer: Answer<C>) -> Choice<C> {
        Choice {
            config: Some(answer.config),
            tier: Some(answer.tier),
            distance: answer.distance,
            record: answer.record,
            stale: answer.stale,
            warnings: answer.warnings,
        }
    }
}
