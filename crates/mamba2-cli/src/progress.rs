//! Progress on the terminal, and silence where there is none.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows `what` with a spinner and the elapsed time while `work` runs.
pub fn spin<T>(what: impl Into<String>, work: impl FnOnce() -> T) -> T {
    // Draws on standard error, and only if that is a terminal.
    let bar = ProgressBar::new_spinner();
    bar.set_style(style("{spinner} {msg} [{elapsed}]"));
    bar.set_message(what.into());
    bar.enable_steady_tick(Duration::from_millis(120));
    let result = work();
    bar.finish_and_clear();
    result
}

/// A bar over `total` items.
pub fn bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    bar.set_style(style("{bar:30} {pos}/{len} {msg} [{elapsed}, {eta} left]"));
    bar
}

fn style(template: &str) -> ProgressStyle {
    // The templates above are constants; should one be wrong, the plain bar serves.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
