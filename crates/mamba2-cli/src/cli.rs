//! The command line. One definition per flag: parser, help and usage errors come from here.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Mamba-2 SSD forward pass: CUDA kernels compiled at run time and tuned per shape, and a CPU backend.
#[derive(Parser)]
#[command(
    version,
    about,
    propagate_version = true,
    max_term_width = 110,
    after_help = "\
Examples:
  mamba2 demo                                        compute on made data, compare with float64
  mamba2 run layer.safetensors -o out.safetensors    compute on your data
  mamba2 run layer.safetensors --check               ... and compare with expected values or float64
  mamba2 tune --shape b=4,l=16384,h=8,p=64,g=1,n=128 find the fastest kernels for a shape, once
  mamba2 explain --shape b=4,l=16384,h=8,p=64,g=1,n=128
  mamba2 doctor                                      what this machine has, and what is missing

Exit codes: 0 done, 1 a check failed, 2 bad input or usage, 3 no device.
`mamba2 COMMAND --help` has examples for each command."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Compute the forward pass of a safetensors file.
    Run(RunArgs),
    /// Compute made data on the best device found and compare it with float64.
    Demo(DemoArgs),
    /// Time forward passes and decode steps and print them beside the physical limit.
    Bench(BenchArgs),
    /// Find the fastest configs for a shape or a list of shapes and keep them.
    Tune(TuneArgs),
    /// Advance a state cache by one or a few tokens (decode) from a safetensors file.
    Step(StepArgs),
    /// Say which config a shape gets, from where, and why.
    Explain(ExplainArgs),
    /// Print the CUDA that a config produces.
    Render(RenderArgs),
    /// List, move, merge, check and clean tuning records.
    Db(DbArgs),
    /// Report the GPU, driver, NVRTC, paths and caches: what was found and what is missing.
    Doctor(DoctorArgs),
    /// Make one call in a new process and say how long it took, for `bench --first-call`.
    #[command(hide = true, name = "first-call")]
    FirstCall(FirstCallArgs),
    /// Serve one tuner over standard input and output.
    #[command(hide = true, name = "tune-worker")]
    TuneWorker {
        /// What the worker is for.
        role: String,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// CUDA if a usable GPU is found, else the CPU.
    Auto,
    /// The CPU backend; CUDA is never touched.
    Cpu,
    /// CUDA, or exit code 3.
    Cuda,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeArg {
    /// Use stored records; never tune.
    Replay,
    /// Tune shapes that have no record.
    Tune,
    /// Ignore records; use the untuned config.
    DefaultOnly,
}

#[derive(Args)]
pub struct EngineArgs {
    /// Where to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendArg,
    /// CUDA device ordinal, as CUDA_VISIBLE_DEVICES numbers them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// How a config is chosen on CUDA: replay, or MAMBA2_MODE, unless given.
    #[arg(long, value_enum)]
    pub mode: Option<ModeArg>,
    /// Use exactly this config: a JSON file, as `mamba2 explain --json` prints under "config".
    #[arg(long, value_name = "FILE", conflicts_with = "mode")]
    pub pin: Option<PathBuf>,
}

#[derive(Args)]
#[command(after_help = "\
The file holds x dt A B C and, if wanted, D z dt_bias initial_states cu_seqlens:

  x, z          [batch, seqlen, nheads, headdim]   bf16, f16 or f32
  dt            [batch, seqlen, nheads]            bf16, f16 or f32
  A, dt_bias    [nheads]                           f32
  B, C          [batch, seqlen, ngroups, dstate]   as x
  D             [nheads] or [nheads, headdim]      f32
  initial_states [batch or sequences, nheads, headdim, dstate]
  cu_seqlens    [sequences + 1]                    i32, packed sequences in one row

Metadata: dt_softplus (true|false), dt_limit (lo,hi). chunk_size is read and ignored: the answer does not depend on it.
The output holds out (x's dtype) and final_states (f32).

Examples:
  mamba2 run layer.safetensors -o out.safetensors
  mamba2 run layer.safetensors --backend cpu --check
  mamba2 run layer.safetensors --check --json
  mamba2 run layer.safetensors --check --every-config    every kernel variant that fits, on a GPU")]
pub struct RunArgs {
    /// Input tensors.
    #[arg(value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// Where to write out and final_states; nothing is written without it.
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Tokens per chunk instead of the tuned or default number.
    #[arg(long, value_name = "N")]
    pub chunk_size: Option<u32>,
    /// Compare with expected_out and expected_final_states of the file, else with float64; exit 1 beyond the bounds.
    #[arg(long)]
    pub check: bool,
    /// Check every legal config of every kernel on CUDA instead of the chosen one: outputs poisoned and guarded, two runs bit-equal.
    #[arg(long, requires = "check", conflicts_with_all = ["output", "pin", "mode"])]
    pub every_config: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "Example:\n  mamba2 demo --shape b=1,l=4096,h=80,p=64,g=1,n=128")]
pub struct DemoArgs {
    /// Shape to compute (see `mamba2 bench --help`).
    #[arg(
        long,
        value_name = "SHAPE",
        default_value = "b=1,l=1024,h=24,p=64,g=1,n=128"
    )]
    pub shape: String,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "\
A shape is b=batch,l=seqlen,h=nheads,p=headdim,g=ngroups,n=dstate and, if wanted, dtype=bf16|f16|f32, dt_dtype=..,
d=none|h|hp, z=1, bias=1, softplus=1, limit=lo:hi, init=none|f32|bf16|f16, final=.., packed=sequences, q=chunk size, tf32=1.
A decode step is step:b=rows,h=nheads,p=headdim,g=ngroups,n=dstate[,t=tokens][,slots=..][,dtype=..][,state=f32|bf16|f16] and
d, z, bias, softplus, limit, dt_dtype as above; with --step the axes may be written batch, nheads, headdim, ngroups, dstate, tokens.

