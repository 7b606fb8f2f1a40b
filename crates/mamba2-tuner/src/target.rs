//! What is tuned ([`Target`]) and what is tried for it ([`Candidate`]).

use std::fmt;

use mamba2_spec::limit::{H200_BF16_FLOPS_PER_S, H200_COPY_BYTES_PER_S, Limit};
use mamba2_spec::parameters::{Parameters, StateUpdate};
use mamba2_spec::{
    DKind, DeviceFacts, DtLimit, Dtype, Kernel, KernelConfig, Problem, SpecError, StepProblem,
    StrategyConfig,
};
use serde::{Deserialize, Serialize};

/// A shape to tune.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(into = "TargetWire", try_from = "TargetWire")]
pub enum Target {
    /// The forward pass.
    Forward(Problem),
    /// The decode step.
    Step(StepProblem),
}

impl Target {
    /// The least time the hardware allows, in microseconds; `None` where its ceilings were not measured.
    pub fn limit_us(&self, device: &DeviceFacts) -> Option<f64> {
        if !device.name.contains("H200") {
            return None;
        }
        match self {
            Target::Forward(p) => {
                Some(Limit::of(p).us(H200_COPY_BYTES_PER_S, H200_BF16_FLOPS_PER_S))
            }
            Target::Step(p) => Some(2.0 * state_bytes(p, p.batch) / H200_COPY_BYTES_PER_S * 1e6),
        }
    }

    /// Device memory that inputs and outputs take while configs are verified, without workspace. Outputs are there four times: what a
    /// run leaves, what the run before left, what was there before, and what the default config left.
    pub fn tensor_bytes(&self) -> u64 {
        let bytes = match self {
            Target::Forward(p) => Limit::of(p).bytes,
            Target::Step(p) => state_bytes(p, p.slots),
        };
        (4.0 * bytes) as u64
    }

    /// Sequences and tokens of the shape are positive, so that there is something to time.
    ///
    /// # Errors
    /// [`SpecError`] as from the problem's own check, or naming the empty size.
    pub fn check(&self) -> Result<(), SpecError> {
        let (name, empty) = match self {
            Target::Forward(p) => {
                p.check()?;
                ("batch * seqlen", p.batch == 0 || p.seqlen == 0)
            }
            Target::Step(p) => {
                p.check()?;
                ("batch", p.batch == 0)
            }
        };
        if empty {
            return Err(SpecError::Size {
                name,
                expected: "at least 1 (there is nothing to time)".into(),
                got: "0".into(),
            });
        }
        Ok(())
    }
}

/// Bytes of the state of so many rows. As a float: a legal problem may have more than an integer counts.
fn state_bytes(p: &StepProblem, rows: usize) -> f64 {
    let sizes = [
        rows,
        p.nheads,
        p.headdim,
        p.dstate,
        p.state_dtype.size_bytes(),
    ];
    sizes.iter().map(|n| *n as f64).product()
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Forward(p) => p.fmt(f),
            Target::Step(p) => write!(f, "step:{p}"),
        }
    }
}

/// The form that travels between processes. Shape strings carry every field of a [`Problem`]; a [`StepProblem`] has none
/// that does, so its fields travel by name, the limits as bits because JSON has no infinity.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum TargetWire {
    Forward(String),
    Step {
        batch: usize,
        tokens: usize,
        slots: usize,
        nheads: usize,
        headdim: usize,
        ngroups: usize,
        dstate: usize,
        dtype: Dtype,
        dt_dtype: Dtype,
        state_dtype: Dtype,
        d: DKind,
        z: bool,
        dt_bias: bool,
        dt_softplus: bool,
        dt_min_bits: u32,
        dt_max_bits: u32,
        indices: bool,
    },
}

impl From<Target> for TargetWire {
    fn from(target: Target) -> TargetWire {
        match target {
            Target::Forward(p) => TargetWire::Forward(p.to_string()),
            Target::Step(p) => TargetWire::Step {
                batch: p.batch,
                tokens: p.tokens,
                slots: p.slots,
                nheads: p.nheads,
                headdim: p.headdim,
                ngroups: p.ngroups,
                dstate: p.dstate,
                dtype: p.dtype,
                dt_dtype: p.dt_dtype,
                state_dtype: p.state_dtype,
                d: p.d,
                z: p.z,
                dt_bias: p.dt_bias,
                dt_softplus: p.dt_softplus,
                dt_min_bits: p.dt_limit.min.to_bits(),
                dt_max_bits: p.dt_limit.max.to_bits(),
                indices: p.indices,
            },
        }
    }
}

