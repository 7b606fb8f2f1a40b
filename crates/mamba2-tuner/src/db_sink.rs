//! The tuning database as a [`Sink`].

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mamba2_spec::{DeviceFacts, Kernel, KernelConfig};
use mamba2_tunedb::{
    Evidence, FailureStage, LocalDb, Provenance, Record, Timing, TuneKey, config_text,
    kernel_config_text,
};

use crate::executor::{Conditions, Failure, FailureKind};
use crate::sink::{Choice, Hopeless, Outcome, Sink, Stage, Stored};
use crate::{Candidate, Summary, Target, TunerError};

/// How long a commit waits for another process that has the store open.
const WAIT: Duration = Duration::from_secs(30);

/// Keeps results and choices in the local database. The store is opened for each commit and closed again, so no lock is
/// held while candidates are measured.
pub struct DbSink {
    db: LocalDb,
    /// Results of the shapes in hand, by key and candidate text.
    known: Mutex<HashMap<TuneKey, HashMap<String, Stored>>>,
}

impl DbSink {
    /// A sink in front of `db`.
    pub fn new(db: LocalDb) -> DbSink {
        DbSink {
            db,
            known: Mutex::default(),
        }
    }

    /// Reads what is stored for a shape, once.
    fn load(
        &self,
        known: &mut HashMap<TuneKey, HashMap<String, Stored>>,
        keys: &[TuneKey],
    ) -> Result<(), TunerError> {
        if keys.iter().all(|key| known.contains_key(key)) {
            return Ok(());
        }
        let timings = self
            .db
            .timings(keys, WAIT)
            .map_err(|e| TunerError::Store(e.to_string()))?;
        for key in keys {
            known.entry(*key).or_default();
        }
        for timing in timings {
            if let Some(stored) = stored_of(&timing) {
                known
                    .entry(timing.key)
                    .or_default()
                    .insert(timing.config_text(), stored);
            }
        }
        Ok(())
    }
}

/// Keys of everything that is timed for a shape.
fn keys_of(device: &DeviceFacts, target: &Target) -> Vec<TuneKey> {
    match target {
        Target::Forward(p) => {
            let kernels = Kernel::ALL
                .into_iter()
                .filter(|k| *k != Kernel::StateUpdate);
            kernels
                .map(|k| TuneKey::kernel(k, p, device))
                .chain([TuneKey::forward(p, device)])
                .collect()
        }
        Target::Step(p) => vec![TuneKey::step(p, device)],
    }
}

/// Key and config text of a candidate; `None` if it is for another kind of shape.
fn identity(
    device: &DeviceFacts,
    target: &Target,
    candidate: &Candidate,
) -> Option<(TuneKey, String)> {
    match (target, candidate) {
        (Target::Forward(p), Candidate::Kernel { kernel, .. }) => {
            let config = candidate.kernels().into_iter().next()?;
            Some((
                TuneKey::kernel(*kernel, p, device),
                kernel_config_text(&config),
            ))
        }
        (Target::Forward(p), Candidate::Strategy(config)) => {
            Some((TuneKey::forward(p, device), config_text(config)))
        }
        (Target::Step(p), Candidate::Step(config)) => {
            Some((TuneKey::step(p, device), config_text(config)))
        }
        _ => None,
    }
}

fn timing_of(
    device: &DeviceFacts,
    target: &Target,
    candidate: &Candidate,
    stored: &Stored,
) -> Option<Timing> {
    let (key, _) = identity(device, target, candidate)?;
    let c = &stored.conditions;
    let built_with = Provenance {
        driver: c.driver.clone(),
        nvrtc: c.nvrtc.clone(),
        template_digest: c.template_digest.clone(),
    };
    let (outcome, policy) = match &stored.outcome {
        Outcome::Timed {
            summary,
            stage,
            out_error,
        } => {
            let outcome = mamba2_tunedb::Outcome::Measured {
                median_us: summary.median_us,
                spread_us: summary.spread_us,
                samples: summary.samples,
                max_error: *out_error,
            };
            (
                outcome,
                format!("{};{}", stored.measurement, stage_text(stage)),
            )
        }
        Outcome::Failed(failure) => {
            let reason = format!("{}: {}", failure.kind.name(), failure.reason);
            (
                mamba2_tunedb::Outcome::Failed {
                    stage: failure_stage(failure.kind),
                    reason,
                },
                String::new(),
            )
        }
    };
    let mut timing = match candidate {
        Candidate::Kernel { .. } => {
            let config: KernelConfig = candidate.kernels().into_iter().next()?;
            Timing::of_kernel(key, &config, outcome, built_with)
        }
        Candidate::Strategy(config) => Timing::new(key, config, outcome, built_with),
        Candidate::Step(config) => Timing::new(key, config, outcome, built_with),
    };
    timing.policy = policy;
    timing.date_unix_s = now_unix_s();
    Some(timing)
}

