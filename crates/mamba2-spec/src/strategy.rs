use std::fmt;

use serde::{Deserialize, Serialize};

use crate::SpecError;
use crate::parameters::{
    ChunkCumsum, ComputeOut, FwdPassState, Parameters, SegmentScan, Sm90ChainForward,
    Sm90FusedForward, Sm90SegmentState, Sm90SplitFusedForward, Sm90SplitSegmentState,
    Sm90SwapFusedForward, Sm90SwapSegmentState, StateUpdate,
};

/// A kernel of `kernel-templates/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// G per chunk, dt after bias, softplus and limit.
    ChunkCumsum,
    /// State at each chunk start and final state.
    FwdPassState,
    /// Y.
    ComputeOut,
    /// State that each segment adds (Hopper).
    Sm90SegmentState,
    /// State at each segment's start.
    SegmentScan,
    /// Y and the final state in one pass (Hopper).
    Sm90FusedForward,
    /// As [`Kernel::Sm90SegmentState`] with the state transposed: any headdim, dstate up to 512 (Hopper).
    Sm90SwapSegmentState,
    /// As [`Kernel::Sm90FusedForward`] with the state transposed: any headdim, dstate up to 512 (Hopper).
    Sm90SwapFusedForward,
    /// As [`Kernel::Sm90SegmentState`] for any headdim, dstate up to 512 in two slices (Hopper).
    Sm90SplitSegmentState,
    /// As [`Kernel::Sm90FusedForward`] for any headdim, dstate up to 512 in two slices, a block each (Hopper).
    Sm90SplitFusedForward,
    /// Y and the final state in one launch, a chain of blocks a sequence (Hopper).
    Sm90ChainForward,
    /// One decode step.
    StateUpdate,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Kernel; 12] = [
        Kernel::ChunkCumsum,
        Kernel::FwdPassState,
        Kernel::ComputeOut,
        Kernel::Sm90SegmentState,
        Kernel::SegmentScan,
        Kernel::Sm90FusedForward,
        Kernel::Sm90SwapSegmentState,
        Kernel::Sm90SwapFusedForward,
        Kernel::Sm90SplitSegmentState,
        Kernel::Sm90SplitFusedForward,
        Kernel::Sm90ChainForward,
        Kernel::StateUpdate,
    ];

    /// True for kernels of wgmma and TMA: they compile for sm_90a only.
    pub const fn needs_wgmma(self) -> bool {
        self.x_box_columns().is_some()
    }

    /// For kernels that take tensor maps of x, B, C and z beside their arguments: headdim elements of a box of x or z, whose rows are
    /// swizzled as a whole. Boxes of B and C are 64 elements of dstate.
    pub const fn x_box_columns(self) -> Option<u32> {
        match self {
            Kernel::Sm90SegmentState
            | Kernel::Sm90FusedForward
            | Kernel::Sm90SplitSegmentState
            | Kernel::Sm90SplitFusedForward
            | Kernel::Sm90ChainForward => Some(64),
            Kernel::Sm90SwapSegmentState | Kernel::Sm90SwapFusedForward => Some(32),
            _ => None,
        }
    }

    /// Name of the kernel, of its template file (without `.cu`) and of its entry function.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::ChunkCumsum => "chunk_cumsum",
            Kernel::FwdPassState => "fwd_pass_state",
            Kernel::ComputeOut => "compute_out",
            Kernel::Sm90SegmentState => "sm90_segment_state",
            Kernel::SegmentScan => "segment_scan",
            Kernel::Sm90FusedForward => "sm90_fused_forward",
            Kernel::Sm90SwapSegmentState => "sm90_swap_segment_state",
            Kernel::Sm90SwapFusedForward => "sm90_swap_fused_forward",
            Kernel::Sm90SplitSegmentState => "sm90_split_segment_state",
            Kernel::Sm90SplitFusedForward => "sm90_split_fused_forward",
            Kernel::Sm90ChainForward => "sm90_chain_forward",
            Kernel::StateUpdate => "state_update",
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Kernel {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Kernel, SpecError> {
        Kernel::ALL
            .into_iter()
            .find(|k| k.name() == text)
            .ok_or_else(|| SpecError::Option {
                key: "kernel".into(),
                expected: format!("one of {:?}", Kernel::ALL.map(Kernel::name)),
                got: text.into(),
            })
    }
}

