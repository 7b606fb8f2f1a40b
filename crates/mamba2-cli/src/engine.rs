//! From command-line arguments to an engine.

use std::path::Path;

use mamba2::{Backend, Choice, CudaError, Engine, Error, Mode, SpecError, StrategyConfig};
use serde_json::{Value, json};

use crate::cli::{BackendArg, EngineArgs, ModeArg};
use crate::error::CliError;
use crate::tuning;

impl From<Error> for CliError {
    fn from(error: Error) -> CliError {
        match error {
            Error::Cuda(error) => error.into(),
            _ if error.is_no_device() => CliError::NoDevice(error.to_string()),
            Error::Spec(error) => error.into(),
            other => CliError::Failed(other.to_string()),
        }
    }
}

impl From<CudaError> for CliError {
    fn from(error: CudaError) -> CliError {
        match error {
            CudaError::UnsupportedArch { .. }
            | CudaError::Spec(SpecError::Size {
                name: "compute capability",
                ..
            }) => CliError::NoDevice(error.to_string()),
            CudaError::Spec(error) => error.into(),
            other if Error::from(other.clone()).is_no_device() => CliError::NoDevice(brief(&other)),
            other => CliError::Failed(other.to_string()),
        }
    }
}

/// Why CUDA cannot be used, in one line.
pub fn brief(error: &CudaError) -> String {
    match error {
        CudaError::NoDriver { .. } => {
            "no CUDA driver was found (`mamba2 doctor` lists what was tried)".into()
        }
        CudaError::NvrtcMissing { .. } => {
            "no NVRTC library was found (`mamba2 doctor` lists what was tried); \
             `pip install nvidia-cuda-nvrtc`, or set MAMBA2_NVRTC_PATH"
                .into()
        }
        other => other
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .to_string(),
    }
}

impl From<mamba2::CpuError> for CliError {
    fn from(error: mamba2::CpuError) -> CliError {
        Error::from(error).into()
    }
}

/// Makes the engine that the arguments ask for.
pub fn open(args: &EngineArgs) -> Result<Engine, CliError> {
    let mut builder = Engine::builder();
    builder = match args.backend {
        BackendArg::Cpu => builder.cpu(),
        BackendArg::Cuda => builder.cuda(args.device)?,
        BackendArg::Auto if args.device == 0 => builder.auto(),
        // Whoever names another device wants that one.
        BackendArg::Auto => builder.cuda(args.device)?,
    };
    if let Some(path) = &args.pin {
        builder = builder.mode(Mode::Pinned(read_config(path)?));
    } else if let Some(mode) = args.mode {
        builder = builder.mode(match mode {
            ModeArg::Replay => Mode::Replay,
            ModeArg::Tune => Mode::Tune,
            ModeArg::DefaultOnly => Mode::DefaultOnly,
        });
    }
    let engine = builder.tuner(tuning::hook()).build()?;
    if let Some(reason) = engine
        .passed_over()
        .filter(|_| args.backend == BackendArg::Auto)
    {
        eprintln!("mamba2: computing on the CPU: {}", brief(reason));
    }
    Ok(engine)
}

fn read_config(path: &Path) -> Result<StrategyConfig, CliError> {
    let text = std::fs::read_to_string(path).map_err(CliError::io(path, "read"))?;
    serde_json::from_str(&text).map_err(|e| CliError::File {
        path: path.into(),
        reason: format!(
            "expected a config as JSON, as `mamba2 explain --json` prints under \"config\": {e}"
        ),
    })
}

/// `cpu, 2 threads`, or the GPU's name and facts.
pub fn describe(engine: &Engine) -> String {
    match engine.device_facts() {
        Some(facts) => format!(
            "cuda, {} ({}, {} multiprocessors)",
            facts.name, facts.arch, facts.sm_count
        ),
        None => format!(
            "cpu, {} threads",
            std::thread::available_parallelism().map_or(1, usize::from)
        ),
    }
}

/// `cpu` or `cuda`.
pub fn backend_name(engine: &Engine) -> &'static str {
    match engine.backend() {
        Backend::Cpu => "cpu",
        Backend::Cuda => "cuda",
    }
}

/// Says on standard error why configs were passed over, such as a pinned one that is not legal here.
pub fn warn_of_choice<C>(choice: &Choice<C>) {
    for warning in &choice.warnings {
        eprintln!("mamba2: {warning}");
    }
}

/// Where the config came from, for people; empty on the CPU.
pub fn describe_choice<C>(choice: &Choice<C>) -> String {
    match choice.tier {
        None => String::new(),
        Some(tier) if choice.distance > 0.0 => {
            format!("config: {tier}, distance {:.2}", choice.distance)
        }
        Some(tier) => format!("config: {tier}"),
    }
}

/// The choice for programs.
pub fn choice_json<C: serde::Serialize>(choice: &Choice<C>) -> Value {
    json!({
        "tier": choice.tier.map(|t| t.to_string()),
        "config": choice.config,
        "distance": choice.distance,
        "stale": choice.stale,
        "warnings": choice.warnings,
    })
}
