//! What a compiled kernel is given: a job (names and numbers) and an image of device memory.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

/// Buffers start at multiples of this, as device allocations do.
const ALIGN: usize = 1024;

/// Device memory. Whatever no buffer covers is NaN in every type.
#[derive(Debug, Default)]
pub(crate) struct Image {
    pub memory: Vec<u8>,
}

impl Image {
    /// Adds a buffer and returns its offset.
    pub fn add(&mut self, bytes: &[u8]) -> usize {
        let at = self.poisoned(bytes.len());
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
        at
    }

    /// Adds a buffer that holds NaN.
    pub fn poisoned(&mut self, bytes: usize) -> usize {
        let at = self.memory.len();
        // Never empty, so that reading past a buffer meets NaN and not its neighbour.
        self.memory
            .resize((at + bytes + 1).next_multiple_of(ALIGN), 0xff);
        at
    }

    /// What a buffer holds.
    pub fn bytes(&self, at: usize, bytes: usize) -> &[u8] {
        &self.memory[at..at + bytes]
    }
}

/// Fields of the kernels' arguments, by name.
#[derive(Debug, Default)]
pub(crate) struct Job {
    fields: BTreeMap<&'static str, String>,
}

impl Job {
    pub fn set<T: Display, const N: usize>(&mut self, name: &'static str, values: [T; N]) {
        let text: Vec<String> = values.iter().map(ToString::to_string).collect();
        self.fields.insert(name, text.join(" "));
    }
}

impl Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, values) in &self.fields {
            writeln!(f, "{name} {values}")?;
        }
        Ok(())
    }
}