impl TryFrom<TargetWire> for Target {
    type Error = SpecError;

    fn try_from(wire: TargetWire) -> Result<Target, SpecError> {
        match wire {
            TargetWire::Forward(text) => text.parse().map(Target::Forward),
            TargetWire::Step {
                batch,
                tokens,
                slots,
                nheads,
                headdim,
                ngroups,
                dstate,
                dtype,
                dt_dtype,
                state_dtype,
                d,
                z,
                dt_bias,
                dt_softplus,
                dt_min_bits,
                dt_max_bits,
                indices,
            } => {
                let dt_limit = DtLimit {
                    min: f32::from_bits(dt_min_bits),
                    max: f32::from_bits(dt_max_bits),
                };
                let step = StepProblem {
                    batch,
                    tokens,
                    slots,
                    nheads,
                    headdim,
                    ngroups,
                    dstate,
                    dtype,
                    dt_dtype,
                    state_dtype,
                    d,
                    z,
                    dt_bias,
                    dt_softplus,
                    dt_limit,
                    indices,
                };
                step.check()?;
                Ok(Target::Step(step))
            }
        }
    }
}

/// One thing that is compiled, verified and timed. The order is the fixed order that breaks ties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Candidate {
    /// One kernel of a strategy, timed on its own. The other kernels of `within` make its inputs and are not timed.
    Kernel {
        /// The kernel that is timed.
        kernel: Kernel,
        /// The strategy it runs in.
        within: StrategyConfig,
    },
    /// A whole forward pass.
    Strategy(StrategyConfig),
    /// A whole decode step.
    Step(StateUpdate),
}

impl Candidate {
    /// Kernels that must be compiled before this can be timed.
    pub fn kernels(&self) -> Vec<KernelConfig> {
        match self {
            Candidate::Kernel { kernel, within } => within
                .kernels()
                .into_iter()
                .filter(|k| k.kernel() == *kernel)
                .collect(),
            Candidate::Strategy(config) => config.kernels(),
            Candidate::Step(config) => vec![KernelConfig::StateUpdate(*config)],
        }
    }
}

/// The identity under which timings are kept: the kernel's own parameters, not those of the kernels beside it.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Candidate::Kernel { .. } => {
                for config in self.kernels() {
                    write!(f, "{}({})", config.kernel(), config.to_text())?;
                }
                Ok(())
            }
            Candidate::Strategy(config) => config.fmt(f),
            Candidate::Step(config) => write!(f, "state_update({})", config.to_text()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_travel_through_json_without_loss() {
        let mut problem: Problem =
            "b=1,l=77,h=6,p=80,g=3,n=256,dtype=f16,z=1,limit=0.001:0.1,packed=2,init=bf16"
                .parse()
                .unwrap();
        problem.dt_dtype = Dtype::F32;
        let mut step = StepProblem::new(3, 8, 64, 2, 128);
        step.z = true;
        step.slots = 9;
        step.indices = true;
        step.dt_limit = DtLimit {
            min: 0.25,
            max: f32::INFINITY,
        };
        for target in [Target::Forward(problem), Target::Step(step)] {
            let text = serde_json::to_string(&target).unwrap();
            assert_eq!(
                serde_json::from_str::<Target>(&text).unwrap(),
                target,
                "{text}"
            );
        }
    }

    #[test]
    fn a_pool_of_slots_beyond_any_memory_is_sized_without_overflow() {
        let step = "b=1,h=1048576,p=256,g=1,n=512,slots=1073741824"
            .parse()
            .unwrap();
        assert_eq!(Target::Step(step).tensor_bytes(), u64::MAX);
        let small = Target::Step("b=2,h=3,p=4,g=1,n=5".parse().unwrap());
        assert_eq!(small.tensor_bytes(), 4 * 2 * 3 * 4 * 5 * 4);
    }

    #[test]
    fn a_kernel_is_named_by_its_own_parameters_only() {
        let a = StrategyConfig::ThreeKernel(Default::default());
        let mut other = mamba2_spec::ThreeKernelConfig::default();
        other.compute_out.warps = 8;
        let b = StrategyConfig::ThreeKernel(other);
        let name = |within| {
            Candidate::Kernel {
                kernel: Kernel::FwdPassState,
                within,
            }
            .to_string()
        };
        assert_eq!(name(a), name(b));
        assert_ne!(
            Candidate::Strategy(a).to_string(),
            Candidate::Strategy(b).to_string()
        );
    }
}
