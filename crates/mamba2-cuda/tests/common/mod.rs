//! Shared by the integration tests.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::{Command, Output};

use mamba2_cuda::{Compiled, Cubin, KernelIdentity, KernelKey, Nvrtc, NvrtcVersion};
use mamba2_kernels::{Rendered, Source};
use mamba2_spec::launch::KernelLaunch;
use mamba2_spec::{Arch, Kernel};

/// NVRTC, or `None` on a developer's machine without it. In CI its absence is a failure.
pub fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::load() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) if std::env::var_os("CI").is_some() => panic!("CI needs NVRTC: {error}"),
        Err(error) => {
            eprintln!("SKIPPED: no NVRTC\n{error}");
            None
        }
    }
}

/// A kernel of the given text, called `tiny`.
pub fn tiny(source: &'static str, smem_bytes: usize) -> Rendered {
    Rendered {
        kernel: Kernel::ChunkCumsum,
        source: Source {
            entry: "tiny",
            source_name: "tests/tiny.cu",
            source,
            config_header: "constexpr int SCALE = 3; // for tests\n".into(),
        },
        launch: KernelLaunch {
            kernel: Kernel::ChunkCumsum,
            grid: 1,
            grid_y: 1,
            threads: 128,
            smem_bytes,
            work_items: 1,
            blocks_per_group: mamba2_spec::launch::Divisor::new(1),
        },
    }
}

/// A well-formed kernel that uses the generated header and a shared one.
pub const GOOD: &str = r#"
#include "common/args.cuh"
#include "mamba2_config.cuh"
extern "C" __global__ void tiny(ForwardArgs args) { args.da_cumsum[threadIdx.x] = SCALE * args.dt_out[threadIdx.x]; }
"#;

/// A made-up cubin, for tests of the cache.
pub fn made_up(config: &str, nvrtc: (u32, u32), code: &[u8]) -> Cubin {
    let identity = KernelIdentity {
        kernel: "tiny".into(),
        source_digest: "00".into(),
        config: config.into(),
        arch: "sm_90a".into(),
        options: vec!["--std=c++17".into()],
    };
    Cubin {
        key: KernelKey {
            identity,
            nvrtc: NvrtcVersion {
                major: nvrtc.0,
                minor: nvrtc.1,
            },
        },
        compiled: Compiled {
            cubin: code.to_vec(),
            log: "a log\nof two lines".into(),
            resources: None,
            target: Arch(90),
        },
    }
}

/// Runs the ignored test `name` of this binary in a process of its own. `None` removes a variable.
pub fn child(name: &str, variables: &[(&str, Option<PathBuf>)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command.args([
        "--exact",
        name,
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    for (key, value) in variables {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command
}

/// Asserts that a child ran exactly one test and that it passed, and returns what it printed.
pub fn passed(output: &Output) -> String {
    let text = format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && text.contains("1 passed"),
        "the child process failed:\n{text}"
    );
    text
}
