mod answer;
mod builder;
mod local;
mod source;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{DeviceFacts, Kernel, Problem, StepProblem, StrategyConfig, rules};

pub use self::answer::{Answer, Tier};
pub use self::builder::LadderBuilder;
use self::local::Local;
use self::source::{Source, nearest};
use crate::bundle::Bundle;
use crate::error::Result;
use crate::key::TuneKey;
use crate::local::LocalDb;
use crate::mode::Mode;
use crate::record::{Record, joint_template_digest};
use crate::shipped::Shipped;
use crate::store::Store;
use crate::validate;

/// Largest distance of a nearest match: a factor of 2 in batch, sequences and seqlen each.
///
/// A record at the bound was tuned for half or double the blocks, or half or double the chunks of a sequence: the same kernels
/// are bound by the same thing, but for problems so small that they do not fill the GPU. A factor of 4 and more takes a problem
/// from one regime (few long sequences, bound by latency) to another (many short ones, bound by bandwidth). A factor of 2 is also
/// the least bound under which records at every other power of two answer for all sizes between them. It is an estimate:
/// `mamba2 tune --hold-out` measures, on shapes that were not tuned, whether what it lets through loses to the default, and
/// [`Ladder::held_out`] is what it asks. Beyond the bound the default speaks.
pub const NEAREST_BOUND: f64 = 1.0;

/// Answers kept in memory; a process that asks for more shapes starts over.
const MAX_ANSWERS: usize = 1 << 16;

/// Digest of each kernel's templates today, in the order of [`Kernel::ALL`].
type Templates = [String; Kernel::ALL.len()];

/// The look-up ladder: override, local, bundle, shipped, nearest, default. Immutable but for [`Ladder::learn`] and
/// [`Ladder::reload`]: other processes' tuning does not change answers under way.
///
/// ```
/// use mamba2_spec::{Arch, DeviceFacts, Problem};
/// use mamba2_tunedb::{Ladder, Tier};
/// let ladder = Ladder::builder().build();
/// let answer = ladder.look_up(&Problem::new(1, 1000, 3, 48, 1, 20), &DeviceFacts::assumed(Arch(80))).unwrap();
/// assert_eq!(answer.tier, Tier::Default);
/// ```
pub struct Ladder {
    mode: Mode,
    db: Option<LocalDb>,
    store: Option<Arc<Store>>,
    local: RwLock<Local>,
    bundles: Vec<Arc<Bundle>>,
    shipped: Shipped,
    templates: Option<Templates>,
    overrides: HashMap<TuneKey, StrategyConfig>,
    other_device: bool,
    warnings: Vec<String>,
    answers: RwLock<HashMap<TuneKey, Answer<StrategyConfig>>>,
    step_answers: RwLock<HashMap<TuneKey, Answer<StateUpdate>>>,
}

impl fmt::Debug for Ladder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ladder")
            .field("mode", &self.mode)
            .field("db", &self.db)
            .finish_non_exhaustive()
    }
}

/// A legal candidate answer.
struct Found<C> {
    config: C,
    tier: Tier,
    distance: f64,
    record: Record,
    stale: bool,
}

impl Ladder {
    /// A ladder of the embedded records only, until told more.
    pub fn builder() -> LadderBuilder {
        LadderBuilder::default()
    }

    /// How look-ups are answered.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Bundles in order of precedence, for their cubins.
    pub fn bundles(&self) -> &[Arc<Bundle>] {
        &self.bundles
    }

    /// Digest of the local snapshot, `None` without one. Ranks with the same digest, bundles and program answer alike.
    pub fn snapshot_digest(&self) -> Option<String> {
        self.local
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .digest
            .clone()
    }

    /// What could not be used, each once.
    pub fn warnings(&self) -> Vec<String> {
        let local = self.local.read().unwrap_or_else(PoisonError::into_inner);
        self.warnings
            .iter()
            .chain(&local.warnings)
            .cloned()
            .collect()
    }

    /// Config of a forward pass. Fails only if no config at all is legal.
    ///
    /// # Errors
    /// [`crate::TuneDbError::Spec`] if the problem is not legal, the GPU too old, or nothing fits it.
    pub fn look_up(&self, problem: &Problem, device: &DeviceFacts) -> Result<Answer> {
        let key = TuneKey::forward(problem, device);
        if let Some(answer) = self
            .answers
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
        {
            return Ok(answer.clone());
        }
        let answer = self.answer_forward(&key, problem, device)?;
        remember(&self.answers, key, &answer);
        Ok(answer)
    }

