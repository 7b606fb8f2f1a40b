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

use mamba2_kernels::{Source, render, render_step};
use mamba2_reference::{Generated, GeneratedStep, Values};
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{DeviceFacts, Dtype, KernelConfig, Problem, StepProblem, StrategyConfig, launch};
use rayon::prelude::*;

pub use compiler::Compiler;
use image::{Image, Job};

/// Places the inputs that a forward pass and a decode step share by name.
macro_rules! place_common {
    ($job:expr, $inputs:expr, $image:expr) => {
        for (name, values) in [
            ("x", Some(&$inputs.x)),
            ("dt", Some(&$inputs.dt)),
            ("A", Some(&$inputs.a)),
            ("B", Some(&$inputs.b)),
            ("C", Some(&$inputs.c)),
            ("D", $inputs.d.as_ref()),
            ("z", $inputs.z.as_ref()),
            ("dt_bias", $inputs.dt_bias.as_ref()),
        ] {
            $job.place(name, values, $image);
        }
    };
}

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
                let rendered = render(k, problem, device);
                let takes_maps = rendered.kernel.needs_wgmma();
                self.compiler.compile(&rendered, takes_maps, &self.cache)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let plan = launch::plan(strategy, problem, device);
        let mut image = Image::default();
        let mut job = Job::default();
        let elems = problem.batch * problem.seqlen * problem.nheads * problem.headdim;
        let state_elems = problem.sequences() * problem.nheads * problem.headdim * problem.dstate;
        place_common!(job, inputs, &mut image);
        job.place("initial_states", inputs.initial_states.as_ref(), &mut image);
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
            ("flags", plan.workspace.flags),
        ] {
            job.set(name, [workspace + region.offset_bytes + 1]);
        }
        job.axes(
            [
                problem.batch,
                problem.seqlen,
                problem.nheads,
                problem.headdim,
                problem.ngroups,
                problem.dstate,
            ],
            inputs.d.as_ref(),
            problem.dt_limit,
        );
        job.set("sequences", [problem.sequences()]);
        job.set("chunk_slots", [plan.slots]);
        job.divisor(
            "chunks_per_row",
            launch::Divisor::new(plan.slots_per_row as u32),
        );
        job.divisor("ngroups", launch::Divisor::new(problem.ngroups as u32));
        job.set("segment", [plan.segment]);
        job.set("scanned", [u8::from(plan.scanned())]);
        job.set("call", [1_u64 << 16]);
        for ((config, program), launch) in kernels.iter().zip(&programs).zip(&plan.launches) {
            if launch.grid == 0 {
                continue;
            }
            let cluster = match config {
                KernelConfig::Sm90SplitFusedForward(_) => launch::dstate_slices(problem) as u32,
                _ => 1,
            };
            job.launch([launch.grid, launch.grid_y], launch.work_items);
            job.divisor("blocks_per_group", launch.blocks_per_group);
            job.set("cluster", [cluster]);
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

    /// Runs a decode step: `out`, NaN where nothing was stored, and the whole state cache after it.
    ///
    /// # Errors
    /// As [`Emulator::forward`].
    pub fn step(
        &self,
        config: &StateUpdate,
        problem: &StepProblem,
        inputs: &GeneratedStep,
        device: &DeviceFacts,
    ) -> Result<(Values, Values), String> {
        self.step_in_rounds(config, problem, inputs, device, None)
    }

    /// As [`Emulator::step`], on a grid that has blocks for `rows` rows only, so that blocks step from row to row.
    ///
    /// # Errors
    /// As [`Emulator::forward`].
    pub fn step_in_rounds(
        &self,
        config: &StateUpdate,
        problem: &StepProblem,
        inputs: &GeneratedStep,
        device: &DeviceFacts,
        rows: Option<usize>,
    ) -> Result<(Values, Values), String> {
        let p = problem;
        let mut rendered = render_step(config, p, device);
        if let Some(rows) = rows {
            rendered.launch.grid_y = rows as u32;
            let header = &mut rendered.source.config_header;
            *header = header.replace("EVERY_ROW = 1", "EVERY_ROW = 0");
        }
        let program = self.compiler.compile(&rendered, false, &self.cache)?;
        let mut image = Image::default();
        let mut job = Job::default();
        place_common!(job, inputs, &mut image);
        let indices = inputs.state_batch_indices.clone().map(Values::I32);
        job.place("state_batch_indices", indices.as_ref(), &mut image);
        let state = image.add(&inputs.state.to_le_bytes());
        let out_bytes = p.batch * p.tokens * p.nheads * p.headdim * p.dtype.size_bytes();
        let out = image.poisoned(out_bytes);
        job.set("state", [state + 1]);
        job.set("out", [out + 1]);
        job.set("slots", [p.slots]);
        // Contiguous, and buffers start on more than any vector.
        let (vector, row) = (p.vector_bytes(), |d: Dtype| p.dstate * d.size_bytes());
        let aligned = row(p.state_dtype).is_multiple_of(vector.state)
            && row(p.dtype).is_multiple_of(vector.inputs);
        job.set("aligned", [u8::from(aligned)]);
        job.axes(
            [p.batch, p.tokens, p.nheads, p.headdim, p.ngroups, p.dstate],
            inputs.d.as_ref(),
            p.dt_limit,
        );
        job.divisor(
            "heads_per_group",
            launch::Divisor::new(p.heads_per_group() as u32),
        );
        let launch = rendered.launch;
        job.launch([launch.grid, launch.grid_y], launch.work_items);
        program
            .run(&job, &mut image, Timing::Early)
            .map_err(|e| format!("{config}: {e}"))?;
        let state_bytes = inputs.state.len() * p.state_dtype.size_bytes();
        Ok((
            values(p.dtype, image.bytes(out, out_bytes)),
            values(p.state_dtype, image.bytes(state, state_bytes)),
        ))
    }

    /// Runs a tool on `blocks` blocks. Its parameter is the addresses of `buffers`, null where there is none, and then `words`. Returns
    /// what the buffers then hold.
    ///
    /// # Errors
    /// As [`Emulator::forward`].
    pub fn tool(
        &self,
        source: &Source,
        blocks: u32,
        buffers: &[Option<&[u8]>],
        words: &[i64],
    ) -> Result<Vec<Vec<u8>>, String> {
        let program = self.compiler.compile(source, false, &self.cache)?;
        let mut image = Image::default();
        let at: Vec<usize> = buffers
            .iter()
            .map(|b| b.map_or(0, |bytes| image.add(bytes) + 1))
            .collect();
        let addresses = at.iter().map(|at| *at as i64);
        let mut job = Job::default();
        job.set_all("words", addresses.chain(words.iter().copied()));
        job.set("pointers", [buffers.len()]);
        job.launch([blocks, 1], 0);
        program.run(&job, &mut image, Timing::Early)?;
        let read = |(at, buffer): (&usize, &Option<&[u8]>)| {
            buffer.map_or_else(Vec::new, |b| image.bytes(at - 1, b.len()).to_vec())
        };
        Ok(at.iter().zip(buffers).map(read).collect())
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
