use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mamba2_cuda::{
    CompileOptions, CubinCache, CudaError, Device, Jit, LoadedForward, LoadedStep, Nvrtc,
};
use mamba2_spec::{Alignment, DeviceFacts, Problem, StepProblem};
use mamba2_tunedb::{CacheDir, Environment, Ladder, Mode, Record, Tier};

use crate::bundles::BundleCubins;
use crate::choice::Choice;
use crate::plan::{Plan, StepPlan};
use crate::{Error, plan};

/// Directory of compiled kernels below the cache directory. A new format takes a new name.
pub const CUBIN_DIRECTORY: &str = "cubins-1";

/// Which backend an engine computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The CPU; never touches CUDA.
    Cpu,
    /// A CUDA device.
    Cuda,
}

/// Tunes one problem for an engine in [`Mode::Tune`]. Implemented by whoever links the tuner.
pub trait TuneHook: Send + Sync {
    /// Tunes a forward pass; `None` if there was nothing to gain or no time for it.
    ///
    /// # Errors
    /// The reason, in words. The plan is then made without.
    fn tune(&self, problem: &Problem, device: &Device, jit: &Jit)
    -> Result<Option<Record>, String>;

    /// Tunes a decode step.
    ///
    /// # Errors
    /// As [`TuneHook::tune`].
    fn tune_step(
        &self,
        problem: &StepProblem,
        device: &Device,
        jit: &Jit,
    ) -> Result<Option<Record>, String>;
}

enum Wish {
    Auto,
    Cpu,
    Cuda(Device),
}

/// Collects what makes up an [`Engine`]. Without a word about the backend it is [`EngineBuilder::auto`].
pub struct EngineBuilder {
    wish: Wish,
    mode: Option<Mode>,
    cache: Option<CacheDir>,
    options: CompileOptions,
    tuner: Option<Arc<dyn TuneHook>>,
}

impl EngineBuilder {
    /// Computes on the CPU. CUDA is not looked for.
    #[must_use]
    pub fn cpu(mut self) -> EngineBuilder {
        self.wish = Wish::Cpu;
        self
    }

    /// Computes on CUDA device `ordinal` of the visible ones.
    ///
    /// # Errors
    /// [`Error::Cuda`] without a driver, without such a device, or for one that is too old.
    pub fn cuda(mut self, ordinal: usize) -> Result<EngineBuilder, Error> {
        self.wish = Wish::Cuda(Device::open(ordinal)?);
        Ok(self)
    }

    /// Computes on the first CUDA device if it can be used, else on the CPU; [`Engine::passed_over`] then says why.
    #[must_use]
    pub fn auto(mut self) -> EngineBuilder {
        self.wish = Wish::Auto;
        self
    }

    /// How configs are looked up. Without it, the variable `MAMBA2_MODE`, else [`Mode::Replay`].
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> EngineBuilder {
        self.mode = Some(mode);
        self
    }

    /// The cache directory, or `None` for no cache. Without it, [`CacheDir::decide`] decides.
    #[must_use]
    pub fn cache_dir(mut self, path: Option<PathBuf>) -> EngineBuilder {
        self.cache = Some(match path {
            Some(path) => CacheDir::fixed(path),
            None => CacheDir::none("the caller wants none"),
        });
        self
    }

    /// Compiles kernels with source lines, for profilers and compute-sanitizer.
    #[must_use]
    pub fn lineinfo(mut self, lineinfo: bool) -> EngineBuilder {
        self.options.lineinfo = lineinfo;
        self
    }

    /// Who tunes in [`Mode::Tune`].
    #[must_use]
    pub fn tuner(mut self, tuner: Arc<dyn TuneHook>) -> EngineBuilder {
        self.tuner = Some(tuner);
        self
    }

    /// Makes the engine.
    ///
    /// # Errors
    /// [`Error::NoTuner`] for [`Mode::Tune`] without a tuner, [`Error::TuneDb`] for a malformed `MAMBA2_MODE`.
    pub fn build(self) -> Result<Engine, Error> {
        let environment = Environment::from_process();
        let mode = match self.mode {
            Some(mode) => mode,
            None => environment.mode()?.unwrap_or_default(),
        };
        if mode == Mode::Tune && self.tuner.is_none() {
            return Err(Error::NoTuner);
        }
        let cache = self.cache.unwrap_or_else(|| CacheDir::decide(&environment));
        let cuda =
            |device: Device| Cuda::new(device, &cache, mode, self.options, self.tuner.clone());
        let (cuda, passed_over) = match self.wish {
            Wish::Cpu => (None, None),
            Wish::Cuda(device) => (Some(cuda(device)), None),
            Wish::Auto => match Device::open(0).map(cuda).and_then(Cuda::able) {
                Ok(cuda) => (Some(cuda), None),
                Err(error) => (None, Some(error)),
            },
        };
        Ok(Engine {
            cuda,
            passed_over,
            cache,
        })
    }
}