Examples:
  mamba2 bench --shape b=4,l=16384,h=8,p=64,g=1,n=128
  mamba2 bench --step batch=64,nheads=80,headdim=64,ngroups=1,dstate=128
  mamba2 bench --sweep models --json models.json
  mamba2 bench --sweep options                     what D, z and the dt pipeline cost
  mamba2 bench --sweep decode --host-cost          what a call costs the host
  mamba2 bench --shape b=1,l=4096,h=80,p=64,g=1,n=128 --first-call
  mamba2 bench --shape b=1,l=4096,h=24,p=64,g=1,n=128,dtype=f32 --backend cpu")]
pub struct BenchArgs {
    /// A shape to time; may be given more than once.
    #[arg(long, value_name = "SHAPE", required_unless_present_any = ["sweep", "step"])]
    pub shape: Vec<String>,
    /// A decode step to time; may be given more than once.
    #[arg(long, value_name = "SHAPE")]
    pub step: Vec<String>,
    /// A kept list of shapes.
    #[arg(long, value_enum)]
    pub sweep: Option<Sweep>,
    /// Time each forward shape plain, with D, with z, with the dt pipeline and with all three, in turns, on inputs as a trained model's:
    /// step sizes that are the same with the pipeline and without.
    #[arg(long, conflicts_with_all = ["host_cost", "first_call"])]
    pub options: bool,
    /// Time what a call costs the host: enqueued, not waited for.
    #[arg(long, conflicts_with = "first_call")]
    pub host_cost: bool,
    /// Time new processes from their start to the end of their first call, with kernels that an earlier process compiled.
    #[arg(long)]
    pub first_call: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Timed calls per shape (30), batches of calls with --host-cost (30), processes with --first-call (10).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub samples: Option<u32>,
    /// Write results to a JSON file; `-` prints them.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(Args)]
pub struct FirstCallArgs {
    /// Shape.
    #[arg(long, value_name = "SHAPE")]
    pub shape: String,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sweep {
    /// seqlen 1024..262144 by dstate 64..512, batch 4, 8 heads.
    Seed,
    /// Layers of published models.
    Models,
    /// Decode steps of 1, 64 and 256 rows, f32 state.
    Decode,
    /// Three forward shapes, each with every option: implies --options.
    Options,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  mamba2 tune --shape b=4,l=16384,h=8,p=64,g=1,n=128
  mamba2 tune --shapes models.toml --resume
  mamba2 tune --shapes models.toml --shard 0/8       one of eight jobs; then `mamba2 db merge`
  mamba2 tune --shapes held-out.toml --hold-out      what the nearest match is worth on shapes that were not tuned

Interrupted? Run it again: every timing is stored as soon as it is known.")]
pub struct TuneArgs {
    /// A shape to tune (see `mamba2 bench --help`), or step:b=64,h=80,p=64,g=1,n=128; may be given more than once.
    #[arg(long, value_name = "SHAPE", required_unless_present = "shapes")]
    pub shape: Vec<String>,
    /// A TOML list of shapes.
    #[arg(long, value_name = "FILE", conflicts_with = "shape")]
    pub shapes: Option<PathBuf>,
    /// Tune only part I of N of the list, I from 0. Taken from Slurm, Kubernetes or torchrun if they say so.
    #[arg(long, value_name = "I/N")]
    pub shard: Option<String>,
    /// Skip shapes whose record is up to date. Candidates of the others are never measured twice, with or without.
    #[arg(long)]
    pub resume: bool,
    /// Tune nothing: look each shape up as if it had never been tuned, and measure what the nearest record says beside the
    /// default. Exit 1 if that loses by more than the noise.
    #[arg(long, conflicts_with_all = ["resume", "report"])]
    pub hold_out: bool,
    /// CUDA device ordinal; may be given more than once. All visible GPUs like the first one if not given.
    #[arg(long, value_name = "N")]
    pub device: Vec<usize>,
    /// Write a self-contained HTML report.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print one JSON object at the end.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "\
The file holds state x dt A B C and, if wanted, D z dt_bias state_batch_indices:

  state   [slots, nheads, headdim, dstate]    f32, bf16 or f16; updated
  x, z    [batch, tokens, nheads, headdim]    dt [batch, tokens, nheads]    B, C [batch, tokens, ngroups, dstate]
  state_batch_indices [batch]                 i32 slot of each row, -1 skips the row

The output holds out and state.

Example:
  mamba2 step token.safetensors -o next.safetensors")]
pub struct StepArgs {
    /// Input tensors.
    #[arg(value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// Where to write out and the updated state.
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Compare with expected_out and expected_state of the file, else with float64; exit 1 beyond the bounds.
    #[arg(long)]
    pub check: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "\
Works without a GPU: `--arch 90` plans for a full card of that compute capability.

Examples:
  mamba2 explain --shape b=1,l=4096,h=80,p=64,g=1,n=128
  mamba2 explain --shape b=1,l=4096,h=80,p=64,g=1,n=128 --arch 90 --json")]
pub struct ExplainArgs {
    /// Shape (see `mamba2 bench --help`).
    #[arg(long, value_name = "SHAPE")]
    pub shape: String,
    /// Explain for this compute capability (80, 86, 89, 90, 100, 103, 120) instead of the GPU found.
    #[arg(long, value_name = "SM")]
    pub arch: Option<u32>,
    /// CUDA device ordinal.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  mamba2 render --kernel compute_out --config swap_ab=1,stages=2
  mamba2 render --kernel fwd_pass_state --header          only the generated header
  mamba2 render --kernel chunk_cumsum --list              the parameters of a kernel and their values")]
pub struct RenderArgs {
    /// chunk_cumsum, fwd_pass_state, compute_out or state_update.
    #[arg(long, value_name = "K")]
    pub kernel: String,
    /// Parameters that differ from the default of the shape, as name=value,...
    #[arg(long, value_name = "K=V,...", default_value = "")]
    pub config: String,
    /// Shape (see `mamba2 bench --help`; for state_update, that of a decode step without `step:`).
    #[arg(long, value_name = "SHAPE")]
    pub shape: Option<String>,
    /// Compute capability.
    #[arg(long, value_name = "SM", default_value_t = 90)]
    pub arch: u32,
    /// Only the generated config header.
    #[arg(long)]
    pub header: bool,
    /// List the kernel's parameters instead.
    #[arg(long)]
    pub list: bool,
}

#[derive(Args)]
pub struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(after_help = "\
Examples:
  mamba2 db list
  mamba2 db export -o h200.json          then, elsewhere:   mamba2 db import h200.json
  mamba2 db merge shard-*.json
  mamba2 db bundle -o h200.mamba2bundle  records and compiled kernels, for hosts without NVRTC")]
pub struct DbArgs {
    #[command(subcommand)]
    pub command: DbCommand,
    /// Print JSON.
    #[arg(long, global = true)]
    pub json: bool,
}

#[derive(Subcommand)]
pub enum DbCommand {
    /// One line per record.
    List {
        /// Only keys that hold all of these name=value pairs, as in h=8,n=128.
        #[arg(long, value_name = "K=V,...", default_value = "")]
        filter: String,
    },
    /// A record, its evidence, and everything measured beside it.
    Show {
        /// Key, as `db list` prints it.
        key: String,
    },
    /// Write local records to a text file, or to a folder with one file per kind of GPU.
    Export {
        /// The file, or an existing folder.
        #[arg(short, long, value_name = "PATH")]
        output: PathBuf,
        /// As for list.
        #[arg(long, value_name = "K=V,...", default_value = "")]
        filter: String,
    },
    /// Add the records of a text file, or a bundle.
    Import {
        /// The file.
        file: PathBuf,
    },
    /// Add the results of other cache directories or exported files (the shards of a job); of two records the better
    /// measured one stays.
    Merge {
        /// Cache directories, exported files, bundles.
        #[arg(required = true)]
        sources: Vec<PathBuf>,
    },
    /// Compare two files, or a file with the local records.
    Diff {
        /// First file.
        left: PathBuf,
        /// Second file; the local records if not given.
        right: Option<PathBuf>,
    },
    /// Check every record against today's rules; exit 1 if one is bad.
    Verify,
    /// Drop what no longer applies and give disk space back.
    Prune,
    /// Print the cache directory and why it is that one.
    Path,
    /// Pack records and compiled kernels into one file.
    Bundle {
        /// The file.
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
    },
}
