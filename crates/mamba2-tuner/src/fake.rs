//! A scripted device: times, noise, failures, hangs and crashes as written down. Search, resume, isolation and reports are
//! tested against it on machines without a GPU.
//!
//! ```
//! use mamba2_tuner::{MemorySink, Policy, Silent, Target, fake::FakeExecutor, tune_target};
//! let target = Target::Forward("b=1,l=256,h=4,p=64,g=1,n=64".parse().unwrap());
//! let report = tune_target(&target, &FakeExecutor::default(), &MemorySink::default(), &Silent, &Policy::default());
//! assert!(report.unwrap().choice.default.is_some());
//! ```

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mamba2_spec::{Arch, DeviceFacts, Kernel, KernelConfig, Problem, StrategyConfig, rules};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::executor::{
    Check, Compiled, Compiling, Conditions, Executor, Failure, FailureKind, Rounds, Tell, Verified,
};
use crate::{Candidate, Target, TunerError};

/// What a [`FakeExecutor`] does. Readable as JSON, for a helper process that plays the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// Facts it claims.
    pub device: DeviceFacts,
    /// Template digest, compiler and driver it claims.
    pub conditions: Conditions,
    /// Template digests of single kernels, by name, that differ from that of the conditions.
    pub templates: BTreeMap<String, String>,
    /// Times of candidates without a rule of their own lie between this and twice this. Unit: microseconds.
    pub base_us: f64,
    /// Samples scatter by up to this share around the true time.
    pub noise: f64,
    /// Device memory it claims, in bytes.
    pub memory_bytes: Option<u64>,
    /// The first rule whose text is part of the candidate's decides.
    pub rules: Vec<Rule>,
    /// True: [`Act::Hang`] sleeps for ever and [`Act::Crash`] aborts the process, as a worker's would.
    pub for_real: bool,
    /// Time one compilation takes. Unit: milliseconds.
    pub compile_ms: u64,
    /// Time one measurement of one candidate takes, so that a job lasts long enough to be killed. Unit: milliseconds.
    pub delay_ms: u64,
    /// The process aborts at the n-th candidate it measures: a job killed in the middle.
    pub die_at_measurement: Option<u64>,
}

/// One line of a [`Script`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// Part of a candidate's text, as in `compute_out(chunk_size=64`.
    pub matches: String,
    /// What happens.
    pub act: Act,
}

impl Rule {
    /// Make the tuning of one shape choose what counts for another as well: the default there with other stages, which leave its blocks
    /// as they are. `None` if `sm90_fused` is not the default of both.
    pub fn lending(tuned: &Problem, near: &Problem, device: &DeviceFacts) -> Option<Vec<Rule>> {
        let default = |p: &Problem| match rules::default_strategy(p, device) {
            Ok(StrategyConfig::Sm90Fused(c)) => Some(c),
            _ => None,
        };
        let mut config = default(near)?;
        let stages = &mut config.fused_forward.stages;
        *stages = if *stages == 2 { 3 } else { 2 };
        let of_tuned = default(tuned)?;
        let segment = of_tuned.fused_forward.segment;
        let kernels = StrategyConfig::Sm90Fused(config)
            .with_segment(segment)
            .kernels();
        let rule = |k: &KernelConfig| Rule {
            matches: format!("{}({})", k.kernel(), k.to_text()),
            act: Act::Takes(1.0),
        };
        // Kernels that the default has too count for it only by themselves.
        let slow = Rule {
            matches: StrategyConfig::Sm90Fused(of_tuned).to_string(),
            act: Act::Takes(100.0),
        };
        Some(
            std::iter::once(slow)
                .chain(kernels.iter().map(rule))
                .collect(),
        )
    }
}

/// What happens to a candidate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// It takes this many microseconds.
    Takes(f64),
    /// Compiling, verifying or measuring it (whichever finds such a fault) fails.
    Fails(FailureKind),
    /// It is right on the twin and wrong on the real shape.
    WrongOnRealShape,
    /// Compiling it kills the process.
    CrashInCompile,
    /// Verifying it never ends.
    Hang,
    /// Verifying it kills the process.
    Crash,
    /// Measuring it kills the process.
    CrashInMeasure,
}

impl Default for Script {
    fn default() -> Script {
        Script {
            device: DeviceFacts::assumed(Arch(90)),
            conditions: Conditions {
                template_digest: "t1".into(),
                nvrtc: "13.0".into(),
                driver: "580".into(),
            },
            templates: BTreeMap::new(),
            base_us: 100.0,
            noise: 0.0,
            memory_bytes: None,
            rules: Vec::new(),
            for_real: false,
            compile_ms: 0,
            delay_ms: 0,
            die_at_measurement: None,
        }
    }
}

/// One call to a [`FakeExecutor`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A candidate was compiled.
    Compile(String),
    /// A candidate was loaded.
    Load(String),
    /// A candidate was verified.
    Verify(String, Check),
    /// A candidate was measured.
    Measure(String),
}

/// The scripted device.
#[derive(Debug, Default)]
pub struct FakeExecutor {
    script: Script,
    calls: Mutex<Vec<Call>>,
    measurements: AtomicU64,
}

impl FakeExecutor {
    /// A device that follows `script`.
    pub fn new(script: Script) -> FakeExecutor {
        FakeExecutor {
            script,
            ..FakeExecutor::default()
        }
    }

    /// Every call so far.
    pub fn calls(&self) -> Vec<Call> {
        self.calls
            .lock()
            .expect("no holder of this lock should panic")
            .clone()
    }

