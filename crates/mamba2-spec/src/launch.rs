//! Everything derived from a problem and a config: grids, threads, shared memory, workspace. Pure functions, never stored.

use crate::parameters::{
    ChunkCumsum, ComputeOut, FwdPassState, SegmentScan, Sm90ChainForward, StateUpdate,
};
use crate::{DeviceFacts, Dtype, Kernel, KernelConfig, Problem, StepProblem, StrategyConfig};

/// Tokens of one shared-memory tile in fwd_pass_state and compute_out.
pub const TILE_TOKENS: usize = 64;
/// Elements that each shared-memory row is longer than its data, so that rows start in different banks.
pub const ROW_PAD_ELEMS: usize = 8;
/// Blocks loop over work beyond this. Grids are one-dimensional, but for that of the decode step.
pub const MAX_GRID_X: u64 = (1 << 31) - 1;
/// The same along y.
pub const MAX_GRID_Y: u32 = (1 << 16) - 1;
/// Regions of the workspace start at multiples of this.
pub const WORKSPACE_ALIGN_BYTES: usize = 256;

/// A number that kernels divide by without a division: kernel-templates/common/args.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Divisor {
    /// The number.
    pub value: u32,
    /// 2^shift / value, rounded up.
    pub multiplier: u32,
    /// At least 31.
    pub shift: u32,
}

impl Divisor {
    /// For numerators below 2^31: 2^shift / value, rounded up, is off by less than 2^(shift - 31) / value.
    pub fn new(value: u32) -> Divisor {
        let bits = value.max(1).next_power_of_two().trailing_zeros();
        let shift = 31 + bits;
        Divisor {
            value,
            multiplier: (1_u64 << shift).div_ceil(u64::from(value.max(1))) as u32,
            shift,
        }
    }
}

/// How one kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelLaunch {
    /// Which kernel.
    pub kernel: Kernel,
    /// Blocks along x. 0 means there is nothing to do and nothing is launched.
    pub grid: u32,
    /// Blocks along y.
    pub grid_y: u32,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub smem_bytes: usize,
    /// Work items the blocks share.
    pub work_items: u64,
    /// Blocks that share the B and C of a group in one segment; 1 for kernels that do not count them.
    pub blocks_per_group: Divisor,
}

impl KernelLaunch {
    /// Blocks of the whole grid.
    pub fn blocks(&self) -> u64 {
        u64::from(self.grid) * u64::from(self.grid_y)
    }
}

/// A piece of the workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Offset from the start of the workspace, a multiple of [`WORKSPACE_ALIGN_BYTES`].
    pub offset_bytes: usize,
    /// Length.
    pub bytes: usize,
}

/// Where intermediates live in the caller's workspace. Chunk slots: see [`Problem::chunk_slots`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// dt after bias, softplus and limit; f32 `[slots, nheads, chunk_size]` (bht) or `[slots, chunk_size, nheads]` (bth).
    pub dt_out: Region,
    /// G, log2 units; as dt_out. For float32 inputs G is two numbers, high and low; all the low ones follow all the high ones.
    pub da_cumsum: Region,
    /// dt * exp2(G_last - G); as dt_out.
    pub state_weight: Region,
    /// Three kernels: state at each chunk start, x's dtype, `[slots, nheads, headdim, dstate rounded up to 8]`. Fused: f32, at each
    /// segment start but a sequence's first; da_cumsum then holds each segment's whole G, `[slots, nheads]`.
    pub states: Region,
    /// Chain: u64 `[slots, nheads, slices]`, which say that a segment's state is there.
    pub flags: Region,
    /// Bytes of the whole.
    pub total_bytes: usize,
}

/// Launches and workspace of a forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    /// In launch order.
    pub launches: Vec<KernelLaunch>,
    /// The caller's workspace.
    pub workspace: Workspace,
    /// Chunk slots (three kernels), segment items (fused) or chains (chain) of all sequences.
    pub slots: usize,
    /// The same of one batch row, 0 when packed; but the blocks of a chain in any case.
    pub slots_per_row: usize,
    /// Tokens of a segment; 0 where a block takes whole sequences, or strategy has no segments.
    pub segment: usize,
}

impl LaunchPlan {
    /// True if segment_scan turns what the segments add into states at their starts; false if the forward pass adds them up itself.
    pub fn scanned(&self) -> bool {
        self.launches
            .iter()
            .any(|l| l.kernel == Kernel::SegmentScan && l.grid > 0)
    }
}

