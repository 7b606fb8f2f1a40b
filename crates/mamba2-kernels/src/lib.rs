//! The CUDA templates, embedded in the binary, and the config header that parameterises them.
//!
//! A kernel is one entry file of `kernel-templates/`, the shared headers, and one generated header,
//! [`CONFIG_HEADER`], that defines every constant by name. Nothing else is ever included, so [`Rendered::template_digest`] covers
//! all the code that NVRTC sees; comments are not part of it ([`code_of`]). Runs on a laptop: no CUDA here.
//!
//! ```
//! use mamba2_kernels::render;
//! use mamba2_spec::{Arch, DeviceFacts, Problem, rules};
//! let problem: Problem = "b=1,l=256,h=4,p=64,g=1,n=128".parse().unwrap();
//! let device = DeviceFacts::assumed(Arch(90));
//! let config = rules::default_strategy(&problem, &device).unwrap().kernels()[0];
//! let kernel = render(&config, &problem, &device);
//! assert!(kernel.config_header.contains("DSTATE = 128"));
//! ```
#![forbid(unsafe_code)]

mod code;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::LazyLock;

use mamba2_spec::launch::{
    KernelLaunch, SEGMENTS_WITHOUT_SCAN, kernel_launch, segment_state_elems, states_row_elems,
    step_launch,
};
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{
    Alignment, Arch, DKind, DeviceFacts, DtLimit, Dtype, Kernel, KernelConfig, Precision, Problem,
    StepProblem,
};
use sha2::{Digest, Sha256};

pub use code::code_of;

/// Name under which templates include the generated header.
pub const CONFIG_HEADER: &str = "mamba2_config.cuh";

macro_rules! templates {
    ($($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../../../kernel-templates/", $path)))),+]
    };
}

/// Headers, by the name templates include them under.
pub const HEADERS: &[(&str, &str)] = templates![
    "common/args.cuh",
    "common/dtypes.cuh",
    "common/fragments.cuh",
    "common/require.cuh",
    "common/sm90_chunk.cuh",
    "common/sm90_forward.cuh",
    "common/sm90_halves.cuh",
    "common/sm90_pipeline.cuh",
    "common/sm90_split_pipeline.cuh",
    "common/sm90_states.cuh",
    "common/sm90_swap_pipeline.cuh",
    "common/softplus.cuh",
    "common/tiles.cuh",
    "common/work.cuh",
    "ptx/cp_async.cuh",
    "ptx/launch.cuh",
    "ptx/ldmatrix.cuh",
    "ptx/math.cuh",
    "ptx/mma.cuh",
    "ptx/prefetch.cuh",
    "ptx/sm90_barrier.cuh",
    "ptx/grid_flag.cuh",
    "ptx/sm90_cluster.cuh",
    "ptx/sm90_tma.cuh",
    "ptx/sm90_wgmma.cuh",
    "ptx/special.cuh",
];

const ENTRIES: &[(&str, &str)] = templates![
    "chunk_cumsum.cu",
    "fwd_pass_state.cu",
    "compute_out.cu",
    "sm90_segment_state.cu",
    "segment_scan.cu",
    "sm90_fused_forward.cu",
    "sm90_swap_segment_state.cu",
    "sm90_swap_fused_forward.cu",
    "sm90_split_segment_state.cu",
    "sm90_split_fused_forward.cu",
    "sm90_chain_forward.cu",
    "state_update.cu",
];

const TOOLS: &[(&str, &str)] = templates!["tool_copy.cu", "tool_compare.cu", "tool_nothing.cu"];

/// The template of a kernel: file name and text.
pub fn entry_file(kernel: Kernel) -> (&'static str, &'static str) {
    let name = kernel.name();
    *ENTRIES
        .iter()
        .find(|(file, _)| file.strip_suffix(".cu") == Some(name))
        .expect("every kernel should have a template of its name")
}

/// Text that NVRTC compiles to one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name of the `extern "C"` entry function.
    pub entry: &'static str,
    /// File name of the entry template, for diagnostics.
    pub source_name: &'static str,
    /// Text of the entry template.
    pub source: &'static str,
    /// Text of the generated header, included as [`CONFIG_HEADER`].
    pub config_header: String,
}