    /// Candidates measured so far, with repetitions.
    pub fn measured(&self) -> Vec<String> {
        let of_measure = |call| match call {
            Call::Measure(name) => Some(name),
            _ => None,
        };
        self.calls().into_iter().filter_map(of_measure).collect()
    }

    /// The true time of a candidate.
    pub fn true_us(&self, candidate: &Candidate) -> f64 {
        let name = candidate.to_string();
        if let Some(Act::Takes(us)) = self.act(&name) {
            return *us;
        }
        match candidate {
            Candidate::Strategy(config) => {
                let part = |k: &mamba2_spec::KernelConfig| {
                    self.true_us(&Candidate::Kernel {
                        kernel: k.kernel(),
                        within: *config,
                    })
                };
                config.kernels().iter().map(part).sum()
            }
            _ => self.script.base_us * (1.0 + unit(&name, 0)),
        }
    }

    fn act(&self, name: &str) -> Option<&Act> {
        self.script
            .rules
            .iter()
            .find(|r| name.contains(&r.matches))
            .map(|r| &r.act)
    }

    fn log(&self, call: Call) {
        self.calls
            .lock()
            .expect("no holder of this lock should panic")
            .push(call);
    }

    fn hang(&self) -> Failure {
        if self.script.for_real {
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        }
        Failure::new(FailureKind::Hang, "scripted")
    }

    fn crash(&self) -> Failure {
        if self.script.for_real {
            std::process::abort();
        }
        Failure::new(FailureKind::Crash, "scripted")
    }
}

/// A number in 0..1 that depends on the text and `salt` only.
fn unit(text: &str, salt: u64) -> f64 {
    let digest = Sha256::new()
        .chain_update(salt.to_le_bytes())
        .chain_update(text)
        .finalize();
    let mut bytes = [0u8; 4];
    bytes.copy_from_slice(&digest[..4]);
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}

impl Executor for FakeExecutor {
    fn device(&self) -> &DeviceFacts {
        &self.script.device
    }

    fn kernel_conditions(&self, kernel: Kernel) -> Conditions {
        let mut conditions = self.script.conditions.clone();
        if let Some(digest) = self.script.templates.get(kernel.name()) {
            conditions.template_digest.clone_from(digest);
        }
        conditions
    }

    fn memory_bytes(&self) -> Option<u64> {
        self.script.memory_bytes
    }

    fn compile(
        &self,
        _target: &Target,
        candidates: &[Candidate],
        tell: Tell<'_>,
    ) -> Result<(), TunerError> {
        let compile = |candidate: &Candidate| {
            let name = candidate.to_string();
            self.log(Call::Compile(name.clone()));
            std::thread::sleep(Duration::from_millis(self.script.compile_ms));
            match self.act(&name) {
                Some(Act::CrashInCompile) => Err(self.crash()),
                Some(Act::Fails(kind @ (FailureKind::Compile | FailureKind::Spill))) => {
                    Err(Failure::new(*kind, "scripted"))
                }
                _ => Ok(Compiled {
                    registers: 64,
                    shared_bytes: 0,
                }),
            }
        };
        for (i, candidate) in candidates.iter().enumerate() {
            let told = tell(Compiling::Started(vec![i]));
            if told == ControlFlow::Break(())
                || tell(Compiling::Done(vec![i], compile(candidate))) == ControlFlow::Break(())
            {
                break;
            }
        }
        Ok(())
    }

    fn load(&self, _target: &Target, candidates: &[Candidate]) -> Result<(), TunerError> {
        for candidate in candidates {
            self.log(Call::Load(candidate.to_string()));
        }
        Ok(())
    }

    fn verify(
        &self,
        _target: &Target,
        candidate: &Candidate,
        check: Check,
    ) -> Result<Result<Verified, Failure>, TunerError> {
        let name = candidate.to_string();
        self.log(Call::Verify(name.clone(), check));
        Ok(match (self.act(&name), check) {
            (Some(Act::Fails(kind)), _) => Err(Failure::new(*kind, "scripted")),
            (Some(Act::WrongOnRealShape), Check::RealShape { .. }) => {
                Err(Failure::new(FailureKind::Wrong, "scripted"))
            }
            (Some(Act::Hang), _) => Err(self.hang()),
            (Some(Act::Crash), _) => Err(self.crash()),
            _ => Ok(Verified {
                out_error: 1e-3,
                states_error: 1e-3,
            }),
        })
    }

    fn measure(
        &self,
        _target: &Target,
        candidates: &[Candidate],
        rounds: Rounds,
    ) -> Result<Vec<Result<Vec<f64>, Failure>>, TunerError> {
        let measure = |candidate: &Candidate| {
            let name = candidate.to_string();
            self.log(Call::Measure(name.clone()));
            let count = self.measurements.fetch_add(1, Ordering::Relaxed) + 1;
            std::thread::sleep(Duration::from_millis(self.script.delay_ms));
            if self.script.die_at_measurement == Some(count) {
                std::process::abort();
            }
            if let Some(Act::CrashInMeasure) = self.act(&name) {
                return Err(self.crash());
            }
            let us = self.true_us(candidate);
            let sample = |i| {
                us * (1.0
                    + self.script.noise * (2.0 * unit(&name, count * 1000 + u64::from(i)) - 1.0))
            };
            Ok((0..rounds.rounds * rounds.samples).map(sample).collect())
        };
        Ok(candidates.iter().map(measure).collect())
    }
}