/// dstate as stored in the workspace: rows stay 16-byte aligned.
pub fn states_row_elems(problem: &Problem) -> usize {
    problem.dstate.next_multiple_of(8)
}

/// Elements that a segment's state takes in the workspace: kernel-templates/common/sm90_chunk.cuh.
pub fn segment_state_elems(problem: &Problem) -> usize {
    problem.headdim.next_multiple_of(64) * problem.dstate.next_multiple_of(64)
}

/// Float32 numbers that hold G: differences of one lose digits where G is large, which 16-bit inputs do not see.
fn sum_words(problem: &Problem) -> usize {
    if problem.dtype == Dtype::F32 { 2 } else { 1 }
}

fn tile_bytes(rows: usize, cols: u32, elem_bytes: usize) -> usize {
    rows * (cols as usize + ROW_PAD_ELEMS) * elem_bytes
}

fn chunk_cumsum_launch(c: &ChunkCumsum, problem: &Problem) -> KernelLaunch {
    let items = problem.chunk_slots(c.chunk_size as usize) as u64
        * (problem.nheads as u64).div_ceil(c.block_h.into());
    launch(Kernel::ChunkCumsum, items, items, 32 * c.block_h, 0)
}

fn fwd_pass_state_launch(c: &FwdPassState, problem: &Problem) -> KernelLaunch {
    let elem = problem.dtype.size_bytes();
    let ring = c.stages as usize
        * (tile_bytes(TILE_TOKENS, c.block_head, elem)
            + tile_bytes(TILE_TOKENS, c.block_state, elem)
            + TILE_TOKENS * 4
            + 16);
    let items = (problem.sequences() * problem.nheads) as u64
        * problem.headdim.div_ceil(c.block_head as usize) as u64
        * problem.dstate.div_ceil(c.block_state as usize) as u64;
    launch(Kernel::FwdPassState, items, items, 32 * c.warps, ring)
}

fn compute_out_launch(c: &ComputeOut, problem: &Problem, device: &DeviceFacts) -> KernelLaunch {
    let elem = problem.dtype.size_bytes();
    let rows = 16 * c.warps as usize;
    let dstate_padded = problem.dstate.next_multiple_of(c.block_state as usize) as u32;
    let c_tile = tile_bytes(rows, dstate_padded.max(c.block_head), elem);
    let stage = tile_bytes(c.block_head as usize, c.block_state, elem)
        .max(tile_bytes(TILE_TOKENS, c.block_state, elem))
        .max(tile_bytes(TILE_TOKENS, c.block_head, elem));
    let vectors = (1 + sum_words(problem)) * (c.block_h * c.chunk_size) as usize * 4;
    let items = problem.chunk_slots(c.chunk_size as usize) as u64
        * (c.chunk_size as usize / rows.min(c.chunk_size as usize)) as u64
        * (problem.nheads as u64).div_ceil(c.block_h.into())
        * problem.headdim.div_ceil(c.block_head as usize) as u64;
    let blocks = if c.persistent == 1 {
        items.min(u64::from(device.sm_count * c.occupancy))
    } else {
        items
    };
    launch(
        Kernel::ComputeOut,
        items,
        blocks,
        32 * c.warps,
        c_tile + c.stages as usize * stage + vectors,
    )
}

/// Tokens of a box, and of a chunk of the fused forward.
const SM90_CHUNK: usize = 64;
const SM90_BOX_BYTES: usize = SM90_CHUNK * 128;
/// What a head's chunk has beside its tiles: five float32 numbers a token.
const SM90_VECTORS_BYTES: usize = 5 * SM90_CHUNK * 4;

/// Segments of a sequence up to which the forward pass adds up states itself.
pub const SEGMENTS_WITHOUT_SCAN: usize = 4;

/// Segment items of all sequences: as [`Problem::chunk_slots`], but an empty sequence has one, for its final state.
fn segment_items(segment: u32, problem: &Problem) -> usize {
    match (problem.packed, segment) {
        (Some(sequences), 0) => sequences,
        (Some(sequences), n) => problem.seqlen / n as usize + sequences,
        (None, _) => problem.batch * segments_per_row(segment, problem),
    }
}

fn segments_per_row(segment: u32, problem: &Problem) -> usize {
    if segment == 0 {
        1
    } else {
        problem.seqlen.div_ceil(segment as usize).max(1)
    }
}

