//! The command `mamba2`, as a library: the binary calls [`main`]. Applications link the crate `mamba2` instead.
//!
//! Beside it stands what tests and fuzzers reach without a process or a GPU: [`tune_on`] and [`untrusted`].
#![forbid(unsafe_code)]

mod bench;
mod case;
mod check;
mod cli;
mod db;
mod doctor;
mod engine;
mod error;
mod every_config;
mod explain;
mod host;
mod print;
mod progress;
mod render;
mod run;
mod shape;
mod step;
mod tensor_file;
mod tuning;

pub mod untrusted;

use std::process::ExitCode;

use clap::Parser;
use mamba2_tuner::Executor;

use cli::{Cli, Command};
pub use error::CliError;

/// Parses the process's arguments, runs the command and says what went wrong on standard error.
pub fn main() -> ExitCode {
    // Warnings of the libraries (an unwritable cache, a damaged record) go to standard error, one line each.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_target(false)
        .without_time()
        .init();
    let command = Cli::parse().command;
    match dispatch(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let way_out = match error {
                CliError::NoDevice(_) if computes_on_cpu(&command) => {
                    "; `--backend cpu` computes without a GPU"
                }
                _ => "",
            };
            eprintln!("mamba2: {error}{way_out}");
            error.exit_code()
        }
    }
}

/// True for commands that do the same on the CPU.
fn computes_on_cpu(command: &Command) -> bool {
    match command {
        Command::Run(args) => !args.every_config,
        Command::Bench(args) => !args.host_cost && !args.first_call,
        Command::Demo(_) | Command::Step(_) => true,
        _ => false,
    }
}

/// `mamba2 tune ARGUMENTS` on the given devices, instead of worker processes that drive GPUs: the whole command on a machine
/// without one.
///
/// # Errors
/// What the command says before it exits.
pub fn tune_on(arguments: &[String], executors: &[&dyn Executor]) -> Result<(), CliError> {
    let line = ["mamba2", "tune"]
        .map(String::from)
        .into_iter()
        .chain(arguments.iter().cloned());
    let parsed = Cli::try_parse_from(line).map_err(|e| CliError::Usage(e.to_string()))?;
    match &parsed.command {
        Command::Tune(args) => tuning::run_on(args, executors),
        other => dispatch(other),
    }
}

fn dispatch(command: &Command) -> Result<(), CliError> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Demo(args) => run::demo(args),
        Command::Bench(args) => bench::run(args),
        Command::Step(args) => step::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Render(args) => render::run(args),
        Command::Db(args) => db::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Tune(args) => tuning::run(args),
        Command::FirstCall(args) => bench::first_call_child(args),
        Command::TuneWorker { role } => tuning::worker(role),
    }
}
