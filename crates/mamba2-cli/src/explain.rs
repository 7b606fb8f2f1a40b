//! `mamba2 explain`: which config a shape gets, from where, and why the others lost. Needs no GPU.

use std::collections::BTreeMap;
use std::fmt::Write;

use mamba2::{Arch, CacheDir, Device, DeviceFacts, Ladder, Problem, StrategyConfig};
use mamba2_spec::launch::plan;
use mamba2_spec::limit::Limit;
use mamba2_tunedb::{Answer, DEFAULT_WAIT, Environment, LocalDb, Outcome, Timing, TuneKey};
use serde_json::{Value, json};

use crate::cli::ExplainArgs;
use crate::engine::brief;
use crate::error::CliError;
use crate::print;

/// Losers printed per kernel.
const SHOWN: usize = 5;

/// Runs the command.
pub fn run(args: &ExplainArgs) -> Result<(), CliError> {
    let problem: Problem = args.shape.parse()?;
    let device = device(args)?;
    let cache = CacheDir::decide(&Environment::from_process());
    let ladder = Ladder::builder()
        .cache(&cache)
        .templates(mamba2_kernels::template_digest)
        .build();
    let answer = ladder.look_up(&problem, &device)?;
    let key = TuneKey::forward(&problem, &device);
    let timings = timings(&cache, &answer.config, &problem, &device);
    let mut warnings = ladder.warnings();
    warnings.extend(answer.warnings.iter().cloned());
    if args.json {
        return print::json(&to_json(
            &problem, &device, &key, &answer, &timings, &warnings,
        ));
    }
    print::out(&to_text(
        &problem, &device, &key, &answer, &timings, &warnings,
    ))
}

/// The GPU of `--arch`, else the one of this machine.
fn device(args: &ExplainArgs) -> Result<DeviceFacts, CliError> {
    match args.arch {
        Some(arch) => Ok(DeviceFacts::assumed(Arch(arch).require_supported()?)),
        None => match Device::open(args.device) {
            Ok(device) => Ok(device.facts().clone()),
            Err(error) => Err(CliError::NoDevice(format!(
                "{}; name a GPU to explain for, as in --arch 90",
                brief(&error)
            ))),
        },
    }
}

