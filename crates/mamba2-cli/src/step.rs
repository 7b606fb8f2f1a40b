//! `mamba2 step`: one decode call on a file.

use std::collections::HashMap;
use std::time::Instant;

use mamba2::StepOutputs;
use mamba2_reference::{Bounds, StepRefInputs};
use serde_json::json;

use crate::case::{StepCase, step_output_views};
use crate::check::{Check, Compared};
use crate::cli::StepArgs;
use crate::engine::{backend_name, choice_json, describe, describe_choice, open, warn_of_choice};
use crate::error::CliError;
use crate::host::OwnedTensor;
use crate::print;
use crate::progress::spin;
use crate::tensor_file;

/// Runs the command.
pub fn run(args: &StepArgs) -> Result<(), CliError> {
    let case = StepCase::read(&args.input)?;
    let engine = open(&args.engine)?;
    let plan = spin("preparing kernels", || engine.step_plan(&case.problem))?;
    let mut outputs = case.outputs();
    let start = Instant::now();
    plan.step_host(&case.views()?, &mut step_output_views(&mut outputs)?)?;
    let compute_ms = start.elapsed().as_secs_f64() * 1e3;
    let check = args.check.then(|| check(&case, &outputs));
    if let Some(path) = &args.output {
        tensor_file::write(
            path,
            &[("out", &outputs.out), ("state", &outputs.state)],
            HashMap::new(),
        )?;
    }
    if args.json {
        print::json(&json!({
            "input": args.input,
            "output": args.output,
            "shape": case.problem.to_string(),
            "backend": backend_name(&engine),
            "device": describe(&engine),
            "choice": choice_json(plan.choice()),
            "compute_ms": compute_ms,
            "passed": check.as_ref().map(Check::passed),
            "check": check.as_ref().map(Check::json),
        }))?;
    } else {
        let mut text = format!("{}\non {}", case.problem, describe(&engine));
        warn_of_choice(plan.choice());
        let choice = describe_choice(plan.choice());
        if !choice.is_empty() {
            text += &format!("; {choice}");
        }
        text += &format!(
            "\ncomputed in {compute_ms:.1} ms\n{}",
            check.as_ref().map(Check::text).unwrap_or_default()
        );
        if let Some(path) = &args.output {
            text += &format!("wrote {}\n", path.display());
        }
        print::out(&text)?;
    }
    check.map_or(Ok(()), Check::into_result)
}

fn check(case: &StepCase, outputs: &StepOutputs<OwnedTensor>) -> Check {
    let bounds = Bounds::of_step(&case.problem);
    let oracle = oracle(case);
    let one = |tensor, bound, got: &OwnedTensor, expected: Option<&Vec<f64>>, oracle: &Vec<f64>| {
        let against = if expected.is_some() {
            "the expected values of the file"
        } else {
            "the float64 recurrence"
        };
        Compared::new(
            tensor,
            against,
            bound,
            &got.to_f64(),
            expected.unwrap_or(oracle),
        )
    };
    Check(vec![
        one(
            "out",
            bounds.out,
            &outputs.out,
            case.expected_out.as_ref(),
            &oracle.out,
        ),
        one(
            "state",
            bounds.states,
            &outputs.state,
            case.expected_state.as_ref(),
            &oracle.state,
        ),
    ])
}

fn oracle(case: &StepCase) -> mamba2_reference::StepRefOutputs {
    let i = &case.inputs;
    let optional = |t: &Option<OwnedTensor>| t.as_ref().map(OwnedTensor::to_f64);
    let inputs = StepRefInputs {
        x: i.x.to_f64(),
        dt: i.dt.to_f64(),
        a: i.a.to_f64(),
        b: i.b.to_f64(),
        c: i.c.to_f64(),
        d: optional(&i.d),
        z: optional(&i.z),
        dt_bias: optional(&i.dt_bias),
        state_batch_indices: i
            .state_batch_indices
            .as_ref()
            .and_then(OwnedTensor::as_i32)
            .map(<[i32]>::to_vec),
        state: case.state.to_f64(),
    };
    mamba2_reference::step(&case.problem, &inputs)
}
