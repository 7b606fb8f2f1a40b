//! The command `mamba2`.
#![forbid(unsafe_code)]

mod bench;
mod case;
mod check;
mod cli;
mod db;
mod doctor;
mod engine;
mod error;
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

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use error::CliError;

fn main() -> ExitCode {
    // Warnings of the libraries (an unwritable cache, a damaged record) go to standard error, one line each.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_target(false)
        .without_time()
        .init();
    match dispatch(&Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mamba2: {error}");
            error.exit_code()
        }
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
