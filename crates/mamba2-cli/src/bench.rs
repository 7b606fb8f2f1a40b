//! `mamba2 bench`: how long the forward pass takes, beside the physical limit.

use std::time::{Duration, Instant};

use mamba2::{
    Device, DeviceBuffer, DeviceTensor, Engine, Error, ForwardInputs, ForwardOutputs, HasMeta,
    Problem, Timer, TimerPolicy,
};
use mamba2_reference::{Pattern, generate};
use mamba2_spec::limit::{H200_BF16_FLOPS_PER_S, H200_COPY_BYTES_PER_S, Limit};
use serde_json::{Value, json};

use crate::case::{ForwardCase, output_views};
use crate::cli::{BenchArgs, Sweep};
use crate::engine::{backend_name, choice_json, describe, open};
use crate::error::CliError;
use crate::host::OwnedTensor;
use crate::print;
use crate::progress::bar;
use crate::tensor_file::write_whole;

/// On the CPU a shape takes at most about this long, but has at least three samples.
const CPU_BUDGET: Duration = Duration::from_secs(5);

/// Layers of published models: name, shape.
const MODELS: &[(&str, &str)] = &[
    ("Mamba-2 130M", "b=1,l=2048,h=24,p=64,g=1,n=128"),
    ("Mamba-2 2.7B", "b=1,l=4096,h=80,p=64,g=1,n=128"),
    ("Mamba-2 2.7B, batch 8", "b=8,l=2048,h=80,p=64,g=1,n=128"),
    ("Mamba-2 2.7B, long", "b=1,l=131072,h=80,p=64,g=1,n=128"),
    ("Nemotron-H", "b=1,l=2048,h=128,p=64,g=8,n=128"),
    ("Nemotron-H, long", "b=1,l=8192,h=128,p=64,g=8,n=128"),
    (
        "Nemotron Nano, headdim 80",
        "b=1,l=8192,h=128,p=80,g=8,n=128",
    ),
    ("Nemotron-H, batch 16", "b=16,l=1024,h=128,p=64,g=8,n=128"),
    ("Granite 4, Bamba", "b=1,l=32768,h=128,p=64,g=1,n=128"),
];

struct Row {
    name: String,
    problem: Problem,
    samples_us: Vec<f64>,
    choice: Value,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    let shapes = shapes(args)?;
    let engine = open(&args.engine)?;
    let progress = bar(shapes.len() as u64);
    let mut rows = Vec::new();
    for (name, problem) in shapes {
        progress.set_message(name.clone());
        let case = ForwardCase::from_reference(
            &problem,
            &generate(&problem, 1, Pattern::Plain).reference(),
        );
        let plan = engine.plan(&case.problem)?;
        let samples_us = match engine.device() {
            Some(device) => on_device(device, &plan, &case, args.samples as usize)?,
            None => on_cpu(&plan, &case, args.samples as usize)?,
        };
        rows.push(Row {
            name,
            problem,
            samples_us,
            choice: choice_json(plan.choice()),
        });
        progress.inc(1);
    }
    progress.finish_and_clear();
    let json_to_stdout = args.json.as_deref().is_some_and(|p| p.as_os_str() == "-");
    if !json_to_stdout {
        print::out(&table(&engine, &rows))?;
    }
    match &args.json {
        None => Ok(()),
        Some(_) if json_to_stdout => print::json(&to_json(&engine, &rows)),
        Some(path) => write_whole(path, format!("{:#}\n", to_json(&engine, &rows)).as_bytes()),
    }
}

fn shapes(args: &BenchArgs) -> Result<Vec<(String, Problem)>, CliError> {
    let mut shapes = Vec::new();
    for text in &args.shape {
        shapes.push((text.clone(), text.parse()?));
    }
    match args.sweep {
        None => {}
        Some(Sweep::Seed) => {
            for seqlen in [1024, 4096, 16384, 65536, 262_144] {
                for dstate in [64, 128, 256, 512] {
                    let problem = Problem::new(4, seqlen, 8, 64, 1, dstate);
                    shapes.push((problem.to_string(), problem));
                }
            }
        }
        Some(Sweep::Models) => {
            for (name, shape) in MODELS {
                shapes.push(((*name).to_string(), shape.parse()?));
            }
        }
    }
    Ok(shapes)
}

