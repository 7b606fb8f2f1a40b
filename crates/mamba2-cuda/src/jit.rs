use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use mamba2_kernels::Source;
use mamba2_spec::Arch;
use serde::{Deserialize, Serialize};

use crate::cache::{Wanted, publish};
use crate::environment::Environment;
use crate::{
    CompileOptions, Cubin, CubinCache, CudaError, KernelIdentity, KernelKey, Nvrtc, NvrtcVersion,
};

const NOTE_FILE: &str = "nvrtc.json";

/// Rendered kernels in, cubins out: from the cache if it has them, else from NVRTC, which is opened at the first miss.
///
/// Which NVRTC would be opened is noted beside the cubins (file, size, date, version), so a process whose kernels are all
/// cached neither opens NVRTC nor calls it, and an upgraded NVRTC is still noticed. A host without NVRTC takes cubins of any
/// NVRTC version, the newest first.
#[derive(Clone)]
pub struct Jit {
    cache: CubinCache,
    options: CompileOptions,
    shipped: Option<Arc<dyn ShippedCubins>>,
    state: Arc<Mutex<State>>,
    counters: Arc<Counters>,
    in_flight: Arc<InFlight>,
}

/// What is being compiled, by digest: who wants the same waits for it, and finds it in the cache.
#[derive(Debug, Default)]
struct InFlight {
    digests: Mutex<BTreeSet<String>>,
    changed: Condvar,
}

/// The right to compile one kernel, until it is dropped.
struct Turn<'a> {
    in_flight: &'a InFlight,
    digest: String,
}

impl InFlight {
    fn turn(&self, digest: String) -> Turn<'_> {
        let digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        let mut digests = self
            .changed
            .wait_while(digests, |digests| digests.contains(&digest))
            .unwrap_or_else(PoisonError::into_inner);
        digests.insert(digest.clone());
        Turn {
            in_flight: self,
            digest,
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let digests = self.in_flight.digests.lock();
        digests
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.digest);
        self.in_flight.changed.notify_all();
    }
}

#[derive(Debug, Default)]
struct Counters {
    compiled: AtomicU64,
    cached: AtomicU64,
    shipped: AtomicU64,
}

/// Kernels that a [`Jit`] and its clones have handed out, by where they came from. A server that has warmed up should see `compiled`
/// stand still: a rise is a variant that the warm-up did not cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JitCounts {
    /// NVRTC made them.
    pub compiled: u64,
    /// From the cache on disk.
    pub cached: u64,
    /// From an imported bundle.
    pub shipped: u64,
}

/// Cubins that came ready made, for instance in an imported bundle. They are taken whatever NVRTC made them: whoever imported
/// them wanted them.
pub trait ShippedCubins: Send + Sync {
    /// The cubin of `identity`, if there is one.
    fn find(&self, identity: &KernelIdentity) -> Option<Cubin>;
}

/// Where a cubin came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// NVRTC made it just now.
    Compiled,
    /// From the cache on disk.
    Cache,
    /// From an imported bundle.
    Shipped,
    /// It was on the device already.
    Loaded,
}

impl std::fmt::Debug for Jit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jit")
            .field("cache", &self.cache)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct State {
    nvrtc: Option<Nvrtc>,
    wanted: Option<Wanted>,
    /// By name and text of the entry template: they are over all template text, and asked for with every config.
    source_digests: BTreeMap<(&'static str, &'static str), String>,
}

/// A kernel and where it came from.
#[derive(Clone, Debug)]
pub struct JitOutcome {
    /// The code.
    pub cubin: Cubin,
    /// Where it came from.
    pub origin: Origin,
}

impl Jit {
    /// A compiler in front of `cache`.
    pub fn new(cache: CubinCache) -> Jit {
        Jit::with_options(cache, CompileOptions::from_environment())
    }

    /// As [`Jit::new`], with other compiler options.
    pub fn with_options(cache: CubinCache, options: CompileOptions) -> Jit {
        Jit {
            cache,
            options,
            shipped: None,
            state: Arc::default(),
            counters: Arc::default(),
            in_flight: Arc::default(),
        }
    }

    /// The same compiler, which also takes cubins from `shipped` if the cache has none.
    pub fn with_shipped(mut self, shipped: Arc<dyn ShippedCubins>) -> Jit {
        self.shipped = Some(shipped);
        self
    }

    /// The cache.
    pub fn cache(&self) -> &CubinCache {
        &self.cache
    }