/// Configs of the three kernels. `chunk_size` and `layout` agree (rule S01).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(deny_unknown_fields)]
pub struct ThreeKernelConfig {
    /// First launch.
    pub chunk_cumsum: ChunkCumsum,
    /// Second launch.
    pub fwd_pass_state: FwdPassState,
    /// Third launch.
    pub compute_out: ComputeOut,
}

/// Configs of the fused Hopper forward. `segment` agrees (rule S01); with `segment` 0 only the last kernel is launched, with few segments
/// not the second.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(deny_unknown_fields)]
pub struct Sm90FusedConfig {
    /// First launch.
    pub segment_state: Sm90SegmentState,
    /// Second launch.
    pub segment_scan: SegmentScan,
    /// Third launch.
    pub fused_forward: Sm90FusedForward,
}

/// Configs of the fused Hopper forward with transposed states. `segment` agrees (rule S01); with `segment` 0 only the last kernel is
/// launched.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(deny_unknown_fields)]
pub struct Sm90SwapFusedConfig {
    /// First launch.
    pub segment_state: Sm90SwapSegmentState,
    /// Second launch.
    pub segment_scan: SegmentScan,
    /// Third launch.
    pub fused_forward: Sm90SwapFusedForward,
}

/// Configs of the fused Hopper forward for any headdim and a dstate in slices. `segment` agrees (rule S01); with `segment` 0 only the last
/// kernel is launched.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(deny_unknown_fields)]
pub struct Sm90SplitFusedConfig {
    /// First launch.
    pub segment_state: Sm90SplitSegmentState,
    /// Second launch.
    pub segment_scan: SegmentScan,
    /// Third launch.
    pub fused_forward: Sm90SplitFusedForward,
}

/// Config of the forward pass in one launch.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(deny_unknown_fields)]
pub struct Sm90ChainConfig {
    /// The only launch.
    pub chain_forward: Sm90ChainForward,
}

/// How a forward pass is done, with every searched parameter. The only thing a tuning database stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "strategy", rename_all = "snake_case")]
pub enum StrategyConfig {
    /// chunk_cumsum, fwd_pass_state, compute_out.
    ThreeKernel(ThreeKernelConfig),
    /// sm90_segment_state, segment_scan, sm90_fused_forward.
    Sm90Fused(Sm90FusedConfig),
    /// sm90_swap_segment_state, segment_scan, sm90_swap_fused_forward.
    Sm90SwapFused(Sm90SwapFusedConfig),
    /// sm90_split_segment_state, segment_scan, sm90_split_fused_forward.
    Sm90SplitFused(Sm90SplitFusedConfig),
    /// sm90_chain_forward.
    Sm90Chain(Sm90ChainConfig),
}

