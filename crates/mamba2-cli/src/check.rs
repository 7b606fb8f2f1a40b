//! Comparing results with the right answer.

use std::fmt::Write;

use mamba2_reference::ErrorReport;
use serde_json::{Value, json};

use crate::error::CliError;

/// One tensor beside its right values.
pub struct Compared {
    /// `out`, `final_states` or `state`.
    pub tensor: &'static str,
    /// Where the right values come from.
    pub against: &'static str,
    /// Largest relative error that is accepted.
    pub bound: f64,
    /// How far it is off.
    pub report: ErrorReport,
}

impl Compared {
    /// Compares one tensor.
    pub fn new(
        tensor: &'static str,
        against: &'static str,
        bound: f64,
        got: &[f64],
        want: &[f64],
    ) -> Compared {
        Compared {
            tensor,
            against,
            bound,
            report: ErrorReport::compare(got, want),
        }
    }

    fn passed(&self) -> bool {
        self.report.within(self.bound)
    }
}

/// What `--check` found.
#[derive(Default)]
pub struct Check(pub Vec<Compared>);

impl Check {
    /// True if every tensor is within its bound.
    pub fn passed(&self) -> bool {
        self.0.iter().all(Compared::passed)
    }

    /// Lines for people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for c in &self.0 {
            let r = &c.report;
            let _ = writeln!(
                text,
                "{:<13} {}  relative error {:.2e} (bound {:.1e}), max error {:.2e} at element {}, against {}",
                c.tensor,
                if c.passed() { "ok    " } else { "FAILED" },
                r.relative_frobenius,
                c.bound,
                r.max_abs,
                r.worst_index,
                c.against
            );
            if r.non_finite > 0 {
                let _ = writeln!(
                    text,
                    "{:<13} {} elements are NaN or infinite",
                    c.tensor, r.non_finite
                );
            }
        }
        text
    }

    /// For programs. Infinite errors become null.
    pub fn json(&self) -> Value {
        let one = |c: &Compared| {
            json!({
                "tensor": c.tensor, "against": c.against, "passed": c.passed(), "bound": c.bound,
                "relative_error": c.report.relative_frobenius, "max_error": c.report.max_abs, "p999_error": c.report.p999_abs,
                "worst_index": c.report.worst_index, "non_finite": c.report.non_finite, "elements": c.report.elems,
            })
        };
        self.0.iter().map(one).collect()
    }

    /// The failure as an error, for the exit code.
    pub fn into_result(self) -> Result<(), CliError> {
        match self.0.iter().find(|c| !c.passed()) {
            None => Ok(()),
            Some(c) => Err(CliError::CheckFailed(format!(
                "{}: relative error {:.2e}, the bound is {:.1e}; {} non-finite elements",
                c.tensor, c.report.relative_frobenius, c.bound, c.report.non_finite
            ))),
        }
    }
}
