use mamba2_spec::{
    Alignment, ChunkSize, ForwardInputs, ForwardOutputs, Problem, check_cu_seqlens, check_forward,
};
use ndarray::Ix4;

use crate::blocks::{HeadBlocks, Sequence};
use crate::chunk::Worker;
use crate::views::Strided;
use crate::{CpuError, HostTensor, HostTensorMut, workers};

/// Tokens per chunk where the problem leaves it open: the fastest of 32, 64, 128 and 256 for headdim 64, dstate 128.
pub const DEFAULT_CHUNK_SIZE: usize = 64;

/// Most heads of a task. More share one C B^T and make larger products, but fewer tasks.
const MAX_BLOCK: usize = 8;

/// The forward pass on host tensors, by chunks, in parallel over (sequence, block of heads) on the current rayon pool.
///
/// Shapes and dtypes: see [`Problem`]; any views with a contiguous innermost axis. Arithmetic is float32 (sums of exponents
/// and the state carried between chunks float64), for every input dtype; [`mamba2_spec::Precision`] and
/// [`Problem::alignment`] make no difference here. Memory beside the tensors: a few times
/// `chunk_size * headdim * heads of a task` floats for each thread, whatever the length. The same call gives the same bits
/// with any number of threads. A NaN or infinity in x or dt may also reach the outputs of up to 63 tokens before it (they
/// share a matrix product, where it meets a zero). Tokens past the last packed offset are neither read nor written.
///
/// # Errors
/// [`CpuError::Spec`] if a tensor, an option or an offset does not fit the problem; [`CpuError::Overlap`] if an output's
/// elements overlap. Nothing is written then.
///
/// Source: the chunked form of the SSD recurrence (Dao and Gu, Transformers are SSMs, section 6).
pub fn forward(
    problem: &Problem,
    inputs: &ForwardInputs<HostTensor<'_>>,
    outputs: &mut ForwardOutputs<HostTensorMut<'_>>,
) -> Result<(), CpuError> {
    // The promise of aligned pointers is for devices; here any address will do.
    let problem = Problem {
        alignment: Alignment::Element,
        ..problem.clone()
    };
    check_forward(&problem, inputs, outputs)?;
    let offsets = inputs.cu_seqlens.map(HostTensor::to_i32);
    if let Some(offsets) = &offsets {
        check_cu_seqlens(offsets, problem.seqlen)?;
    }
    let out = Strided::new(&mut outputs.out, "out")?;
    let states = outputs
        .final_states
        .as_mut()
        .map(|t| Strided::new(t, "final_states"))
        .transpose()?;

    let chunk_size = chunk_size(&problem);
    let block = heads_per_task(&problem, chunk_size);
    let sequences = Sequences {
        offsets,
        seqlen: problem.seqlen,
        left: problem.sequences(),
        next: 0,
        out: Some(out),
        states,
    };
    let tasks = HeadBlocks::new(sequences, problem.nheads, problem.heads_per_group(), block);
    workers::run(
        tasks,
        at_most(&problem),
        || Worker::new(&problem, inputs, chunk_size, block),
        Worker::run,
    );
    Ok(())
}

/// Bytes of scratch that [`forward`] allocates for `problem` on the current rayon pool, beside the tensors and small change
/// for each packed sequence. Does not depend on `seqlen` once that is longer than a chunk.
pub fn scratch_bytes(problem: &Problem) -> usize {
    let chunk_size = chunk_size(problem);
    let threads = rayon::current_num_threads().min(at_most(problem));
    threads * Worker::scratch_bytes(problem, chunk_size, heads_per_task(problem, chunk_size))
}

fn chunk_size(problem: &Problem) -> usize {
    let wanted = match problem.chunk_size {
        ChunkSize::Fixed(n) => n as usize,
        ChunkSize::Tuned => DEFAULT_CHUNK_SIZE,
    };
    wanted.min(problem.seqlen)
}

/// Upper bound of the number of tasks.
fn at_most(problem: &Problem) -> usize {
    problem.sequences().saturating_mul(problem.nheads)
}

/// As many heads as leave four tasks for each thread, and scratch of a few MiB.
fn heads_per_task(problem: &Problem, chunk_size: usize) -> usize {
    let of_group = problem.heads_per_group();
    let groups = problem.sequences().saturating_mul(problem.ngroups);
    let fits = |heads: usize| {
        heads == 1 || heads * problem.headdim * chunk_size.max(problem.dstate) <= 1 << 18
    };
    let enough = |heads: usize| {
        groups.saturating_mul(of_group.div_ceil(heads)) >= 4 * rayon::current_num_threads()
    };
    (1..=MAX_BLOCK.min(of_group))
        .rev()
        .find(|heads| fits(*heads) && enough(*heads))
        .unwrap_or(1)
}

/// The sequences of a call, taken off the front of the outputs one by one.
struct Sequences<'a> {
    offsets: Option<Vec<i32>>,
    seqlen: usize,
    left: usize,
    next: usize,
    /// Rows not yet taken; when packed, the one row without the tokens already taken.
    out: Option<Strided<'a, Ix4>>,
    states: Option<Strided<'a, Ix4>>,
}

impl<'a> Iterator for Sequences<'a> {
    type Item = Sequence<'a>;

    fn next(&mut self) -> Option<Sequence<'a>> {
        self.left = self.left.checked_sub(1)?;
        let index = self.next;
        self.next += 1;
        let states = self.states.take().map(|states| {
            let (first, rest) = states.take_first();
            self.states = Some(rest);
            first
        });
        let out = self.out.take()?;
        let (row, first_token, len, out) = match &self.offsets {
            None => {
                let (row, rest) = out.take_first();
                self.out = Some(rest);
                (index, 0, self.seqlen, row)
            }
            Some(offsets) => {
                let (first, end) = (offsets[index] as usize, offsets[index + 1] as usize);
                let (tokens, rest) = out.split_at(1, end - first);
                self.out = Some(rest);
                (0, first, end - first, tokens.take_first().0)
            }
        };
        Some(Sequence {
            index,
            row,
            first_token,
            len,
            out,
            states,
        })
    }
}
