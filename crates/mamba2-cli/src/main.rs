//! The command `mamba2`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    mamba2_cli::main()
}
