//! Calls made ready, and their times.

use std::time::{Duration, Instant};

use mamba2::{
    CudaError, Device, DeviceBuffer, DeviceTensor, Engine, Error, ForwardInputs, ForwardOutputs,
    Graph, Plan, Samples, StepInputs, StepOutputs, StepPlan, Stream, Timer, TimerPolicy,
};
use mamba2_cuda::{Call, Copier, Nothing, Origin};
use mamba2_reference::{Pattern, generate, generate_step};
use mamba2_tuner::Target;
use mamba2_tuner::gpu::{Placement, place};
use serde_json::Value;

use crate::case::{ForwardCase, StepCase, output_views, step_output_views};
use crate::engine::{choice_json, warn_of_choice};
use crate::error::CliError;

/// On the CPU a shape takes at most about this long, but has at least three samples.
const CPU_BUDGET: Duration = Duration::from_secs(5);
/// Bytes of the copy that gives the speed of memory: many times the cache, and half a millisecond, beside which the cost of
/// its launch is nothing.
const COPY_BYTES: usize = 1 << 30;
/// Parameters of the empty kernel, about as many as a decode step has.
pub const NOTHING_BYTES: usize = 296;
const SEED: u64 = 1;

/// A plan of either kind of call.
pub enum Planned {
    Forward(Box<Plan>),
    Step(Box<StepPlan>),
}

impl Planned {
    /// Looks up, compiles and loads.
    pub fn new(engine: &Engine, target: &Target) -> Result<Planned, CliError> {
        Ok(match target {
            Target::Forward(problem) => {
                let plan = engine.plan(problem)?;
                warn_of_choice(plan.choice());
                Planned::Forward(plan.into())
            }
            Target::Step(problem) => {
                let plan = engine.step_plan(problem)?;
                warn_of_choice(plan.choice());
                Planned::Step(plan.into())
            }
        })
    }

    /// Puts made inputs on the device.
    pub fn ready(self, device: &Device, pattern: Pattern) -> Result<Ready, CliError> {
        let placement = Placement::Exact;
        Ok(match self {
            Planned::Forward(plan) => {
                let problem = plan.problem();
                let made = generate(problem, SEED, pattern);
                let inputs = place::forward(device, problem, &made, placement)?;
                let outputs = place::forward_outputs(device, problem, placement)?;
                let workspace = device.alloc(plan.workspace_bytes())?;
                Ready::Forward(plan, inputs.into(), outputs, workspace)
            }
            Planned::Step(plan) => {
                let problem = plan.problem();
                let made = generate_step(problem, SEED, pattern);
                let inputs = place::step(device, problem, &made, placement)?;
                let outputs = place::step_outputs(device, problem, &made, placement)?;
                Ready::Step(plan, inputs.into(), outputs)
            }
        })
    }
}

/// A plan, and tensors on the device to call it with.
pub enum Ready {
    Forward(
        Box<Plan>,
        Box<ForwardInputs<DeviceTensor>>,
        ForwardOutputs<DeviceTensor>,
        DeviceBuffer,
    ),
    Step(
        Box<StepPlan>,
        Box<StepInputs<DeviceTensor>>,
        StepOutputs<DeviceTensor>,
    ),
}

impl Ready {
    /// Enqueues the call.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), Error> {
        match self {
            Ready::Forward(plan, inputs, outputs, workspace) => {
                plan.forward(stream, inputs, outputs, workspace)
            }
            Ready::Step(plan, inputs, outputs) => plan.step(stream, inputs, outputs),
        }
    }

    /// The call as a graph, as whoever makes it again and again with the same tensors would have it.
    pub fn capture(&self, stream: &Stream) -> Result<Graph, CudaError> {
        stream.capture(|stream| self.enqueue(stream).map_err(of_cuda))
    }

    /// Config and tier.
    pub fn choice(&self) -> Value {
        match self {
            Ready::Forward(plan, ..) => choice_json(plan.choice()),
            Ready::Step(plan, ..) => choice_json(plan.choice()),
        }
    }

    /// Bytes of parameters of each launch of a call.
    pub fn parameter_bytes(&self) -> Vec<usize> {
        match self {
            Ready::Forward(plan, ..) => plan
                .loaded()
                .map_or_else(Vec::new, |l| l.parameter_bytes().collect()),
            Ready::Step(plan, ..) => plan.loaded().iter().map(|l| l.parameter_bytes()).collect(),
        }
    }

    /// Kernels that NVRTC had to make for the plan.
    pub fn compiled(&self) -> usize {
        let origins: Vec<Origin> = match self {
            Ready::Forward(plan, ..) => plan.reports().iter().map(|r| r.origin).collect(),
            Ready::Step(plan, ..) => plan.loaded().iter().map(|l| l.report().origin).collect(),
        };
        origins.iter().filter(|o| **o == Origin::Compiled).count()
    }
}

/// Times of some shapes, taken in turns.
pub struct Measured {
    /// Samples and choice of each.
    pub rows: Vec<(Samples, Value)>,
    /// Speed of a plain copy, timed in turns with them; `None` on the CPU.
    pub copy_bytes_per_s: Option<f64>,
    /// Time of an empty kernel, likewise: what a launch takes whatever it does.
    pub nothing_us: Option<f64>,
}

