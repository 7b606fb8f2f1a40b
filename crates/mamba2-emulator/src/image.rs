//! What a compiled kernel is given: a job (names and numbers) and an image of device memory.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use mamba2_reference::Values;
use mamba2_spec::DtLimit;
use mamba2_spec::launch::Divisor;

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
        self.set_all(name, values.into_iter());
    }

    pub fn set_all<T: Display>(&mut self, name: &'static str, values: impl Iterator<Item = T>) {
        let text: Vec<String> = values.map(|v| v.to_string()).collect();
        self.fields.insert(name, text.join(" "));
    }

    /// Adds a tensor to the image and sets its address, or null.
    pub fn place(&mut self, name: &'static str, values: Option<&Values>, image: &mut Image) {
        let at = values.map_or(0, |v| image.add(&v.to_le_bytes()) + 1);
        self.set(name, [at]);
    }

    /// Sizes, strides of contiguous tensors, and limits. `axes`: batch, seqlen, nheads, headdim, ngroups, dstate.
    pub fn axes(&mut self, axes: [usize; 6], d: Option<&Values>, limit: DtLimit) {
        let [_, seqlen, nheads, headdim, ngroups, dstate] = axes;
        let token = |heads: usize, inner: usize| [seqlen * heads * inner, heads * inner, inner];
        self.set("axes", axes);
        self.set("x_strides", token(nheads, headdim));
        self.set("dt_strides", token(nheads, 1));
        self.set("b_strides", token(ngroups, dstate));
        let head = headdim * dstate;
        self.set("state_strides", [nheads * head, head, dstate]);
        self.set("d_head_stride", [d.map_or(0, |d| d.len() / nheads.max(1))]);
        self.set("dt_min", [limit.min]);
        self.set("dt_max", [limit.max]);
    }

    /// A number that kernels divide by.
    pub fn divisor(&mut self, name: &'static str, d: Divisor) {
        self.set(name, [d.value, d.multiplier, d.shift]);
    }

    /// Blocks along x and y, without clusters, and their work.
    pub fn launch(&mut self, blocks: [u32; 2], work_items: u64) {
        self.set("grid", blocks);
        self.set("cluster", [1]);
        self.set("work_items", [work_items]);
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
