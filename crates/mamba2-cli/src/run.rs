//! `mamba2 run` and `mamba2 demo`: the forward pass of a file, or of made data.

use std::collections::HashMap;
use std::time::Instant;

use mamba2::{ChunkSize, Engine, ForwardOutputs, Plan, Problem};
use mamba2_reference::{Bounds, Pattern};
use serde_json::{Value, json};

use crate::case::{ForwardCase, output_views};
use crate::check::{Check, Compared};
use crate::cli::{DemoArgs, RunArgs};
use crate::engine::{backend_name, choice_json, describe, describe_choice, open, warn_of_choice};
use crate::error::CliError;
use crate::every_config;
use crate::host::OwnedTensor;
use crate::print;
use crate::progress::spin;
use crate::tensor_file;

/// A finished forward pass.
struct Done {
    outputs: ForwardOutputs<OwnedTensor>,
    plan: Plan,
    plan_s: f64,
    compute_s: f64,
}

/// `mamba2 run`.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    let mut case = ForwardCase::read(&args.input)?;
    if let Some(n) = args.chunk_size {
        case.problem.chunk_size = ChunkSize::Fixed(n);
        case.problem.check()?;
    }
    let engine = open(&args.engine)?;
    if args.every_config {
        return every_config::run(args, &engine, &case);
    }
    let done = compute(&engine, &case)?;
    let check = args
        .check
        .then(|| spin("comparing", || check(&case, &done.outputs)));
    if let Some(path) = &args.output {
        let mut tensors = vec![("out", &done.outputs.out)];
        tensors.extend(
            done.outputs
                .final_states
                .as_ref()
                .map(|t| ("final_states", t)),
        );
        tensor_file::write(path, &tensors, HashMap::new())?;
    }
    if args.json {
        let mut report = report_json(&engine, &case, &done, check.as_ref());
        report["input"] = json!(args.input);
        report["output"] = json!(args.output);
        print::json(&report)?;
    } else {
        let mut text = report_text(&engine, &case, &done, check.as_ref());
        if let Some(path) = &args.output {
            text += &format!("wrote {}\n", path.display());
        }
        print::out(&text)?;
    }
    check.map_or(Ok(()), Check::into_result)
}

/// `mamba2 demo`.
pub fn demo(args: &DemoArgs) -> Result<(), CliError> {
    let problem: Problem = args.shape.parse()?;
    let engine = open(&args.engine)?;
    let case = spin("making data", || {
        ForwardCase::generated(&problem, 1, Pattern::Plain)
    });
    let done = compute(&engine, &case)?;
    let check = spin("checking against float64", || check(&case, &done.outputs));
    if args.json {
        print::json(&report_json(&engine, &case, &done, Some(&check)))?;
    } else {
        print::out(&report_text(&engine, &case, &done, Some(&check)))?;
    }
    check.into_result()
}

fn compute(engine: &Engine, case: &ForwardCase) -> Result<Done, CliError> {
    let start = Instant::now();
    let plan = spin("preparing kernels", || engine.plan(&case.problem))?;
    let plan_s = start.elapsed().as_secs_f64();
    let mut outputs = case.outputs();
    let start = Instant::now();
    spin("computing", || -> Result<(), CliError> {
        Ok(plan.forward_host(&case.views()?, &mut output_views(&mut outputs)?)?)
    })?;
    Ok(Done {
        outputs,
        plan,
        plan_s,
        compute_s: start.elapsed().as_secs_f64(),
    })
}

/// Against the file's expected values where it has them, else against the float64 recurrence.
fn check(case: &ForwardCase, outputs: &ForwardOutputs<OwnedTensor>) -> Check {
    let bounds = Bounds::of(&case.problem);
    let wants_oracle = case.expected_out.is_none()
        || (outputs.final_states.is_some() && case.expected_final_states.is_none());
    let oracle = wants_oracle.then(|| case.oracle());
    let mut check = Check::default();
    let mut compare = |tensor,
                       bound,
                       got: &OwnedTensor,
                       expected: Option<&Vec<f64>>,
                       oracle: Option<&Vec<f64>>| {
        let against = if expected.is_some() {
            "the expected values of the file"
        } else {
            "the float64 recurrence"
        };
        if let Some(want) = expected.or(oracle) {
            check
                .0
                .push(Compared::new(tensor, against, bound, &got.to_f64(), want));
        }
    };
    compare(
        "out",
        bounds.out,
        &outputs.out,
        case.expected_out.as_ref(),
        oracle.as_ref().map(|o| &o.out),
    );
    if let Some(states) = &outputs.final_states {
        let expected = case.expected_final_states.as_ref();
        compare(
            "final_states",
            bounds.states,
            states,
            expected,
            oracle.as_ref().map(|o| &o.final_states),
        );
    }
    check
}

fn report_text(engine: &Engine, case: &ForwardCase, done: &Done, check: Option<&Check>) -> String {
    let mut text = format!("{}\non {}", case.problem, describe(engine));
    warn_of_choice(done.plan.choice());
    let choice = describe_choice(done.plan.choice());
    if !choice.is_empty() {
        text += &format!("; {choice}");
    }
    // On CUDA the second number is mostly copying; `mamba2 bench` times the kernels.
    text += &format!(
        "\nprepared in {:.1} ms, computed in {:.1} ms\n",
        done.plan_s * 1e3,
        done.compute_s * 1e3
    );
    text + &check.map(Check::text).unwrap_or_default()
}

fn report_json(engine: &Engine, case: &ForwardCase, done: &Done, check: Option<&Check>) -> Value {
    json!({
        "shape": case.problem.to_string(),
        "backend": backend_name(engine),
        "device": describe(engine),
        "choice": choice_json(done.plan.choice()),
        "prepare_ms": done.plan_s * 1e3,
        "compute_ms": done.compute_s * 1e3,
        "passed": check.map(Check::passed),
        "check": check.map(Check::json),
    })
}
