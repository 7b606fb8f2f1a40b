//! Runs the kernel templates of mamba2-jit on the CPU, thread by thread, so that a machine without a GPU can test what they compute.
//!
//! The templates are compiled as C++ for this machine. `runtime/` has what CUDA adds to C++ (threads as fibers, shuffles, barriers) and
//! a second version of every instruction wrapper in `kernel-templates/ptx/`: matrix products by their documented register maps and
//! descriptor layouts, tensor-map copies, mbarriers, clusters.
//!
//! What it shows: indices, masks, layouts, descriptors, swizzles, the order of stages and phases, deadlocks. With [`Timing::Late`],
//! asynchronous products are made at the last moment that their waits allow. What only a GPU shows: speed, races between threads (they
//! run one after the other here), memory fences, registers.
//!
//! It needs a C++20 compiler; [`Compiler::find`] says which.
#![forbid(unsafe_code)]

mod compiler;
mod image;

use std::path::PathBuf;

use mamba2_kernels::render;
use mamba2_reference::{Generated, Values};
use mamba2_spec::{DeviceFacts, Dtype, KernelConfig, Problem, StrategyConfig, launch};
use rayon::prelude::*;

pub use compiler::Compiler;
use image::{Image, Job};

/// When asynchronous matrix products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// Where they are started.
    Early,
    /// Where they are waited for; until then their results are NaN.
    Late,
}

/// Results of a forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// `[batch, seqlen, nheads, headdim]` in x's dtype; NaN where nothing was stored.
    pub out: Values,
    /// `[sequences, nheads, headdim, dstate]`, if the problem wants it.
    pub final_states: Option<Values>,
}

/// Compiles kernels and runs them.
#[derive(Clone, Debug)]
pub struct Emulator {
    compiler: Compiler,
    cache: PathBuf,
}

impl Emulator {
    /// `cache` keeps compiled kernels by what they were made of.
    pub fn new(compiler: Compiler, cache: impl Into<PathBuf>) -> Emulator {
        Emulator {
            compiler,
            cache: cache.into(),
        }
    }

    /// Runs a whole strategy on poisoned outputs and a poisoned workspace.
    ///
    /// # Errors
    /// The compiler's messages, or what a kernel did wrong.
    pub fn forward(
        &self,
        strategy: &StrategyConfig,
        problem: &Problem,
        inputs: &Generated,
        device: &DeviceFacts,
        timing: Timing,
    ) -> Result<Outputs, String> {
        let kernels = strategy.kernels();
        let programs = kernels
            .par_iter()
            .map(|k| {
                self.compiler
                    .compile(&render(k, problem, device), &self.cache)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let plan = launch::plan(strategy, problem, device);
        let mut image = Image::default();
        let mut job = Job::default();
        let elems = problem.batch * problem.seqlen * problem.nheads * problem.headdim;
        let state_elems = problem.sequences() * problem.nheads * problem.headdim * problem.dstate;
        for (name, values) in [
            ("x", Some(&inputs.x)),
            ("dt", Some(&inputs.dt)),
            ("A", Some(&inputs.a)),
            ("B", Some(&inputs.b)),
            ("C", Some(&inputs.c)),
            ("D", inputs.d.as_ref()),
            ("z", inputs.z.as_ref()),
            ("dt_bias", inputs.dt_bias.as_ref()),
            ("initial_states", inputs.initial_states.as_ref()),
        ] {
            let at = values.map_or(0, |v| image.add(&v.to_le_bytes()) + 1);
            job.set(name, [at]);
        }
        let offsets: Option<Vec<u8>> = inputs
            .cu_seqlens
            .as_ref()
            .map(|cu| cu.iter().flat_map(|v| v.to_le_bytes()).collect());
        job.set("cu_seqlens", [offsets.map_or(0, |b| image.add(&b) + 1)]);
        let out = image.poisoned(elems * problem.dtype.size_bytes());
        job.set("out", [out + 1]);
        let states = problem
            .final_states
            .map(|dtype| (dtype, image.poisoned(state_elems * dtype.size_bytes())));
        job.set("final_states", [states.map_or(0, |(_, at)| at + 1)]);
        let workspace = image.poisoned(plan.workspace.total_bytes);
        for (name, region) in [
            ("dt_out", plan.workspace.dt_out),
            ("da_cumsum", plan.workspace.da_cumsum),
            ("state_weight", plan.workspace.state_weight),
            ("states", plan.workspace.states),
        ] {
            job.set(name, [workspace + region.offset_bytes + 1]);
        }
        let token =
            |heads: usize, inner: usize| [problem.seqlen * heads * inner, heads * inner, inner];
        job.set("x_strides", token(problem.nheads, problem.headdim));
        job.set("dt_strides", token(problem.nheads, 1));
        job.set("b_strides", token(problem.ngroups, problem.dstate));
        let head = problem.headdim * problem.dstate;
        job.set(
            "state_strides",
            [problem.nheads * head, head, problem.dstate],
        );
        let d_per_head = inputs
            .d
            .as_ref()
            .map_or(0, |d| d.len() / problem.nheads.max(1));
        job.set("d_head_stride", [d_per_head]);
        job.set("sequences", [problem.sequences()]);
        job.set("chunk_slots", [plan.slots]);
        job.set("chunks_per_row", [plan.slots_per_row]);
        job.set("dt_min", [problem.dt_limit.min]);
        job.set("dt_max", [problem.dt_limit.max]);
        job.set(
            "axes",
            [
                problem.batch,
                problem.seqlen,
                problem.nheads,
                problem.headdim,
                problem.ngroups,
                problem.dstate,
            ],
        );
        for ((config, program), launch) in kernels.iter().zip(&programs).zip(&plan.launches) {
            if launch.grid == 0 {
                continue;
            }
            let cluster = match config {
                KernelConfig::Sm90ClusterForward(c) => c.cluster,
                _ => 1,
            };
            job.set("grid", [launch.grid]);
            job.set("cluster", [cluster]);
            job.set("work_items", [launch.work_items]);
            job.set(
                "x_columns",
                [launch.kernel.x_box_columns().unwrap_or_default()],
            );
            program
                .run(&job, &mut image, timing)
                .map_err(|e| format!("{} {}: {e}", config.kernel(), config.to_text()))?;
        }
        Ok(Outputs {
            out: values(
                problem.dtype,
                image.bytes(out, elems * problem.dtype.size_bytes()),
            ),
            final_states: states.map(|(dtype, at)| {
                values(dtype, image.bytes(at, state_elems * dtype.size_bytes()))
            }),
        })
    }
}

fn values(dtype: Dtype, bytes: &[u8]) -> Values {
    let pairs = || {
        bytes
            .chunks_exact(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
    };
    match dtype {
        Dtype::Bf16 => Values::Bf16(pairs().map(half::bf16::from_bits).collect()),
        Dtype::F16 => Values::F16(pairs().map(half::f16::from_bits).collect()),
        Dtype::F32 => Values::F32(
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        ),
    }
}