/// A kernel ready for NVRTC: its [`Source`], to which it dereferences, and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// Which kernel.
    pub kernel: Kernel,
    /// What is compiled.
    pub source: Source,
    /// How the kernel is launched with this config.
    pub launch: KernelLaunch,
}

impl std::ops::Deref for Rendered {
    type Target = Source;

    fn deref(&self) -> &Source {
        &self.source
    }
}

impl Rendered {
    /// [`Source::template_digest`]: the version of the template.
    pub fn template_digest(&self) -> String {
        self.source.template_digest()
    }
}

impl Source {
    /// SHA-256 in hex over the code ([`code_of`]) of the entry template and of the headers it includes, and their names. The same for all
    /// configs, and whatever the comments say.
    pub fn template_digest(&self) -> String {
        digest_of((self.source_name, self.source))
    }

    /// Every header NVRTC may need: the shared ones and the generated one.
    pub fn headers(&self) -> Vec<(&str, &str)> {
        let mut headers: Vec<(&str, &str)> = HEADERS.to_vec();
        headers.push((CONFIG_HEADER, &self.config_header));
        headers
    }

    /// Entry and headers as one text, as people want to read it.
    pub fn full_text(&self) -> String {
        let mut text = String::new();
        for (name, body) in self.headers() {
            let _ = writeln!(text, "// ==== {name}\n{body}");
        }
        let _ = writeln!(text, "// ==== {}\n{}", self.source_name, self.source);
        text
    }
}

/// Kernels that are no part of the operator: they measure and check those that are. Nothing about them is tuned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tool {
    /// Copies device memory.
    Copy,
    /// Compares two runs' results in guarded memory with each other and with a standard.
    Compare(Dtype),
    /// Does nothing, with that many bytes of parameters, a multiple of 8.
    Nothing(u32),
}

impl Tool {
    /// Every tool, each kind of parameter once.
    pub const ALL: [Tool; 5] = [
        Tool::Copy,
        Tool::Compare(Dtype::Bf16),
        Tool::Compare(Dtype::F16),
        Tool::Compare(Dtype::F32),
        Tool::Nothing(1024),
    ];
    /// Threads of a block.
    pub const THREADS: u32 = 256;

    /// The tool, ready for NVRTC. It runs on any number of blocks of [`Tool::THREADS`] threads, without dynamic shared memory.
    pub fn render(self, arch: Arch) -> Source {
        let (entry, at) = match self {
            Tool::Copy => ("tool_copy", 0),
            Tool::Compare(_) => ("tool_compare", 1),
            Tool::Nothing(_) => ("tool_nothing", 2),
        };
        let mut header = Header::new(entry, arch);
        match self {
            Tool::Copy => {}
            Tool::Compare(dtype) => {
                header.constant("X_DTYPE", dtype_code(Some(dtype)), DTYPES);
            }
            Tool::Nothing(bytes) => {
                header.constant("PARAMETER_BYTES", bytes.into(), "of the kernel");
            }
        }
        header.constant("THREADS", Tool::THREADS.into(), "threads per block");
        let (source_name, source) = TOOLS[at];
        Source {
            entry,
            source_name,
            source,
            config_header: header.text,
        }
    }
}

/// [`Source::template_digest`] of a kernel.
pub fn template_digest(kernel: Kernel) -> String {
    digest_of(entry_file(kernel))
}