    fn answer_forward(
        &self,
        key: &TuneKey,
        problem: &Problem,
        device: &DeviceFacts,
    ) -> Result<Answer> {
        problem.check()?;
        device.arch.require_supported()?;
        let mut warnings = Vec::new();
        let pinned = match self.mode {
            Mode::Pinned(config) => Some(config),
            _ => self.overrides.get(key).copied(),
        };
        if let Some(config) = pinned {
            match rules::check_strategy(&config, problem, device) {
                Ok(()) => return Ok(plain(config, Tier::Override, warnings)),
                Err(e) => warnings.push(format!("the pinned config is not legal here: {e}")),
            }
        }
        if matches!(self.mode, Mode::Replay | Mode::Tune) {
            let check = |record: &Record| validate::check_strategy(record, problem, device);
            let near = |record: &Record| validate::transfer_strategy(record, problem, device);
            if let Some(answer) = self.find(key, true, kernels_of, check, near, &mut warnings) {
                return Ok(answer);
            }
        }
        Ok(plain(
            rules::default_strategy(problem, device)?,
            Tier::Default,
            warnings,
        ))
    }

    /// What [`Ladder::look_up`] would say had this very problem never been tuned: the nearest record within
    /// [`NEAREST_BOUND`], else the default. Not remembered.
    ///
    /// # Errors
    /// As [`Ladder::look_up`].
    pub fn held_out(&self, problem: &Problem, device: &DeviceFacts) -> Result<Answer> {
        problem.check()?;
        device.arch.require_supported()?;
        let mut warnings = Vec::new();
        let key = TuneKey::forward(problem, device);
        let check = |record: &Record| validate::check_strategy(record, problem, device);
        let near = |record: &Record| validate::transfer_strategy(record, problem, device);
        match self.find(&key, false, kernels_of, check, near, &mut warnings) {
            Some(answer) => Ok(answer),
            None => Ok(plain(
                rules::default_strategy(problem, device)?,
                Tier::Default,
                warnings,
            )),
        }
    }

    /// As [`Ladder::held_out`], for a decode step.
    ///
    /// # Errors
    /// As [`Ladder::look_up`].
    pub fn held_out_step(
        &self,
        problem: &StepProblem,
        device: &DeviceFacts,
    ) -> Result<Answer<StateUpdate>> {
        problem.check()?;
        device.arch.require_supported()?;
        let mut warnings = Vec::new();
        let key = TuneKey::step(problem, device);
        let check = |record: &Record| validate::check_step(record, problem, device);
        match self.find(
            &key,
            false,
            step_kernels,
            check,
            |r| check(r).map(Some),
            &mut warnings,
        ) {
            Some(answer) => Ok(answer),
            None => Ok(plain(
                rules::default_step(problem, device)?,
                Tier::Default,
                warnings,
            )),
        }
    }

    /// Config of a decode step.
    ///
    /// # Errors
    /// As [`Ladder::look_up`].
    pub fn look_up_step(
        &self,
        problem: &StepProblem,
        device: &DeviceFacts,
    ) -> Result<Answer<StateUpdate>> {
        let key = TuneKey::step(problem, device);
        if let Some(answer) = self
            .step_answers
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
        {
            return Ok(answer.clone());
        }
        problem.check()?;
        device.arch.require_supported()?;
        let mut warnings = Vec::new();
        let mut found = None;
        if matches!(self.mode, Mode::Replay | Mode::Tune) {
            let check = |record: &Record| validate::check_step(record, problem, device);
            found = self.find(
                &key,
                true,
                step_kernels,
                check,
                |r| check(r).map(Some),
                &mut warnings,
            );
        }
        let answer = match found {
            Some(answer) => answer,
            None => plain(
                rules::default_step(problem, device)?,
                Tier::Default,
                warnings,
            ),
        };
        remember(&self.step_answers, key, &answer);
        Ok(answer)
    }

