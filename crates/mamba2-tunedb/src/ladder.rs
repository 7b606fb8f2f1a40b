use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{DeviceFacts, Problem, StepProblem, StrategyConfig, rules};

use crate::bundle::Bundle;
use crate::error::Result;
use crate::key::TuneKey;
use crate::local::LocalDb;
use crate::mode::Mode;
use crate::parts;
use crate::paths::CacheDir;
use crate::record::Record;
use crate::shipped::Shipped;
use crate::snapshot::Snapshot;
use crate::store::Store;
use crate::validate;

/// Largest distance of a nearest match: a factor of 2 in batch, sequences and seqlen each.
///
/// Within it, the work per multiprocessor and the number of chunks change by less than what separates the regimes of the
/// kernels (few long sequences, many short ones); records at powers of two then answer for every size between them.
/// Beyond it the default speaks.
pub const NEAREST_BOUND: f64 = 1.0;

/// Answers kept in memory; a process that asks for more shapes starts over.
const MAX_ANSWERS: usize = 1 << 16;

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

/// Where records can be looked up.
trait Source: Send + Sync {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>>;
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>>;
    /// Numbers of multiprocessors of GPUs of the same architecture that there are records for.
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>>;
}

/// Prefix of all keys of an architecture.
fn arch_prefix(key: &TuneKey) -> String {
    let text = key.to_string();
    let end = text.find(",sms=").map_or(text.len(), |i| i + ",sms=".len());
    text[..end].to_string()
}

fn sm_counts_of(keys: impl IntoIterator<Item = TuneKey>) -> Vec<u32> {
    let counts: std::collections::BTreeSet<u32> = keys.into_iter().map(|k| k.sm_count()).collect();
    counts.into_iter().collect()
}

impl Source for Snapshot {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Snapshot::get(self, key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        self.keys_with_prefix(&key.family_prefix())
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        self.keys_with_prefix(&arch_prefix(key)).map(sm_counts_of)
    }
}

impl Source for Store {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Store::get(self, key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        self.keys_with_prefix(&key.family_prefix())
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        self.keys_with_prefix(&arch_prefix(key)).map(sm_counts_of)
    }
}

impl Source for Bundle {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        self.record(key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        self.keys_with_prefix(&key.family_prefix())
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        self.keys_with_prefix(&arch_prefix(key)).map(sm_counts_of)
    }
}

impl Source for Shipped {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Shipped::get(self, key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        Ok(Shipped::family(self, key))
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        Ok(Shipped::sm_counts(self, key))
    }
}

impl Source for BTreeMap<String, Record> {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Ok(BTreeMap::get(self, &key.to_string()).cloned())
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        let prefix = key.family_prefix();
        let range = self
            .range(prefix.clone()..)
            .take_while(|(text, _)| text.starts_with(&prefix));
        Ok(range.map(|(_, record)| record.key).collect())
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        let same_arch = self.values().filter(|r| r.key.arch() == key.arch());
        Ok(sm_counts_of(same_arch.map(|r| r.key)))
    }
}

/// Digests of today's templates; a record with another digest is stale.
#[derive(Clone, Debug, Default)]
struct Templates {
    forward: Option<String>,
    step: Option<String>,
}

/// The local tier: what this process learned, parts, and the store or the snapshot.
#[derive(Default)]
struct Local {
    /// Wins over what lies below for the same key.
    learned: BTreeMap<String, Record>,
    published: Option<Arc<dyn Source>>,
    digest: Option<String>,
    warnings: Vec<String>,
}

/// Collects what makes up a [`Ladder`].
#[derive(Default)]
pub struct LadderBuilder {
    mode: Mode,
    local: Option<LocalDb>,
    store: Option<Arc<Store>>,
    bundles: Vec<Arc<Bundle>>,
    shipped: Option<Shipped>,
    templates: Templates,
    overrides: HashMap<TuneKey, StrategyConfig>,
    other_device: bool,
    warnings: Vec<String>,
}

impl LadderBuilder {
    /// How look-ups are answered; [`Mode::Replay`] unless set.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Uses the local database of a cache directory, and the bundles imported there. A missing directory is no fault.
    #[must_use]
    pub fn cache(mut self, cache: &CacheDir) -> Self {
        match LocalDb::in_cache(cache) {
            Ok(local) => {
                self.import_bundles(&local);
                self.local = Some(local);
            }
            Err(e) => self.warnings.push(e.to_string()),
        }
        self
    }

    fn import_bundles(&mut self, local: &LocalDb) {
        let Ok(entries) = std::fs::read_dir(local.bundles_path()) else {
            return;
        };
        let mut paths: Vec<PathBuf> = entries
            .flatten()
            .map(|e| e.path())
            .filter(|p| p.extension().is_some_and(|e| e == Bundle::EXTENSION))
            .collect();
        paths.sort();
        for path in paths {
            match Bundle::open(&path) {
                Ok(bundle) => self.bundles.push(Arc::new(bundle)),
                Err(e) => self.warnings.push(e.to_string()),
            }
        }
    }