    /// Kernels handed out so far.
    pub fn counts(&self) -> JitCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        JitCounts {
            compiled: read(&self.counters.compiled),
            cached: read(&self.counters.cached),
            shipped: read(&self.counters.shipped),
        }
    }

    /// True once NVRTC has been opened.
    pub fn nvrtc_is_open(&self) -> bool {
        self.lock().nvrtc.is_some()
    }

    /// NVRTC, opened if it was not yet.
    ///
    /// # Errors
    /// [`CudaError::NvrtcMissing`].
    pub fn nvrtc(&self) -> Result<Nvrtc, CudaError> {
        let mut state = self.lock();
        self.open(&mut state)
    }

    /// The cubin of `source` for `arch`. Compiling is logged: it takes seconds.
    ///
    /// # Errors
    /// [`CudaError::NvrtcMissing`] if it is neither cached nor can be compiled, or whatever [`Nvrtc::compile`] refuses.
    pub fn cubin(&self, source: &Source, arch: Arch) -> Result<JitOutcome, CudaError> {
        self.cubin_of(source, &self.identity(source, arch), arch)
    }

    /// The identity of what [`Jit::cubin`] gives: equal ones are one cubin.
    pub fn identity(&self, source: &Source, arch: Arch) -> KernelIdentity {
        let mut state = self.lock();
        let digest = state
            .source_digests
            .entry((source.source_name, source.source))
            .or_insert_with(|| source.template_digest());
        KernelIdentity::with_digest(source, digest.clone(), arch, self.options)
    }

    /// As [`Jit::cubin`], by whoever has the identity.
    pub(crate) fn cubin_of(
        &self,
        source: &Source,
        identity: &KernelIdentity,
        arch: Arch,
    ) -> Result<JitOutcome, CudaError> {
        let started = Instant::now();
        let outcome = self.find_or_compile(source, identity, arch)?;
        let counter = match outcome.origin {
            Origin::Compiled => &self.counters.compiled,
            Origin::Cache | Origin::Loaded => &self.counters.cached,
            Origin::Shipped => &self.counters.shipped,
        };
        let count = counter.fetch_add(1, Ordering::Relaxed) + 1;
        if outcome.origin == Origin::Compiled {
            tracing::info!(
                kernel = source.entry,
                seconds = started.elapsed().as_secs_f64(),
                compiled_so_far = count,
                "compiled a kernel"
            );
        }
        Ok(outcome)
    }

    fn find_or_compile(
        &self,
        source: &Source,
        identity: &KernelIdentity,
        arch: Arch,
    ) -> Result<JitOutcome, CudaError> {
        if let Some(cubin) = self.cache.get(identity, self.wanted()) {
            return Ok(JitOutcome {
                cubin,
                origin: Origin::Cache,
            });
        }
        if let Some(cubin) = self.shipped.as_ref().and_then(|s| s.find(identity)) {
            return Ok(JitOutcome {
                cubin,
                origin: Origin::Shipped,
            });
        }
        let _turn = self.in_flight.turn(identity.digest());
        if let Some(cubin) = self.cache.get(identity, self.wanted()) {
            return Ok(JitOutcome {
                cubin,
                origin: Origin::Cache,
            });
        }
        let nvrtc = self.nvrtc()?;
        let compiled = nvrtc.compile_with(source, arch, self.options)?;
        let cubin = Cubin {
            key: KernelKey {
                identity: identity.clone(),
                nvrtc: nvrtc.version(),
            },
            compiled,
        };
        self.cache.put(&cubin);
        Ok(JitOutcome {
            cubin,
            origin: Origin::Compiled,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // The state is options and digests that are each set in one step: a panic elsewhere leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wanted(&self) -> Wanted {
        let mut state = self.lock();
        if let Some(wanted) = state.wanted {
            return wanted;
        }
        let noted = self
            .cache
            .directory()
            .and_then(|d| Note::read(d, &Environment::read()));
        let wanted = match noted {
            Some(version) => Wanted::Exactly(version),
            None => match self.open(&mut state) {
                Ok(nvrtc) => Wanted::Exactly(nvrtc.version()),
                Err(_) => Wanted::Newest,
            },
        };
        state.wanted = Some(wanted);
        wanted
    }

    fn open(&self, state: &mut State) -> Result<Nvrtc, CudaError> {
        if let Some(nvrtc) = &state.nvrtc {
            return Ok(nvrtc.clone());
        }
        let environment = Environment::read();
        let nvrtc = Nvrtc::load_in(&environment)?;
        state.wanted = Some(Wanted::Exactly(nvrtc.version()));
        state.nvrtc = Some(nvrtc.clone());
        if let (Some(directory), Some(note)) =
            (self.cache.directory(), Note::of(&nvrtc, &environment))
        {
            note.write(directory);
        }
        Ok(nvrtc)
    }
}

/// Which NVRTC the last search found.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    environment: String,
    path: String,
    bytes: u64,
    modified_ns: u128,
    version: NvrtcVersion,
}

impl Note {
    fn of(nvrtc: &Nvrtc, environment: &Environment) -> Option<Note> {
        let (bytes, modified_ns) = file_state(nvrtc.path())?;
        let environment = environment.fingerprint();
        Some(Note {
            environment,
            path: nvrtc.path().into(),
            bytes,
            modified_ns,
            version: nvrtc.version(),
        })
    }

    /// The version noted, if the same search would still find the same file.
    fn read(directory: &Path, environment: &Environment) -> Option<NvrtcVersion> {
        let note: Note =
            serde_json::from_slice(&std::fs::read(directory.join(NOTE_FILE)).ok()?).ok()?;
        let same = note.environment == environment.fingerprint()
            && file_state(&note.path) == Some((note.bytes, note.modified_ns));
        same.then_some(note.version)
    }

    fn write(&self, directory: &Path) {
        let same = std::fs::read(directory.join(NOTE_FILE))
            .is_ok_and(|b| serde_json::from_slice::<Note>(&b).is_ok_and(|n| n == *self));
        if !same && let Ok(text) = serde_json::to_vec(self) {
            // Without the note the next process opens NVRTC to learn its version; the cache itself warns if unwritable.
            let _ = publish(directory, NOTE_FILE, &text);
        }
    }
}

fn file_state(path: &str) -> Option<(u64, u128)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((
        meta.len(),
        meta.modified()
            .ok()?
            .duration_since(SystemTime::UNIX_EPOCH)
            .ok()?
            .as_nanos(),
    ))
}