/// Segment starts that are kept: all but the first of each row. Packed rows keep a slot for each item.
fn segment_slots(segment: u32, problem: &Problem) -> usize {
    match (problem.packed, segment) {
        (_, 0) => 0,
        (Some(_), _) => segment_items(segment, problem),
        (None, _) => problem.batch * (segments_per_row(segment, problem) - 1),
    }
}

/// Parameters and shape of a kernel of the fused forward.
struct Sm90Launch {
    kernel: Kernel,
    segment: u32,
    heads: u32,
    warpgroups: u32,
    stages: u32,
    halves: u32,
}

/// Warpgroups that share a head of sm90_fused_forward or sm90_chain_forward, a part of dstate each.
pub(crate) fn sm90_slices(with_c: bool, warpgroups: u32, dstate: usize) -> u32 {
    if with_c && warpgroups == 2 && dstate > 128 {
        2
    } else {
        1
    }
}

/// Parts of a head's state that the blocks of a chain hand over by themselves, a flag each.
fn parts_of_state(c: &Sm90ChainForward, problem: &Problem) -> usize {
    sm90_slices(true, c.warpgroups, problem.dstate).max(c.halves) as usize
}

impl Sm90Launch {
    fn with_c(&self) -> bool {
        self.kernel != Kernel::Sm90SegmentState
    }

    /// Heads of a block.
    fn heads_block(&self, problem: &Problem) -> usize {
        let slices = sm90_slices(self.with_c(), self.warpgroups, problem.dstate);
        // One at least: what rule K05 refuses is rendered too, for the template to refuse it.
        (self.heads * self.warpgroups / slices / self.halves).max(1) as usize
    }

    fn smem_bytes(&self, problem: &Problem) -> usize {
        let with_c = self.with_c();
        let slices = sm90_slices(with_c, self.warpgroups, problem.dstate) as usize;
        let boxes = problem.dstate.div_ceil(64);
        let heads = self.heads_block(problem);
        let x_and_z = heads * if with_c && problem.z { 2 } else { 1 };
        let tiles = (boxes * if with_c { 2 } else { 1 } + x_and_z) * SM90_BOX_BYTES;
        let vectors = (heads * SM90_VECTORS_BYTES).next_multiple_of(1024);
        if self.halves > 1 {
            // A tile of S a chunk, and what the halves hand each other; Y goes where x was.
            return 1024
                + self.stages as usize * (tiles + vectors + SM90_BOX_BYTES)
                + 2 * SM90_BOX_BYTES;
        }
        // Of each consumer or pair of slices: two tiles of S, and two boxes of Y; and what slices exchange.
        let own = if with_c { 4 } else { 0 };
        let exchange = if slices > 1 { 2 } else { 0 };
        1024 + self.stages as usize * (tiles + vectors)
            + (self.warpgroups as usize / slices * own + exchange) * SM90_BOX_BYTES
    }

    /// Blocks that share the heads of a group in one segment.
    fn blocks_per_group(&self, problem: &Problem) -> usize {
        problem
            .heads_per_group()
            .div_ceil(self.heads_block(problem))
    }

    fn launch(&self, problem: &Problem) -> KernelLaunch {
        let blocks = self.blocks_per_group(problem);
        let threads = self.threads();
        let smem_bytes = self.smem_bytes(problem);
        segment_launch(
            self.kernel,
            self.segment,
            problem,
            blocks,
            threads,
            smem_bytes,
        )
    }

    /// A producer, the consumers and, for C B^T, one more warpgroup.
    fn threads(&self) -> u32 {
        let scores = u32::from(self.with_c());
        128 * (self.warpgroups + 1 + scores)
    }
}

fn chain_forward_launch(c: &Sm90ChainForward, problem: &Problem) -> KernelLaunch {
    let forward = Sm90Launch {
        kernel: Kernel::Sm90ChainForward,
        segment: 0,
        heads: 1,
        warpgroups: c.warpgroups,
        stages: c.stages,
        halves: c.halves,
    };
    let per_group = forward.blocks_per_group(problem);
    let chains = (problem.sequences() * problem.ngroups * per_group) as u64;
    let blocks = chains * u64::from(c.segments);
    KernelLaunch {
        blocks_per_group: Divisor::new(per_group as u32),
        ..launch(
            Kernel::Sm90ChainForward,
            blocks,
            blocks,
            forward.threads(),
            forward.smem_bytes(problem),
        )
    }
}

