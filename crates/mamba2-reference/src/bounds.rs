use mamba2_spec::{Dtype, Precision, Problem, StepProblem};

/// Largest relative Frobenius error that is accepted, against float64 on the rounded inputs.
///
/// | dtype | out | states |
/// |---|---|---|
/// | bf16 | 3e-3 (mamba_ssm on an H200: 2.3e-3) | 2.5e-3 |
/// | f16 | 4e-4 (mamba_ssm: 2.9e-4) | 4e-4 |
/// | f32 | 1e-5 | 1e-5 |
/// | f32 with `Precision::Tf32` | 3e-3 (mamba_ssm: 1.3e-3) | 3e-3 |
///
/// States that are stored in 16 bits are held to the wider of the two dtypes' bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// For `out`.
    pub out: f64,
    /// For `final_states`, or the state cache of a decode step.
    pub states: f64,
}

impl Bounds {
    /// The bounds of a forward pass.
    pub fn of(problem: &Problem) -> Bounds {
        let bounds = Bounds::of_dtype(problem.dtype, problem.precision);
        Bounds {
            states: bounds
                .states
                .max(stored(problem.final_states.unwrap_or(Dtype::F32))),
            ..bounds
        }
    }

    /// The bounds of a decode step.
    pub fn of_step(problem: &StepProblem) -> Bounds {
        let bounds = Bounds::of_dtype(problem.dtype, Precision::Float32);
        Bounds {
            states: bounds.states.max(stored(problem.state_dtype)),
            ..bounds
        }
    }

    fn of_dtype(dtype: Dtype, precision: Precision) -> Bounds {
        match (dtype, precision) {
            (Dtype::Bf16, _) => Bounds {
                out: 3e-3,
                states: 2.5e-3,
            },
            (Dtype::F16, _) => Bounds {
                out: 4e-4,
                states: 4e-4,
            },
            (Dtype::F32, Precision::Float32) => Bounds {
                out: 1e-5,
                states: 1e-5,
            },
            (Dtype::F32, Precision::Tf32) => Bounds {
                out: 3e-3,
                states: 3e-3,
            },
        }
    }
}

/// What storing a state in `dtype` costs at most.
fn stored(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 2.5e-3,
        Dtype::F16 => 4e-4,
        Dtype::F32 => 0.0,
    }
}
