use mamba2_spec::SpecError;
use thiserror::Error;

/// Why a call of the CPU backend was refused. Nothing was computed and no output was written.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The problem, a tensor or an offset is not as documented.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A tensor's data is of another element type than its description says.
    #[error("host tensor: described as {described}, the data is {data}")]
    DataDtype {
        /// dtype of the description.
        described: &'static str,
        /// dtype of the slice.
        data: &'static str,
    },
    /// A view reaches past the end of its data.
    #[error(
        "host tensor: shape {shape:?} with strides {strides:?} spans {span} elements, the data has {data}"
    )]
    Span {
        /// Shape of the view.
        shape: Vec<usize>,
        /// Strides of the view, in elements.
        strides: Vec<usize>,
        /// Elements from the first to one past the last of the view, or "too many to count".
        span: String,
        /// Elements of the slice.
        data: usize,
    },
    /// An output's elements overlap each other.
    #[error(
        "{tensor}: expected a view whose elements do not overlap, got shape {shape:?} with strides {strides:?}"
    )]
    Overlap {
        /// Name of the tensor.
        tensor: &'static str,
        /// Shape of the view.
        shape: Vec<usize>,
        /// Strides of the view, in elements.
        strides: Vec<usize>,
    },
    /// An entry of state_batch_indices names no slot, or one that another row has.
    #[error("state_batch_indices: expected {expected}, got {got} in row {row}")]
    StateIndex {
        /// Row at fault.
        row: usize,
        /// What is accepted.
        expected: String,
        /// What came.
        got: i32,
    },
}
