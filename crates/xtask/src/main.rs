//! `cargo xtask test | check | bless`. See [`xtask`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

use xtask::carry_over::Side;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test    everything: format, lints, tests, documentation, every kernel compiled for every architecture
          (fetches NVRTC and a C++ compiler, about 90 MB each, into the target folder if this machine has none)
  check   the quick part: format, lints, architecture, golden headers
  bless   rewrite the golden headers after a wanted change of the templates' constants
  gate    only compile every kernel for every architecture; gate KERNEL ...: only these kernels
  carry-over before FILE
          before an edit of templates: writes to FILE what the kernels of shipped records compile to
  carry-over after FILE
          after it: records whose kernels compile to the same are marked as measured with today's templates";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => xtask::steps::test(),
        ["check"] => xtask::steps::check(),
        ["bless"] => xtask::golden::bless(),
        ["gate", ref kernels @ ..] => xtask::steps::gate(kernels),
        // The compile gate proper, started by `test` and `gate` with the path of NVRTC in its environment.
        ["gate-here", ref kernels @ ..] => xtask::gate::run(kernels),
        ["carry-over", side @ ("before" | "after"), file] => xtask::steps::carry_over(side, file),
        ["carry-over-here", "before", file] => xtask::carry_over::run(Side::Before, file.as_ref()),
        ["carry-over-here", "after", file] => xtask::carry_over::run(Side::After, file.as_ref()),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => Err(format!("unknown command {arguments:?}\n{USAGE}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
    }
}
