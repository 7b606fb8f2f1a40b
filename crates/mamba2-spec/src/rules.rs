//! Numbered legality rules. Each is checked here before anything is compiled, and asserted under the same number in the
//! CUDA template (`MAMBA2_REQUIRE(C01, ...)`); a test in mamba2-kernels pairs the two lists.

use crate::launch::{SEGMENTS_WITHOUT_SCAN, kernel_launch, sm90_slices, step_launch};
use crate::parameters::{
    ComputeOut, FwdPassState, Parameters, SegmentScan, Sm90ChainForward, Sm90FusedForward,
    Sm90SplitFusedForward, Sm90SwapFusedForward, Sm90SwapSegmentState, StateUpdate,
};
use crate::{
    Alignment, ChunkSize, DKind, DeviceFacts, Dtype, Kernel, KernelConfig, Problem,
    Sm90ChainConfig, Sm90FusedConfig, Sm90SplitFusedConfig, Sm90SwapFusedConfig, SpecError,
    StepProblem, StrategyConfig, ThreeKernelConfig, estimate,
};

/// A legality rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    /// Number, unique and never reused.
    pub id: &'static str,
    /// What must hold, with the reason.
    pub text: &'static str,
    /// True if the rule is a property of the config alone, so that the CUDA template asserts it too.
    pub in_cuda: bool,
}

macro_rules! rules {
    ($($id:ident $in_cuda:literal $text:literal;)+) => {
        /// Every rule, in order of its number.
        pub const RULES: &[Rule] = &[$(Rule { id: stringify!($id), text: $text, in_cuda: $in_cuda }),+];
    };
}

rules! {
    S01 false "the kernels of a strategy agree on chunk_size and layout, or on segment: one writes what the next reads";
    S02 false "a fixed chunk_size of the problem is the chunk_size of every kernel";
    S03 false "shared memory fits what one block may opt in to on the device";
    F01 true "CHUNK_SIZE is a multiple of the 64-token tile";
    F02 true "each warp of fwd_pass_state owns whole 16 x 16 accumulator tiles";
    F03 true "accumulators of fwd_pass_state stay within 64 registers a thread: more spills";
    F04 false "a block is not wider than the padded tensor: the rest would be work on zeros";
    F05 false "BLOCK_HEAD covers headdim, or 64 of it, or pads it less than that would: narrower blocks only read x and B more often";
    F06 false "beside 64 accumulators a thread where BLOCK_HEAD does not divide headdim no four stages, and no two where it is wider than headdim and BLOCK_STATE narrower than dstate: the copies need the registers, and ptxas spills";
    O01 true "CHUNK_SIZE is a multiple of the 64-token tile";
    O02 true "the rows of a block (16 a warp) divide the chunk";
    O03 false "BLOCK_H divides the heads of a group: they share B and C";
    O04 false "the registers the tiles need fit the budget that OCCUPANCY leaves: more spills";
    O05 false "a block is not wider than the padded tensor: the rest would be work on zeros";
    O06 false "BLOCK_HEAD covers headdim, or 64 of it, or pads it less than that would: narrower blocks only repeat C B^T";
    O07 false "OCCUPANCY is the largest that leaves the same registers: smaller ones are the same kernel";
    O08 false "BLOCK_STATE is 32 only for float32 or a dstate that 64 would pad: narrower tiles only add barriers";
    O09 false "two warps only where the C rows of four do not fit shared memory: fewer rows read B and x more often";
    P01 true "16-bit inputs only: wgmma has no float32 product";
    P02 true "headdim fits one 64-row tile, dstate padded to 64 is 64, 128 or 256";
    P03 true "the states of a warpgroup, and what the products need beside them, stay in registers";
    P04 true "16-byte copies need 16-byte aligned views";
    P05 false "a segment is whole 64-token chunks";
    P06 false "wgmma exists on compute capability 9.0 only";
    P07 false "a segment is shorter than the sequence, and a sequence has at most 128 of them: the scan is serial";
    P08 false "at most a third of the heads a block computes are padding of its group";
    P09 false "two heads a warpgroup in bf16 only, and more than 128 of dstate a warpgroup without 16-bit initial states: the others need more registers, and ptxas spills them";
    K01 false "the blocks of all chains of a launch run at once, one a multiprocessor: they wait for each other";
    K02 false "every block of a chain has a chunk of an unpacked sequence";
    K03 false "two consumers of a chain with packed sequences, or with more than 64 of dstate and the gate in f16 or beside 16-bit initial states, or with more than 128 and those beside a D per headdim, need more registers than there are: ptxas spills them";
    K04 false "blocks count the tokens of all segments after theirs in 32 bits";
    K05 true "halves of a segment belong to two consumers, with at most 128 of dstate";
    K06 false "halves of a segment are of an unpacked sequence, with more chunks than segments and a stage for each chunk of a segment";
    W01 true "the state of a unit, and what the products need beside it, stay in registers";
    W02 false "BLOCK_HEAD is the narrowest that covers headdim in its number of tiles, which is a power of two";
    W03 false "at most a third of the units a block computes are padding of its group";
    W04 false "one stage only where two do not fit shared memory: it cannot copy ahead";
    V01 true "at most two slices of dstate, and more than one slice or unit: else sm90_fused is the same";
    V02 false "at most a third of the units a block computes are padding of its group";
    V03 false "the gate in f16 on all tokens of two units with 256 of dstate needs more registers than there are: ptxas spills them";
    U01 true "WARPS * 32 threads hold whole rows: ROW_THREADS divides a warp";
    U02 true "BLOCK_HEAD is a multiple of the rows one pass of the block covers";
    U03 false "a block is not taller than the padded headdim";
}