/// Code of the headers, hashed once: an engine asks for the digest of every kernel.
struct Headers(BTreeMap<&'static str, (Sha256Digest, Vec<String>)>);

type Sha256Digest = [u8; 32];

static OF_HEADERS: LazyLock<Headers> = LazyLock::new(|| Headers::of(HEADERS.iter().copied()));

impl Headers {
    /// Digest and includes of each.
    fn of(headers: impl IntoIterator<Item = (&'static str, impl AsRef<str>)>) -> Headers {
        let of = |(name, text)| {
            let code = code_of(AsRef::<str>::as_ref(&text));
            (name, (Sha256::digest(&code).into(), includes(&code)))
        };
        Headers(headers.into_iter().map(of).collect())
    }

    /// Digest over an entry template and the headers that it includes, and those that they include: an edit of one changes nothing for kernels that
    /// never see it.
    fn digest_with(&self, (name, text): (&str, &str)) -> String {
        let code = code_of(text);
        let mut seen = BTreeMap::new();
        let mut open = includes(&code);
        while let Some(header) = open.pop() {
            // The generated one, which is part of what a kernel is named by, has no text here.
            let Some((name, (digest, includes))) = self.0.get_key_value(header.as_str()) else {
                continue;
            };
            if seen.insert(*name, digest).is_none() {
                open.extend(includes.iter().cloned());
            }
        }
        let mut hash = Sha256::new();
        // Lengths first, so that no two lists of texts give the same stream.
        for part in [name, &code] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        for (name, digest) in seen {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(digest);
        }
        hash.finalize().iter().fold(String::new(), |mut s, b| {
            let _ = write!(s, "{b:02x}");
            s
        })
    }
}

/// Names of the files that a text includes.
fn includes(code: &str) -> Vec<String> {
    code.lines()
        .filter_map(|line| line.trim().strip_prefix("#include"))
        .filter_map(|rest| rest.split('"').nth(1))
        .map(String::from)
        .collect()
}

fn digest_of(entry: (&str, &str)) -> String {
    OF_HEADERS.digest_with(entry)
}

struct Header {
    text: String,
}

impl Header {
    fn new(kernel: impl std::fmt::Display, arch: Arch) -> Header {
        let mut header = Header {
            text: String::new(),
        };
        let _ = writeln!(
            header.text,
            "// Generated for {kernel} on {arch}: every constant the templates take.\n#pragma once"
        );
        header.constant(
            "SM_ARCH",
            i64::from(arch.0),
            "compute capability, major * 10 + minor",
        );
        header
    }

    fn constant(&mut self, name: &str, value: i64, why: &str) {
        let _ = writeln!(self.text, "constexpr int {name} = {value}; // {why}");
    }

    fn parameters(&mut self, config: &KernelConfig) {
        let rows = KernelConfig::rows(config.kernel());
        let constants = rows.iter().filter(|row| row.cuda.is_some());
        for (row, (name, value)) in constants.zip(config.constants()) {
            let named = if row.value_names.is_empty() {
                String::new()
            } else {
                format!(" {}:", row.display(value))
            };
            self.constant(name, value.into(), &format!("tuned,{named} {}", row.unit));
        }
    }

    fn launch(&mut self, launch: &KernelLaunch) {
        self.constant("THREADS", launch.threads.into(), "threads per block");
        self.constant(
            "SMEM_BYTES",
            launch.smem_bytes as i64,
            "dynamic shared memory of a block",
        );
    }
}

const DTYPES: &str = "-1 none, 0 bf16, 1 f16, 2 f32";

fn dtype_code(dtype: Option<Dtype>) -> i64 {
    match dtype {
        None => -1,
        Some(Dtype::Bf16) => 0,
        Some(Dtype::F16) => 1,
        Some(Dtype::F32) => 2,
    }
}

/// Sizes, dtypes and options that forward and step share.
struct Common {
    headdim: usize,
    dstate: usize,
    dtype: Dtype,
    dt_dtype: Dtype,
    d: DKind,
    z: bool,
    dt_bias: bool,
    dt_softplus: bool,
    dt_limit: DtLimit,
}

impl Common {
    fn write(&self, header: &mut Header) {
        header.constant("HEADDIM", self.headdim as i64, "elements of x per head");
        header.constant("DSTATE", self.dstate as i64, "state size");
        header.constant("X_DTYPE", dtype_code(Some(self.dtype)), DTYPES);
        header.constant("DT_DTYPE", dtype_code(Some(self.dt_dtype)), DTYPES);
        let d = match self.d {
            DKind::None => 0,
            DKind::PerHead => 1,
            DKind::PerHeaddim => 2,
        };
        header.constant("D_KIND", d, "0 none, 1 [nheads], 2 [nheads, headdim]");
        header.constant("HAS_Z", self.z.into(), "output gated by silu(z)");
        header.constant("HAS_DT_BIAS", self.dt_bias.into(), "dt + dt_bias");
        header.constant(
            "DT_SOFTPLUS",
            self.dt_softplus.into(),
            "softplus after the bias, identity above 20",
        );
        header.constant(
            "HAS_DT_LIMIT",
            (self.dt_limit != DtLimit::NONE).into(),
            "clamp after softplus",
        );
    }
}

/// Renders one kernel of the forward pass.
pub fn render(config: &KernelConfig, problem: &Problem, device: &DeviceFacts) -> Rendered {
    let kernel = config.kernel();
    let launch = kernel_launch(config, problem, device);
    let mut header = Header::new(kernel, device.arch);
    Common {
        headdim: problem.headdim,
        dstate: problem.dstate,
        dtype: problem.dtype,
        dt_dtype: problem.dt_dtype,
        d: problem.d,
        z: problem.z,
        dt_bias: problem.dt_bias,
        dt_softplus: problem.dt_softplus,
        dt_limit: problem.dt_limit,
    }
    .write(&mut header);
    header.constant(
        "INITIAL_DTYPE",
        dtype_code(problem.initial_states),
        "dtype of initial_states, -1 none",
    );
    header.constant(
        "FINAL_DTYPE",
        dtype_code(problem.final_states),
        "dtype of final_states, -1 none",
    );
    header.constant(
        "PACKED",
        problem.packed.is_some().into(),
        "sequences packed in one row, offsets in cu_seqlens",
    );
    header.constant(
        "USE_TF32",
        (problem.precision == Precision::Tf32).into(),
        "one TF32 product instead of three for f32",
    );
    header.constant(
        "ALIGNED",
        (problem.alignment == Alignment::Bytes16).into(),
        "views allow 16-byte copies",
    );
    header.constant(
        "STATES_ROW",
        states_row_elems(problem) as i64,
        "row of a chunk state in the workspace, elements",
    );
    header.constant(
        "STATE_ELEMS",
        segment_state_elems(problem) as i64,
        "elements of a segment state in the workspace",
    );
    header.constant(
        "SEGMENTS_WITHOUT_SCAN",
        SEGMENTS_WITHOUT_SCAN as i64,
        "segments of a sequence that the forward pass adds up itself",
    );
    header.parameters(config);
    header.launch(&launch);
    rendered(kernel, header, launch)
}

/// Renders the decode step.
pub fn render_step(config: &StateUpdate, problem: &StepProblem, device: &DeviceFacts) -> Rendered {
    let launch = step_launch(config, problem, device);
    let mut header = Header::new(Kernel::StateUpdate, device.arch);
    Common {
        headdim: problem.headdim,
        dstate: problem.dstate,
        dtype: problem.dtype,
        dt_dtype: problem.dt_dtype,
        d: problem.d,
        z: problem.z,
        dt_bias: problem.dt_bias,
        dt_softplus: problem.dt_softplus,
        dt_limit: problem.dt_limit,
    }
    .write(&mut header);
    header.constant(
        "STATE_DTYPE",
        dtype_code(Some(problem.state_dtype)),
        "dtype of the state cache",
    );
    header.constant(
        "HAS_INDICES",
        problem.indices.into(),
        "slot of each row in state_batch_indices",
    );
    header.constant(
        "ONE_TOKEN",
        (problem.tokens == 1).into(),
        "a call has one token a row",
    );
    header.constant(
        "EVERY_ROW",
        (launch.blocks() == launch.work_items).into(),
        "the grid has blocks for every row",
    );
    header.parameters(&KernelConfig::StateUpdate(*config));
    header.launch(&launch);
    rendered(Kernel::StateUpdate, header, launch)
}

fn rendered(kernel: Kernel, header: Header, launch: KernelLaunch) -> Rendered {
    let (source_name, source) = entry_file(kernel);
    Rendered {
        kernel,
        source: Source {
            entry: kernel.name(),
            source_name,
            source,
            config_header: header.text,
        },
        launch,
    }
}

#[cfg(test)]
mod tests {
    use mamba2_spec::{Arch, DeviceFacts, Problem};

    use super::{
        CONFIG_HEADER, HEADERS, Headers, code_of, digest_of, entry_file, includes, template_digest,
    };

    #[test]
    fn a_digest_is_of_the_code_and_of_every_token_of_it() {
        for kernel in mamba2_spec::Kernel::ALL {
            let (name, text) = entry_file(kernel);
            let digest = template_digest(kernel);
            let commented = text.replace(";\n", "; // a remark\n\n  /* and */\n");
            assert_ne!(commented, text);
            assert_eq!(digest_of((name, &commented)), digest, "{name}");
            assert_eq!(digest_of((name, &code_of(text))), digest, "{name}");
            let changed = code_of(text).replacen('=', "+=", 1);
            assert_ne!(digest_of((name, &changed)), digest, "{name}");
        }
        for (name, text) in HEADERS {
            let code = code_of(text);
            assert_eq!(code_of(&code), code, "{name}");
            assert!(!code.contains("//"), "{name}");
            assert!(code.starts_with("#pragma once\n"), "{name}");
        }
    }

    #[test]
    fn a_header_counts_for_the_kernels_that_include_it_and_for_no_other() {
        let digests = |headers: &Headers| {
            mamba2_spec::Kernel::ALL.map(|kernel| headers.digest_with(entry_file(kernel)))
        };
        let today = digests(&Headers::of(HEADERS.iter().copied()));
        for (changed, kernels) in [
            (
                "common/sm90_split_pipeline.cuh",
                vec!["sm90_split_segment_state", "sm90_split_fused_forward"],
            ),
            (
                "common/work.cuh",
                vec!["chunk_cumsum", "fwd_pass_state", "compute_out"],
            ),
            // Through other headers too.
            (
                "ptx/math.cuh",
                mamba2_spec::Kernel::ALL.map(|k| k.name()).to_vec(),
            ),
        ] {
            let edited = HEADERS.iter().map(|(name, text)| {
                let edit = if *name == changed {
                    "\nconstexpr int EDIT = 1;\n"
                } else {
                    ""
                };
                (*name, format!("{text}{edit}"))
            });
            let now = digests(&Headers::of(edited));
            for ((kernel, before), after) in mamba2_spec::Kernel::ALL.iter().zip(&today).zip(&now) {
                let includes = kernels.contains(&kernel.name());
                assert_eq!(before != after, includes, "{changed}: {}", kernel.name());
            }
        }
    }

    #[test]
    fn every_include_is_a_header() {
        let entries = mamba2_spec::Kernel::ALL.map(entry_file);
        for (file, text) in entries.iter().chain(HEADERS) {
            let code = code_of(text);
            assert_eq!(
                includes(&code).len(),
                code.matches("#include").count(),
                "{file}"
            );
            for name in includes(&code) {
                let known = HEADERS.iter().any(|(header, _)| *header == name);
                assert!(known || name == CONFIG_HEADER, "{file} includes {name}");
            }
        }
    }

    /// Launches overlap: one that reads what another writes has to wait for it.
    #[test]
    fn every_kernel_that_follows_another_waits_for_it() {
        let device = DeviceFacts::assumed(Arch(90));
        let mut seen = 0;
        for shape in [
            "b=2,l=4096,h=8,p=64,g=1,n=128",
            "b=2,l=4096,h=8,p=128,g=1,n=512",
        ] {
            let problem: Problem = shape.parse().expect("a shape");
            for strategy in mamba2_spec::rules::agreement_defaults(&problem, &device) {
                for kernel in strategy.kernels().iter().skip(1) {
                    let (file, text) = entry_file(kernel.kernel());
                    assert!(
                        text.contains("griddepcontrol_wait")
                            || text.contains("wait_for_states") && text.contains("wait_at_the_end"),
                        "{file} does not wait for the kernel before it"
                    );
                    seen += 1;
                }
            }
        }
        assert!(seen > 0);
    }
}