/// What the CUDA backend is made of.
struct Cuda {
    device: Device,
    jit: Jit,
    ladder: Ladder,
    tuner: Option<Arc<dyn TuneHook>>,
    tunings: AtomicU64,
}

impl Cuda {
    fn new(
        device: Device,
        cache: &CacheDir,
        mode: Mode,
        options: CompileOptions,
        tuner: Option<Arc<dyn TuneHook>>,
    ) -> Cuda {
        let ladder = Ladder::builder()
            .mode(mode)
            .cache(cache)
            .templates(mamba2_kernels::template_digest)
            .build();
        let cubins = match &cache.path {
            Some(path) => CubinCache::new(path.join(CUBIN_DIRECTORY)),
            None => CubinCache::disabled(),
        };
        let bundles = BundleCubins::new(ladder.bundles().to_vec(), device.facts().arch);
        let options = CompileOptions {
            racecheck: options.racecheck || CompileOptions::from_environment().racecheck,
            ..options
        };
        let jit = Jit::with_options(cubins, options).with_shipped(Arc::new(bundles));
        Cuda {
            device,
            jit,
            ladder,
            tuner,
            tunings: AtomicU64::new(0),
        }
    }

    /// Itself, unless there is neither a compiler nor any compiled kernel.
    fn able(self) -> Result<Cuda, CudaError> {
        let has_kernels = !self.ladder.bundles().is_empty() || !self.jit.cache().is_empty();
        if !has_kernels {
            Nvrtc::load()?;
        }
        Ok(self)
    }

    fn choose(&self, problem: &Problem) -> Result<Choice, Error> {
        let answer = self.ladder.look_up(problem, self.device.facts())?;
        if !wants_tuning(self.ladder.mode(), answer.tier, answer.stale) {
            return Ok(Choice::of(answer));
        }
        let tuned = self.tuner.as_ref().map(|t| {
            self.count_tuning(problem);
            t.tune(problem, &self.device, &self.jit)
        });
        if self.learn(tuned) {
            return Ok(Choice::of(
                self.ladder.look_up(problem, self.device.facts())?,
            ));
        }
        Ok(Choice::of(answer))
    }

    fn choose_step(
        &self,
        problem: &StepProblem,
    ) -> Result<Choice<mamba2_spec::parameters::StateUpdate>, Error> {
        let answer = self.ladder.look_up_step(problem, self.device.facts())?;
        if !wants_tuning(self.ladder.mode(), answer.tier, answer.stale) {
            return Ok(Choice::of(answer));
        }
        let tuned = self.tuner.as_ref().map(|t| {
            self.count_tuning(problem);
            t.tune_step(problem, &self.device, &self.jit)
        });
        if self.learn(tuned) {
            return Ok(Choice::of(
                self.ladder.look_up_step(problem, self.device.facts())?,
            ));
        }
        Ok(Choice::of(answer))
    }

    fn load(&self, problem: &Problem, choice: &Choice) -> Result<LoadedForward, Error> {
        let config = choice
            .config
            .as_ref()
            .expect("a choice on CUDA should have a config");
        Ok(LoadedForward::load(
            &self.device,
            &self.jit,
            problem,
            config,
        )?)
    }

    fn count_tuning(&self, shape: &dyn std::fmt::Display) {
        let count = self.tunings.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::info!(%shape, tunings_so_far = count, "tuning a shape that has no record");
    }

    /// Takes in what the tuner found. A failed tuning costs time, never an answer.
    fn learn(&self, tuned: Option<Result<Option<Record>, String>>) -> bool {
        match tuned {
            Some(Ok(Some(record))) => {
                self.ladder.learn(record);
                true
            }
            Some(Err(reason)) => {
                tracing::warn!(%reason, "tuning failed, going on without");
                false
            }
            Some(Ok(None)) | None => false,
        }
    }
}

/// True if the answer is anything but a fresh record of this very problem.
fn wants_tuning(mode: Mode, tier: Tier, stale: bool) -> bool {
    mode == Mode::Tune
        && (stale
            || !matches!(
                tier,
                Tier::Override | Tier::Local | Tier::Bundle | Tier::Shipped
            ))
}

