use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mamba2_cuda::{
    Call, CudaError, Device, DeviceTensor, Jit, LoadedForward, LoadedStep, Stream, Timer,
    TimerPolicy,
};
use mamba2_reference::{Bounds, Pattern, generate, generate_step};
use mamba2_spec::{
    DeviceFacts, ForwardInputs, ForwardOutputs, Kernel, KernelConfig, Problem, StepInputs,
    StepOutputs, StepProblem, StrategyConfig, rules,
};

use super::compile::{compile_all, conditions, of_kernel};
use super::output::Scratch;
use super::place::Placement;
use super::trial::{Distance, ForwardTrial, Oracle, Standard, StepTrial, failure_of};
use super::twin;
use crate::executor::{
    Check, Compiled, Conditions, Executor, Failure, FailureKind, Rounds, Verified,
};
use crate::{Candidate, Target, TunerError};

/// Inputs like those of a trained model: some heads forget at once, some remember across many chunks.
const PATTERN: Pattern = Pattern::Model;
const SEED: u64 = 1;
/// Share of the free memory that one shape may use.
const MEMORY_SHARE: f64 = 0.9;

/// A GPU in this process. A candidate that hangs or crashes takes the process with it: see [`crate::worker`].
pub struct GpuExecutor {
    device: Device,
    jit: Jit,
    /// For everything but timing.
    stream: Stream,
    timer: Mutex<Timer>,
    memory_bytes: u64,
    conditions: [Conditions; Kernel::ALL.len()],
    lost: AtomicBool,
    prepared: Mutex<Prepared>,
}

/// What was made for the shape in hand.
#[derive(Default)]
struct Prepared {
    target: Option<Target>,
    /// By length: strategies that split sequences need longer ones.
    twins: HashMap<usize, Twin>,
    real: Option<Real>,
    scratch: Option<Scratch>,
    /// Outputs of the standard on the real shape, on the device.
    standard: Option<(Candidate, Standard)>,
    /// Candidates loaded lately, by whether for the twin. Each is used three times in a row: verified, looked at, measured.
    loaded: HashMap<(bool, Candidate), Arc<Loaded>>,
}

/// Loaded candidates that are kept; a few batches' worth.
const KEPT: usize = 512;

enum Twin {
    Forward(ForwardTrial, Oracle),
    Step(StepTrial, Oracle),
}

enum Real {
    Forward(ForwardTrial),
    Step(StepTrial),
}

/// A candidate, loaded.
enum Loaded {
    Forward(LoadedForward),
    Step(LoadedStep),
}

impl GpuExecutor {
    /// Opens device `ordinal`, compiling through `jit`.
    ///
    /// # Errors
    /// [`CudaError`] if there is no such device or it cannot be used.
    pub fn open(ordinal: usize, jit: Jit) -> Result<GpuExecutor, CudaError> {
        let device = Device::open(ordinal)?;
        let (major, minor) = device.driver_version();
        let conditions = conditions(&jit, &format!("{major}.{minor}"));
        let timer = Mutex::new(Timer::new(&device)?);
        let stream = device.stream()?;
        let (free, _) = device.memory_bytes()?;
        let memory_bytes = (free as f64 * MEMORY_SHARE) as u64;
        Ok(GpuExecutor {
            device,
            jit,
            stream,
            timer,
            memory_bytes,
            conditions,
            lost: AtomicBool::new(false),
            prepared: Mutex::default(),
        })
    }

    fn failure(&self, error: &CudaError) -> Failure {
        let failure = failure_of(error);
        self.note(&failure);
        failure
    }

    fn note(&self, failure: &Failure) {
        if failure.kind == FailureKind::Crash {
            self.lost.store(true, Ordering::SeqCst);
        }
    }

    /// Starts anew for another shape. The old one's memory is free before the new one's is taken.
    fn switch(&self, prepared: &mut Prepared, target: &Target) {
        if prepared.target.as_ref() != Some(target) {
            *prepared = Prepared {
                target: Some(target.clone()),
                ..Prepared::default()
            };
        }
    }

    fn unfit(&self, target: &Target, error: &CudaError) -> TunerError {
        self.note(&failure_of(error));
        if error.is_fatal() {
            return TunerError::Device(error.to_string());
        }
        TunerError::Unfit {
            target: target.to_string(),
            reason: error.to_string(),
        }
    }

