//! Which sizes are worth a tuning: powers of two. Sizes between them find the record by the ladder's nearest match, so many
//! batch sizes and lengths do not mean many tunings.

use mamba2_spec::{Problem, StepProblem};

/// The power of two nearest to `n` by ratio; 0 stays 0.
fn round(n: usize) -> usize {
    if n < 2 {
        return n;
    }
    let below = 1usize << n.ilog2();
    // n / below < above / n, in integers: the ratio to the power below is the smaller one.
    if (n as u128) * (n as u128) < 2 * (below as u128) * (below as u128) {
        below
    } else {
        2 * below
    }
}

/// The problem to tune so that `problem` is covered: batch, sequences and seqlen rounded, all else as it is.
///
/// Its key is at most half of [`crate::NEAREST_BOUND`] away, so the look-up of `problem` itself finds it.
pub fn tuning_shape(problem: &Problem) -> Problem {
    let mut rounded = problem.clone();
    rounded.batch = round(problem.batch);
    rounded.seqlen = round(problem.seqlen);
    rounded.packed = problem.packed.map(round);
    // At the operator's limits rounding up may leave them.
    if rounded.check().is_ok() {
        rounded
    } else {
        problem.clone()
    }
}

/// The step to tune so that `problem` is covered: batch rounded, all else as it is.
pub fn tuning_step_shape(problem: &StepProblem) -> StepProblem {
    let mut rounded = problem.clone();
    rounded.batch = round(problem.batch);
    rounded.slots = rounded.slots.max(rounded.batch);
    rounded
}
