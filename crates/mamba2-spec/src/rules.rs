//! Numbered legality rules. Each is checked here before anything is compiled, and asserted under the same number in the
//! CUDA template (`MAMBA2_REQUIRE(C01, ...)`); a test in mamba2-kernels pairs the two lists.

use crate::launch::{kernel_launch, step_launch};
use crate::parameters::{ComputeOut, FwdPassState, StateUpdate};
use crate::{ChunkSize, DeviceFacts, KernelConfig, Problem, SpecError, StepProblem, StrategyConfig};

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
    S01 false "the kernels of a strategy agree on chunk_size and layout: one writes what the next reads";
    S02 false "a fixed chunk_size of the problem is the chunk_size of every kernel";
    S03 false "shared memory fits what one block may opt in to on the device";
    F01 true "CHUNK_SIZE is a multiple of the 64-token tile";
    F02 true "each warp of fwd_pass_state owns whole 16 x 16 accumulator tiles";
    F03 true "accumulators of fwd_pass_state stay within 64 registers a thread: more spills";
    F04 false "a block is not wider than the padded tensor: the rest would be work on zeros";
    O01 true "CHUNK_SIZE is a multiple of the 64-token tile";
    O02 true "the rows of a block (16 a warp) divide the chunk";
    O03 true "BLOCK_H divides the heads of a group: they share B and C";
    O04 false "the registers the tiles need fit the budget that OCCUPANCY leaves: more spills";
    O05 false "a block is not wider than the padded tensor: the rest would be work on zeros";
    U01 true "WARPS * 32 threads hold whole rows: ROW_THREADS divides a warp";
    U02 true "BLOCK_HEAD is a multiple of the rows one pass of the block covers";
    U03 false "a block is not taller than the padded headdim";
}

fn rule(id: &'static str) -> &'static Rule {
    RULES.iter().find(|r| r.id == id).expect("rule ids should come from the table")
}

fn require(kernel: &KernelConfig, id: &'static str, holds: bool, detail: impl FnOnce() -> String) -> Result<(), SpecError> {
    if holds {
        return Ok(());
    }
    let rule = rule(id);
    Err(SpecError::Rule { kernel: kernel.kernel().name(), rule: rule.id, text: rule.text, detail: detail() })
}

/// Checks one kernel's config for a forward problem on a device.
///
/// # Errors
/// [`SpecError::Rule`] with the first rule broken.
pub fn check_kernel(config: &KernelConfig, problem: &Problem, device: &DeviceFacts) -> Result<(), SpecError> {
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
            c.chunk_size
        }
        KernelConfig::StateUpdate(_) => {
            return require(config, "S02", false, || "state_update is not part of a forward pass".into());
        }
    };
    require(config, "S02", fixed(chunk_size), || format!("problem asks for {:?}, config has {chunk_size}", problem.chunk_size))?;
    let smem_bytes = kernel_launch(config, problem, device).smem_bytes;
    fits_shared_memory(config, smem_bytes, device)
}

fn fits_shared_memory(config: &KernelConfig, smem_bytes: usize, device: &DeviceFacts) -> Result<(), SpecError> {
    let limit = device.shared_memory_optin_bytes;
    require(config, "S03", smem_bytes <= limit, || format!("{smem_bytes} bytes wanted, {limit} available"))
}

/// A block extent may exceed the tensor only by padding to the smallest value of its domain.
fn not_too_wide(block: u32, extent: usize, smallest: u32) -> bool {
    block <= smallest || (block as usize) < 2 * extent.next_multiple_of(16)
}

