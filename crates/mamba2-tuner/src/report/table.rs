use std::fmt::Write;

use super::{JobReport, time_text};

/// Columns of numbers are right-aligned; a missing number is a dash.
pub(super) fn of(job: &JobReport) -> String {
    let width = job
        .shapes
        .iter()
        .map(|s| s.shape.len())
        .chain([5])
        .max()
        .unwrap_or(5);
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:width$}  {:>10}  {:>8}  {:>10}  {:>7}  {:>10}  {:>6}  {:>6}  {:>6}  {:>7}",
        "shape",
        "tuned us",
        "spread",
        "default us",
        "speedup",
        "limit us",
        "tried",
        "stored",
        "failed",
        "seconds"
    );
    for s in &job.shapes {
        let number = |n: Option<f64>, digits: usize| {
            n.map_or_else(|| "-".into(), |n| format!("{n:.digits$}"))
        };
        let _ = writeln!(
            text,
            "{:width$}  {:>10.1}  {:>7.1}%  {:>10}  {:>7}  {:>10}  {:>6}  {:>6}  {:>6}  {:>7.1}",
            s.shape,
            s.choice.summary.median_us,
            100.0 * s.choice.summary.relative_spread(),
            number(s.choice.default.map(|d| d.median_us), 1),
            number(s.speedup(), 3),
            number(s.limit_us, 1),
            s.counts.candidates,
            s.counts.stored,
            s.counts.failed,
            s.seconds
        );
    }
    for failed in &job.failed {
        let _ = writeln!(text, "{:width$}  failed: {}", failed.shape, failed.reason);
    }
    let others = if job.other_shards > 0 {
        format!(", {} left to other shards", job.other_shards)
    } else {
        String::new()
    };
    let _ = writeln!(
        text,
        "{} shapes tuned, {} failed{others}, {}",
        job.shapes.len(),
        job.failed.len(),
        time_text(job.seconds, &job.phases())
    );
    text
}