    /// The best record for `key`: exact and fresh in order of the tiers, exact and stale (both only if `exact`), nearest, other
    /// GPUs. `check` and `check_near` say what config a record of this very key, or of another, means here, if
    /// anything.
    fn find<C>(
        &self,
        key: &TuneKey,
        exact: bool,
        kernels: impl Fn(&Record) -> Vec<Kernel>,
        check: impl Fn(&Record) -> Result<C>,
        check_near: impl Fn(&Record) -> Result<Option<C>>,
        warnings: &mut Vec<String>,
    ) -> Option<Answer<C>> {
        let local = self.local.read().unwrap_or_else(PoisonError::into_inner);
        let mut tiers: Vec<(Tier, Tier, &dyn Source)> =
            vec![(Tier::Local, Tier::LocalNearest, &local.learned)];
        tiers.extend(
            local
                .published
                .as_deref()
                .map(|s| (Tier::Local, Tier::LocalNearest, s)),
        );
        tiers.extend(
            self.bundles
                .iter()
                .map(|b| (Tier::Bundle, Tier::BundleNearest, &**b as &dyn Source)),
        );
        tiers.push((Tier::Shipped, Tier::ShippedNearest, &self.shipped));

        let usable =
            |source: &dyn Source, tier, at: &TuneKey, distance: f64, warnings: &mut Vec<String>| {
                let legal = source.get(at).and_then(|found| match found {
                    Some(record) if at == key => Ok(Some((check(&record)?, record))),
                    Some(record) => Ok(check_near(&record)?.map(|config| (config, record))),
                    None => Ok(None),
                });
                match legal {
                    Ok(found) => found.map(|(config, record)| {
                        let stale = self.templates.as_ref().is_some_and(|today| {
                            let of = |kernel| today[place(kernel)].clone();
                            let now = joint_template_digest(kernels(&record).into_iter().map(of));
                            now != record.evidence.built_with.template_digest
                        });
                        Found {
                            config,
                            tier,
                            distance,
                            record,
                            stale,
                        }
                    }),
                    Err(e) => {
                        // Asked once a key and process: the answer is remembered.
                        tracing::warn!("{tier} record passed over: {e}");
                        warnings.push(format!("{tier}: {e}"));
                        None
                    }
                }
            };

        let mut stale = None;
        for (tier, _, source) in tiers.iter().filter(|_| exact) {
            match usable(*source, *tier, key, 0.0, warnings) {
                Some(found) if !found.stale => {
                    return Some(answer(found, false, std::mem::take(warnings)));
                }
                Some(found) if stale.is_none() => stale = Some(found),
                _ => {}
            }
        }
        if let Some(found) = stale {
            return Some(answer(found, false, std::mem::take(warnings)));
        }
        let near = |near_key: &TuneKey, warnings: &mut Vec<String>| {
            let mut best: Option<Found<C>> = None;
            for (_, tier, source) in &tiers {
                // The exact key was asked already, or is held out.
                for candidate in nearest(*source, near_key, warnings)
                    .into_iter()
                    .filter(|found| found != key)
                {
                    let distance = near_key.distance(&candidate).unwrap_or(f64::INFINITY);
                    if let Some(found) = usable(*source, *tier, &candidate, distance, warnings) {
                        let rank = |f: &Found<C>| (f.stale, f.distance);
                        if best.as_ref().is_none_or(|b| rank(&found) < rank(b)) {
                            best = Some(found);
                        }
                        break;
                    }
                }
            }
            best
        };
        if let Some(found) = near(key, warnings) {
            return Some(answer(found, false, std::mem::take(warnings)));
        }
        if self.other_device {
            let mut counts: Vec<u32> = tiers
                .iter()
                .flat_map(|(_, _, s)| s.sm_counts(key).unwrap_or_default())
                .collect();
            counts.retain(|n| *n != key.sm_count());
            counts.sort_by_key(|n| (n.abs_diff(key.sm_count()), *n));
            counts.dedup();
            for count in counts {
                if let Some(found) = near(&key.with_sm_count(count), warnings) {
                    return Some(answer(found, true, std::mem::take(warnings)));
                }
            }
        }
        None
    }

    /// Takes a record into the local tier of this process, as after tuning without a writable cache.
    pub fn learn(&self, record: Record) {
        let mut local = self.local.write().unwrap_or_else(PoisonError::into_inner);
        local.learned.insert(record.key.to_string(), record);
        drop(local);
        self.forget();
    }

    /// Reads the local tier again, as after tuning or on request. Writes nothing.
    pub fn reload(&self) {
        let learned = std::mem::take(
            &mut self
                .local
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .learned,
        );
        let local = self.read_local(learned);
        local.warnings.iter().for_each(|w| tracing::warn!("{w}"));
        *self.local.write().unwrap_or_else(PoisonError::into_inner) = local;
        self.forget();
    }

    fn forget(&self) {
        self.answers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        self.step_answers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }
}

/// The kernels that a forward record was measured with.
fn kernels_of(record: &Record) -> Vec<Kernel> {
    let kernels = record.strategy().map(|config| config.kernels());
    kernels.map_or_else(|_| Vec::new(), |k| k.iter().map(|k| k.kernel()).collect())
}

fn place(kernel: Kernel) -> usize {
    Kernel::ALL
        .iter()
        .position(|k| *k == kernel)
        .expect("ALL should hold every kernel")
}

fn step_kernels(_: &Record) -> Vec<Kernel> {
    vec![Kernel::StateUpdate]
}

fn plain<C>(config: C, tier: Tier, warnings: Vec<String>) -> Answer<C> {
    Answer {
        config,
        tier,
        distance: 0.0,
        record: None,
        stale: false,
        other_device: false,
        warnings,
    }
}

fn answer<C>(found: Found<C>, other_device: bool, warnings: Vec<String>) -> Answer<C> {
    Answer {
        config: found.config,
        tier: found.tier,
        distance: found.distance,
        record: Some(Arc::new(found.record)),
        stale: found.stale,
        other_device,
        warnings,
    }
}

fn remember<C: Clone>(
    answers: &RwLock<HashMap<TuneKey, Answer<C>>>,
    key: TuneKey,
    answer: &Answer<C>,
) {
    let mut answers = answers.write().unwrap_or_else(PoisonError::into_inner);
    if answers.len() >= MAX_ANSWERS {
        answers.clear();
    }
    answers.insert(key, answer.clone());
}