/// Parameters and shape of a kernel of the fused forward with transposed states; kernel-templates/common/sm90_swap_pipeline.cuh
/// carves the same shared memory.
struct Sm90SwapLaunch {
    kernel: Kernel,
    segment: u32,
    block_head: u32,
    warpgroups: u32,
    stages: u32,
}

impl Sm90SwapLaunch {
    fn launch(&self, problem: &Problem) -> KernelLaunch {
        let with_c = self.kernel == Kernel::Sm90SwapFusedForward;
        let (warpgroups, stages) = (self.warpgroups as usize, self.stages as usize);
        let p_tiles = problem.headdim.div_ceil(self.block_head as usize);
        let share = warpgroups == 2 && p_tiles.is_multiple_of(2);
        let pairs = problem.dstate.div_ceil(64);
        let tile = self.block_head.div_ceil(32) as usize * SM90_CHUNK * 64;
        let x_stages = stages.max(2);
        let boxes = stages * pairs * if with_c { 2 } else { 1 } * SM90_BOX_BYTES;
        let own = if with_c { (1 + pairs) * tile } else { 0 };
        let scores = if with_c && share { SM90_BOX_BYTES } else { 0 };
        let vectors = x_stages * if share { 1 } else { warpgroups } * SM90_VECTORS_BYTES;
        let barriers_and_segment = (stages * pairs + x_stages) * 16 + 64;
        let units = problem.heads_per_group() * p_tiles;
        segment_launch(
            self.kernel,
            self.segment,
            problem,
            units.div_ceil(warpgroups),
            128 * (self.warpgroups + 1),
            boxes + warpgroups * (x_stages * tile + own) + scores + vectors + barriers_and_segment,
        )
    }
}

/// Parameters and shape of a kernel of the fused forward in slices; kernel-templates/sm90_split_fused_forward.cu and
/// common/sm90_split_pipeline.cuh carve the same shared memory.
struct Sm90SplitLaunch {
    kernel: Kernel,
    segment: u32,
    warpgroups: u32,
    stages: u32,
}

/// Blocks that share the dstate of a unit, 256 elements each: a cluster of the fused forward in slices.
pub fn dstate_slices(problem: &Problem) -> usize {
    problem.dstate.div_ceil(256)
}

impl Sm90SplitLaunch {
    fn launch(&self, problem: &Problem) -> KernelLaunch {
        let with_c = self.kernel == Kernel::Sm90SplitFusedForward;
        let (warpgroups, stages) = (self.warpgroups as usize, self.stages as usize);
        let slices = dstate_slices(problem);
        let boxes = problem.dstate.div_ceil(64).next_power_of_two().min(4);
        let p_tiles = problem.headdim.div_ceil(64);
        let sets = if p_tiles.is_multiple_of(2) {
            1
        } else {
            warpgroups
        };
        let tiles = (boxes * if with_c { 2 } else { 1 } + warpgroups) * SM90_BOX_BYTES;
        // Of four chunks.
        let vectors = 4 * sets * SM90_VECTORS_BYTES;
        let z = if problem.z {
            warpgroups * SM90_BOX_BYTES / slices
        } else {
            0
        };
        // Float32, in two places, for half of the tokens.
        let exchange = if slices > 1 {
            2 * warpgroups * SM90_BOX_BYTES
        } else {
            0
        };
        let own = if with_c {
            sets * SM90_BOX_BYTES + z + exchange
        } else {
            0
        };
        let units = problem.heads_per_group() * p_tiles;
        segment_launch(
            self.kernel,
            self.segment,
            problem,
            units.div_ceil(warpgroups) * slices,
            128 * (self.warpgroups + 1),
            1024 + stages * tiles + own + vectors,
        )
    }
}

fn segment_scan_launch(_: &SegmentScan, problem: &Problem) -> KernelLaunch {
    const THREADS: usize = 256;
    let blocks = segment_state_elems(problem).div_ceil(4 * THREADS);
    let items = (problem.sequences() * problem.nheads * blocks) as u64;
    launch(Kernel::SegmentScan, items, items, THREADS as u32, 0)
}