/// A backend, its caches and its tuning records. Makes plans; usable from any thread.
///
/// ```
/// use mamba2::{Engine, Problem};
/// let engine = Engine::builder().cpu().build()?;
/// let problem: Problem = "b=1,l=100,h=2,p=16,g=1,n=16,dtype=f32".parse()?;
/// let plan = engine.plan(&problem)?;
/// assert_eq!(plan.workspace_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Engine {
    cuda: Option<Cuda>,
    passed_over: Option<CudaError>,
    cache: CacheDir,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("Engine");
        debug.field("backend", &self.backend());
        if let Some(cuda) = &self.cuda {
            debug.field("device", &cuda.device);
        }
        debug.finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts making an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder {
            wish: Wish::Auto,
            mode: None,
            cache: None,
            options: CompileOptions::default(),
            tuner: None,
        }
    }

    /// Which backend it computes on.
    pub fn backend(&self) -> Backend {
        if self.cuda.is_some() {
            Backend::Cuda
        } else {
            Backend::Cpu
        }
    }

    /// Why [`EngineBuilder::auto`] took the CPU.
    pub fn passed_over(&self) -> Option<&CudaError> {
        self.passed_over.as_ref()
    }

    /// Facts of the GPU; `None` on the CPU backend.
    pub fn device_facts(&self) -> Option<&DeviceFacts> {
        self.cuda.as_ref().map(|c| c.device.facts())
    }

    /// The GPU; `None` on the CPU backend.
    pub fn device(&self) -> Option<&Device> {
        self.cuda.as_ref().map(|c| &c.device)
    }

    /// Compiler and cubin cache; `None` on the CPU backend.
    pub fn jit(&self) -> Option<&Jit> {
        self.cuda.as_ref().map(|c| &c.jit)
    }

    /// Shapes this engine has tuned; 0 outside [`Mode::Tune`]. Kernels it compiled: `jit().counts()`.
    pub fn tunings(&self) -> u64 {
        self.cuda
            .as_ref()
            .map_or(0, |c| c.tunings.load(Ordering::Relaxed))
    }

    /// The look-up ladder; `None` on the CPU backend.
    pub fn ladder(&self) -> Option<&Ladder> {
        self.cuda.as_ref().map(|c| &c.ladder)
    }

    /// The cache directory, and why it is that one.
    pub fn cache_dir(&self) -> &CacheDir {
        &self.cache
    }

    /// Looks up the config of a forward pass, compiles and loads its kernels. Every variant the calls may need is ready then:
    /// a problem that promises 16-byte alignment also gets the kernels for calls that do not keep the promise. Reusable for ever.
    /// Must not be called while a stream of this thread is being captured.
    ///
    /// # Errors
    /// [`Error::Spec`] for a problem that is not legal, [`Error::Cuda`] if a kernel cannot be compiled or loaded.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, Error> {
        problem.check()?;
        let Some(cuda) = &self.cuda else {
            return Ok(Plan::cpu(problem.clone()));
        };
        // Before anything is compiled beside it: a tuner times.
        let choice = cuda.choose(problem)?;
        if problem.alignment == Alignment::Element {
            let main = cuda.load(problem, &choice)?;
            return Ok(Plan::cuda(problem.clone(), main, None, choice));
        }
        // The other path is for calls that break a promise; it is looked up, but not worth tuning.
        let any = Problem {
            alignment: Alignment::Element,
            ..problem.clone()
        };
        let any_choice = Choice::of(cuda.ladder.look_up(&any, cuda.device.facts())?);
        let (main, any) = rayon::join(
            || cuda.load(problem, &choice),
            || cuda.load(&any, &any_choice),
        );
        Ok(Plan::cuda(problem.clone(), main?, Some(any?), choice))
    }

    /// Looks up the config of a decode step, compiles and loads its kernel.
    ///
    /// # Errors
    /// As [`Engine::plan`].
    pub fn step_plan(&self, problem: &StepProblem) -> Result<StepPlan, Error> {
        problem.check()?;
        let Some(cuda) = &self.cuda else {
            return Ok(plan::StepPlan::cpu(problem.clone()));
        };
        let choice = cuda.choose_step(problem)?;
        let config = choice
            .config
            .as_ref()
            .expect("a choice on CUDA should have a config");
        let loaded = LoadedStep::load(&cuda.device, &cuda.jit, problem, config)?;
        Ok(StepPlan::cuda(problem.clone(), loaded, choice))
    }
}
