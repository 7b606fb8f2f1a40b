use std::collections::BTreeMap;

use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{DeviceFacts, KernelConfig, Problem, StepProblem, StrategyConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Result, TuneDbError};
use crate::key::{Subject, TuneKey};

/// Longest record or timing that is read or written, in bytes of JSON.
pub const MAX_RECORD_BYTES: usize = 64 * 1024;

/// What a measurement depends on besides shape, config and GPU. A change of any of them makes a failure worth another try.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Provenance {
    /// Version of the CUDA driver, as in `13.0`.
    pub driver: String,
    /// Version of NVRTC, as in `13.0`.
    pub nvrtc: String,
    /// Digest of the kernel templates that the config uses, without their comments.
    pub template_digest: String,
}

/// [`Provenance::template_digest`] of a config, from the template digest of each of its kernels in their order. The one function
/// that tuning and look-up share: what one writes the other compares.
pub fn joint_template_digest(of_kernels: impl IntoIterator<Item = String>) -> String {
    // Enough of each to see a change, and records stay readable.
    const PREFIX: usize = 16;
    let prefixes: Vec<String> = of_kernels
        .into_iter()
        .map(|digest| digest.chars().take(PREFIX).collect())
        .collect();
    prefixes.join("+")
}

/// What was seen when a record's config won. Fields that an older program did not write take their default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evidence {
    /// Compiler, driver and templates of the measurement.
    pub built_with: Provenance,
    /// Candidates that were considered.
    pub candidates: u32,
    /// Seconds since 1970 by the clock of the measuring machine. Orders merges, decides nothing else.
    pub date_unix_s: u64,
    /// Median of the default config in the same run, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_median_us: Option<f64>,
    /// Product name of the GPU. Display only.
    pub gpu: String,
    /// Largest relative Frobenius error against the float64 oracle.
    pub max_error: f64,
    /// Median time, in microseconds.
    pub median_us: f64,
    /// True if the samples scattered too much to trust the choice; any calm record replaces this one.
    pub noisy: bool,
    /// How it was measured: rounds, flush, early cut.
    pub policy: String,
    /// Candidates that failed to compile, verify or run.
    pub rejected: u32,
    /// Number of timed samples.
    pub samples: u32,
    /// Interquartile range of the samples, in microseconds.
    pub spread_us: f64,
}