impl StrategyConfig {
    /// `three_kernel`, ...
    pub fn name(&self) -> &'static str {
        match self {
            StrategyConfig::ThreeKernel(_) => "three_kernel",
            StrategyConfig::Sm90Fused(_) => "sm90_fused",
            StrategyConfig::Sm90SwapFused(_) => "sm90_swap_fused",
            StrategyConfig::Sm90SplitFused(_) => "sm90_split_fused",
            StrategyConfig::Sm90Chain(_) => "sm90_chain",
        }
    }

    /// Tokens per chunk.
    pub fn chunk_size(&self) -> u32 {
        match self {
            StrategyConfig::ThreeKernel(c) => c.compute_out.chunk_size,
            StrategyConfig::Sm90Fused(_)
            | StrategyConfig::Sm90SwapFused(_)
            | StrategyConfig::Sm90SplitFused(_)
            | StrategyConfig::Sm90Chain(_) => 64,
        }
    }

    /// Tokens per segment of a strategy that splits sequences into segments of one length; 0 is the whole sequence.
    pub fn segment(&self) -> Option<u32> {
        match self {
            StrategyConfig::ThreeKernel(_) | StrategyConfig::Sm90Chain(_) => None,
            StrategyConfig::Sm90Fused(c) => Some(c.fused_forward.segment),
            StrategyConfig::Sm90SwapFused(c) => Some(c.fused_forward.segment),
            StrategyConfig::Sm90SplitFused(c) => Some(c.fused_forward.segment),
        }
    }

    /// The same with segments of another length; a strategy without segments as it is.
    pub fn with_segment(mut self, segment: u32) -> StrategyConfig {
        match &mut self {
            StrategyConfig::ThreeKernel(_) | StrategyConfig::Sm90Chain(_) => {}
            StrategyConfig::Sm90Fused(c) => {
                c.segment_state.segment = segment;
                c.segment_scan.segment = segment;
                c.fused_forward.segment = segment;
            }
            StrategyConfig::Sm90SwapFused(c) => {
                c.segment_state.segment = segment;
                c.segment_scan.segment = segment;
                c.fused_forward.segment = segment;
            }
            StrategyConfig::Sm90SplitFused(c) => {
                c.segment_state.segment = segment;
                c.segment_scan.segment = segment;
                c.fused_forward.segment = segment;
            }
        }
        self
    }

    /// The kernels in launch order, with their configs.
    pub fn kernels(&self) -> Vec<KernelConfig> {
        match self {
            StrategyConfig::ThreeKernel(c) => vec![
                KernelConfig::ChunkCumsum(c.chunk_cumsum),
                KernelConfig::FwdPassState(c.fwd_pass_state),
                KernelConfig::ComputeOut(c.compute_out),
            ],
            StrategyConfig::Sm90Fused(c) if c.fused_forward.segment == 0 => {
                vec![KernelConfig::Sm90FusedForward(c.fused_forward)]
            }
            StrategyConfig::Sm90Fused(c) => vec![
                KernelConfig::Sm90SegmentState(c.segment_state),
                KernelConfig::SegmentScan(c.segment_scan),
                KernelConfig::Sm90FusedForward(c.fused_forward),
            ],
            StrategyConfig::Sm90SwapFused(c) if c.fused_forward.segment == 0 => {
                vec![KernelConfig::Sm90SwapFusedForward(c.fused_forward)]
            }
            StrategyConfig::Sm90SwapFused(c) => vec![
                KernelConfig::Sm90SwapSegmentState(c.segment_state),
                KernelConfig::SegmentScan(c.segment_scan),
                KernelConfig::Sm90SwapFusedForward(c.fused_forward),
            ],
            StrategyConfig::Sm90SplitFused(c) if c.fused_forward.segment == 0 => {
                vec![KernelConfig::Sm90SplitFusedForward(c.fused_forward)]
            }
            StrategyConfig::Sm90SplitFused(c) => vec![
                KernelConfig::Sm90SplitSegmentState(c.segment_state),
                KernelConfig::SegmentScan(c.segment_scan),
                KernelConfig::Sm90SplitFusedForward(c.fused_forward),
            ],
            StrategyConfig::Sm90Chain(c) => {
                vec![KernelConfig::Sm90ChainForward(c.chain_forward)]
            }
        }
    }

    /// The same strategy with one kernel's config replaced; `None` if the strategy has no such kernel.
    pub fn with_kernel(mut self, kernel: KernelConfig) -> Option<StrategyConfig> {
        match (&mut self, kernel) {
            (StrategyConfig::ThreeKernel(c), KernelConfig::ChunkCumsum(k)) => c.chunk_cumsum = k,
            (StrategyConfig::ThreeKernel(c), KernelConfig::FwdPassState(k)) => c.fwd_pass_state = k,
            (StrategyConfig::ThreeKernel(c), KernelConfig::ComputeOut(k)) => c.compute_out = k,
            (StrategyConfig::Sm90Fused(c), KernelConfig::Sm90SegmentState(k)) => {
                c.segment_state = k
            }
            (StrategyConfig::Sm90Fused(c), KernelConfig::SegmentScan(k)) => c.segment_scan = k,
            (StrategyConfig::Sm90Fused(c), KernelConfig::Sm90FusedForward(k)) => {
                c.fused_forward = k
            }
            (StrategyConfig::Sm90SwapFused(c), KernelConfig::Sm90SwapSegmentState(k)) => {
                c.segment_state = k
            }
            (StrategyConfig::Sm90SwapFused(c), KernelConfig::SegmentScan(k)) => c.segment_scan = k,
            (StrategyConfig::Sm90SwapFused(c), KernelConfig::Sm90SwapFusedForward(k)) => {
                c.fused_forward = k
            }
            (StrategyConfig::Sm90SplitFused(c), KernelConfig::Sm90SplitSegmentState(k)) => {
                c.segment_state = k
            }
            (StrategyConfig::Sm90SplitFused(c), KernelConfig::SegmentScan(k)) => c.segment_scan = k,
            (StrategyConfig::Sm90SplitFused(c), KernelConfig::Sm90SplitFusedForward(k)) => {
                c.fused_forward = k
            }
            (StrategyConfig::Sm90Chain(c), KernelConfig::Sm90ChainForward(k)) => {
                c.chain_forward = k
            }
            _ => return None,
        }
        Some(self)
    }

    /// What the kernels of the strategy agree on, as in `chunk_size=128,layout=bht`.
    pub fn agreement(&self) -> String {
        match self {
            StrategyConfig::ThreeKernel(c) => {
                let layout = ChunkCumsum::ROWS
                    .iter()
                    .find(|r| r.name == "layout")
                    .expect("chunk_cumsum should have a layout");
                format!(
                    "chunk_size={},layout={}",
                    c.compute_out.chunk_size,
                    layout.display(c.compute_out.layout)
                )
            }
            StrategyConfig::Sm90Fused(_)
            | StrategyConfig::Sm90SwapFused(_)
            | StrategyConfig::Sm90SplitFused(_) => {
                format!("segment={}", self.segment().unwrap_or_default())
            }
            StrategyConfig::Sm90Chain(_) => "one launch".into(),
        }
    }
}

