//! `mamba2 bench --first-call`: how long a new process takes to its first result, with kernels that an earlier process compiled.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::ValueEnum;
use mamba2::{Device, Samples};
use mamba2_reference::Pattern;
use mamba2_tuner::Target;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::measure::{Planned, once_on_cpu};
use crate::cli::{BackendArg, BenchArgs, EngineArgs, FirstCallArgs};
use crate::engine::{describe, open};
use crate::error::CliError;
use crate::print;
use crate::shape::parse_target;

/// Processes per shape, unless the command line says otherwise.
const PROCESSES: usize = 10;

/// What a child says about itself, in one line. Unit of times: milliseconds.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    device: String,
    /// Loading the driver, cuInit, and making the context: CUDA's own start.
    cuda_ms: f64,
    /// Look-up, compilation or cache, loading of the kernels.
    prepare_ms: f64,
    /// Making test inputs and copying them to the device, which is no part of a caller's first call.
    inputs_ms: f64,
    /// The call, waited for. On the CPU, with the making of its inputs.
    call_ms: f64,
    /// Kernels that NVRTC had to make.
    compiled: usize,
}

/// One process: from its start to its report, and the report.
struct Process {
    total_ms: f64,
    report: Report,
}

impl Process {
    /// Process start to first result, without CUDA's own start and the making of test inputs.
    fn own_ms(&self) -> f64 {
        self.total_ms - self.report.cuda_ms - self.report.inputs_ms
    }
}

/// The measured process: one call, then a line.
pub fn child(args: &FirstCallArgs) -> Result<(), CliError> {
    let target = parse_target(&args.shape)?;
    let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let device = match args.engine.backend {
        BackendArg::Cpu => None,
        BackendArg::Cuda => Some(Device::open(args.engine.device)?),
        BackendArg::Auto => Device::open(args.engine.device).ok(),
    };
    let cuda_ms = device.as_ref().map_or(0.0, |_| ms(start));
    let start = Instant::now();
    let engine = open(&args.engine)?;
    let mut report = Report {
        device: describe(&engine),
        cuda_ms,
        prepare_ms: 0.0,
        inputs_ms: 0.0,
        call_ms: 0.0,
        compiled: 0,
    };
    match engine.device() {
        None => {
            report.prepare_ms = ms(start);
            let start = Instant::now();
            once_on_cpu(&engine, &target)?;
            report.call_ms = ms(start);
        }
        Some(device) => {
            let plan = Planned::new(&engine, &target)?;
            report.prepare_ms = ms(start);
            let start = Instant::now();
            let ready = plan.ready(device, Pattern::Plain)?;
            let stream = device.stream()?;
            report.inputs_ms = ms(start);
            let start = Instant::now();
            ready.enqueue(&stream)?;
            stream.synchronize()?;
            report.call_ms = ms(start);
            report.compiled = ready.compiled();
        }
    }
    print::out(&serde_json::to_string(&report).map_err(|e| CliError::Failed(e.to_string()))?)
}

/// Starts `PROCESSES` processes one after the other for each shape, after one that may compile.
pub fn run(args: &BenchArgs, targets: &[Target]) -> Result<(), CliError> {
    let processes = args.samples.map_or(PROCESSES, |n| n as usize);
    let mut rows = Vec::new();
    let mut text = String::new();
    let mut recompiled = None;
    for target in targets {
        let first = start(&args.engine, target)?;
        let mut warm = Vec::with_capacity(processes);
        for _ in 0..processes {
            warm.push(start(&args.engine, target)?);
        }
        let median = |of: &dyn Fn(&Process) -> f64| {
            let us = warm.iter().map(of).collect();
            // Any unit will do.
            Samples { us }.median_us()
        };
        if warm.iter().any(|p| p.report.compiled > 0) {
            recompiled.get_or_insert(target);
        }
        if text.is_empty() {
            text += &format!(
                "on {}\nmilliseconds from the start of a process to the end of its first call, medians of {processes} processes after one that may compile\n{:>10} {:>10} {:>10} {:>10} {:>10} {:>14}  shape\n",
                first.report.device,
                "own",
                "in all",
                "CUDA start",
                "prepare",
                "call",
                "first process"
            );
        }
        text += &format!(
            "{:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>14.1}  {target}\n",
            median(&Process::own_ms),
            median(&|p| p.total_ms),
            median(&|p| p.report.cuda_ms),
            median(&|p| p.report.prepare_ms),
            median(&|p| p.report.call_ms),
            first.total_ms,
        );
        let process = |p: &Process| json!({ "total_ms": p.total_ms, "own_ms": p.own_ms(), "report": p.report });
        rows.push(json!({
            "shape": target.to_string(),
            "own_ms": median(&Process::own_ms),
            "total_ms": median(&|p| p.total_ms),
            "cuda_ms": median(&|p| p.report.cuda_ms),
            "first_process": process(&first),
            "processes": warm.iter().map(process).collect::<Vec<_>>(),
        }));
    }
    text +=
        "own: all but CUDA's own start (driver, cuInit, context) and the making of test inputs\n";
    let document = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "kind": "first_call",
        "rows": rows,
    });
    super::publish(args, &text, &document)?;
    match recompiled {
        None => Ok(()),
        Some(target) => Err(CliError::Failed(format!(
            "{target}: kernels were compiled in a process that should have found them in the cache"
        ))),
    }
}

/// Starts one process and waits for its line.
fn start(engine: &EngineArgs, target: &Target) -> Result<Process, CliError> {
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        CliError::Failed(format!("first-call: {what}: {error}"))
    };
    let program = std::env::current_exe().map_err(|e| failed("this program", &e))?;
    let mut command = Command::new(program);
    command
        .args(["first-call", "--shape", &target.to_string()])
        .args(arguments(engine))
        .stdout(Stdio::piped());
    let start = Instant::now();
    let mut child = command.spawn().map_err(|e| failed("start", &e))?;
    let mut line = String::new();
    let stdout = child.stdout.take().expect("standard output is piped");
    let read = BufReader::new(stdout).read_line(&mut line);
    let total_ms = start.elapsed().as_secs_f64() * 1e3;
    let status = child.wait().map_err(|e| failed("wait", &e))?;
    read.map_err(|e| failed("read", &e))?;
    if !status.success() {
        // What was wrong stands on standard error already.
        let what = format!("the process for {target} ended with {status}");
        return Err(match status.code() {
            Some(3) => CliError::NoDevice(what),
            _ => CliError::Failed(what),
        });
    }
    let report = serde_json::from_str(&line).map_err(|e| failed("report", &e))?;
    Ok(Process { total_ms, report })
}

/// The command line of these arguments.
fn arguments(engine: &EngineArgs) -> Vec<OsString> {
    let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
        value()
            .map(|v| v.get_name().to_string())
            .unwrap_or_default()
    };
    let mut list: Vec<OsString> = vec![
        "--backend".into(),
        name(&|| engine.backend.to_possible_value()).into(),
        "--device".into(),
        engine.device.to_string().into(),
    ];
    if let Some(mode) = engine.mode {
        list.extend(["--mode".into(), name(&|| mode.to_possible_value()).into()]);
    }
    if let Some(pin) = &engine.pin {
        list.extend(["--pin".into(), pin.into()]);
    }
    list
}