/// One tuned choice: a key, named parameters and the evidence for them.
///
/// The text form is one line of JSON with sorted names. Fields this program does not know are kept and written back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The tuned problem. First, so that lines of a sorted file begin with it.
    pub key: TuneKey,
    /// Named parameters as JSON. Read through [`Record::strategy`] or [`Record::step_config`].
    pub config: Value,
    /// Why this config.
    #[serde(default)]
    pub evidence: Evidence,
    /// Fields written by a newer program.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl Record {
    /// Record of a forward pass.
    pub fn forward(
        problem: &Problem,
        device: &DeviceFacts,
        config: &StrategyConfig,
        evidence: Evidence,
    ) -> Record {
        Record {
            key: TuneKey::forward(problem, device),
            config: to_value(config),
            evidence,
            extra: BTreeMap::new(),
        }
    }

    /// Record of a decode step.
    pub fn step(
        problem: &StepProblem,
        device: &DeviceFacts,
        config: &StateUpdate,
        evidence: Evidence,
    ) -> Record {
        Record {
            key: TuneKey::step(problem, device),
            config: to_value(config),
            evidence,
            extra: BTreeMap::new(),
        }
    }

    /// The config of a forward record. Parameters the record does not name take their default.
    ///
    /// # Errors
    /// [`TuneDbError::Refused`] if the record is not of a forward pass, or names a strategy, kernel, parameter or value
    /// that this program does not have.
    pub fn strategy(&self) -> Result<StrategyConfig> {
        self.read_config(Subject::Forward)
    }

    /// The config of a step record.
    ///
    /// # Errors
    /// As [`Record::strategy`].
    pub fn step_config(&self) -> Result<StateUpdate> {
        self.read_config(Subject::Step)
    }

    fn read_config<'de, C: Deserialize<'de>>(&'de self, subject: Subject) -> Result<C> {
        let refused = |reason: String| TuneDbError::Refused {
            what: format!("record {}", self.key),
            reason,
        };
        if self.key.subject() != subject {
            return Err(refused(format!(
                "expected a record of {subject}, got {}",
                self.key.subject()
            )));
        }
        C::deserialize(&self.config).map_err(|e| refused(e.to_string()))
    }

    /// The canonical line of JSON, without a line break.
    ///
    /// # Errors
    /// [`TuneDbError::TooLarge`] beyond [`MAX_RECORD_BYTES`], [`TuneDbError::Refused`] for a time or error that is not finite.
    pub fn to_json(&self) -> Result<String> {
        let e = &self.evidence;
        let numbers = [
            e.median_us,
            e.spread_us,
            e.max_error,
            e.default_median_us.unwrap_or(0.0),
        ];
        if !numbers.iter().all(|n| n.is_finite() && *n >= 0.0) {
            return Err(TuneDbError::Refused {
                what: format!("record {}", self.key),
                reason: format!("expected finite, non-negative times and errors, got {numbers:?}"),
            });
        }
        let mut sorted = self.clone();
        sorted.config.sort_all_objects();
        sorted.extra.values_mut().for_each(Value::sort_all_objects);
        bounded_json("record", &sorted)
    }

    /// Reads a line of JSON from an untrusted source.
    ///
    /// # Errors
    /// [`TuneDbError::TooLarge`], or [`TuneDbError::Damaged`] with the place and reason.
    pub fn from_json(text: &[u8]) -> Result<Record> {
        parse_bounded("record", text)
    }

    /// Which of two records for one key to keep when stores are merged: a calm one over a noisy one, then the later one,
    /// then the faster one, then the smaller text, so that every order of merging ends with the same record.
    #[must_use]
    pub fn preferred<'a>(&'a self, other: &'a Record) -> &'a Record {
        let rank = |r: &Record| (!r.evidence.noisy, r.evidence.date_unix_s);
        let by_rank = rank(self).cmp(&rank(other));
        let by_time = other.evidence.median_us.total_cmp(&self.evidence.median_us);
        let by_text = || {
            other
                .to_json()
                .unwrap_or_default()
                .cmp(&self.to_json().unwrap_or_default())
        };
        if by_rank.then(by_time).then_with(by_text).is_ge() {
            self
        } else {
            other
        }
    }
}

/// Where a candidate failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureStage {
    /// NVRTC refused it.
    Compile,
    /// It spills registers.
    Spill,
    /// The driver refused to load or launch it.
    Launch,
    /// Its numbers are wrong or differ from run to run, or it wrote where it must not.
    Verify,
    /// It ran past its time limit and its worker was killed.
    Timeout,
    /// It took its worker process with it.
    Crash,
    /// A stage that a newer program knows.
    #[serde(other)]
    Other,
}

/// Result of one candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// It ran and its numbers are right.
    Measured {
        /// Median time, in microseconds.
        median_us: f64,
        /// Interquartile range, in microseconds.
        spread_us: f64,
        /// Number of timed samples; few after an early cut.
        samples: u32,
        /// Relative Frobenius error against the oracle.
        #[serde(default)]
        max_error: f64,
    },
    /// It cannot be used.
    Failed {
        /// Where it failed.
        stage: FailureStage,
        /// Why, in full.
        reason: String,
    },
}

/// One (shape, config) measurement. All are kept, so that a new candidate costs only its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Shape, and what was timed.
    pub key: TuneKey,
    /// Named parameters, as JSON text with sorted names.
    pub config: Value,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Compiler, driver and templates.
    #[serde(default)]
    pub built_with: Provenance,
    /// How it was measured.
    #[serde(default)]
    pub policy: String,
    /// Seconds since 1970. Display and pruning only.
    #[serde(default)]
    pub date_unix_s: u64,
}

impl Timing {
    /// Timing of a strategy or a step (`config` of the key's subject).
    pub fn new(
        key: TuneKey,
        config: &impl Serialize,
        outcome: Outcome,
        built_with: Provenance,
    ) -> Timing {
        Timing {
            key,
            config: to_value(config),
            outcome,
            built_with,
            policy: String::new(),
            date_unix_s: 0,
        }
    }