/// `strategy:kernel(name=value,...);kernel(...)`, for people and logs.
impl fmt::Display for StrategyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kernels: Vec<String> = self
            .kernels()
            .iter()
            .map(|k| format!("{}({})", k.kernel(), k.to_text()))
            .collect();
        write!(f, "{}:{}", self.name(), kernels.join(";"))
    }
}

macro_rules! kernel_config {
    ($($kernel:ident),+) => {
        /// One kernel with its parameters.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)]
        pub enum KernelConfig { $($kernel($kernel)),+ }

        impl KernelConfig {
            /// Which kernel.
            pub fn kernel(&self) -> Kernel {
                match self { $(KernelConfig::$kernel(_) => Kernel::$kernel),+ }
            }

            /// `(CUDA constant, value)` of every parameter.
            pub fn constants(&self) -> Vec<(&'static str, u32)> {
                match self { $(KernelConfig::$kernel(p) => p.constants()),+ }
            }

            /// `name=value,...`
            pub fn to_text(&self) -> String {
                match self { $(KernelConfig::$kernel(p) => p.to_text()),+ }
            }

            /// Reads `name=value,...` for `kernel`, on top of the defaults.
            ///
            /// # Errors
            /// [`SpecError::Option`] for an unknown name or a value outside its domain.
            pub fn from_text(kernel: Kernel, text: &str) -> Result<KernelConfig, SpecError> {
                Ok(match kernel { $(Kernel::$kernel => KernelConfig::$kernel($kernel::from_text(text)?)),+ })
            }

            /// Every combination of the domains of `kernel`; legality is for [`crate::rules`].
            pub fn space(kernel: Kernel) -> Vec<KernelConfig> {
                match kernel { $(Kernel::$kernel => $kernel::space().into_iter().map(KernelConfig::$kernel).collect()),+ }
            }

            /// The rows of the parameter table of `kernel`.
            pub fn rows(kernel: Kernel) -> &'static [crate::parameters::Row] {
                match kernel { $(Kernel::$kernel => $kernel::ROWS),+ }
            }
        }
    };
}

kernel_config!(
    ChunkCumsum,
    FwdPassState,
    ComputeOut,
    Sm90SegmentState,
    SegmentScan,
    Sm90FusedForward,
    Sm90SwapSegmentState,
    Sm90SwapFusedForward,
    Sm90SplitSegmentState,
    Sm90SplitFusedForward,
    Sm90ChainForward,
    StateUpdate
);
