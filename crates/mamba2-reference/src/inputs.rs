use mamba2_spec::Problem;

/// Inputs of a forward pass in float64, contiguous, in the shapes of [`Problem`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names are those of the table at `Problem`
pub struct RefInputs {
    pub x: Vec<f64>,
    pub dt: Vec<f64>,
    pub a: Vec<f64>,
    pub b: Vec<f64>,
    pub c: Vec<f64>,
    pub d: Option<Vec<f64>>,
    pub z: Option<Vec<f64>>,
    pub dt_bias: Option<Vec<f64>>,
    pub initial_states: Option<Vec<f64>>,
    pub cu_seqlens: Option<Vec<i32>>,
}

/// Results of a forward pass in float64.
#[derive(Clone, Debug, PartialEq)]
pub struct RefOutputs {
    /// `[batch, seqlen, nheads, headdim]`. Tokens past the last packed offset are 0.
    pub out: Vec<f64>,
    /// `[sequences, nheads, headdim, dstate]`.
    pub final_states: Vec<f64>,
}

/// Inputs of a decode step in float64, contiguous, in the shapes of [`mamba2_spec::StepProblem`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct StepRefInputs {
    pub x: Vec<f64>,
    pub dt: Vec<f64>,
    pub a: Vec<f64>,
    pub b: Vec<f64>,
    pub c: Vec<f64>,
    pub d: Option<Vec<f64>>,
    pub z: Option<Vec<f64>>,
    pub dt_bias: Option<Vec<f64>>,
    pub state_batch_indices: Option<Vec<i32>>,
    pub state: Vec<f64>,
}

/// Results of a decode step in float64.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRefOutputs {
    /// `[batch, tokens, nheads, headdim]`. Skipped rows are 0 here; a backend leaves them untouched.
    pub out: Vec<f64>,
    /// `[slots, nheads, headdim, dstate]`. Slots that no row names are as they were.
    pub state: Vec<f64>,
}

/// Token ranges of the sequences: first token in the flattened `[batch * seqlen]` axis, and length.
pub(crate) fn spans(problem: &Problem, cu_seqlens: Option<&[i32]>) -> Vec<(usize, usize)> {
    match cu_seqlens {
        Some(cu) => cu
            .windows(2)
            .map(|w| (w[0] as usize, (w[1] - w[0]) as usize))
            .collect(),
        None => (0..problem.batch)
            .map(|b| (b * problem.seqlen, problem.seqlen))
            .collect(),
    }
}

/// Writes per-(sequence, head) results `[len, headdim]` and `[headdim, dstate]` into the tensors they belong to.
pub(crate) fn scatter(
    problem: &Problem,
    spans: &[(usize, usize)],
    parts: Vec<(Vec<f64>, Vec<f64>)>,
) -> RefOutputs {
    let (nheads, headdim) = (problem.nheads, problem.headdim);
    let mut out = vec![0.0; problem.batch * problem.seqlen * nheads * headdim];
    let mut final_states = Vec::with_capacity(spans.len() * nheads * headdim * problem.dstate);
    for (i, (y, state)) in parts.into_iter().enumerate() {
        let (first, head) = (spans[i / nheads].0, i % nheads);
        for (t, row) in y.chunks_exact(headdim).enumerate() {
            let at = ((first + t) * nheads + head) * headdim;
            out[at..at + headdim].copy_from_slice(row);
        }
        final_states.extend(state);
    }
    RefOutputs { out, final_states }
}