/// Launch of one kernel of the forward pass. The config need not be legal; sizes are still meaningful for messages.
pub fn kernel_launch(
    config: &KernelConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> KernelLaunch {
    match config {
        KernelConfig::ChunkCumsum(c) => chunk_cumsum_launch(c, problem),
        KernelConfig::FwdPassState(c) => fwd_pass_state_launch(c, problem),
        KernelConfig::ComputeOut(c) => compute_out_launch(c, problem, device),
        KernelConfig::Sm90SegmentState(c) => Sm90Launch {
            kernel: Kernel::Sm90SegmentState,
            segment: c.segment,
            heads: c.heads,
            warpgroups: c.warpgroups,
            stages: c.stages,
            halves: 1,
        }
        .launch(problem),
        KernelConfig::SegmentScan(c) => segment_scan_launch(c, problem),
        KernelConfig::Sm90FusedForward(c) => Sm90Launch {
            kernel: Kernel::Sm90FusedForward,
            segment: c.segment,
            heads: c.heads,
            warpgroups: c.warpgroups,
            stages: c.stages,
            halves: 1,
        }
        .launch(problem),
        KernelConfig::Sm90SwapSegmentState(c) => Sm90SwapLaunch {
            kernel: Kernel::Sm90SwapSegmentState,
            segment: c.segment,
            block_head: c.block_head,
            warpgroups: c.warpgroups,
            stages: c.stages,
        }
        .launch(problem),
        KernelConfig::Sm90SwapFusedForward(c) => Sm90SwapLaunch {
            kernel: Kernel::Sm90SwapFusedForward,
            segment: c.segment,
            block_head: c.block_head,
            warpgroups: c.warpgroups,
            stages: c.stages,
        }
        .launch(problem),
        KernelConfig::Sm90SplitSegmentState(c) => Sm90SplitLaunch {
            kernel: Kernel::Sm90SplitSegmentState,
            segment: c.segment,
            warpgroups: c.warpgroups,
            stages: c.stages,
        }
        .launch(problem),
        KernelConfig::Sm90SplitFusedForward(c) => Sm90SplitLaunch {
            kernel: Kernel::Sm90SplitFusedForward,
            segment: c.segment,
            warpgroups: c.warpgroups,
            stages: c.stages,
        }
        .launch(problem),
        KernelConfig::Sm90ChainForward(c) => chain_forward_launch(c, problem),
        KernelConfig::StateUpdate(_) => launch(Kernel::StateUpdate, 0, 0, 32, 0),
    }
}

/// Launch of the decode step: a block for each tile (x) of each row (y), or, if a grid cannot have as many, for those of fewer rows.
pub fn step_launch(c: &StateUpdate, problem: &StepProblem, _device: &DeviceFacts) -> KernelLaunch {
    let tiles = (problem.nheads * problem.headdim.div_ceil(c.block_head as usize)) as u64;
    let rows = problem.batch as u64;
    let blocks = if rows == 0 { 0 } else { tiles };
    KernelLaunch {
        grid_y: rows.clamp(1, MAX_GRID_Y.into()) as u32,
        ..launch(Kernel::StateUpdate, tiles * rows, blocks, 32 * c.warps, 0)
    }
}

fn launch(
    kernel: Kernel,
    work_items: u64,
    blocks: u64,
    threads: u32,
    smem_bytes: usize,
) -> KernelLaunch {
    KernelLaunch {
        kernel,
        grid: blocks.min(MAX_GRID_X) as u32,
        grid_y: 1,
        threads,
        smem_bytes,
        work_items,
        blocks_per_group: Divisor::new(1),
    }
}

/// Launch of a block for every `blocks_per_group` of every group and segment.
fn segment_launch(
    kernel: Kernel,
    segment: u32,
    problem: &Problem,
    blocks_per_group: usize,
    threads: u32,
    smem_bytes: usize,
) -> KernelLaunch {
    let items = (segment_items(segment, problem) * problem.ngroups * blocks_per_group) as u64;
    KernelLaunch {
        blocks_per_group: Divisor::new(blocks_per_group as u32),
        ..launch(kernel, items, items, threads, smem_bytes)
    }
}

/// Whether sm90_fused_forward may add up so many segments of so much dstate (of all heads of a warpgroup) itself.
pub(crate) fn adds_up(segments: usize, states: usize) -> bool {
    segments <= SEGMENTS_WITHOUT_SCAN && states <= 128
}

/// Few segments are added up where their states are loaded: segments * (segments - 1) / 2 reads out of L2 cost less than a launch. In
/// sm90_split_fused_forward there are no registers for that if the initial state comes element by element.
fn needs_scan(config: &StrategyConfig, problem: &Problem) -> bool {
    match config {
        StrategyConfig::Sm90Fused(c) => {
            let segments = segments_per_row(c.fused_forward.segment, problem);
            let f = &c.fused_forward;
            let slices = sm90_slices(true, f.warpgroups, problem.dstate);
            let states = f.heads as usize * problem.dstate.next_multiple_of(64);
            !adds_up(segments, states / slices as usize)
        }
        StrategyConfig::Sm90SplitFused(c) => {
            segments_per_row(c.fused_forward.segment, problem) > SEGMENTS_WITHOUT_SCAN
                || problem.initial_states.is_some_and(|d| d != Dtype::F32)
        }
        _ => true,
    }
}

/// Launches and workspace of a whole strategy.
pub fn plan(config: &StrategyConfig, problem: &Problem, device: &DeviceFacts) -> LaunchPlan {
    let launches = config
        .kernels()
        .iter()
        .map(|k| {
            let mut launch = kernel_launch(k, problem, device);
            if launch.kernel == Kernel::SegmentScan && !needs_scan(config, problem) {
                launch.grid = 0;
            }
            launch
        })
        .collect();
    let of_chain = match config {
        StrategyConfig::Sm90Chain(c) => Some(c.chain_forward.segments as usize),
        _ => None,
    };
    let (slots, slots_per_row) = match config.segment() {
        _ if of_chain.is_some() => (problem.sequences(), 1),
        None => {
            let chunk_size = config.chunk_size() as usize;
            (
                problem.chunk_slots(chunk_size),
                problem.seqlen.div_ceil(chunk_size),
            )
        }
        Some(segment) => (
            segment_items(segment, problem),
            segments_per_row(segment, problem),
        ),
    };
    let slots_per_row = match of_chain {
        Some(blocks) => blocks,
        None if problem.packed.is_some() => 0,
        None => slots_per_row,
    };
    LaunchPlan {
        launches,
        workspace: workspace(config, problem),
        slots,
        slots_per_row,
        segment: config.segment().unwrap_or(0) as usize,
    }
}

fn workspace(config: &StrategyConfig, problem: &Problem) -> Workspace {
    let mut at = 0usize;
    let mut region = |bytes: usize| {
        let region = Region {
            offset_bytes: at,
            bytes,
        };
        at += bytes.next_multiple_of(WORKSPACE_ALIGN_BYTES);
        region
    };
    let per_state = problem.nheads * segment_state_elems(problem) * 4;
    let mut workspace = match (config, config.segment()) {
        (StrategyConfig::Sm90Chain(c), _) => {
            let slots = problem.sequences() * (c.chain_forward.segments as usize - 1);
            Workspace {
                da_cumsum: region(slots * problem.nheads * 4),
                states: region(slots * per_state),
                flags: region(
                    slots * problem.nheads * parts_of_state(&c.chain_forward, problem) * 8,
                ),
                ..Workspace::default()
            }
        }
        (_, None) => {
            let chunk_size = config.chunk_size() as usize;
            let slots = problem.chunk_slots(chunk_size);
            let per_token = slots * problem.nheads * chunk_size * 4;
            Workspace {
                dt_out: region(per_token),
                da_cumsum: region(per_token * sum_words(problem)),
                state_weight: region(per_token),
                states: region(
                    slots
                        * problem.nheads
                        * problem.headdim
                        * states_row_elems(problem)
                        * problem.dtype.size_bytes(),
                ),
                ..Workspace::default()
            }
        }
        (_, Some(segment)) => {
            let slots = segment_slots(segment, problem);
            Workspace {
                da_cumsum: region(slots * problem.nheads * 4),
                states: region(slots * per_state),
                ..Workspace::default()
            }
        }
    };
    workspace.total_bytes = at;
    workspace
}

#[cfg(test)]
mod tests {
    use super::Divisor;

    #[test]
    fn a_divisor_divides() {
        let values = (1..=70)
            .chain([96, 127, 128, 129, 255, 1000, 65_535, 65_537, 1_000_003])
            .chain([(1 << 30) - 1, 1 << 30, (1 << 30) + 1, i32::MAX as u32]);
        for value in values {
            let d = Divisor::new(value);
            let near = (0..40).map(|k| k * value.min(1 << 25));
            let numerators = near
                .flat_map(|n| [n.saturating_sub(1), n, n + 1])
                .chain([i32::MAX as u32 - 1, i32::MAX as u32]);
            for n in numerators.filter(|n| *n <= i32::MAX as u32) {
                let quotient = (u64::from(n) * u64::from(d.multiplier)) >> d.shift;
                assert_eq!(quotient, u64::from(n / value), "{n} / {value}");
            }
        }
    }
}