    /// Looks up in a store that this process holds open, instead of its snapshot.
    #[must_use]
    pub fn store(mut self, store: Arc<Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Adds a bundle; earlier ones win.
    #[must_use]
    pub fn bundle(mut self, bundle: Arc<Bundle>) -> Self {
        self.bundles.push(bundle);
        self
    }

    /// Uses these shipped records instead of the embedded ones.
    #[must_use]
    pub fn shipped(mut self, shipped: Shipped) -> Self {
        self.shipped = Some(shipped);
        self
    }

    /// Digests of today's templates, as tuning writes them to [`crate::Provenance::template_digest`]. Fresh records are
    /// preferred over stale ones of any tier.
    #[must_use]
    pub fn templates(mut self, forward: impl Into<String>, step: impl Into<String>) -> Self {
        self.templates = Templates {
            forward: Some(forward.into()),
            step: Some(step.into()),
        };
        self
    }

    /// Pins the config of one problem.
    #[must_use]
    pub fn pin(mut self, problem: &Problem, device: &DeviceFacts, config: StrategyConfig) -> Self {
        self.overrides
            .insert(TuneKey::forward(problem, device), config);
        self
    }

    /// Also uses records of GPUs of the same architecture with another number of multiprocessors, as the last tier before
    /// the default. Answers say so.
    #[must_use]
    pub fn other_device(mut self, allowed: bool) -> Self {
        self.other_device = allowed;
        self
    }

    /// Opens what there is. Faults become warnings: a ladder can always answer.
    pub fn build(self) -> Ladder {
        let ladder = Ladder {
            mode: self.mode,
            db: self.local,
            store: self.store,
            local: RwLock::default(),
            bundles: self.bundles,
            shipped: self.shipped.unwrap_or_else(Shipped::embedded),
            templates: self.templates,
            overrides: self.overrides,
            other_device: self.other_device,
            warnings: self.warnings,
            answers: RwLock::default(),
            step_answers: RwLock::default(),
        };
        ladder.warnings.iter().for_each(|w| tracing::warn!("{w}"));
        ladder.reload();
        ladder
    }
}

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
    templates: Templates,
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
            if let Some(answer) =
                self.find(key, self.templates.forward.as_deref(), check, &mut warnings)
            {
                return Ok(answer);
            }
        }
        Ok(plain(
            rules::default_strategy(problem, device)?,
            Tier::Default,
            warnings,
        ))
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
            found = self.find(&key, self.templates.step.as_deref(), check, &mut warnings);
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

    /// The best record for `key`: exact and fresh in order of the tiers, exact and stale, nearest, other GPUs.
    fn find<C>(
        &self,
        key: &TuneKey,
        template: Option<&str>,
        check: impl Fn(&Record) -> Result<C>,
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
                let legal = source.get(at).and_then(|found| {
                    found
                        .map(|record| check(&record).map(|c| (c, record)))
                        .transpose()
                });
                match legal {
                    Ok(found) => found.map(|(config, record)| {
                        let stale = template.is_some_and(|digest| {
                            digest != record.evidence.built_with.template_digest
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
        for (tier, _, source) in &tiers {
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
                // The exact key was asked already.
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

    fn read_local(&self, learned: BTreeMap<String, Record>) -> Local {
        let mut local = Local {
            learned,
            ..Local::default()
        };
        if let Some(store) = &self.store {
            local.published = Some(store.clone());
            return local;
        }
        let Some(db) = &self.db else { return local };
        for path in parts::list(&db.parts_path()) {
            match parts::read(&path) {
                Ok(part) => part
                    .records
                    .into_iter()
                    .for_each(|record| merge_into(&mut local.learned, record)),
                Err(e) => local.warnings.push(format!("{e}; passed over")),
            }
        }
        match db.snapshot() {
            Ok(Some(snapshot)) => {
                // A part may be older than what was committed since.
                local.learned.retain(|_, record| {
                    let published = snapshot.get(&record.key).ok().flatten();
                    published.is_none_or(|published| {
                        !std::ptr::eq(published.preferred(record), &published)
                    })
                });
                local.digest = Some(snapshot.digest());
                local.published = Some(Arc::new(snapshot));
            }
            Ok(None) => self.read_store(db, &mut local),
            Err(e) => {
                let saved = Snapshot::salvage(&db.snapshot_path()).unwrap_or_default();
                local
                    .warnings
                    .push(format!("{e}; using {} good records of it", saved.len()));
                saved
                    .into_iter()
                    .for_each(|record| merge_into(&mut local.learned, record));
                self.read_store(db, &mut local);
            }
        }
        local
    }

    /// Without a good snapshot the store itself is asked, if it is there and nobody holds it.
    fn read_store(&self, db: &LocalDb, local: &mut Local) {
        if !db.store_path().is_dir() {
            return;
        }
        match db.open_store(Duration::ZERO) {
            Ok(store) => store
                .records()
                .flatten()
                .for_each(|record| merge_into(&mut local.learned, record)),
            Err(e) => local
                .warnings
                .push(format!("{e}; going on without the local store")),
        }
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

fn merge_into(records: &mut BTreeMap<String, Record>, record: Record) {
    let key = record.key.to_string();
    match records.get(&key) {
        Some(old) if std::ptr::eq(old.preferred(&record), old) => {}
        _ => drop(records.insert(key, record)),
    }
}

/// Keys of the source within [`NEAREST_BOUND`], nearest first; of equals the larger problem, then the order of the keys.
fn nearest(source: &dyn Source, key: &TuneKey, warnings: &mut Vec<String>) -> Vec<TuneKey> {
    let family = source.family(key).unwrap_or_else(|e| {
        warnings.push(e.to_string());
        Vec::new()
    });
    let mut near: Vec<(f64, TuneKey)> = family
        .into_iter()
        .filter_map(|k| {
            key.distance(&k)
                .filter(|d| *d <= NEAREST_BOUND)
                .map(|d| (d, k))
        })
        .collect();
    near.sort_by(|(a, ka), (b, kb)| a.total_cmp(b).then(kb.cmp(ka)));
    near.into_iter().map(|(_, k)| k).collect()
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
