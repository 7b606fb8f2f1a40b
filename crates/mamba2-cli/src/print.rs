//! Standard output. A reader that closes the pipe early (`mamba2 render ... | head`) is not an error.

use std::io::{ErrorKind, Write};

use crate::error::CliError;

/// Prints text, with a newline at its end.
pub fn out(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    match write!(stdout, "{text}{newline}").and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(CliError::Failed(format!(
            "cannot write to standard output: {e}"
        ))),
        _ => Ok(()),
    }
}

/// Prints one JSON value, indented.
pub fn json(value: &serde_json::Value) -> Result<(), CliError> {
    out(&format!("{value:#}"))
}
