//! Golden files: the generated config header of each kernel for a few problems. A changed constant shows up in review;
//! `cargo xtask bless` accepts it.

use std::fs;
use std::path::PathBuf;

use mamba2_kernels::{render, render_step};
use mamba2_spec::{Arch, DeviceFacts, Problem, StepProblem, StrategyConfig, rules};

use crate::steps::root;

const FORWARD: &[(&str, &str)] = &[
    ("headline", "b=4,l=16384,h=8,p=64,g=1,n=128"),
    ("dstate_512", "b=4,l=16384,h=8,p=64,g=1,n=512"),
    (
        "every_option",
        "b=1,l=1000,h=24,p=80,g=3,n=256,dtype=f16,dt_dtype=f32,d=hp,z=1,bias=1,softplus=1,limit=0.001:0.1,init=bf16,final=f16,packed=7,align=1",
    ),
    (
        "float32",
        "b=2,l=200,h=4,p=64,g=2,n=64,dtype=f32,d=none,init=none,final=none",
    ),
];
const STEP: &[(&str, &str)] = &[
    ("decode", "b=64,h=80,p=64,g=1,n=128"),
    (
        "decode_paged_bf16",
        "b=4,h=8,p=80,g=2,n=64,t=2,slots=16,state=bf16",
    ),
];

fn folder() -> PathBuf {
    root().join("crates/xtask/golden")
}

/// File names and what they should hold.
///
/// # Errors
/// A shape of the tables above that the rules no longer take.
pub fn headers() -> Result<Vec<(PathBuf, String)>, String> {
    let device = DeviceFacts::assumed(Arch(90));
    let mut files = Vec::new();
    for (name, shape) in FORWARD {
        let problem: Problem = shape.parse().map_err(|e| format!("{name}: {e}"))?;
        let strategy =
            rules::default_strategy(&problem, &device).map_err(|e| format!("{name}: {e}"))?;
        // Every strategy, whichever the shape prefers.
        let three =
            rules::default_three_kernel(&problem, &device).map_err(|e| format!("{name}: {e}"))?;
        let mut strategies = vec![strategy];
        for other in std::iter::once(StrategyConfig::ThreeKernel(three))
            .chain(rules::agreement_defaults(&problem, &device))
        {
            if strategies.iter().all(|s| s.name() != other.name()) {
                strategies.push(other);
            }
        }
        let mut kernels: Vec<_> = strategies.iter().flat_map(|s| s.kernels()).collect();
        kernels.sort_by_key(|k| k.kernel());
        kernels.dedup_by_key(|k| k.kernel());
        for config in kernels {
            let header = render(&config, &problem, &device).source.config_header;
            files.push((
                folder().join(format!("{name}.{}.cuh", config.kernel())),
                header,
            ));
        }
    }
    for (name, shape) in STEP {
        let problem: StepProblem = shape.parse().map_err(|e| format!("{name}: {e}"))?;
        let config = rules::default_step(&problem, &device).map_err(|e| format!("{name}: {e}"))?;
        files.push((
            folder().join(format!("{name}.state_update.cuh")),
            render_step(&config, &problem, &device).source.config_header,
        ));
    }
    Ok(files)
}

/// Rewrites the golden files.
///
/// # Errors
/// A file that cannot be written.
pub fn bless() -> Result<(), String> {
    let io = |e: std::io::Error| format!("{}: {e}", folder().display());
    let wanted = headers()?;
    fs::create_dir_all(folder()).map_err(io)?;
    for entry in fs::read_dir(folder()).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if wanted.iter().all(|(name, _)| *name != path) {
            fs::remove_file(&path).map_err(io)?;
        }
    }
    for (path, text) in &wanted {
        if fs::read_to_string(path).ok().as_ref() != Some(text) {
            println!("xtask: wrote {}", path.display());
            fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(())
}