fn check_fwd_pass_state(config: &KernelConfig, c: &FwdPassState, problem: &Problem) -> Result<(), SpecError> {
    require(config, "F01", c.chunk_size.is_multiple_of(64), || format!("CHUNK_SIZE = {}", c.chunk_size))?;
    let (m, n) = if c.swap_ab == 1 { (c.block_state, c.block_head) } else { (c.block_head, c.block_state) };
    let warps_m = c.warps.min(m / 16);
    let warps_n = c.warps / warps_m;
    require(config, "F02", warps_m * warps_n == c.warps && n.is_multiple_of(16 * warps_n) && m.is_multiple_of(16 * warps_m), || {
        format!("M = {m}, N = {n}, {warps_m} x {warps_n} warps")
    })?;
    let accumulators = m * n / (32 * c.warps);
    require(config, "F03", accumulators <= 64, || format!("{accumulators} accumulators a thread"))?;
    require(config, "F04", not_too_wide(c.block_head, problem.headdim, 32) && not_too_wide(c.block_state, problem.dstate, 32), || {
        format!("BLOCK_HEAD = {}, BLOCK_STATE = {} for headdim {} and dstate {}", c.block_head, c.block_state, problem.headdim, problem.dstate)
    })
}

/// Registers compute_out needs per thread, from counting its tiles and reading ptxas reports: Y of every head, raw and scaled
/// C B^T, fragments and addresses.
fn compute_out_registers(c: &ComputeOut, problem: &Problem) -> u32 {
    let wide = problem.dtype == crate::Dtype::F32;
    let y = c.block_h * c.block_head / 2;
    y + 32 + if wide { 72 } else { 60 }
}

fn check_compute_out(config: &KernelConfig, c: &ComputeOut, problem: &Problem) -> Result<(), SpecError> {
    require(config, "O01", c.chunk_size.is_multiple_of(64), || format!("CHUNK_SIZE = {}", c.chunk_size))?;
    require(config, "O02", c.chunk_size.is_multiple_of(16 * c.warps), || format!("CHUNK_SIZE = {}, WARPS = {}", c.chunk_size, c.warps))?;
    require(config, "O03", problem.heads_per_group().is_multiple_of(c.block_h as usize), || {
        format!("BLOCK_H = {}, {} heads a group", c.block_h, problem.heads_per_group())
    })?;
    let budget = (65536 / (c.occupancy * c.warps * 32)).min(255);
    let need = compute_out_registers(c, problem);
    require(config, "O04", need <= budget, || format!("{need} registers wanted, {budget} available"))?;
    require(config, "O05", not_too_wide(c.block_head, problem.headdim, 32) && not_too_wide(c.block_state, problem.dstate, 32), || {
        format!("BLOCK_HEAD = {}, BLOCK_STATE = {} for headdim {} and dstate {}", c.block_head, c.block_state, problem.headdim, problem.dstate)
    })
}

/// Checks a whole strategy.
///
/// # Errors
/// [`SpecError::Rule`] with the first rule broken, or whatever [`Problem::check`] refuses.
pub fn check_strategy(config: &StrategyConfig, problem: &Problem, device: &DeviceFacts) -> Result<(), SpecError> {
    problem.check()?;
    for kernel in config.kernels() {
        check_kernel(&kernel, problem, device)?;
    }
    match config {
        StrategyConfig::ThreeKernel(c) => {
            let shared = [
                (c.chunk_cumsum.chunk_size, c.chunk_cumsum.layout),
                (c.fwd_pass_state.chunk_size, c.fwd_pass_state.layout),
                (c.compute_out.chunk_size, c.compute_out.layout),
            ];
            require(&KernelConfig::ComputeOut(c.compute_out), "S01", shared.iter().all(|s| *s == shared[0]), || {
                format!("(chunk_size, layout) = {shared:?}")
            })
        }
    }
}

/// Checks a decode config.
///
/// # Errors
/// [`SpecError::Rule`] with the first rule broken.
pub fn check_step_config(c: &StateUpdate, problem: &StepProblem, device: &DeviceFacts) -> Result<(), SpecError> {
    problem.check()?;
    let config = KernelConfig::StateUpdate(*c);
    require(&config, "U01", 32u32.is_multiple_of(c.row_threads), || format!("ROW_THREADS = {}", c.row_threads))?;
    let pass = c.warps * 32 / c.row_threads;
    require(&config, "U02", c.block_head.is_multiple_of(pass), || format!("BLOCK_HEAD = {}, {pass} rows a pass", c.block_head))?;
    require(&config, "U03", not_too_wide(c.block_head, problem.headdim, 4), || {
        format!("BLOCK_HEAD = {}, headdim {}", c.block_head, problem.headdim)
    })?;
    fits_shared_memory(&config, step_launch(c, problem, device).smem_bytes, device)
}

