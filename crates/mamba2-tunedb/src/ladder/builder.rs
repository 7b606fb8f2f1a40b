use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, RwLock};

use mamba2_spec::{DeviceFacts, Kernel, Problem, StrategyConfig};

use super::{Ladder, Templates};
use crate::bundle::Bundle;
use crate::key::TuneKey;
use crate::local::LocalDb;
use crate::mode::Mode;
use crate::paths::CacheDir;
use crate::shipped::Shipped;
use crate::store::Store;

/// Collects what makes up a [`Ladder`].
#[derive(Default)]
pub struct LadderBuilder {
    mode: Mode,
    local: Option<LocalDb>,
    store: Option<Arc<Store>>,
    bundles: Vec<Arc<Bundle>>,
    shipped: Option<Shipped>,
    templates: Option<Templates>,
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

    /// The digest of each kernel's templates today: a record whose kernels had others is stale, and fresh records are
    /// preferred over stale ones of any tier. Without this no record is stale.
    #[must_use]
    pub fn templates(mut self, of: impl Fn(Kernel) -> String) -> Self {
        self.templates = Some(Kernel::ALL.map(of));
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