/// What was measured for this shape, whole calls first, then kernel by kernel. A store that cannot be read has nothing to say.
fn timings(
    cache: &CacheDir,
    config: &StrategyConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Vec<(String, Vec<Timing>)> {
    let Ok(db) = LocalDb::in_cache(cache) else {
        return Vec::new();
    };
    // Opening the store would make one; where nothing was tuned there is nothing to read.
    if !db.root().exists() {
        return Vec::new();
    }
    let mut subjects = vec![("whole call".to_string(), TuneKey::forward(problem, device))];
    for kernel in config.kernels() {
        subjects.push((
            kernel.kernel().to_string(),
            TuneKey::kernel(kernel.kernel(), problem, device),
        ));
    }
    subjects
        .into_iter()
        .map(|(name, key)| (name, db.timings(&[key], DEFAULT_WAIT).unwrap_or_default()))
        .filter(|(_, timings)| !timings.is_empty())
        .collect()
}

fn median_us(timing: &Timing) -> Option<f64> {
    match timing.outcome {
        Outcome::Measured { median_us, .. } => Some(median_us),
        Outcome::Failed { .. } => None,
    }
}

/// Failed candidates by stage, with one reason each.
fn failures(timings: &[Timing]) -> BTreeMap<String, (usize, String)> {
    let mut failures = BTreeMap::new();
    for timing in timings {
        if let Outcome::Failed { stage, reason } = &timing.outcome {
            let first = reason.lines().next().unwrap_or_default().to_string();
            failures
                .entry(format!("{stage:?}").to_lowercase())
                .or_insert((0, first))
                .0 += 1;
        }
    }
    failures
}

fn to_text(
    problem: &Problem,
    device: &DeviceFacts,
    key: &TuneKey,
    answer: &Answer,
    timings: &[(String, Vec<Timing>)],
    warnings: &[String],
) -> String {
    let mut text = String::new();
    let launch = plan(&answer.config, problem, device);
    let limit = Limit::of(problem);
    let _ = writeln!(text, "shape       {problem}");
    let _ = writeln!(
        text,
        "device      {} ({}, {} multiprocessors)",
        device.name, device.arch, device.sm_count
    );
    let _ = writeln!(text, "key         {key}");
    let _ = write!(text, "tier        {}", answer.tier);
    let _ = match (answer.distance > 0.0, answer.record.as_ref()) {
        (true, Some(record)) => writeln!(
            text,
            ", distance {:.2} from {}",
            answer.distance, record.key
        ),
        _ => writeln!(text),
    };
    if answer.stale {
        let _ = writeln!(
            text,
            "            tuned with other kernel templates: legal, but worth tuning again"
        );
    }
    let _ = writeln!(text, "strategy    {}", answer.config.name());
    for (config, launch) in answer.config.kernels().iter().zip(&launch.launches) {
        let _ = writeln!(
            text,
            "  {:<16} {}",
            config.kernel().name(),
            config.to_text()
        );
        let _ = writeln!(
            text,
            "  {:<16} {} blocks of {} threads, {} bytes of shared memory",
            "",
            launch.blocks(),
            launch.threads,
            launch.smem_bytes
        );
    }
    let _ = writeln!(text, "workspace   {} bytes", launch.workspace.total_bytes);
    let _ = writeln!(
        text,
        "at least    {:.1} MB moved, {:.2} GFLOP",
        limit.bytes / 1e6,
        limit.flops / 1e9
    );
    if let Some(record) = &answer.record {
        let e = &record.evidence;
        let _ = write!(
            text,
            "evidence    {:.2} us (spread {:.2} us, {} samples)",
            e.median_us, e.spread_us, e.samples
        );
        if let Some(default) = e.default_median_us {
            let _ = write!(text, ", the default config {default:.2} us");
        }
        let _ = writeln!(
            text,
            "\n            error {:.1e}, {} candidates, {} rejected, on {}, NVRTC {}, driver {}",
            e.max_error, e.candidates, e.rejected, e.gpu, e.built_with.nvrtc, e.built_with.driver
        );
    } else {
        let _ = writeln!(
            text,
            "evidence    none; `mamba2 tune --shape {problem}` on the GPU makes some"
        );
    }
    for (name, timings) in timings {
        let mut measured: Vec<&Timing> =
            timings.iter().filter(|t| median_us(t).is_some()).collect();
        measured.sort_by(|a, b| {
            median_us(a)
                .unwrap_or(f64::MAX)
                .total_cmp(&median_us(b).unwrap_or(f64::MAX))
        });
        let _ = writeln!(text, "measured    {name}: {} candidates", measured.len());
        for timing in measured.iter().take(SHOWN) {
            let _ = writeln!(
                text,
                "  {:10.2} us  {}",
                median_us(timing).unwrap_or_default(),
                timing.config_text()
            );
        }
        for (stage, (count, reason)) in failures(timings) {
            let _ = writeln!(text, "  {count} lost at {stage}, such as: {reason}");
        }
    }
    for warning in warnings {
        let _ = writeln!(text, "warning     {warning}");
    }
    text
}

fn to_json(
    problem: &Problem,
    device: &DeviceFacts,
    key: &TuneKey,
    answer: &Answer,
    timings: &[(String, Vec<Timing>)],
    warnings: &[String],
) -> Value {
    let launch = plan(&answer.config, problem, device);
    let limit = Limit::of(problem);
    json!({
        "shape": problem.to_string(),
        "device": device,
        "key": key,
        "tier": answer.tier.to_string(),
        "distance": answer.distance,
        "stale": answer.stale,
        "config": answer.config,
        "launches": launch.launches.iter().map(|l| json!({
            "kernel": l.kernel, "grid": l.blocks(), "threads": l.threads, "shared_memory_bytes": l.smem_bytes,
        })).collect::<Value>(),
        "workspace_bytes": launch.workspace.total_bytes,
        "least_bytes": limit.bytes,
        "least_flops": limit.flops,
        "record": answer.record.as_deref(),
        "measured": timings.iter().map(|(name, t)| (name.clone(), json!(t))).collect::<serde_json::Map<_, _>>(),
        "warnings": warnings,
    })
}