fn rule(id: &'static str) -> &'static Rule {
    RULES
        .iter()
        .find(|r| r.id == id)
        .expect("rule ids should come from the table")
}

fn require(
    kernel: &KernelConfig,
    id: &'static str,
    holds: bool,
    detail: impl FnOnce() -> String,
) -> Result<(), SpecError> {
    if holds {
        return Ok(());
    }
    let rule = rule(id);
    Err(SpecError::Rule {
        kernel: kernel.kernel().name(),
        rule: rule.id,
        text: rule.text,
        detail: detail(),
    })
}

/// Checks one kernel's config for a forward problem on a device.
///
/// # Errors
/// [`SpecError::Rule`] with the first rule broken.
pub fn check_kernel(
    config: &KernelConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    let fixed = |chunk_size: u32| match problem.chunk_size {
        ChunkSize::Fixed(n) => n == chunk_size,
        ChunkSize::Tuned => true,
    };
    let chunk_size = match config {
        KernelConfig::ChunkCumsum(c) => c.chunk_size,
        KernelConfig::FwdPassState(c) => {
            check_fwd_pass_state(config, c, problem)?;
            c.chunk_size
        }
        KernelConfig::ComputeOut(c) => {
            check_compute_out(config, c, problem)?;
            let four = KernelConfig::ComputeOut(ComputeOut {
                warps: 4,
                stages: 2,
                block_state: 32,
                block_h: 1,
                ..*c
            });
            let four_fit = kernel_launch(&four, problem, device).smem_bytes
                <= device.shared_memory_optin_bytes;
            require(config, "O09", c.warps > 2 || !four_fit, || {
                format!("WARPS = {}", c.warps)
            })?;
            c.chunk_size
        }
        KernelConfig::Sm90SegmentState(c) => {
            check_sm90(config, c.segment, c.heads, c.warpgroups, 1, problem, device)?;
            64
        }
        KernelConfig::SegmentScan(c) => {
            check_segment(config, c.segment, problem, false)?;
            64
        }
        KernelConfig::Sm90SwapSegmentState(c) => {
            check_sm90_swap(
                config,
                c.segment,
                c.block_head,
                c.warpgroups,
                problem,
                device,
            )?;
            let two = KernelConfig::Sm90SwapSegmentState(Sm90SwapSegmentState { stages: 2, ..*c });
            check_single_stage(config, c.stages, &two, problem, device)?;
            64
        }
        KernelConfig::Sm90SwapFusedForward(c) => {
            check_sm90_swap(
                config,
                c.segment,
                c.block_head,
                c.warpgroups,
                problem,
                device,
            )?;
            let two = KernelConfig::Sm90SwapFusedForward(Sm90SwapFusedForward { stages: 2, ..*c });
            check_single_stage(config, c.stages, &two, problem, device)?;
            64
        }
        KernelConfig::Sm90SplitSegmentState(c) => {
            check_sm90_split(config, c.segment, c.warpgroups, problem, device)?;
            64
        }
        KernelConfig::Sm90SplitFusedForward(c) => {
            check_sm90_split(config, c.segment, c.warpgroups, problem, device)?;
            64
        }
        KernelConfig::Sm90FusedForward(c) => {
            check_sm90(config, c.segment, c.heads, c.warpgroups, 1, problem, device)?;
            64
        }
        KernelConfig::Sm90ChainForward(c) => {
            let halves_fit = c.warpgroups == 2 && problem.dstate <= 128;
            require(config, "K05", c.halves == 1 || halves_fit, || {
                format!("{} consumers, dstate {}", c.warpgroups, problem.dstate)
            })?;
            check_sm90(config, 0, 1, c.warpgroups, c.halves, problem, device)?;
            let launch = kernel_launch(config, problem, device);
            let blocks = launch.work_items;
            require(config, "K01", blocks <= u64::from(device.sm_count), || {
                format!("{blocks} blocks for {} multiprocessors", device.sm_count)
            })?;
            let chunks = problem.seqlen.div_ceil(64);
            require(
                config,
                "K02",
                problem.packed.is_some() || chunks >= c.segments as usize,
                || format!("{chunks} chunks for {} blocks", c.segments),
            )?;
            let of_segment = chunks.div_ceil(c.segments as usize) * 64;
            require(
                config,
                "K04",
                of_segment * (SEGMENTS_WITHOUT_SCAN - 1) <= i32::MAX as usize,
                || format!("{of_segment} tokens a segment"),
            )?;
            let whole = problem.packed.is_none()
                && chunks > c.segments as usize
                && of_segment <= c.stages as usize * 64;
            require(config, "K06", c.halves == 1 || whole, || {
                format!("{of_segment} tokens a segment, {} stages", c.stages)
            })?;
            let crowded = c.warpgroups == 2 && problem.dstate > 64;
            let short_initial = problem.initial_states.is_some_and(|d| d != Dtype::F32);
            let gate = problem.z && (problem.dtype == Dtype::F16 || short_initial);
            let d_and_initial =
                problem.dstate > 128 && problem.d == DKind::PerHeaddim && short_initial;
            require(
                config,
                "K03",
                !(crowded && (gate || d_and_initial)
                    || c.warpgroups == 2 && problem.packed.is_some()),
                || {
                    format!(
                        "dstate {}, dtype {}, D {:?}, z {}, initial states in {:?}, packed {}",
                        problem.dstate,
                        problem.dtype,
                        problem.d,
                        problem.z,
                        problem.initial_states,
                        problem.packed.is_some()
                    )
                },
            )?;
            64
        }
        KernelConfig::StateUpdate(_) => {
            return require(config, "S02", false, || {
                "state_update is not part of a forward pass".into()
            });
        }
    };
    require(config, "S02", fixed(chunk_size), || {
        format!(
            "problem asks for {:?}, config has {chunk_size}",
            problem.chunk_size
        )
    })?;
    let smem_bytes = kernel_launch(config, problem, device).smem_bytes;
    fits_shared_memory(config, smem_bytes, device)
}

fn fits_shared_memory(
    config: &KernelConfig,
    smem_bytes: usize,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    let limit = device.shared_memory_optin_bytes;
    require(config, "S03", smem_bytes <= limit, || {
        format!("{smem_bytes} bytes wanted, {limit} available")
    })
}

/// A block extent may exceed the tensor only by padding to the smallest value of its domain.
fn not_too_wide(block: u32, extent: usize, smallest: u32) -> bool {
    block <= smallest || (block as usize) < 2 * extent.next_multiple_of(16)
}

/// True for the block that covers `headdim`, the 64 wide one, and those that pad `headdim` less than the covering one.
fn useful_block_head(block: u32, headdim: usize) -> bool {
    let cover = [32u32, 64, 128]
        .into_iter()
        .find(|b| *b as usize >= headdim)
        .unwrap_or(128);
    let padded = |b: u32| headdim.next_multiple_of(b as usize);
    block == cover || (block == 64 && headdim > 64) || padded(block) < padded(cover)
}

fn check_fwd_pass_state(
    config: &KernelConfig,
    c: &FwdPassState,
    problem: &Problem,
) -> Result<(), SpecError> {
    require(config, "F01", c.chunk_size.is_multiple_of(64), || {
        format!("CHUNK_SIZE = {}", c.chunk_size)
    })?;
    let (m, n) = if c.swap_ab == 1 {
        (c.block_state, c.block_head)
    } else {
        (c.block_head, c.block_state)
    };
    let warps_m = c.warps.min(m / 16);
    let warps_n = c.warps / warps_m;
    require(
        config,
        "F02",
        warps_m * warps_n == c.warps
            && n.is_multiple_of(16 * warps_n)
            && m.is_multiple_of(16 * warps_m),
        || format!("M = {m}, N = {n}, {warps_m} x {warps_n} warps"),
    )?;
    let accumulators = m * n / (32 * c.warps);
    require(config, "F03", accumulators <= 64, || {
        format!("{accumulators} accumulators a thread")
    })?;
    let ragged = !problem.headdim.is_multiple_of(c.block_head as usize);
    let wider_than_head = (c.block_head as usize) > problem.headdim;
    let tiles_of_state = problem.dstate > c.block_state as usize;
    let spills = c.stages == 4 || c.stages == 2 && wider_than_head && tiles_of_state;
    require(
        config,
        "F06",
        !(ragged && accumulators == 64 && spills),
        || {
            format!(
                "STAGES = {}, BLOCK_HEAD = {} for headdim {}, BLOCK_STATE = {} for dstate {}",
                c.stages, c.block_head, problem.headdim, c.block_state, problem.dstate
            )
        },
    )?;
    require(
        config,
        "F05",
        useful_block_head(c.block_head, problem.headdim),
        || {
            format!(
                "BLOCK_HEAD = {} for headdim {}",
                c.block_head, problem.headdim
            )
        },
    )?;
    require(
        config,
        "F04",
        not_too_wide(c.block_head, problem.headdim, 32)
            && not_too_wide(c.block_state, problem.dstate, 32),
        || {
            format!(
                "BLOCK_HEAD = {}, BLOCK_STATE = {} for headdim {} and dstate {}",
                c.block_head, c.block_state, problem.headdim, problem.dstate
            )
        },
    )
}

/// Registers compute_out needs per thread, from counting its tiles and reading ptxas reports: Y of every head, raw and scaled
/// C B^T, fragments and addresses.
fn compute_out_registers(c: &ComputeOut, problem: &Problem) -> u32 {
    // float32 holds each fragment in twice the registers, and half as many again while it splits them; copies of single elements
    // need more addresses than copies of vectors.
    let y = c.block_h * c.block_head / 2;
    let wide = if problem.dtype == Dtype::F32 {
        48 + y
    } else {
        0
    };
    let element = if problem.alignment == Alignment::Element {
        12
    } else {
        0
    };
    // So does a headdim that the tiles do not fill, where a block goes through more than one set of rows.
    let ragged = if c.chunk_size == 256 && !problem.headdim.is_multiple_of(c.block_head as usize) {
        8
    } else {
        0
    };
    y + y / 8 + 96 + 8 * c.block_h + wide + element + ragged
}

fn check_compute_out(
    config: &KernelConfig,
    c: &ComputeOut,
    problem: &Problem,
) -> Result<(), SpecError> {
    require(config, "O01", c.chunk_size.is_multiple_of(64), || {
        format!("CHUNK_SIZE = {}", c.chunk_size)
    })?;
    require(
        config,
        "O02",
        c.chunk_size.is_multiple_of(16 * c.warps),
        || format!("CHUNK_SIZE = {}, WARPS = {}", c.chunk_size, c.warps),
    )?;
    require(
        config,
        "O03",
        problem.heads_per_group().is_multiple_of(c.block_h as usize),
        || {
            format!(
                "BLOCK_H = {}, {} heads a group",
                c.block_h,
                problem.heads_per_group()
            )
        },
    )?;
    let budget = |occupancy: u32| (65536 / (occupancy * c.warps * 32) / 8 * 8).min(255);
    let (need, room) = (compute_out_registers(c, problem), budget(c.occupancy));
    require(config, "O04", need <= room, || {
        format!("{need} registers wanted, {room} available")
    })?;
    let domain = ComputeOut::ROWS
        .iter()
        .find(|r| r.name == "occupancy")
        .expect("compute_out should have an occupancy")
        .domain;
    require(
        config,
        "O07",
        domain
            .iter()
            .all(|o| *o <= c.occupancy || budget(*o) < room),
        || format!("OCCUPANCY = {} with {} warps", c.occupancy, c.warps),
    )?;
    // With two warps shared memory is so short that narrow tiles may be all that fits.
    require(
        config,
        "O06",
        c.warps == 2 || useful_block_head(c.block_head, problem.headdim),
        || {
            format!(
                "BLOCK_HEAD = {} for headdim {}",
                c.block_head, problem.headdim
            )
        },
    )?;
    let narrow = problem.dtype == Dtype::F32
        || problem.dstate.next_multiple_of(32) < problem.dstate.next_multiple_of(64);
    require(config, "O08", c.block_state > 32 || narrow, || {
        format!(
            "BLOCK_STATE = {} for dstate {}",
            c.block_state, problem.dstate
        )
    })?;
    require(
        config,
        "O05",
        not_too_wide(c.block_head, problem.headdim, 32)
            && not_too_wide(c.block_state, problem.dstate, 32),
        || {
            format!(
                "BLOCK_HEAD = {}, BLOCK_STATE = {} for headdim {} and dstate {}",
                c.block_head, c.block_state, problem.headdim, problem.dstate
            )
        },
    )
}

/// `whole`: segment 0, the whole sequence at once, is a choice.
fn check_segment(
    config: &KernelConfig,
    segment: u32,
    problem: &Problem,
    whole: bool,
) -> Result<(), SpecError> {
    let segments = if segment == 0 {
        1
    } else {
        problem.seqlen.div_ceil(segment as usize)
    };
    require(
        config,
        "P07",
        if segment == 0 {
            whole
        } else {
            (2..=128).contains(&segments)
        },
        || format!("segments of {segment} tokens, {} tokens", problem.seqlen),
    )
}

/// What both fused strategies ask of a problem and a device.
fn check_sm90_problem(
    config: &KernelConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    require(config, "P06", device.arch.has_wgmma(), || {
        format!("{}", device.arch)
    })?;
    require(config, "P01", problem.dtype != Dtype::F32, || {
        format!("dtype {}", problem.dtype)
    })
}

/// What both fused strategies ask of pointers, strides and segments.
fn check_sm90_segments(
    config: &KernelConfig,
    segment: u32,
    whole: bool,
    problem: &Problem,
) -> Result<(), SpecError> {
    require(
        config,
        "P04",
        problem.alignment == Alignment::Bytes16,
        || format!("{:?}", problem.alignment),
    )?;
    require(config, "P05", segment.is_multiple_of(64), || {
        format!("SEGMENT = {segment}")
    })?;
    check_segment(config, segment, problem, whole)
}

fn check_sm90(
    config: &KernelConfig,
    segment: u32,
    heads: u32,
    warpgroups: u32,
    halves: u32,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    check_sm90_problem(config, problem, device)?;
    let with_c = config.kernel() != Kernel::Sm90SegmentState;
    let padded = problem.dstate.next_multiple_of(64) as u32;
    require(
        config,
        "P02",
        problem.headdim <= 64 && matches!(padded, 64 | 128 | 256),
        || format!("headdim {}, dstate {}", problem.headdim, problem.dstate),
    )?;
    let slices = sm90_slices(with_c, warpgroups, problem.dstate);
    let states = heads * padded / slices / 2;
    // From counting fragments and reading ptxas reports.
    let two_heads = match (heads, problem.z && problem.dtype == Dtype::F16) {
        (1, _) => 0,
        (_, gate_in_f16) => padded / 4 + if gate_in_f16 { 24 } else { 0 },
    };
    let need = states
        + if with_c {
            96 + two_heads
        } else {
            40 + 16 * heads
        };
    let room = sm90_consumer_registers(with_c, warpgroups, states);
    require(config, "P03", need <= room, || {
        format!("{need} registers a thread wanted, {room} available")
    })?;
    require(
        config,
        "P09",
        !with_c
            || ((heads == 1 || problem.dtype == Dtype::Bf16)
                && (padded / slices <= 128
                    || problem.initial_states.is_none_or(|d| d == Dtype::F32))),
        || {
            format!(
                "HEADS = {heads}, dstate {}, dtype {}, initial states in {:?}",
                problem.dstate, problem.dtype, problem.initial_states
            )
        },
    )?;
    check_sm90_segments(config, segment, with_c, problem)?;
    let block = (heads * warpgroups / slices / halves) as usize;
    let group = problem.heads_per_group();
    require(
        config,
        "P08",
        block == 1 || 2 * group.next_multiple_of(block) <= 3 * group,
        || format!("{block} heads a block, {group} a group"),
    )
}

/// Registers of a consumer thread after the others gave away theirs; common/sm90_pipeline.cuh computes the same.
fn sm90_consumer_registers(with_c: bool, warpgroups: u32, states: u32) -> u32 {
    let warpgroups_in_all = warpgroups + if with_c { 2 } else { 1 };
    let blocks = if !with_c && warpgroups == 1 && states <= 64 {
        2
    } else {
        1
    };
    let launch = (65536 / (blocks * 128 * warpgroups_in_all) / 8 * 8).min(248);
    let producer = if with_c && warpgroups == 1 { 72 } else { 56 };
    let scores = if with_c { 104 } else { 0 };
    ((launch * warpgroups_in_all - producer - scores) / warpgroups / 8 * 8).min(240)
}

fn check_sm90_swap(
    config: &KernelConfig,
    segment: u32,
    block_head: u32,
    warpgroups: u32,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    check_sm90_problem(config, problem, device)?;
    let with_c = config.kernel() == Kernel::Sm90SwapFusedForward;
    let p_tiles = problem.headdim.div_ceil(block_head as usize);
    let share = warpgroups == 2 && p_tiles.is_multiple_of(2);
    // From counting tiles and reading ptxas reports; common/sm90_swap_pipeline.cuh computes the same.
    let boxes = problem.dstate.div_ceil(64) as u32;
    let states = boxes * block_head / 2;
    let tight = states >= 96;
    let beside = match (with_c, share) {
        (false, _) => 64,
        (true, true) => block_head / 2 + 72 + 2 * boxes,
        (true, false) => block_head / 2 + if tight { 104 } else { 100 },
    };
    let producer = match (problem.packed.is_some(), with_c, tight) {
        (true, _, _) => 88,
        (false, false, _) => 64,
        (false, true, true) => 40,
        (false, true, false) => 56,
    };
    let consumer = |blocks: u32| {
        let threads = 128 * (warpgroups + 1);
        let launch = (65536 / (blocks * threads) / 8 * 8).min(248);
        ((launch * threads - producer * 128) / (128 * warpgroups) / 8 * 8).min(240)
    };
    let need = states + beside;
    let two_blocks = problem.packed.is_none() && warpgroups == 1 && need <= consumer(2);
    let room = consumer(if two_blocks { 2 } else { 1 });
    require(config, "W01", need <= room, || {
        format!("{need} registers a thread wanted, {room} available")
    })?;
    check_sm90_segments(config, segment, with_c, problem)?;
    let narrower_covers = Sm90SwapFusedForward::ROWS
        .iter()
        .find(|r| r.name == "block_head")
        .expect("the kernel should have a block_head")
        .domain
        .iter()
        .any(|b| *b < block_head && problem.headdim.div_ceil(*b as usize) == p_tiles);
    require(
        config,
        "W02",
        p_tiles.is_power_of_two() && !narrower_covers,
        || format!("BLOCK_HEAD = {block_head} for headdim {}", problem.headdim),
    )?;
    let (units, block) = (problem.heads_per_group() * p_tiles, warpgroups as usize);
    require(
        config,
        "W03",
        block == 1 || 2 * units.next_multiple_of(block) <= 3 * units,
        || format!("{block} units a block, {units} a group"),
    )
}

fn check_sm90_split(
    config: &KernelConfig,
    segment: u32,
    warpgroups: u32,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    check_sm90_problem(config, problem, device)?;
    require(
        config,
        "V01",
        problem.dstate <= 512 && (problem.headdim > 64 || problem.dstate > 256),
        || format!("headdim {}, dstate {}", problem.headdim, problem.dstate),
    )?;
    let whole = config.kernel() == Kernel::Sm90SplitFusedForward;
    check_sm90_segments(config, segment, whole, problem)?;
    let units = problem.heads_per_group() * problem.headdim.div_ceil(64);
    let block = warpgroups as usize;
    require(
        config,
        "V02",
        block == 1 || 2 * units.next_multiple_of(block) <= 3 * units,
        || format!("{block} units a block, {units} a group"),
    )?;
    let crowded = whole && block == 2 && (129..=256).contains(&problem.dstate);
    require(
        config,
        "V03",
        !(crowded && problem.z && problem.dtype == Dtype::F16),
        || format!("dstate {}, dtype {}", problem.dstate, problem.dtype),
    )
}

/// Rule W04, given the same config with two stages.
fn check_single_stage(
    config: &KernelConfig,
    stages: u32,
    two: &KernelConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    let two_fit =
        kernel_launch(two, problem, device).smem_bytes <= device.shared_memory_optin_bytes;
    require(config, "W04", stages > 1 || !two_fit, || {
        format!("STAGES = {stages}")
    })
}

/// Checks a whole strategy.
///
/// # Errors
/// [`SpecError::Rule`] with the first rule broken, or whatever [`Problem::check`] refuses.
pub fn check_strategy(
    config: &StrategyConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    problem.check()?;
    let kernels = config.kernels();
    for kernel in &kernels {
        check_kernel(kernel, problem, device)?;
    }
    let agreements: Vec<(u32, u32)> = match config {
        StrategyConfig::ThreeKernel(c) => vec![
            (c.chunk_cumsum.chunk_size, c.chunk_cumsum.layout),
            (c.fwd_pass_state.chunk_size, c.fwd_pass_state.layout),
            (c.compute_out.chunk_size, c.compute_out.layout),
        ],
        StrategyConfig::Sm90Fused(c) => [
            c.segment_state.segment,
            c.segment_scan.segment,
            c.fused_forward.segment,
        ]
        .map(|s| (s, 0))
        .to_vec(),
        StrategyConfig::Sm90Chain(_) => vec![(0, 0)],
        StrategyConfig::Sm90SwapFused(c) => [
            c.segment_state.segment,
            c.segment_scan.segment,
            c.fused_forward.segment,
        ]
        .map(|s| (s, 0))
        .to_vec(),
        StrategyConfig::Sm90SplitFused(c) => [
            c.segment_state.segment,
            c.segment_scan.segment,
            c.fused_forward.segment,
        ]
        .map(|s| (s, 0))
        .to_vec(),
    };
    let last = kernels.last().expect("a strategy should have kernels");
    require(
        last,
        "S01",
        agreements.iter().all(|a| *a == agreements[0]),
        || format!("{agreements:?}"),
    )
}

/// Checks a decode config.
///
/// # Errors
/// [`SpecError::Rule`] with the first rule broken.
pub fn check_step_config(
    c: &StateUpdate,
    problem: &StepProblem,
    device: &DeviceFacts,
) -> Result<(), SpecError> {
    problem.check()?;
    let config = KernelConfig::StateUpdate(*c);
    require(&config, "U01", 32u32.is_multiple_of(c.row_threads), || {
        format!("ROW_THREADS = {}", c.row_threads)
    })?;
    let pass = c.warps * 32 / c.row_threads;
    require(&config, "U02", c.block_head.is_multiple_of(pass), || {
        format!("BLOCK_HEAD = {}, {pass} rows a pass", c.block_head)
    })?;
    require(
        &config,
        "U03",
        not_too_wide(c.block_head, problem.headdim, 4),
        || format!("BLOCK_HEAD = {}, headdim {}", c.block_head, problem.headdim),
    )?;
    fits_shared_memory(&config, step_launch(c, problem, device).smem_bytes, device)
}

/// Every legal config of one kernel of the forward pass, in the fixed order of the table.
pub fn legal_kernel_configs(
    kernel: Kernel,
    problem: &Problem,
    device: &DeviceFacts,
) -> Vec<KernelConfig> {
    KernelConfig::space(kernel)
        .into_iter()
        .filter(|c| check_kernel(c, problem, device).is_ok())
        .collect()
}

/// Every legal config of the decode step.
pub fn legal_step_configs(problem: &StepProblem, device: &DeviceFacts) -> Vec<StateUpdate> {
    StateUpdate::space()
        .into_iter()
        .filter(|c| check_step_config(c, problem, device).is_ok())
        .collect()
}

/// The untuned config for a problem: on Hopper one launch for up to 8192 tokens where that fills the GPU, else the fused forward of the lowest
/// estimate (packed sequences: with blocks enough) where that is legal, else the one in slices or with transposed states; elsewhere three
/// kernels with the table's defaults, or the legal config nearest to them.
///
/// # Errors
/// [`SpecError::NoConfig`] naming the sizes and the limit, if nothing fits the device.
pub fn default_strategy(
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<StrategyConfig, SpecError> {
    check_problem_on(problem, device)?;
    let fused = || default_fused(problem, device).map(StrategyConfig::Sm90Fused);
    let split = || {
        default_segment(problem, device, |segment| {
            sm90_split_fused_for(problem, device, segment).map(StrategyConfig::Sm90SplitFused)
        })
    };
    let swap = || {
        default_segment(problem, device, |segment| {
            sm90_swap_fused_for(problem, device, segment).map(StrategyConfig::Sm90SwapFused)
        })
        .map(|chosen| with_longer_segments(problem, device, chosen))
    };
    // Tiles of 64 that pad headdim by more than a third are worse than transposed states, which pad it to a multiple of 16.
    let tiles_fit = 3 * problem.headdim.next_multiple_of(64) <= 4 * problem.headdim;
    let sm90 = default_chain(problem, device).or_else(fused).or_else(|| {
        if tiles_fit || problem.dstate > 256 {
            split().or_else(swap)
        } else {
            swap().or_else(split)
        }
    });
    match sm90 {
        Some(config) => Ok(config),
        None => default_three_kernel(problem, device).map(StrategyConfig::ThreeKernel),
    }
}

fn check_problem_on(problem: &Problem, device: &DeviceFacts) -> Result<(), SpecError> {
    problem.check()?;
    device.arch.require_supported()?;
    match problem.chunk_size {
        ChunkSize::Fixed(n) if ![64, 128, 256].contains(&n) => Err(SpecError::Size {
            name: "chunk_size",
            expected: "64, 128 or 256 on CUDA (the CPU backend takes any)".into(),
            got: n.to_string(),
        }),
        _ => Ok(()),
    }
}

/// The untuned config of the three-kernel strategy.
///
/// # Errors
/// [`SpecError::NoConfig`] naming the sizes and the limit, if nothing fits the device.
pub fn default_three_kernel(
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<ThreeKernelConfig, SpecError> {
    check_problem_on(problem, device)?;
    let preferred = match problem.chunk_size {
        ChunkSize::Fixed(n) => n,
        ChunkSize::Tuned => 64,
    };
    [preferred, 128, 256]
        .into_iter()
        .find_map(|chunk_size| three_kernel_for(problem, device, chunk_size, 0))
        .ok_or_else(|| {
            SpecError::NoConfig(format!(
                "headdim {} and dstate {} in {} need more than the {} bytes of shared memory of one block on {}",
                problem.headdim, problem.dstate, problem.dtype, device.shared_memory_optin_bytes, device.name
            ))
        })
}

/// The three kernels' configs nearest to the table's defaults for one chunk_size and layout.
fn three_kernel_for(
    problem: &Problem,
    device: &DeviceFacts,
    chunk_size: u32,
    layout: u32,
) -> Option<ThreeKernelConfig> {
    let chunk_cumsum = nearest(
        crate::parameters::ChunkCumsum {
            chunk_size,
            layout,
            ..Default::default()
        },
        |c| {
            (c.chunk_size, c.layout) == (chunk_size, layout)
                && check_kernel(&KernelConfig::ChunkCumsum(*c), problem, device).is_ok()
        },
    )?;
    let fwd_pass_state = nearest(
        FwdPassState {
            chunk_size,
            layout,
            ..Default::default()
        },
        |c| {
            (c.chunk_size, c.layout) == (chunk_size, layout)
                && check_kernel(&KernelConfig::FwdPassState(*c), problem, device).is_ok()
        },
    )?;
    let compute_out = nearest(
        ComputeOut {
            chunk_size,
            layout,
            ..Default::default()
        },
        |c| {
            (c.chunk_size, c.layout) == (chunk_size, layout)
                && check_kernel(&KernelConfig::ComputeOut(*c), problem, device).is_ok()
        },
    )?;
    Some(ThreeKernelConfig {
        chunk_cumsum,
        fwd_pass_state,
        compute_out,
    })
}

/// The configs of a fused strategy's kernels nearest to the table's defaults for one segment length.
fn segment_kernels<S: Parameters, F: Parameters>(
    problem: &Problem,
    device: &DeviceFacts,
    segment: u32,
    state: fn(S) -> KernelConfig,
    forward: fn(F) -> KernelConfig,
) -> Option<(S, SegmentScan, F)> {
    let legal = |config: &KernelConfig| check_kernel(config, problem, device).is_ok();
    let fused_forward = nearest(starting_point::<F>(segment, problem), |c| {
        has_segment(c, segment) && legal(&forward(c.clone()))
    })?;
    let segment_scan = SegmentScan { segment };
    let wanted = starting_point::<S>(segment, problem);
    // The whole sequence at once launches neither of the other two.
    let segment_state = if segment == 0 {
        wanted
    } else {
        check_kernel(&KernelConfig::SegmentScan(segment_scan), problem, device).ok()?;
        nearest(wanted, |c| {
            has_segment(c, segment) && legal(&state(c.clone()))
        })?
    };
    Some((segment_state, segment_scan, fused_forward))
}

/// Row of `segment` in the table of a kernel that has it.
fn segment_row<P: Parameters>() -> usize {
    P::ROWS
        .iter()
        .position(|r| r.name == "segment")
        .expect("a fused strategy's kernel should have a segment")
}

/// The table's defaults with this segment and, where the kernel has one, the narrowest BLOCK_HEAD that covers headdim.
fn starting_point<P: Parameters>(segment: u32, problem: &Problem) -> P {
    let mut config = P::default();
    config.set_value(segment_row::<P>(), segment);
    if let Some(row) = P::ROWS.iter().position(|r| r.name == "block_head") {
        let covers = |b: &&u32| **b as usize >= problem.headdim;
        if let Some(block_head) = P::ROWS[row].domain.iter().find(covers) {
            config.set_value(row, *block_head);
        }
    }
    config
}

fn has_segment<P: Parameters>(config: &P, segment: u32) -> bool {
    config.value(segment_row::<P>()) == segment
}

fn sm90_fused_for(
    problem: &Problem,
    device: &DeviceFacts,
    segment: u32,
) -> Option<Sm90FusedConfig> {
    let (segment_state, segment_scan, fused_forward) = segment_kernels(
        problem,
        device,
        segment,
        KernelConfig::Sm90SegmentState,
        KernelConfig::Sm90FusedForward,
    )?;
    let config = Sm90FusedConfig {
        segment_state,
        segment_scan,
        fused_forward,
    };
    // Slices of a head are faster only where they save the scan (default_fused), or where nothing else is legal.
    if problem.dstate <= 128 {
        return Some(config);
    }
    with_forward_warpgroups(&config, 1, problem, device).or(Some(config))
}

/// The config with another number of warpgroups in its last kernel, if that is legal.
fn with_forward_warpgroups(
    config: &Sm90FusedConfig,
    warpgroups: u32,
    problem: &Problem,
    device: &DeviceFacts,
) -> Option<Sm90FusedConfig> {
    let mut other = *config;
    other.fused_forward.warpgroups = warpgroups;
    check_strategy(&StrategyConfig::Sm90Fused(other), problem, device)
        .is_ok()
        .then_some(other)
}

fn sm90_swap_fused_for(
    problem: &Problem,
    device: &DeviceFacts,
    segment: u32,
) -> Option<Sm90SwapFusedConfig> {
    let (segment_state, segment_scan, fused_forward) = segment_kernels(
        problem,
        device,
        segment,
        KernelConfig::Sm90SwapSegmentState,
        KernelConfig::Sm90SwapFusedForward,
    )?;
    Some(Sm90SwapFusedConfig {
        segment_state,
        segment_scan,
        fused_forward,
    })
}

fn sm90_split_fused_for(
    problem: &Problem,
    device: &DeviceFacts,
    segment: u32,
) -> Option<Sm90SplitFusedConfig> {
    let (segment_state, segment_scan, fused_forward) = segment_kernels(
        problem,
        device,
        segment,
        KernelConfig::Sm90SplitSegmentState,
        KernelConfig::Sm90SplitFusedForward,
    )?;
    Some(Sm90SplitFusedConfig {
        segment_state,
        segment_scan,
        fused_forward,
    })
}

/// Blocks of the last kernel of a strategy.
fn forward_blocks(config: &StrategyConfig, problem: &Problem, device: &DeviceFacts) -> u64 {
    let forward = config.kernels().pop();
    kernel_launch(
        &forward.expect("a strategy should have kernels"),
        problem,
        device,
    )
    .work_items
}

/// The config of a strategy with the longest segment that still gives nine blocks for ten multiprocessors, else with the one that gives
/// the most blocks.
fn default_segment(
    problem: &Problem,
    device: &DeviceFacts,
    with: impl Fn(u32) -> Option<StrategyConfig>,
) -> Option<StrategyConfig> {
    let mut options: Vec<(u64, StrategyConfig)> = SegmentScan::ROWS[0]
        .domain
        .iter()
        .filter_map(|segment| with(*segment))
        .map(|c| (forward_blocks(&c, problem, device), c))
        .collect();
    options.sort_by_key(|(blocks, _)| *blocks);
    let enough = u64::from(device.sm_count) * 9 / 10;
    let chosen = options
        .iter()
        .find(|(blocks, _)| *blocks >= enough)
        .or(options.last())?;
    Some(chosen.1)
}

/// The config with one warpgroup a block, if that is legal, and with the stages of the default where only two warpgroups had no room for them (with a
/// gate: b=1, l=8192, 128 heads in 8 groups on an H200 171.5 us against 190.4 with two stages).
fn one_warpgroup(
    config: &Sm90FusedConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Option<Sm90FusedConfig> {
    let mut one = *config;
    one.segment_state.warpgroups = 1;
    one.fused_forward.warpgroups = 1;
    let mut staged = one;
    staged.fused_forward.stages = Sm90FusedForward::default()
        .stages
        .max(one.fused_forward.stages);
    [staged, one]
        .into_iter()
        .find(|c| check_strategy(&StrategyConfig::Sm90Fused(*c), problem, device).is_ok())
}

/// The segment and warpgroups of the lowest estimate, the longest segment of equals. Packed sequences are of any length, which the estimate
/// does not know: they take what gives blocks enough.
fn default_fused(problem: &Problem, device: &DeviceFacts) -> Option<Sm90FusedConfig> {
    let with = |segment| sm90_fused_for(problem, device, segment);
    if problem.packed.is_some() {
        let config = default_segment(problem, device, |segment| {
            with(segment).map(StrategyConfig::Sm90Fused)
        })?;
        return match with_longer_segments(problem, device, config) {
            StrategyConfig::Sm90Fused(c) => Some(c),
            _ => None,
        };
    }
    let estimate = |c: &Sm90FusedConfig| {
        let f = &c.fused_forward;
        let of_sum = c.segment_state.warpgroups;
        estimate::fused_us(problem, device, f.segment, of_sum, f.warpgroups)
    };
    SegmentScan::ROWS[0]
        .domain
        .iter()
        .rev()
        .filter_map(|segment| with(*segment))
        .flat_map(|c| {
            let slices = || with_forward_warpgroups(&c, 2, problem, device);
            let sliced = if problem.dstate > 128 { slices() } else { None };
            [Some(c), one_warpgroup(&c, problem, device), sliced]
        })
        .flatten()
        .map(|c| (estimate(&c), c))
        .reduce(|best, next| if next.0 < best.0 { next } else { best })
        .map(|(_, c)| c)
}

/// `config` as it would be in place of the default: with its segments. `None` if it is of another strategy, is not legal here, or shares whole
/// sequences or segments of them out among other blocks than the default does, for how many are best hangs on the size.
pub fn in_place_of_default(
    config: &StrategyConfig,
    default: &StrategyConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Option<StrategyConfig> {
    let adapted = match default.segment() {
        Some(segment) => config.with_segment(segment),
        None => *config,
    };
    let blocks = |c: &StrategyConfig| -> Vec<u64> {
        let work = |k: &KernelConfig| kernel_launch(k, problem, device).work_items;
        c.kernels().iter().map(work).collect()
    };
    let alike =
        matches!(default, StrategyConfig::ThreeKernel(_)) || blocks(&adapted) == blocks(default);
    (config.name() == default.name() && alike && check_strategy(&adapted, problem, device).is_ok())
        .then_some(adapted)
}

/// One warpgroup a block in place of two, where the blocks then fill the GPU once without a split of the sequences (no pass over x and B to sum
/// segments), or where segments of less than 256 tokens become longer (they spend their time on starting up).
fn with_longer_segments(
    problem: &Problem,
    device: &DeviceFacts,
    chosen: StrategyConfig,
) -> StrategyConfig {
    let Some(segment @ 1..) = chosen.segment() else {
        return chosen;
    };
    let mut one = chosen;
    match &mut one {
        StrategyConfig::Sm90Fused(c) => match one_warpgroup(c, problem, device) {
            Some(one) => *c = one,
            None => return chosen,
        },
        StrategyConfig::Sm90SwapFused(c) => {
            c.segment_state.warpgroups = 1;
            c.fused_forward.warpgroups = 1;
        }
        _ => return chosen,
    }
    let better = |c: &StrategyConfig| match c.segment() {
        // A second wave of whole sequences would cost more than the pass saved; packed ones are of any length.
        Some(0) => {
            problem.packed.is_none()
                && forward_blocks(c, problem, device) <= u64::from(device.sm_count)
        }
        other => segment < 256 && other > chosen.segment(),
    };
    default_segment(problem, device, |segment| {
        let config = one.with_segment(segment);
        check_strategy(&config, problem, device)
            .is_ok()
            .then_some(config)
    })
    .filter(better)
    .unwrap_or(chosen)
}

/// One launch, of four or three blocks a sequence, where those run at once and the shipped records say that it is faster than sums in a launch of
/// their own:
/// * short sequences, one head a block, two thirds of the GPU filled. With fewer blocks more and shorter segments are faster (b=1, l=2048, 12
///   heads on an H200 20.6 us against 25.7), with more than 512 tokens a block too;
/// * longer ones, two heads a block, nine tenths of it filled (b=1, l=8192, 80 heads: 120.6 us against 136.9).
fn default_chain(problem: &Problem, device: &DeviceFacts) -> Option<StrategyConfig> {
    let one_head = (512..=2048).contains(&problem.seqlen) && problem.dstate <= 256;
    let two_heads = (2048..=8192).contains(&problem.seqlen) && (65..=128).contains(&problem.dstate);
    if problem.packed.is_some() {
        return None;
    }
    let of_blocks = |segments: u32, warpgroups: u32| {
        let tokens = problem.seqlen / segments as usize;
        let ring = Sm90ChainForward {
            segments,
            warpgroups,
            stages: if tokens <= 128 { 2 } else { 3 },
            halves: 1,
        };
        // Where a segment fits shared memory, two consumers share its tokens: b=4, l=1024, 8 heads on an H200 15.1 us against 16.3.
        let chunks = problem.seqlen.div_ceil(64).div_ceil(segments as usize) as u32;
        let halves = Sm90ChainForward {
            warpgroups: 2,
            stages: chunks.max(2),
            halves: 2,
            ..ring
        };
        let legal = |c: &Sm90ChainForward| {
            check_kernel(&KernelConfig::Sm90ChainForward(*c), problem, device).is_ok()
        };
        let of_kind = |wanted: Sm90ChainForward| {
            nearest(wanted, |c| {
                let kind = |c: &Sm90ChainForward| (c.segments, c.warpgroups, c.halves);
                kind(c) == kind(&wanted) && legal(c)
            })
        };
        let chain_forward = of_kind(halves)
            .filter(|_| warpgroups == 1)
            .or_else(|| of_kind(ring))?;
        let config = StrategyConfig::Sm90Chain(Sm90ChainConfig { chain_forward });
        // With halves less of the GPU will do: b=1, l=512, 20 heads (80 blocks) 12.6 us against 14.4 in a launch for the sums and one for the rest.
        let (part, of) = match (warpgroups, chain_forward.halves) {
            (1, 1) => (2, 3),
            (1, _) => (3, 5),
            _ => (9, 10),
        };
        let blocks = forward_blocks(&config, problem, device);
        let fills = of * blocks >= part * u64::from(device.sm_count);
        let fits = tokens >= 128 && (warpgroups == 2 || tokens <= 512);
        (fills && fits).then_some(config)
    };
    [
        (4, 1, one_head),
        (3, 1, one_head),
        (4, 2, two_heads),
        (3, 2, two_heads),
    ]
    .into_iter()
    .filter(|(.., wanted)| *wanted)
    .find_map(|(segments, warpgroups, _)| of_blocks(segments, warpgroups))
}

/// One config for every way a strategy's kernels can agree (chunk_size and layout, or segment): the starting points of a search,
/// each kernel of which may then be replaced by any other legal config that keeps the agreement.
pub fn agreement_defaults(problem: &Problem, device: &DeviceFacts) -> Vec<StrategyConfig> {
    let rows = crate::parameters::ChunkCumsum::ROWS;
    let three = rows[0].domain.iter().flat_map(|chunk_size| {
        rows[1]
            .domain
            .iter()
            .filter_map(|layout| three_kernel_for(problem, device, *chunk_size, *layout))
    });
    let fused = Sm90FusedForward::ROWS[0]
        .domain
        .iter()
        .filter_map(|segment| sm90_fused_for(problem, device, *segment));
    let swap_fused = Sm90SwapFusedForward::ROWS[0]
        .domain
        .iter()
        .filter_map(|segment| sm90_swap_fused_for(problem, device, *segment));
    let split_fused = Sm90SplitFusedForward::ROWS[0]
        .domain
        .iter()
        .filter_map(|segment| sm90_split_fused_for(problem, device, *segment));
    let chain = nearest(Sm90ChainForward::default(), |c| {
        check_kernel(&KernelConfig::Sm90ChainForward(*c), problem, device).is_ok()
    })
    .map(|chain_forward| Sm90ChainConfig { chain_forward });
    three
        .map(StrategyConfig::ThreeKernel)
        .chain(fused.map(StrategyConfig::Sm90Fused))
        .chain(swap_fused.map(StrategyConfig::Sm90SwapFused))
        .chain(split_fused.map(StrategyConfig::Sm90SplitFused))
        .chain(chain.map(StrategyConfig::Sm90Chain))
        .collect()
}

/// Every legal config of `kernel` that can stand in `within` without breaking its agreement, in the fixed order of the table.
pub fn alternatives(
    within: &StrategyConfig,
    kernel: Kernel,
    problem: &Problem,
    device: &DeviceFacts,
) -> Vec<KernelConfig> {
    KernelConfig::space(kernel)
        .into_iter()
        .filter(|c| {
            within
                .with_kernel(*c)
                .is_some_and(|s| check_strategy(&s, problem, device).is_ok())
        })
        .collect()
}

/// The legal config that differs from `wanted` in the fewest parameters, and of those the one that keeps the first ones of the table:
/// they come in the order of their weight. The order of values breaks ties.
fn nearest<P: Parameters>(wanted: P, legal: impl Fn(&P) -> bool) -> Option<P> {
    let distance = |c: &P| {
        let differing = || (0..P::ROWS.len()).filter(|i| c.value(*i) != wanted.value(*i));
        (
            differing().count(),
            std::cmp::Reverse(differing().next().unwrap_or(P::ROWS.len())),
        )
    };
    P::space()
        .into_iter()
        .filter(|c| legal(c))
        .min_by_key(distance)
}

/// The untuned config of the decode step.
///
/// # Errors
/// [`SpecError::NoConfig`] if nothing fits, [`SpecError::Size`] for an unsupported GPU.
pub fn default_step(problem: &StepProblem, device: &DeviceFacts) -> Result<StateUpdate, SpecError> {
    problem.check()?;
    device.arch.require_supported()?;
    nearest(StateUpdate::default(), |c| {
        check_step_config(c, problem, device).is_ok()
    })
    .ok_or_else(|| {
        SpecError::NoConfig(format!(
            "headdim {} and dstate {}",
            problem.headdim, problem.dstate
        ))
    })
}
