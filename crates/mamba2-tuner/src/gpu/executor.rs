use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mamba2_cuda::{
    Call, CudaError, Device, DeviceTensor, Jit, LoadedForward, LoadedStep, Stream, Timer,
    TimerPolicy,
};
use mamba2_reference::{Bounds, generate, generate_step};
use mamba2_spec::{
    DeviceFacts, ForwardInputs, ForwardOutputs, Kernel, KernelConfig, Problem, StepInputs,
    StepOutputs, StepProblem, StrategyConfig,
};
use rayon::prelude::*;

use super::compile::{compile_each, conditions, of_kernel};
use super::output::Scratch;
use super::place::Placement;
use super::trial::{Distance, ForwardTrial, Standard, StepTrial, failure_of};
use super::twins::{Trial, Twins, twin_of};
use crate::executor::{Check, Conditions, Executor, Failure, FailureKind, Rounds, Tell, Verified};
use crate::{Candidate, Target, TunerError};

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
    /// Of this shape and of earlier ones, with what was found on them.
    twins: Twins,
    real: Option<Real>,
    scratch: Option<Scratch>,
    /// Outputs of the standard on the real shape, on the device.
    standard: Option<(Candidate, Standard)>,
    /// Candidates loaded lately, by whether for the twin. Each is used three times in a row: verified, looked at, measured.
    loaded: HashMap<(bool, Candidate), Arc<Loaded>>,
}

/// Loaded candidates that are kept; a few batches' worth.
const KEPT: usize = 512;

enum Real {
    Forward(ForwardTrial),
    Step(StepTrial),
}

/// A candidate, loaded.
enum Loaded {
    Forward(Box<LoadedForward>),
    Step(Box<LoadedStep>),
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

    /// Starts anew for another shape. The old one's memory is free before the new one's is taken, but for its twins: shapes that differ
    /// in length or batch have the same.
    fn switch(&self, prepared: &mut Prepared, target: &Target) {
        if prepared.target.as_ref() != Some(target) {
            *prepared = Prepared {
                target: Some(target.clone()),
                twins: std::mem::take(&mut prepared.twins),
                ..Prepared::default()
            };
        }
    }

    /// Makes the twins that candidates are to be verified on: those whose whole config is known to be right there need none.
    fn make_twins(
        &self,
        prepared: &mut Prepared,
        target: &Target,
        candidates: &[Candidate],
    ) -> Result<(), TunerError> {
        let wholes: Vec<Candidate> = candidates.iter().map(whole).collect();
        self.with_room(prepared, target, |prepared| {
            let twins = &mut prepared.twins;
            twins.make(&self.device, &self.jit, target, &wholes)
        })
    }

    /// Makes something for a shape. What was kept of earlier shapes must not be in its way.
    fn with_room(
        &self,
        prepared: &mut Prepared,
        target: &Target,
        make: impl Fn(&mut Prepared) -> Result<(), CudaError>,
    ) -> Result<(), TunerError> {
        let mut made = make(prepared);
        if made.as_ref().is_err_and(CudaError::is_out_of_memory) {
            prepared.twins.release();
            made = make(prepared);
        }
        made.map_err(|e| self.unfit(target, &e))
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

    fn make_real(&self, target: &Target) -> Result<Real, CudaError> {
        Ok(match target {
            Target::Forward(problem) => {
                let made = generate(problem, super::SEED, super::PATTERN);
                Real::Forward(ForwardTrial::new(
                    &self.device,
                    &self.jit,
                    problem,
                    &made,
                    Placement::Exact,
                )?)
            }
            Target::Step(problem) => {
                let made = generate_step(problem, super::SEED, super::PATTERN);
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
        let whole = whole(candidate);
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
            (Target::Forward(problem), Candidate::Strategy(within)) => self
                .load_forward(problem, within)
                .map(|l| Loaded::Forward(l.into())),
            (Target::Step(problem), Candidate::Step(config)) => self
                .load_step(problem, config)
                .map(|l| Loaded::Step(l.into())),
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

    /// Loads what is not loaded of the candidates, on all cores: for their twins, unless they are known to be right there, and for the
    /// shape itself.
    fn load_ahead(&self, prepared: &mut Prepared, target: &Target, candidates: &[Candidate]) {
        let mut wholes: Vec<Candidate> = Vec::new();
        for whole in candidates.iter().map(whole) {
            if !wholes.contains(&whole) {
                wholes.push(whole);
            }
        }
        let (twins, known) = (&prepared.twins, &prepared.loaded);
        let load = |whole: Candidate| {
            let twin = twin_of(target, &whole).filter(|twin| twins.found(twin, &whole).is_none());
            // One after the other: the second finds the modules of the first.
            let places = [(false, Some(target.clone())), (true, twin)];
            places.into_iter().filter_map(move |(is_twin, problem)| {
                let key = (is_twin, whole);
                if known.contains_key(&key) {
                    return None;
                }
                let loaded = self.load_now(&problem?, &whole).ok()?;
                Some((key, Arc::new(loaded)))
            })
        };
        let loaded: Vec<((bool, Candidate), Arc<Loaded>)> =
            wholes.into_par_iter().flat_map_iter(load).collect();
        if prepared.loaded.len() + loaded.len() > KEPT {
            prepared.loaded.clear();
        }
        prepared.loaded.extend(loaded);
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
        let whole = whole(candidate);
        let problem = twin_of(target, candidate).ok_or_else(mismatch)?;
        if let Some(verified) = twins.found(&problem, &whole) {
            return Ok(verified);
        }
        let twin = twins.get(&problem).ok_or_else(mismatch)?;
        let loaded = self.load(kept, true, &twin.problem, candidate)?;
        let run = match (&twin.trial, &*loaded) {
            (Trial::Forward(trial), Loaded::Forward(loaded)) => {
                let bytes = loaded.plan().workspace.total_bytes;
                let scratch = self.scratch(scratch, bytes).map_err(|e| self.failure(&e))?;
                trial.run_twice(loaded, &self.stream, scratch)?
            }
            (Trial::Step(trial), Loaded::Step(loaded)) => trial.run_twice(loaded, &self.stream)?,
            _ => return Err(mismatch()),
        };
        let verified = twin.oracle.check(&run)?;
        twins.note(&problem, whole, verified);
        Ok(verified)
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

/// What runs when a candidate is verified: the whole strategy around a kernel.
fn whole(candidate: &Candidate) -> Candidate {
    match candidate {
        Candidate::Kernel { within, .. } => Candidate::Strategy(*within),
        other => *other,
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
        tell: Tell<'_>,
    ) -> Result<(), TunerError> {
        compile_each(&self.jit, self.device.facts(), target, candidates, tell);
        Ok(())
    }

    fn load(&self, target: &Target, candidates: &[Candidate]) -> Result<(), TunerError> {
        self.prepare(target)?;
        let mut prepared = self
            .prepared
            .lock()
            .expect("no holder of this lock should panic");
        self.make_twins(&mut prepared, target, candidates)?;
        self.load_ahead(&mut prepared, target, candidates);
        Ok(())
    }

    fn prepare(&self, target: &Target) -> Result<(), TunerError> {
        let mut prepared = self
            .prepared
            .lock()
            .expect("no holder of this lock should panic");
        self.switch(&mut prepared, target);
        if prepared.real.is_some() {
            return Ok(());
        }
        self.with_room(&mut prepared, target, |prepared| {
            prepared.real = Some(self.make_real(target)?);
            Ok(())
        })
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
            Check::Twin => {
                self.make_twins(&mut prepared, target, std::slice::from_ref(candidate))?;
                self.verify_twin(&mut prepared, target, candidate)
            }
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