/// `None` for what cannot be read: it is measured again.
fn stored_of(timing: &Timing) -> Option<Stored> {
    let b = &timing.built_with;
    let conditions = Conditions {
        template_digest: b.template_digest.clone(),
        nvrtc: b.nvrtc.clone(),
        driver: b.driver.clone(),
    };
    let (outcome, measurement) = match &timing.outcome {
        mamba2_tunedb::Outcome::Measured {
            median_us,
            spread_us,
            samples,
            max_error,
        } => {
            let (measurement, stage) = timing.policy.rsplit_once(';')?;
            let summary = Summary {
                median_us: *median_us,
                spread_us: *spread_us,
                samples: *samples,
            };
            (
                Outcome::Timed {
                    summary,
                    stage: parse_stage(stage)?,
                    out_error: *max_error,
                },
                measurement.to_string(),
            )
        }
        mamba2_tunedb::Outcome::Failed { reason, .. } => {
            let (kind, reason) = reason.split_once(": ")?;
            let kind = FailureKind::ALL.into_iter().find(|k| k.name() == kind)?;
            (Outcome::Failed(Failure::new(kind, reason)), String::new())
        }
    };
    Some(Stored {
        conditions,
        measurement,
        outcome,
    })
}

fn failure_stage(kind: FailureKind) -> FailureStage {
    match kind {
        FailureKind::Compile => FailureStage::Compile,
        FailureKind::Spill => FailureStage::Spill,
        FailureKind::Launch | FailureKind::OutOfMemory => FailureStage::Launch,
        FailureKind::Wrong | FailureKind::Unstable | FailureKind::OutOfBounds => {
            FailureStage::Verify
        }
        FailureKind::Hang => FailureStage::Timeout,
        FailureKind::Crash => FailureStage::Crash,
    }
}

fn stage_text(stage: &Stage) -> String {
    match stage {
        Stage::Cut(Hopeless::InGroup) => "cut".into(),
        Stage::Cut(Hopeless::InAll) => "cut all".into(),
        Stage::Measured => "measured".into(),
        Stage::Refined => "refined".into(),
        Stage::Final {
            set,
            screened_us: None,
        } => format!("final {set}"),
        Stage::Final {
            set,
            screened_us: Some(us),
        } => format!("final {set} {us}"),
    }
}

fn parse_stage(text: &str) -> Option<Stage> {
    let words: Vec<&str> = text.split(' ').collect();
    Some(match words[..] {
        ["cut"] => Stage::Cut(Hopeless::InGroup),
        ["cut", "all"] => Stage::Cut(Hopeless::InAll),
        ["measured"] => Stage::Measured,
        ["refined"] => Stage::Refined,
        ["final", set] => Stage::Final {
            set: set.into(),
            screened_us: None,
        },
        ["final", set, us] => Stage::Final {
            set: set.into(),
            screened_us: Some(us.parse().ok()?),
        },
        _ => return None,
    })
}

fn now_unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

impl Sink for DbSink {
    fn result(
        &self,
        device: &DeviceFacts,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Option<Stored>, TunerError> {
        let Some((key, text)) = identity(device, target, candidate) else {
            return Ok(None);
        };
        let mut known = self
            .known
            .lock()
            .expect("no holder of this lock should panic");
        self.load(&mut known, &keys_of(device, target))?;
        Ok(known
            .get(&key)
            .and_then(|of_key| of_key.get(&text))
            .cloned())
    }

    fn put_results(
        &self,
        device: &DeviceFacts,
        target: &Target,
        results: &[(Candidate, Stored)],
    ) -> Result<(), TunerError> {
        let timings: Vec<Timing> = results
            .iter()
            .filter_map(|(c, s)| timing_of(device, target, c, s))
            .collect();
        self.db
            .commit(&[], &timings, WAIT)
            .map_err(|e| TunerError::Store(e.to_string()))?;
        let mut known = self
            .known
            .lock()
            .expect("no holder of this lock should panic");
        for (candidate, stored) in results {
            if let Some((key, text)) = identity(device, target, candidate) {
                known.entry(key).or_default().insert(text, stored.clone());
            }
        }
        Ok(())
    }

    fn put_choice(
        &self,
        device: &DeviceFacts,
        target: &Target,
        choice: &Choice,
    ) -> Result<(), TunerError> {
        let record = record_of(device, target, choice).ok_or_else(|| {
            TunerError::Store(format!(
                "{target}: {} is for another kind of shape",
                choice.candidate
            ))
        })?;
        self.db
            .commit(&[record], &[], WAIT)
            .map(drop)
            .map_err(|e| TunerError::Store(e.to_string()))
    }
}

/// The record that the launcher finds.
pub fn record_of(device: &DeviceFacts, target: &Target, choice: &Choice) -> Option<Record> {
    let c = &choice.conditions;
    let evidence = Evidence {
        built_with: Provenance {
            driver: c.driver.clone(),
            nvrtc: c.nvrtc.clone(),
            template_digest: c.template_digest.clone(),
        },
        candidates: u32::try_from(choice.candidates).unwrap_or(u32::MAX),
        date_unix_s: now_unix_s(),
        default_median_us: choice.default.map(|d| d.median_us),
        gpu: device.name.clone(),
        max_error: choice.max_error,
        median_us: choice.summary.median_us,
        noisy: !choice.quiet,
        policy: choice.measurement.clone(),
        rejected: u32::try_from(choice.rejected).unwrap_or(u32::MAX),
        samples: choice.summary.samples,
        spread_us: choice.summary.spread_us,
    };
    match (target, &choice.candidate) {
        (Target::Forward(p), Candidate::Strategy(config)) => {
            Some(Record::forward(p, device, config, evidence))
        }
        (Target::Step(p), Candidate::Step(config)) => {
            Some(Record::step(p, device, config, evidence))
        }
        _ => None,
    }
}