/// Every legal config of one kernel of the forward pass, in the fixed order of the table.
pub fn legal_kernel_configs(kernel: crate::Kernel, problem: &Problem, device: &DeviceFacts) -> Vec<KernelConfig> {
    KernelConfig::space(kernel).into_iter().filter(|c| check_kernel(c, problem, device).is_ok()).collect()
}

/// Every legal config of the decode step.
pub fn legal_step_configs(problem: &StepProblem, device: &DeviceFacts) -> Vec<StateUpdate> {
    use crate::parameters::Parameters;
    StateUpdate::space().into_iter().filter(|c| check_step_config(c, problem, device).is_ok()).collect()
}

/// The untuned config for a problem: the table's defaults where they are legal, else the legal config nearest to them.
///
/// # Errors
/// [`SpecError::NoConfig`] naming the sizes and the limit, if nothing fits the device.
pub fn default_strategy(problem: &Problem, device: &DeviceFacts) -> Result<StrategyConfig, SpecError> {
    problem.check()?;
    device.arch.require_supported()?;
    if let ChunkSize::Fixed(n) = problem.chunk_size
        && ![64, 128, 256].contains(&n)
    {
        return Err(SpecError::Size {
            name: "chunk_size",
            expected: "64, 128 or 256 on CUDA (the CPU backend takes any)".into(),
            got: n.to_string(),
        });
    }
    let preferred = match problem.chunk_size {
        ChunkSize::Fixed(n) => n,
        ChunkSize::Tuned => 128,
    };
    for chunk_size in [preferred, 64, 128, 256] {
        if let Some(config) = default_with_chunk_size(problem, device, chunk_size) {
            return Ok(config);
        }
    }
    Err(SpecError::NoConfig(format!(
        "headdim {} and dstate {} in {} need more than the {} bytes of shared memory of one block on {}",
        problem.headdim, problem.dstate, problem.dtype, device.shared_memory_optin_bytes, device.name
    )))
}

fn default_with_chunk_size(problem: &Problem, device: &DeviceFacts, chunk_size: u32) -> Option<StrategyConfig> {
    let chunk_cumsum = crate::parameters::ChunkCumsum { chunk_size, ..Default::default() };
    let layout = chunk_cumsum.layout;
    let fwd_pass_state = nearest_to_default(FwdPassState { chunk_size, layout, ..Default::default() }, |c| {
        check_kernel(&KernelConfig::FwdPassState(*c), problem, device).is_ok() && c.chunk_size == chunk_size && c.layout == layout
    })?;
    let compute_out = nearest_to_default(ComputeOut { chunk_size, layout, ..Default::default() }, |c| {
        check_kernel(&KernelConfig::ComputeOut(*c), problem, device).is_ok() && c.chunk_size == chunk_size && c.layout == layout
    })?;
    let config = StrategyConfig::ThreeKernel(crate::ThreeKernelConfig { chunk_cumsum, fwd_pass_state, compute_out });
    check_strategy(&config, problem, device).is_ok().then_some(config)
}

/// The legal config that differs from `wanted` in the fewest parameters; the table's order breaks ties.
fn nearest_to_default<P: crate::parameters::Parameters>(wanted: P, legal: impl Fn(&P) -> bool) -> Option<P> {
    let distance = |c: &P| (0..P::ROWS.len()).filter(|i| c.value(*i) != wanted.value(*i)).count();
    P::space().into_iter().filter(|c| legal(c)).min_by_key(distance)
}

/// The untuned config of the decode step.
///
/// # Errors
/// [`SpecError::NoConfig`] if nothing fits, [`SpecError::Size`] for an unsupported GPU.
pub fn default_step(problem: &StepProblem, device: &DeviceFacts) -> Result<StateUpdate, SpecError> {
    problem.check()?;
    device.arch.require_supported()?;
    nearest_to_default(StateUpdate::default(), |c| check_step_config(c, problem, device).is_ok())
        .ok_or_else(|| SpecError::NoConfig(format!("headdim {} and dstate {}", problem.headdim, problem.dstate)))
}