fn on_cpu(plan: &mamba2::Plan, case: &ForwardCase, samples: usize) -> Result<Vec<f64>, CliError> {
    let inputs = case.views()?;
    let mut outputs = case.outputs();
    let mut views = output_views(&mut outputs)?;
    plan.forward_host(&inputs, &mut views)?;
    let start = Instant::now();
    let mut samples_us = Vec::new();
    while samples_us.len() < samples && (samples_us.len() < 3 || start.elapsed() < CPU_BUDGET) {
        let start = Instant::now();
        plan.forward_host(&inputs, &mut views)?;
        samples_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(samples_us)
}

/// CUDA graph replays with a cold L2, as the tuner measures.
fn on_device(
    device: &Device,
    plan: &mamba2::Plan,
    case: &ForwardCase,
    samples: usize,
) -> Result<Vec<f64>, CliError> {
    let tensors = DeviceCase::new(device, case)?;
    let workspace = device.alloc(plan.workspace_bytes())?;
    let timer = Timer::new(device)?;
    let policy = TimerPolicy {
        samples,
        ..TimerPolicy::default()
    };
    let measured = timer.time(policy, &mut |stream, _| {
        plan.forward(stream, &tensors.inputs, &tensors.outputs, &workspace)
            .map_err(|error| match error {
                Error::Cuda(error) => error,
                Error::Spec(error) => error.into(),
                other => unreachable!("a CUDA plan should fail in CUDA only: {other}"),
            })
    })?;
    Ok(measured.us)
}

/// A case on the device.
struct DeviceCase {
    inputs: ForwardInputs<DeviceTensor>,
    outputs: ForwardOutputs<DeviceTensor>,
}

impl DeviceCase {
    fn new(device: &Device, case: &ForwardCase) -> Result<DeviceCase, CliError> {
        let up = |tensor: &OwnedTensor| -> Result<DeviceTensor, CliError> {
            let buffer: DeviceBuffer = device.upload(&tensor.to_le_bytes())?;
            Ok(DeviceTensor::new(&buffer, 0, *tensor.meta())?)
        };
        let up_all = |tensor: &Option<OwnedTensor>| tensor.as_ref().map(up).transpose();
        let (i, o) = (&case.inputs, case.outputs());
        Ok(DeviceCase {
            inputs: ForwardInputs {
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
            },
            outputs: ForwardOutputs {
                out: up(&o.out)?,
                final_states: up_all(&o.final_states)?,
            },
        })
    }
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

/// The least time of an H200, whose ceilings were measured; elsewhere the limit is not known.
fn limit_us(engine: &Engine, problem: &Problem) -> Option<f64> {
    let is_h200 = engine
        .device_facts()
        .is_some_and(|facts| facts.name.contains("H200"));
    is_h200.then(|| Limit::of(problem).us(H200_COPY_BYTES_PER_S, H200_BF16_FLOPS_PER_S))
}

fn table(engine: &Engine, rows: &[Row]) -> String {
    let mut text = format!(
        "on {}\n{:>12} {:>12} {:>12} {:>10} {:>12} {:>10}  shape\n",
        describe(engine),
        "median us",
        "min us",
        "max us",
        "GB/s",
        "limit us",
        "x limit"
    );
    for row in rows {
        let sorted = sorted(&row.samples_us);
        let median = median(&sorted);
        let limit = limit_us(engine, &row.problem);
        let or_dash = |v: Option<f64>| v.map_or("-".into(), |v| format!("{v:.1}"));
        text += &format!(
            "{median:>12.1} {:>12.1} {:>12.1} {:>10.1} {:>12} {:>10}  {}\n",
            sorted.first().copied().unwrap_or(f64::NAN),
            sorted.last().copied().unwrap_or(f64::NAN),
            Limit::of(&row.problem).bytes / median / 1e3,
            or_dash(limit),
            or_dash(limit.map(|l| median / l)),
            row.name
        );
    }
    text
}

fn to_json(engine: &Engine, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let sorted = sorted(&row.samples_us);
        let limit = Limit::of(&row.problem);
        json!({
            "name": row.name,
            "shape": row.problem.to_string(),
            "median_us": median(&sorted),
            "min_us": sorted.first(),
            "max_us": sorted.last(),
            "samples_us": row.samples_us,
            "least_bytes": limit.bytes,
            "least_flops": limit.flops,
            "limit_us": limit_us(engine, &row.problem),
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
