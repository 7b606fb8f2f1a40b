//! `mamba2 render`: the CUDA that a config produces.

use std::fmt::Write;

use mamba2_kernels::{Rendered, render, render_step};
use mamba2_spec::parameters::{Parameters, StateUpdate};
use mamba2_spec::{
    Arch, DeviceFacts, Kernel, KernelConfig, Problem, SpecError, StepProblem, StrategyConfig, rules,
};

use crate::cli::RenderArgs;
use crate::error::CliError;
use crate::print::out;

const FORWARD_SHAPE: &str = "b=4,l=16384,h=8,p=64,g=1,n=128";
const STEP_SHAPE: &str = "b=64,h=80,p=64,g=1,n=128";

/// Runs the command.
pub fn run(args: &RenderArgs) -> Result<(), CliError> {
    let kernel: Kernel = args.kernel.parse()?;
    if args.list {
        return out(&list(kernel));
    }
    let device = DeviceFacts::assumed(Arch(args.arch).require_supported()?);
    let (rendered, legal) = if kernel == Kernel::StateUpdate {
        step(args, &device)?
    } else {
        forward(args, kernel, &device)?
    };
    // An illegal config can still be looked at; it just cannot be used.
    if let Err(reason) = legal {
        eprintln!("mamba2: this config is never used: {reason}");
    }
    if args.header {
        return out(&rendered.config_header);
    }
    out(&format!(
        "// {} blocks of {} threads, {} bytes of shared memory\n{}",
        rendered.launch.blocks(),
        rendered.launch.threads,
        rendered.launch.smem_bytes,
        rendered.full_text()
    ))
}

type Legal = Result<(), SpecError>;

fn forward(
    args: &RenderArgs,
    kernel: Kernel,
    device: &DeviceFacts,
) -> Result<(Rendered, Legal), CliError> {
    let problem: Problem = args.shape.as_deref().unwrap_or(FORWARD_SHAPE).parse()?;
    // The config the kernel has in the default of whichever strategy uses it; where none can, the table's own defaults.
    let mut defaults = vec![rules::default_strategy(&problem, device)?];
    defaults.extend(rules::default_three_kernel(&problem, device).map(StrategyConfig::ThreeKernel));
    defaults.extend(rules::agreement_defaults(&problem, device));
    let default = defaults
        .iter()
        .flat_map(StrategyConfig::kernels)
        .find(|c| c.kernel() == kernel);
    let base = default.map(|c| c.to_text()).unwrap_or_default();
    let config = KernelConfig::from_text(kernel, &changed(&base, &args.config))?;
    Ok((
        render(&config, &problem, device),
        rules::check_kernel(&config, &problem, device),
    ))
}

fn step(args: &RenderArgs, device: &DeviceFacts) -> Result<(Rendered, Legal), CliError> {
    let problem: StepProblem = args.shape.as_deref().unwrap_or(STEP_SHAPE).parse()?;
    let base = rules::default_step(&problem, device)?;
    let config = StateUpdate::from_text(&changed(&base.to_text(), &args.config))?;
    Ok((
        render_step(&config, &problem, device),
        rules::check_step_config(&config, &problem, device),
    ))
}

/// `base` with the pairs of `changes` put over it. Unknown names stay, for the parser to refuse.
fn changed(base: &str, changes: &str) -> String {
    let name = |pair: &str| {
        pair.split('=')
            .next()
            .unwrap_or_default()
            .trim()
            .to_string()
    };
    let changes: Vec<&str> = changes
        .split(',')
        .filter(|p| !p.trim().is_empty())
        .collect();
    let kept = base
        .split(',')
        .filter(|pair| changes.iter().all(|c| name(c) != name(pair)));
    kept.chain(changes.iter().copied())
        .collect::<Vec<_>>()
        .join(",")
}

fn list(kernel: Kernel) -> String {
    let mut text = String::new();
    for row in KernelConfig::rows(kernel) {
        let values: Vec<String> = row.domain.iter().map(|v| row.display(*v)).collect();
        let _ = writeln!(
            text,
            "{:<12} {} (default {}, unit: {}, {})\n            {}",
            row.name,
            values.join(" | "),
            row.display(row.default),
            row.unit,
            row.cuda
                .map_or("launch argument".into(), |c| format!("CUDA {c}")),
            row.doc.trim()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn a_change_replaces_the_value_of_the_base() {
        assert_eq!(changed("a=1,b=2,c=3", "b=5"), "a=1,c=3,b=5");
        assert_eq!(changed("a=1", ""), "a=1");
        assert_eq!(changed("a=1", "typo=2"), "a=1,typo=2");
    }
}
