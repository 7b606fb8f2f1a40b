//! `mamba2 bench`: how long forward passes and decode steps take, beside the physical limit.

use std::time::{Duration, Instant};

use mamba2::{
    Device, DeviceTensor, Engine, Error, HasMeta, Problem, StepProblem, Timer, TimerPolicy,
};
use mamba2::{ForwardInputs, ForwardOutputs, StepInputs, StepOutputs};
use mamba2_reference::Pattern;
use mamba2_tuner::{Target, shapes};
use serde_json::{Value, json};

use crate::case::{ForwardCase, StepCase, output_views, step_output_views};
use crate::cli::{BenchArgs, Sweep};
use crate::engine::{backend_name, choice_json, describe, open};
use crate::error::CliError;
use crate::host::OwnedTensor;
use crate::print;
use crate::progress::bar;
use crate::tensor_file::write_whole;
use crate::tuning::parse_target;

/// On the CPU a shape takes at most about this long, but has at least three samples.
const CPU_BUDGET: Duration = Duration::from_secs(5);

struct Row {
    target: Target,
    samples_us: Vec<f64>,
    choice: Value,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    let targets = targets(args)?;
    let engine = open(&args.engine)?;
    let progress = bar(targets.len() as u64);
    let mut rows = Vec::new();
    for target in targets {
        progress.set_message(target.to_string());
        let (samples_us, choice) = match &target {
            Target::Forward(problem) => forward(&engine, problem, args.samples as usize)?,
            Target::Step(problem) => step(&engine, problem, args.samples as usize)?,
        };
        rows.push(Row {
            target,
            samples_us,
            choice,
        });
        progress.inc(1);
    }
    progress.finish_and_clear();
    match &args.json {
        Some(path) if path.as_os_str() == "-" => print::json(&to_json(&engine, &rows)),
        Some(path) => {
            print::out(&table(&engine, &rows))?;
            write_whole(path, format!("{:#}\n", to_json(&engine, &rows)).as_bytes())
        }
        None => print::out(&table(&engine, &rows)),
    }
}

fn targets(args: &BenchArgs) -> Result<Vec<Target>, CliError> {
    let mut targets: Vec<Target> = args
        .shape
        .iter()
        .map(|text| parse_target(text))
        .collect::<Result<_, _>>()?;
    let list = match args.sweep {
        None => return Ok(targets),
        Some(Sweep::Seed) => include_str!("../../../tuning-db/shapes/sweep.toml"),
        Some(Sweep::Models) => include_str!("../../../tuning-db/shapes/bench.toml"),
    };
    targets.extend(shapes::parse(list)?);
    Ok(targets)
}

fn forward(
    engine: &Engine,
    problem: &Problem,
    samples: usize,
) -> Result<(Vec<f64>, Value), CliError> {
    let case = ForwardCase::generated(problem, 1, Pattern::Plain);
    let plan = engine.plan(&case.problem)?;
    let choice = choice_json(plan.choice());
    let Some(device) = engine.device() else {
        let inputs = case.views()?;
        let mut outputs = case.outputs();
        let mut views = output_views(&mut outputs)?;
        return Ok((
            on_cpu(samples, || plan.forward_host(&inputs, &mut views))?,
            choice,
        ));
    };
    let up = |t: &OwnedTensor| upload(device, t);
    let up_all = |t: &Option<OwnedTensor>| t.as_ref().map(up).transpose();
    let (i, o) = (&case.inputs, case.outputs());
    let inputs = ForwardInputs {
        x: up(&i.x)?,
        dt: up(&i.dt)?,
        a: up(&i.a)?,
        b: up(&i.b)?,
        c: up(&i.c)?,
        d: up_all(&i.d)?,
        z: up_all(&i.z)?,
        dt_bias: up_all(&i.dt_bias)?,
        initial_states: up_all(&i.initial_states)?,
        cu_seqlens: up_all(&i.cu_seqlens)?,
    };
    let outputs = ForwardOutputs {
        out: up(&o.out)?,
        final_states: up_all(&o.final_states)?,
    };
    let workspace = device.alloc(plan.workspace_bytes())?;
    Ok((
        on_device(device, samples, |stream| {
            plan.forward(stream, &inputs, &outputs, &workspace)
        })?,
        choice,
    ))
}