    /// A twin for each length that the shape's strategies need.
    fn make_twins(&self, target: &Target) -> Result<HashMap<usize, Twin>, CudaError> {
        let mut twins = HashMap::new();
        match target {
            Target::Forward(problem) => {
                for config in rules::agreement_defaults(problem, self.device.facts()) {
                    let twin = twin::of_forward(problem, &config);
                    if twins.contains_key(&twin.seqlen) {
                        continue;
                    }
                    let mut made = generate(&twin, SEED, PATTERN);
                    let oracle = Oracle::forward(&twin, &made);
                    made.poison_tail(&twin);
                    let trial =
                        ForwardTrial::new(&self.device, &self.jit, &twin, &made, Placement::Exact)?;
                    twins.insert(twin.seqlen, Twin::Forward(trial, oracle));
                }
            }
            Target::Step(problem) => {
                let twin = twin::of_step(problem);
                let made = generate_step(&twin, SEED, PATTERN);
                let oracle = Oracle::step(&twin, &made);
                let trial =
                    StepTrial::new(&self.device, &self.jit, &twin, &made, Placement::Exact)?;
                twins.insert(twin_length(target, None), Twin::Step(trial, oracle));
            }
        }
        Ok(twins)
    }

    fn make_real(&self, target: &Target) -> Result<Real, CudaError> {
        Ok(match target {
            Target::Forward(problem) => {
                let made = generate(problem, SEED, PATTERN);
                Real::Forward(ForwardTrial::new(
                    &self.device,
                    &self.jit,
                    problem,
                    &made,
                    Placement::Exact,
                )?)
            }
            Target::Step(problem) => {
                let made = generate_step(problem, SEED, PATTERN);
                Real::Step(StepTrial::new(
                    &self.device,
                    &self.jit,
                    problem,
                    &made,
                    Placement::Exact,
                )?)
            }
        })
    }

