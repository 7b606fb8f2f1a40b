use std::fmt;
use std::sync::Arc;

use mamba2_spec::StrategyConfig;

use crate::record::Record;
#[cfg(doc)]
use crate::{LadderBuilder, TuneKey};

/// Who spoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The caller pinned the config.
    Override,
    /// Tuned on this machine for exactly this problem.
    Local,
    /// From an imported bundle, for exactly this problem.
    Bundle,
    /// Shipped with the program, for exactly this problem.
    Shipped,
    /// Tuned on this machine for a nearby size.
    LocalNearest,
    /// From an imported bundle, for a nearby size.
    BundleNearest,
    /// Shipped with the program, for a nearby size.
    ShippedNearest,
    /// No record speaks: the untuned config of the architecture.
    Default,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Override => "override",
            Tier::Local => "local",
            Tier::Bundle => "bundle",
            Tier::Shipped => "shipped",
            Tier::LocalNearest => "local nearest",
            Tier::BundleNearest => "bundle nearest",
            Tier::ShippedNearest => "shipped nearest",
            Tier::Default => "default",
        })
    }
}

/// What the ladder says about a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer<C = StrategyConfig> {
    /// The config to use: legal for the problem by today's rules.
    pub config: C,
    /// Who spoke.
    pub tier: Tier,
    /// [`TuneKey::distance`] to the record's problem; 0 unless the tier is a nearest one.
    pub distance: f64,
    /// The record that spoke.
    pub record: Option<Arc<Record>>,
    /// True if the record was made with other kernel templates than today's: legal, but worth tuning again.
    pub stale: bool,
    /// True if the record is of a GPU with another number of multiprocessors, which [`LadderBuilder::other_device`] allowed.
    pub other_device: bool,
    /// Records that were passed over, and why.
    pub warnings: Vec<String>,
}
