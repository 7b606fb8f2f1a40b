use thiserror::Error;

/// Why a problem, a tensor, an option or a config was refused. Nothing was computed or enqueued.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A tensor's shape is not the documented one.
    #[error("{tensor}: expected {axes} = {expected:?}, got {got:?}")]
    Shape {
        /// Name of the tensor.
        tensor: &'static str,
        /// Names of the axes, as in `[batch, seqlen, nheads, headdim]`.
        axes: &'static str,
        /// The documented shape for this problem.
        expected: Vec<usize>,
        /// The shape that came.
        got: Vec<usize>,
    },
    /// A tensor's element type is not the documented one.
    #[error("{tensor}: expected dtype {expected}, got {got}")]
    Dtype {
        /// Name of the tensor.
        tensor: &'static str,
        /// What is accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// A tensor's strides cannot be used.
    #[error("{tensor}: expected {expected}, got strides {got:?} (in elements)")]
    Stride {
        /// Name of the tensor.
        tensor: &'static str,
        /// The rule.
        expected: &'static str,
        /// The strides that came, in elements.
        got: Vec<usize>,
    },
    /// A tensor the problem promises is absent, or one it does not promise is there.
    #[error("{tensor}: the problem says it is {expected}, the call has it {got}")]
    Presence {
        /// Name of the tensor.
        tensor: &'static str,
        /// `present` or `absent`.
        expected: &'static str,
        /// `present` or `absent`.
        got: &'static str,
    },
    /// A size is outside the limits of the operator.
    #[error("{name}: expected {expected}, got {got}")]
    Size {
        /// Name of the size.
        name: &'static str,
        /// The limit.
        expected: String,
        /// What came.
        got: String,
    },
    /// An option, shape string or config key cannot be read.
    #[error("{key}: expected {expected}, got {got:?}")]
    Option {
        /// Key at fault.
        key: String,
        /// What is accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// Packed offsets are malformed.
    #[error("cu_seqlens: {0}")]
    CuSeqlens(String),
    /// A config breaks a numbered legality rule.
    #[error("{kernel}: rule {rule} ({text}): {detail}")]
    Rule {
        /// Kernel the config is for.
        kernel: &'static str,
        /// Number of the rule, the same in Rust and CUDA.
        rule: &'static str,
        /// The rule.
        text: &'static str,
        /// The values that break it.
        detail: String,
    },
    /// No config of any kernel fits this problem on this device.
    #[error("no kernel fits: {0}")]
    NoConfig(String),
}