/// Times calls on the backend of an engine.
pub struct Bench<'a> {
    engine: &'a Engine,
    samples: usize,
    gpu: Option<Gpu<'a>>,
}

struct Gpu<'a> {
    device: &'a Device,
    timer: Timer,
    copier: Copier,
    nothing: Nothing,
    from: DeviceBuffer,
    to: DeviceBuffer,
}

impl<'a> Bench<'a> {
    /// Takes the memory that timing needs.
    pub fn new(engine: &'a Engine, samples: usize) -> Result<Bench<'a>, CliError> {
        let gpu = match engine.device().zip(engine.jit()) {
            None => None,
            Some((device, jit)) => Some(Gpu {
                device,
                timer: Timer::new(device)?,
                // By a kernel: the driver's own copy reached 2755 GB/s on an H200 where a kernel reaches 4250.
                copier: Copier::load(device, jit)?,
                nothing: Nothing::load(device, jit, NOTHING_BYTES)?,
                // What is in it does not matter to a copy.
                from: device.alloc(COPY_BYTES)?,
                to: device.alloc(COPY_BYTES)?,
            }),
        };
        Ok(Bench {
            engine,
            samples,
            gpu,
        })
    }

    /// Times shapes in turns with one another and, on a GPU, with a copy: CUDA graph replays with a cold L2, as the tuner
    /// measures.
    pub fn together(&self, targets: &[Target], pattern: Pattern) -> Result<Measured, CliError> {
        let Some(gpu) = &self.gpu else {
            let rows = targets
                .iter()
                .map(|t| on_cpu(self.engine, t, self.samples, pattern));
            return Ok(Measured {
                rows: rows.collect::<Result<_, _>>()?,
                copy_bytes_per_s: None,
                nothing_us: None,
            });
        };
        let ready: Vec<Ready> = targets
            .iter()
            .map(|t| Planned::new(self.engine, t)?.ready(gpu.device, pattern))
            .collect::<Result<_, _>>()?;
        let mut calls: Vec<Box<Call<'_>>> = Vec::new();
        for one in &ready {
            calls.push(Box::new(move |stream, _| {
                one.enqueue(stream).map_err(of_cuda)
            }));
        }
        calls.push(Box::new(|stream, _| {
            gpu.copier.copy(stream, &gpu.to, &gpu.from)
        }));
        calls.push(Box::new(|stream, _| gpu.nothing.launch(stream)));
        let mut borrowed: Vec<&mut Call<'_>> = calls
            .iter_mut()
            .map(|c| &mut **c as &mut Call<'_>)
            .collect();
        let policy = TimerPolicy {
            samples: self.samples,
            ..TimerPolicy::default()
        };
        let mut all = gpu.timer.compare(policy, &mut borrowed)?;
        let nothing_us = all.pop().map(|n| n.median_us());
        let copy = all.pop().map(|c| c.median_us());
        Ok(Measured {
            rows: all
                .into_iter()
                .zip(ready.iter().map(Ready::choice))
                .collect(),
            copy_bytes_per_s: copy.map(|us| 2.0 * COPY_BYTES as f64 / (us * 1e-6)),
            nothing_us,
        })
    }
}

/// What a call on CUDA can say.
fn of_cuda(error: Error) -> CudaError {
    match error {
        Error::Cuda(error) => error,
        Error::Spec(error) => error.into(),
        other => unreachable!("a plan on CUDA should fail in CUDA only: {other}"),
    }
}

fn on_cpu(
    engine: &Engine,
    target: &Target,
    samples: usize,
    pattern: Pattern,
) -> Result<(Samples, Value), CliError> {
    match target {
        Target::Forward(problem) => {
            let case = ForwardCase::generated(problem, SEED, pattern);
            let plan = engine.plan(&case.problem)?;
            let inputs = case.views()?;
            let mut outputs = case.outputs();
            let mut views = output_views(&mut outputs)?;
            let samples = repeat(samples, || plan.forward_host(&inputs, &mut views))?;
            Ok((samples, choice_json(plan.choice())))
        }
        Target::Step(problem) => {
            let case = StepCase::generated(problem, SEED, pattern);
            let plan = engine.step_plan(&case.problem)?;
            let inputs = case.views()?;
            let mut outputs = case.outputs();
            let mut views = step_output_views(&mut outputs)?;
            let samples = repeat(samples, || plan.step_host(&inputs, &mut views))?;
            Ok((samples, choice_json(plan.choice())))
        }
    }
}

/// One call, waited for on the CPU backend.
pub fn once_on_cpu(engine: &Engine, target: &Target) -> Result<(), CliError> {
    on_cpu(engine, target, 0, Pattern::Plain).map(drop)
}

fn repeat(
    samples: usize,
    mut call: impl FnMut() -> Result<(), Error>,
) -> Result<Samples, CliError> {
    call()?;
    let begin = Instant::now();
    let mut us = Vec::new();
    while us.len() < samples && (us.len() < 3 || begin.elapsed() < CPU_BUDGET) {
        let start = Instant::now();
        call()?;
        us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(Samples { us })
}