fn step(
    engine: &Engine,
    problem: &StepProblem,
    samples: usize,
) -> Result<(Vec<f64>, Value), CliError> {
    let case = StepCase::generated(problem, 1, Pattern::Plain);
    let plan = engine.step_plan(&case.problem)?;
    let choice = choice_json(plan.choice());
    let Some(device) = engine.device() else {
        let inputs = case.views()?;
        let mut outputs = case.outputs();
        let mut views = step_output_views(&mut outputs)?;
        return Ok((
            on_cpu(samples, || plan.step_host(&inputs, &mut views))?,
            choice,
        ));
    };
    let up = |t: &OwnedTensor| upload(device, t);
    let up_all = |t: &Option<OwnedTensor>| t.as_ref().map(up).transpose();
    let (i, o) = (&case.inputs, case.outputs());
    let inputs = StepInputs {
        x: up(&i.x)?,
        dt: up(&i.dt)?,
        a: up(&i.a)?,
        b: up(&i.b)?,
        c: up(&i.c)?,
        d: up_all(&i.d)?,
        z: up_all(&i.z)?,
        dt_bias: up_all(&i.dt_bias)?,
        state_batch_indices: up_all(&i.state_batch_indices)?,
    };
    let outputs = StepOutputs {
        state: up(&o.state)?,
        out: up(&o.out)?,
    };
    Ok((
        on_device(device, samples, |stream| {
            plan.step(stream, &inputs, &outputs)
        })?,
        choice,
    ))
}

fn upload(device: &Device, tensor: &OwnedTensor) -> Result<DeviceTensor, CliError> {
    let buffer = device.upload(&tensor.to_le_bytes())?;
    Ok(DeviceTensor::new(&buffer, 0, *tensor.meta())?)
}

fn on_cpu(
    samples: usize,
    mut call: impl FnMut() -> Result<(), Error>,
) -> Result<Vec<f64>, CliError> {
    call()?;
    let begin = Instant::now();
    let mut samples_us = Vec::new();
    while samples_us.len() < samples && (samples_us.len() < 3 || begin.elapsed() < CPU_BUDGET) {
        let start = Instant::now();
        call()?;
        samples_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(samples_us)
}

/// CUDA graph replays with a cold L2, as the tuner measures.
fn on_device(
    device: &Device,
    samples: usize,
    mut call: impl FnMut(&mamba2::Stream) -> Result<(), Error>,
) -> Result<Vec<f64>, CliError> {
    let timer = Timer::new(device)?;
    let policy = TimerPolicy {
        samples,
        ..TimerPolicy::default()
    };
    let measured = timer.time(policy, &mut |stream, _| {
        call(stream).map_err(|error| match error {
            Error::Cuda(error) => error,
            Error::Spec(error) => error.into(),
            other => unreachable!("a plan on CUDA should fail in CUDA only: {other}"),
        })
    })?;
    Ok(measured.us)
}

fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => f64::NAN,
        n if n.is_multiple_of(2) => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        n => sorted[n / 2],
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Known for GPUs whose ceilings were measured.
fn limit_us(engine: &Engine, target: &Target) -> Option<f64> {
    engine
        .device_facts()
        .and_then(|facts| target.limit_us(facts))
}

fn table(engine: &Engine, rows: &[Row]) -> String {
    let mut text = format!("on {}\n", describe(engine));
    text += &format!(
        "{:>12} {:>12} {:>12} {:>12} {:>8}  shape\n",
        "median us", "min us", "max us", "limit us", "x limit"
    );
    for row in rows {
        let sorted = sorted(&row.samples_us);
        let median = median(&sorted);
        let limit = limit_us(engine, &row.target);
        let or_dash = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.1}"));
        text += &format!(
            "{median:>12.1} {:>12.1} {:>12.1} {:>12} {:>8}  {}\n",
            sorted.first().copied().unwrap_or(f64::NAN),
            sorted.last().copied().unwrap_or(f64::NAN),
            or_dash(limit),
            or_dash(limit.map(|l| median / l)),
            row.target
        );
    }
    text
}

fn to_json(engine: &Engine, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let sorted = sorted(&row.samples_us);
        json!({
            "shape": row.target.to_string(),
            "median_us": median(&sorted),
            "min_us": sorted.first(),
            "max_us": sorted.last(),
            "samples_us": row.samples_us,
            "limit_us": limit_us(engine, &row.target),
            "choice": row.choice,
        })
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "backend": backend_name(engine),
        "device": describe(engine),
        "facts": engine.device_facts(),
        "rows": rows.iter().map(row).collect::<Value>(),
    })
}
