//! `mamba2 run --check --every-config`: a file's case with every legal config of every kernel.

use mamba2::{Device, Engine};
use mamba2_cuda::Jit;
use mamba2_spec::Kernel;
use mamba2_tuner::gpu::every_config::{Ran, forward_configs, run_forward_configs};
use mamba2_tuner::gpu::{ForwardTrial, Oracle, Placement};
use serde_json::{Value, json};

use crate::case::ForwardCase;
use crate::cli::{BackendArg, RunArgs};
use crate::engine::{brief, describe};
use crate::error::CliError;
use crate::print;
use crate::progress::{bar, spin};

/// Failures that are printed; `--json` has all.
const SHOWN: usize = 20;

/// Runs the command.
pub fn run(args: &RunArgs, engine: &Engine, case: &ForwardCase) -> Result<(), CliError> {
    let (device, jit) = gpu(args, engine)?;
    let problem = &case.problem;
    let kernels = forward_configs(problem, device.facts(), None)?;
    let made = case.made();
    let oracle = spin("float64 recurrence", || oracle(case));
    let trial = ForwardTrial::new(device, jit, problem, &made, Placement::Exact)?;
    let stream = device.stream()?;
    let all: usize = kernels.iter().map(|(_, configs)| configs.len()).sum();
    // Each is compiled, then run.
    let progress = bar(2 * all as u64);
    let mut done: Vec<(Kernel, Ran)> = Vec::new();
    if !args.json {
        print::out(&format!("{problem}\non {}\n", describe(engine)))?;
    }
    for (kernel, configs) in &kernels {
        progress.set_message(kernel.name());
        let tick = || progress.inc(1);
        let ran = run_forward_configs(device, jit, &stream, &trial, &oracle, configs, &tick);
        if !args.json {
            let line = format!("{:23} {ran}\n", kernel.name());
            progress.suspend(|| print::out(&line))?;
        }
        let crashed = ran.crashed();
        done.push((*kernel, ran));
        if crashed {
            break;
        }
    }
    progress.finish_and_clear();
    report(args, engine, case, &done)
}

fn gpu<'a>(args: &RunArgs, engine: &'a Engine) -> Result<(&'a Device, &'a Jit), CliError> {
    let found = engine.device().zip(engine.jit());
    found.ok_or_else(|| match engine.passed_over() {
        Some(reason) if args.engine.backend != BackendArg::Cpu => {
            CliError::NoDevice(format!("--every-config needs a GPU: {}", brief(reason)))
        }
        _ => CliError::Usage(
            "--every-config is for CUDA: the CPU backend has one config, which --check alone compares"
                .into(),
        ),
    })
}

/// The file's expected values where it has them, else the float64 recurrence.
fn oracle(case: &ForwardCase) -> Oracle {
    let made = case.made();
    let (out, states) = (
        case.expected_out.clone(),
        case.expected_final_states.clone(),
    );
    let (out, states) = match (out, states) {
        (Some(out), Some(states)) => (out, states),
        (out, states) => {
            let computed = case.oracle();
            (
                out.unwrap_or(computed.out),
                states.unwrap_or(computed.final_states),
            )
        }
    };
    Oracle::expecting(&case.problem, &made, out, states)
}

fn report(
    args: &RunArgs,
    engine: &Engine,
    case: &ForwardCase,
    done: &[(Kernel, Ran)],
) -> Result<(), CliError> {
    let configs: usize = done.iter().map(|(_, ran)| ran.configs).sum();
    let failures: Vec<String> = done
        .iter()
        .flat_map(|(_, ran)| &ran.failures)
        .map(|(config, failure)| format!("{config}: {failure}"))
        .collect();
    let crashed = done.iter().any(|(_, ran)| ran.crashed());
    if args.json {
        print::json(&json!({
            "input": args.input,
            "shape": case.problem.to_string(),
            "device": describe(engine),
            "passed": failures.is_empty(),
            "kernels": done.iter().map(kernel_json).collect::<Vec<Value>>(),
        }))?;
    } else {
        for failure in failures.iter().take(SHOWN) {
            print::out(&format!("FAILED {failure}\n"))?;
        }
        if failures.len() > SHOWN {
            print::out(&format!("and {} more\n", failures.len() - SHOWN))?;
        }
    }
    if failures.is_empty() {
        return Ok(());
    }
    let rest = if crashed {
        "; the last destroyed the context, and the rest was not run"
    } else {
        ""
    };
    Err(CliError::CheckFailed(format!(
        "{} of {configs} configs{rest}",
        failures.len()
    )))
}

fn kernel_json((kernel, ran): &(Kernel, Ran)) -> Value {
    let failures = ran.failures.iter();
    json!({
        "kernel": kernel.name(),
        "configs": ran.configs,
        "failed": ran.failures.len(),
        "failures": failures
            .map(|(config, failure)| json!({ "config": config.to_string(), "failure": failure.to_string() }))
            .collect::<Vec<Value>>(),
        "max_error_out": ran.out_error,
        "max_error_states": ran.states_error,
        "seconds": ran.seconds,
    })
}