    fn load(
        &self,
        kept: &mut HashMap<(bool, Candidate), Arc<Loaded>>,
        is_twin: bool,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Arc<Loaded>, Failure> {
        let whole = match candidate {
            Candidate::Kernel { within, .. } => Candidate::Strategy(*within),
            other => *other,
        };
        if let Some(loaded) = kept.get(&(is_twin, whole)) {
            return Ok(loaded.clone());
        }
        let loaded = Arc::new(self.load_now(target, &whole)?);
        if kept.len() >= KEPT {
            kept.clear();
        }
        kept.insert((is_twin, whole), loaded.clone());
        Ok(loaded)
    }

    fn load_now(&self, target: &Target, candidate: &Candidate) -> Result<Loaded, Failure> {
        let loaded = match (target, candidate) {
            (Target::Forward(problem), Candidate::Strategy(within)) => {
                self.load_forward(problem, within).map(Loaded::Forward)
            }
            (Target::Step(problem), Candidate::Step(config)) => {
                self.load_step(problem, config).map(Loaded::Step)
            }
            _ => {
                return Err(Failure::new(
                    FailureKind::Launch,
                    "the candidate is for another kind of shape",
                ));
            }
        };
        let loaded = loaded.map_err(|e| self.failure(&e))?;
        let local = match &loaded {
            Loaded::Forward(forward) => forward.reports().map(|r| r.local_bytes).max().unwrap_or(0),
            Loaded::Step(step) => step.report().local_bytes,
        };
        if local > 0 {
            return Err(Failure::new(
                FailureKind::Spill,
                format!("{local} bytes of local memory a thread"),
            ));
        }
        Ok(loaded)
    }

    fn load_forward(
        &self,
        problem: &Problem,
        config: &StrategyConfig,
    ) -> Result<LoadedForward, CudaError> {
        LoadedForward::load(&self.device, &self.jit, problem, config)
    }

    fn load_step(
        &self,
        problem: &StepProblem,
        config: &mamba2_spec::parameters::StateUpdate,
    ) -> Result<LoadedStep, CudaError> {
        LoadedStep::load(&self.device, &self.jit, problem, config)
    }

    /// Workspace of at least `bytes`, kept for the next candidate.
    fn scratch<'a>(
        &self,
        slot: &'a mut Option<Scratch>,
        bytes: usize,
    ) -> Result<&'a Scratch, CudaError> {
        if slot.as_ref().is_none_or(|s| s.bytes() < bytes) {
            *slot = None;
            *slot = Some(Scratch::new(&self.device, bytes)?);
        }
        Ok(slot.as_ref().expect("a scratch was just made"))
    }

    fn verify_twin(
        &self,
        prepared: &mut Prepared,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Verified, Failure> {
        let Prepared {
            twins,
            scratch,
            loaded: kept,
            ..
        } = prepared;
        let strategy = match candidate {
            Candidate::Kernel { within, .. } | Candidate::Strategy(within) => Some(within),
            Candidate::Step(_) => None,
        };
        let twin = twins
            .get(&twin_length(target, strategy))
            .ok_or_else(mismatch)?;
        match twin {
            Twin::Forward(trial, oracle) => {
                let twin = Target::Forward(trial.problem.clone());
                let loaded = self.load(kept, true, &twin, candidate)?;
                let Loaded::Forward(loaded) = &*loaded else {
                    return Err(mismatch());
                };
                let bytes = loaded.plan().workspace.total_bytes;
                let scratch = self.scratch(scratch, bytes).map_err(|e| self.failure(&e))?;
                oracle.check(&trial.run_twice(loaded, &self.stream, scratch)?)
            }
            Twin::Step(trial, oracle) => {
                let twin = Target::Step(trial.problem.clone());
                let loaded = self.load(kept, true, &twin, candidate)?;
                let Loaded::Step(loaded) = &*loaded else {
                    return Err(mismatch());
                };
                oracle.check(&trial.run_twice(loaded, &self.stream)?)
            }
        }
    }

    fn run_real(
        &self,
        prepared: &mut Prepared,
        target: &Target,
        candidate: &Candidate,
        standard: Option<&Standard>,
    ) -> Result<Distance, Failure> {
        let Prepared {
            real,
            scratch,
            loaded: kept,
            ..
        } = prepared;
        let loaded = self.load(kept, false, target, candidate)?;
        match (
            real.as_ref().expect("the shape should be prepared"),
            &*loaded,
        ) {
            (Real::Forward(trial), Loaded::Forward(loaded)) => {
                let bytes = loaded.plan().workspace.total_bytes;
                let scratch = self.scratch(scratch, bytes).map_err(|e| self.failure(&e))?;
                trial.check_twice(loaded, &self.stream, scratch, standard)
            }
            (Real::Step(trial), Loaded::Step(loaded)) => {
                trial.check_twice(loaded, &self.stream, standard)
            }
            _ => Err(mismatch()),
        }
    }

    fn verify_real(
        &self,
        prepared: &mut Prepared,
        target: &Target,
        candidate: &Candidate,
        against: &Candidate,
    ) -> Result<Verified, Failure> {
        let known = prepared.standard.take();
        let standard = match known.filter(|(standard, _)| standard == against) {
            Some((_, standard)) => standard,
            None => {
                self.run_real(prepared, target, against, None)?;
                let copied = match prepared.real.as_ref() {
                    Some(Real::Forward(trial)) => trial.standard(&self.stream),
                    Some(Real::Step(trial)) => trial.standard(&self.stream),
                    None => return Err(mismatch()),
                };
                copied.map_err(|e| self.failure(&e))?
            }
        };
        prepared.standard = Some((*against, standard.clone()));
        if candidate == against {
            return Ok(Verified::default());
        }
        let distance = self.run_real(prepared, target, candidate, Some(&standard))?;
        near_enough(target, distance)
    }

    /// Times candidates that leave the same kind of data in the workspace.
    fn measure_alike(
        &self,
        prepared: &mut Prepared,
        candidates: &[&Candidate],
        loaded: &[Arc<Loaded>],
        samples: usize,
    ) -> Result<Vec<Vec<f64>>, CudaError> {
        let policy = TimerPolicy {
            warmup: 1,
            samples,
            calls_per_replay: 1,
            cold: true,
        };
        let Prepared { real, scratch, .. } = prepared;
        let bytes = loaded.iter().map(|l| workspace_bytes(l)).max().unwrap_or(0);
        let scratch = self.scratch(scratch, bytes)?;
        let call = match real.as_ref().expect("the shape should be prepared") {
            Real::Forward(trial) => Tensors::Forward(trial.call()),
            Real::Step(trial) => Tensors::Step(trial.call()),
        };
        // Kernels timed alone find what the kernels before them leave.
        if let (Tensors::Forward((inputs, outputs)), Some(Loaded::Forward(first))) =
            (&call, loaded.first().map(|l| &**l))
        {
            first.enqueue(&self.stream, inputs, outputs, scratch.buffer())?;
            self.stream.synchronize()?;
        }
        let mut calls: Vec<Box<Call<'_>>> = candidates
            .iter()
            .zip(loaded)
            .map(|(candidate, loaded)| timed_call(candidate, loaded, &call, scratch))
            .collect();
        let mut borrowed: Vec<&mut Call<'_>> = calls
            .iter_mut()
            .map(|c| &mut **c as &mut Call<'_>)
            .collect();
        let timer = self
            .timer
            .lock()
            .expect("no holder of this lock should panic");
        let all = timer.compare(policy, &mut borrowed)?;
        Ok(all.into_iter().map(|s| s.us).collect())
    }
}

/// Length of the twin that serves a strategy; 0 for decode steps, which have one twin.
fn twin_length(target: &Target, strategy: Option<&StrategyConfig>) -> usize {
    match (target, strategy) {
        (Target::Forward(problem), Some(config)) => twin::of_forward(problem, config).seqlen,
        _ => 0,
    }
}

fn mismatch() -> Failure {
    Failure::new(
        FailureKind::Launch,
        "the candidate is for another kind of shape",
    )
}

fn workspace_bytes(loaded: &Loaded) -> usize {
    match loaded {
        Loaded::Forward(forward) => forward.plan().workspace.total_bytes,
        Loaded::Step(_) => 0,
    }
}

enum Tensors<'a> {
    Forward(
        (
            &'a ForwardInputs<DeviceTensor>,
            ForwardOutputs<DeviceTensor>,
        ),
    ),
    Step((&'a StepInputs<DeviceTensor>, StepOutputs<DeviceTensor>)),
}

fn timed_call<'a>(
    candidate: &Candidate,
    loaded: &'a Loaded,
    tensors: &'a Tensors<'a>,
    scratch: &'a Scratch,
) -> Box<Call<'a>> {
    match (loaded, tensors) {
        (Loaded::Forward(loaded), Tensors::Forward((inputs, outputs))) => {
            let alone = match candidate {
                Candidate::Kernel { kernel, within } => within
                    .kernels()
                    .iter()
                    .position(|k: &KernelConfig| k.kernel() == *kernel),
                _ => None,
            };
            Box::new(move |stream: &Stream, _| match alone {
                Some(index) => {
                    loaded.enqueue_kernel(index, stream, inputs, outputs, scratch.buffer())
                }
                None => loaded.enqueue(stream, inputs, outputs, scratch.buffer()),
            })
        }
        (Loaded::Step(loaded), Tensors::Step((inputs, outputs))) => {
            Box::new(move |stream: &Stream, _| loaded.enqueue(stream, inputs, outputs))
        }
        _ => Box::new(|_: &Stream, _| {
            Err(CudaError::Timer {
                expected: "a candidate for the kind of shape in hand",
                got: "another".into(),
            })
        }),
    }
}

