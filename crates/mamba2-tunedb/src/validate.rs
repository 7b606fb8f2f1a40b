//! Today's rules, asked of every record before it is used: a bad record costs time, never an answer.

use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::{DeviceFacts, Problem, StepProblem, StrategyConfig, launch, rules};

use crate::error::{Result, TuneDbError};
use crate::key::Subject;
use crate::record::Record;

/// Largest workspace a record may ask for: more than any GPU's memory.
pub const MAX_WORKSPACE_BYTES: usize = 256 << 30;
/// Most elements of x, or of all states, that a record's problem may have; sizes beyond it are no real problem and would
/// overflow the arithmetic of launch plans.
const MAX_ELEMS: u128 = 1 << 40;

fn refused(record: &Record, reason: impl ToString) -> TuneDbError {
    TuneDbError::Refused {
        what: format!("record {}", record.key),
        reason: reason.to_string(),
    }
}

/// The config of a forward record, if it is legal for `problem` on `device`.
///
/// # Errors
/// [`TuneDbError::Refused`] with the rule it breaks, the unknown parameter, or the workspace it wants.
pub fn check_strategy(
    record: &Record,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<StrategyConfig> {
    let config = record.strategy()?;
    check_config(record, &config, problem, device)?;
    Ok(config)
}

/// What the forward record of another, similar problem says of this one. Nothing transfers of what shares the work out among the multiprocessors
/// (segment lengths, heads of a block), nor do strategies, whose crossings lie somewhere between sizes: those are the default's. So a record
/// counts only where it agrees with this problem's default in them, and its other parameters were measured to be worth something; `None` if
/// it says nothing here.
///
/// # Errors
/// As [`check_strategy`].
pub fn transfer_strategy(
    record: &Record,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<Option<StrategyConfig>> {
    let config = record.strategy()?;
    let default = rules::default_strategy(problem, device).map_err(|e| refused(record, e))?;
    let evidence = &record.evidence;
    // A record without its default's time was not made by this tuner; it is taken at its word.
    let gain = evidence
        .default_median_us
        .is_none_or(|us| us > evidence.median_us * NEAR_GAIN);
    let adapted = gain
        .then(|| rules::in_place_of_default(&config, &default, problem, device))
        .flatten();
    if let Some(config) = &adapted {
        check_config(record, config, problem, device)?;
    }
    Ok(adapted)
}

/// Speedup over its own default from which a record's parameters are worth taking elsewhere: beyond noise and what a segment can shift.
const NEAR_GAIN: f64 = 1.05;

fn check_config(
    record: &Record,
    config: &StrategyConfig,
    problem: &Problem,
    device: &DeviceFacts,
) -> Result<()> {
    problem.check().map_err(|e| refused(record, e))?;
    let p = |n: usize| n as u128;
    let tokens = p(problem.batch) * p(problem.seqlen) * p(problem.nheads) * p(problem.headdim);
    let states =
        p(problem.sequences()) * p(problem.nheads) * p(problem.headdim) * p(problem.dstate);
    if tokens.max(states) > MAX_ELEMS {
        return Err(refused(
            record,
            format!(
                "expected tensors of at most {MAX_ELEMS} elements, got {}",
                tokens.max(states)
            ),
        ));
    }
    rules::check_strategy(config, problem, device).map_err(|e| refused(record, e))?;
    let workspace = launch::plan(config, problem, device).workspace.total_bytes;
    if workspace > MAX_WORKSPACE_BYTES {
        return Err(refused(
            record,
            format!("expected a workspace of at most {MAX_WORKSPACE_BYTES} bytes, got {workspace}"),
        ));
    }
    Ok(())
}

/// The config of a step record, if it is legal for `problem` on `device`.
///
/// # Errors
/// As [`check_strategy`].
pub fn check_step(
    record: &Record,
    problem: &StepProblem,
    device: &DeviceFacts,
) -> Result<StateUpdate> {
    let config = record.step_config()?;
    let elems = problem.batch as u128
        * problem.nheads as u128
        * problem.headdim as u128
        * problem.dstate as u128;
    if elems > MAX_ELEMS {
        return Err(refused(
            record,
            format!("expected states of at most {MAX_ELEMS} elements, got {elems}"),
        ));
    }
    rules::check_step_config(&config, problem, device).map_err(|e| refused(record, e))?;
    Ok(config)
}

/// Checks a record by itself, for the problem and GPU its key names.
///
/// # Errors
/// As [`check_strategy`]; also for a key of a single kernel, which has timings but no records.
pub fn check_record(record: &Record) -> Result<()> {
    let device = record.key.device();
    device
        .arch
        .require_supported()
        .map_err(|e| refused(record, e))?;
    record.to_json()?;
    match (
        record.key.subject(),
        record.key.problem(),
        record.key.step_problem(),
    ) {
        (Subject::Forward, Some(problem), _) => check_strategy(record, &problem, &device).map(drop),
        (Subject::Step, _, Some(step)) => check_step(record, &step, &device).map(drop),
        _ => Err(refused(
            record,
            "expected a record of a forward pass or a step",
        )),
    }
}