    /// Timing of one kernel.
    pub fn of_kernel(
        key: TuneKey,
        config: &KernelConfig,
        outcome: Outcome,
        built_with: Provenance,
    ) -> Timing {
        Timing {
            key,
            config: kernel_value(config),
            outcome,
            built_with,
            policy: String::new(),
            date_unix_s: 0,
        }
    }

    /// True if the same templates, NVRTC and driver are in use now: measuring again would tell nothing new, and a failure
    /// would fail again.
    pub fn is_current(&self, now: &Provenance) -> bool {
        self.built_with == *now
    }

    /// The config as canonical text: the identity of the candidate within its key.
    pub fn config_text(&self) -> String {
        canonical_text(&self.config)
    }

    /// The line of JSON, without a line break. A long reason of a failure is cut.
    ///
    /// # Errors
    /// [`TuneDbError::TooLarge`] beyond [`MAX_RECORD_BYTES`].
    pub fn to_json(&self) -> Result<String> {
        let mut short = self.clone();
        short.config.sort_all_objects();
        if let Outcome::Failed { reason, .. } = &mut short.outcome {
            // Compiler logs can be long; the head says what is wrong.
            truncate(reason, 4096);
        }
        bounded_json("timing", &short)
    }

    /// Reads a line of JSON from an untrusted source.
    ///
    /// # Errors
    /// [`TuneDbError::TooLarge`], or [`TuneDbError::Damaged`] with the place and reason.
    pub fn from_json(text: &[u8]) -> Result<Timing> {
        parse_bounded("timing", text)
    }
}

/// Canonical text of a config, comparable with [`Timing::config_text`].
pub fn config_text(config: &impl Serialize) -> String {
    canonical_text(&to_value(config))
}

/// As [`config_text`], for one kernel.
pub fn kernel_config_text(config: &KernelConfig) -> String {
    canonical_text(&kernel_value(config))
}

fn kernel_value(config: &KernelConfig) -> Value {
    match config {
        KernelConfig::ChunkCumsum(c) => to_value(c),
        KernelConfig::FwdPassState(c) => to_value(c),
        KernelConfig::ComputeOut(c) => to_value(c),
        KernelConfig::Sm90SegmentState(c) => to_value(c),
        KernelConfig::SegmentScan(c) => to_value(c),
        KernelConfig::Sm90FusedForward(c) => to_value(c),
        KernelConfig::Sm90SwapSegmentState(c) => to_value(c),
        KernelConfig::Sm90SwapFusedForward(c) => to_value(c),
        KernelConfig::Sm90SplitSegmentState(c) => to_value(c),
        KernelConfig::Sm90SplitFusedForward(c) => to_value(c),
        KernelConfig::Sm90ChainForward(c) => to_value(c),
        KernelConfig::StateUpdate(c) => to_value(c),
    }
}

fn to_value(config: &impl Serialize) -> Value {
    let mut value =
        serde_json::to_value(config).expect("configs should be maps of names to numbers and words");
    value.sort_all_objects();
    value
}

fn canonical_text(config: &Value) -> String {
    let mut sorted = config.clone();
    sorted.sort_all_objects();
    sorted.to_string()
}

fn truncate(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        let mut end = bytes;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
}

fn check_size(what: &str, bytes: usize) -> Result<()> {
    if bytes <= MAX_RECORD_BYTES {
        return Ok(());
    }
    Err(TuneDbError::TooLarge {
        what: what.into(),
        limit: MAX_RECORD_BYTES as u64,
        got: bytes as u64,
        unit: "bytes",
    })
}

fn bounded_json(what: &str, value: &impl Serialize) -> Result<String> {
    let text =
        serde_json::to_string(value).map_err(|e| TuneDbError::damaged(what, e.to_string()))?;
    check_size(what, text.len())?;
    Ok(text)
}

fn parse_bounded<'de, T: Deserialize<'de>>(what: &str, text: &'de [u8]) -> Result<T> {
    check_size(what, text.len())?;
    serde_json::from_slice(text).map_err(|e| TuneDbError::damaged(what, e.to_string()))
}