/// Two right results of one shape differ by at most twice the bound: each may be off by one.
fn near_enough(target: &Target, distance: Distance) -> Result<Verified, Failure> {
    let bounds = match target {
        Target::Forward(p) => Bounds::of(p),
        Target::Step(p) => Bounds::of_step(p),
    };
    let mut faults = Vec::new();
    for (name, error, bound) in [
        ("out", distance.out, 2.0 * bounds.out),
        ("states", distance.states, 2.0 * bounds.states),
    ] {
        if error > bound {
            faults.push(format!("{name}: expected at most {bound:.1e} from the standard config on the shape itself, got {error:.1e}"));
        }
    }
    if faults.is_empty() {
        return Ok(Verified {
            out_error: distance.out,
            states_error: distance.states,
        });
    }
    Err(Failure::new(FailureKind::Wrong, faults.join("; ")))
}

/// What candidates must share so that one's intermediate results serve the other as input.
fn intermediate(candidate: &Candidate) -> Option<String> {
    match candidate {
        Candidate::Kernel { within, .. } => {
            Some(format!("{} {}", within.name(), within.agreement()))
        }
        _ => None,
    }
}

impl Executor for GpuExecutor {
    fn device(&self) -> &DeviceFacts {
        self.device.facts()
    }

    fn kernel_conditions(&self, kernel: Kernel) -> Conditions {
        of_kernel(&self.conditions, kernel)
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    fn memory_bytes(&self) -> Option<u64> {
        Some(self.memory_bytes)
    }

    fn compile(
        &self,
        target: &Target,
        candidates: &[Candidate],
    ) -> Result<Vec<Result<Compiled, Failure>>, TunerError> {
        Ok(compile_all(
            &self.jit,
            self.device.facts(),
            target,
            candidates,
        ))
    }

    fn prepare(&self, target: &Target) -> Result<(), TunerError> {
        let mut prepared = self
            .prepared
            .lock()
            .expect("no holder of this lock should panic");
        self.switch(&mut prepared, target);
        if prepared.twins.is_empty() {
            prepared.twins = self
                .make_twins(target)
                .map_err(|e| self.unfit(target, &e))?;
        }
        if prepared.real.is_none() {
            prepared.real = Some(self.make_real(target).map_err(|e| self.unfit(target, &e))?);
        }
        Ok(())
    }

    fn verify(
        &self,
        target: &Target,
        candidate: &Candidate,
        check: Check,
    ) -> Result<Result<Verified, Failure>, TunerError> {
        self.prepare(target)?;
        let mut prepared = self
            .prepared
            .lock()
            .expect("no holder of this lock should panic");
        let verified = match check {
            Check::Twin => self.verify_twin(&mut prepared, target, candidate),
            Check::RealShape { against } => {
                self.verify_real(&mut prepared, target, candidate, &against)
            }
        };
        if let Err(failure) = &verified {
            self.note(failure);
        }
        Ok(verified)
    }

    fn measure(
        &self,
        target: &Target,
        candidates: &[Candidate],
        rounds: Rounds,
    ) -> Result<Vec<Result<Vec<f64>, Failure>>, TunerError> {
        self.prepare(target)?;
        let mut prepared = self
            .prepared
            .lock()
            .expect("no holder of this lock should panic");
        let samples = (rounds.rounds * rounds.samples) as usize;
        let mut results: Vec<Option<Result<Vec<f64>, Failure>>> =
            candidates.iter().map(|_| None).collect();
        let mut kinds: Vec<Option<String>> = candidates.iter().map(intermediate).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let mut members = Vec::new();
            let mut loaded = Vec::new();
            for (i, candidate) in candidates
                .iter()
                .enumerate()
                .filter(|(_, c)| intermediate(c) == kind)
            {
                match self.load(&mut prepared.loaded, false, target, candidate) {
                    Ok(one) => {
                        members.push(i);
                        loaded.push(one);
                    }
                    Err(failure) => results[i] = Some(Err(failure)),
                }
            }
            let chosen: Vec<&Candidate> = members.iter().map(|i| &candidates[*i]).collect();
            if chosen.is_empty() {
                continue;
            }
            match self.measure_alike(&mut prepared, &chosen, &loaded, samples) {
                Ok(times) => members
                    .iter()
                    .zip(times)
                    .for_each(|(i, us)| results[*i] = Some(Ok(us))),
                // Whoever is at fault is found one by one: here, or in a new process if the context is gone.
                Err(error) if members.len() > 1 && error.is_fatal() => {
                    self.note(&failure_of(&error));
                    return Err(TunerError::Device(error.to_string()));
                }
                Err(_) if members.len() > 1 => {
                    for (i, one) in members.iter().zip(loaded) {
                        let alone =
                            self.measure_alike(&mut prepared, &[&candidates[*i]], &[one], samples);
                        results[*i] = Some(
                            alone
                                .map(|mut us| us.swap_remove(0))
                                .map_err(|e| self.failure(&e)),
                        );
                    }
                }
                Err(error) => results[members[0]] = Some(Err(self.failure(&error))),
            }
        }
        Ok(results
            .into_iter()
            .map(|r| r.expect("every candidate should have an answer"))
            .collect())
    }
}
