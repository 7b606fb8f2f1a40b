//! Shapes on the command line.

use mamba2::StepProblem;
use mamba2_tuner::Target;

use crate::error::CliError;

/// Axes by the names that tensors have, for `--step`.
const LONG_NAMES: [(&str, &str); 7] = [
    ("batch", "b"),
    ("tokens", "t"),
    ("nheads", "h"),
    ("headdim", "p"),
    ("ngroups", "g"),
    ("dstate", "n"),
    ("state_dtype", "state"),
];
/// A forward pass, or a decode step after `step:`.
pub fn parse_target(text: &str) -> Result<Target, CliError> {
    let target = match text.strip_prefix("step:") {
        Some(step) => Target::Step(parse_step(step)?),
        None => Target::Forward(text.parse()?),
    };
    target.check()?;
    Ok(target)
}

/// A decode step; axes may have their long names.
pub fn parse_step(text: &str) -> Result<StepProblem, CliError> {
    let pairs: Vec<String> = text
        .split(',')
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let short = LONG_NAMES
                .iter()
                .find(|(long, _)| *long == key.trim())
                .map_or(key.trim(), |(_, short)| short);
            format!("{short}={}", value.trim())
        })
        .collect();
    Ok(pairs.join(",").parse()?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use mamba2::{DKind, Dtype};

    #[test]
    fn long_and_short_names_of_axes_mean_the_same() {
        assert_eq!(
            parse_step("batch=64,nheads=80,headdim=64,dstate=128,ngroups=1").unwrap(),
            parse_step("b=64,h=80,p=64,g=1,n=128").unwrap()
        );
    }

    #[test]
    fn what_a_target_prints_is_read_back() {
        let mut step = StepProblem::new(3, 8, 64, 2, 128);
        (step.z, step.dt_bias, step.dt_softplus) = (true, true, true);
        (step.d, step.dt_dtype, step.state_dtype) = (DKind::PerHeaddim, Dtype::F32, Dtype::F16);
        step.dt_limit.min = 0.25;
        step.tokens = 2;
        for target in [Target::Step(step.clone()), {
            step.d = DKind::None;
            (step.slots, step.indices) = (9, true);
            Target::Step(step)
        }] {
            assert_eq!(parse_target(&target.to_string()).unwrap(), target);
        }
    }

    #[test]
    fn unknown_keys_and_values_are_refused_by_name() {
        for (text, word) in [
            ("b=1,h=1,p=1,g=1,n=1,no_such=1", "no_such"),
            ("b=1,h=1,p=1,g=1,n=1,z=7", "z"),
            ("b=1,h=1,p=1,g=1,n=1,limit=1", "limit"),
            ("b=x,h=1,p=1,g=1,n=1", "b"),
        ] {
            let error = parse_step(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
