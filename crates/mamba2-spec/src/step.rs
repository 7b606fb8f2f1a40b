use std::fmt;
use std::str::FromStr;

use crate::problem::{SharedOptions, for_each_pair, parse_value, size};
use crate::{DKind, DtLimit, Dtype, SpecError};

/// One decode call (mamba_ssm's `selective_state_update`): a state cache updated in place, one or a few tokens per row.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | state (in place) | `[slots, nheads, headdim, dstate]` | `state_dtype` |
/// | x, z, out | `[batch, tokens, nheads, headdim]` | `dtype` |
/// | dt | `[batch, tokens, nheads]` | `dt_dtype` |
/// | B, C | `[batch, tokens, ngroups, dstate]` | `dtype` |
/// | A, dt_bias | `[nheads]` | f32 |
/// | D | `[nheads]` or `[nheads, headdim]` | f32 |
/// | state_batch_indices | `[batch]` | i32; -1 skips the row and touches nothing |
#[derive(Clone, Debug, PartialEq)]
pub struct StepProblem {
    /// Rows.
    pub batch: usize,
    /// Tokens per row, applied in order (1 for plain decode).
    pub tokens: usize,
    /// Slots of the state cache; at least `batch` without indices.
    pub slots: usize,
    /// Heads.
    pub nheads: usize,
    /// Elements of x per head, 1..=256.
    pub headdim: usize,
    /// Groups that share B and C.
    pub ngroups: usize,
    /// State size, 1..=512.
    pub dstate: usize,
    /// dtype of x, B, C, z and out.
    pub dtype: Dtype,
    /// dtype of dt.
    pub dt_dtype: Dtype,
    /// dtype of the state cache.
    pub state_dtype: Dtype,
    /// Rank of D.
    pub d: DKind,
    /// True if the output is gated by `silu(z)`.
    pub z: bool,
    /// True if dt_bias is added to dt.
    pub dt_bias: bool,
    /// True if softplus follows the bias.
    pub dt_softplus: bool,
    /// Clamp after softplus.
    pub dt_limit: DtLimit,
    /// True if state_batch_indices is given; otherwise row `i` uses slot `i`.
    pub indices: bool,
}

/// Vectors of a decode step: 16 bytes of a row of the state, and as many elements of B and C. Unit: bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepVectors {
    /// Of the state.
    pub state: usize,
    /// Of B and C, at most what one instruction loads.
    pub inputs: usize,
}

impl StepProblem {
    /// Plain decode: bf16 inputs, f32 state, D per head, one token, no indices.
    pub fn new(
        batch: usize,
        nheads: usize,
        headdim: usize,
        ngroups: usize,
        dstate: usize,
    ) -> StepProblem {
        StepProblem {
            batch,
            tokens: 1,
            slots: batch,
            nheads,
            headdim,
            ngroups,
            dstate,
            dtype: Dtype::Bf16,
            dt_dtype: Dtype::Bf16,
            state_dtype: Dtype::F32,
            d: DKind::PerHead,
            z: false,
            dt_bias: false,
            dt_softplus: false,
            dt_limit: DtLimit::NONE,
            indices: false,
        }
    }

    /// What rows of the state and of B and C must start on multiples of for a kernel to load whole vectors of them.
    pub fn vector_bytes(&self) -> StepVectors {
        let state = 16;
        let elems = state / self.state_dtype.size_bytes();
        StepVectors {
            state,
            inputs: (elems * self.dtype.size_bytes()).min(16),
        }
    }

    /// Heads that share one B and C. Call after [`StepProblem::check`].
    pub fn heads_per_group(&self) -> usize {
        self.nheads / self.ngroups.max(1)
    }

    /// Checks every size and option.
    ///
    /// # Errors
    /// [`SpecError::Size`] or [`SpecError::Option`].
    pub fn check(&self) -> Result<(), SpecError> {
        size("nheads", self.nheads, 1, 1 << 20)?;
        size("headdim", self.headdim, 1, 256)?;
        size("ngroups", self.ngroups, 1, self.nheads)?;
        size("dstate", self.dstate, 1, 512)?;
        size("tokens", self.tokens, 1, 64)?;
        if !self.nheads.is_multiple_of(self.ngroups) {
            return Err(SpecError::Size {
                name: "nheads",
                expected: format!("a multiple of ngroups = {}", self.ngroups),
                got: self.nheads.to_string(),
            });
        }
        if !self.indices && self.slots < self.batch {
            return Err(SpecError::Size {
                name: "slots",
                expected: format!(
                    "at least batch = {} without state_batch_indices",
                    self.batch
                ),
                got: self.slots.to_string(),
            });
        }
        self.dt_limit.check()
    }
}

/// Step shapes: `b=64,h=80,p=64,g=1,n=128[,t=1][,slots=..][,dtype=bf16][,state=f32]` and d, z, bias, softplus, limit and dt_dtype as in
/// the shape of a forward pass.
impl FromStr for StepProblem {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<StepProblem, SpecError> {
        let mut step = StepProblem::new(0, 0, 0, 0, 0);
        let mut slots = None;
        let mut options = SharedOptions::default();
        for_each_pair(text, |key, value| {
            if options.set(key, value)? {
                return Ok(());
            }
            let number = || parse_value::<usize>(key, value, "a whole number");
            match key {
                "b" => step.batch = number()?,
                "h" => step.nheads = number()?,
                "p" => step.headdim = number()?,
                "g" => step.ngroups = number()?,
                "n" => step.dstate = number()?,
                "t" => step.tokens = number()?,
                "slots" => slots = Some(number()?),
                "dtype" => step.dtype = value.parse()?,
                "state" => step.state_dtype = value.parse()?,
                _ => {
                    return Err(SpecError::Option {
                        key: key.into(),
                        expected: format!(
                            "one of b, h, p, g, n, t, slots, dtype, state, {}",
                            SharedOptions::KEYS
                        ),
                        got: text.into(),
                    });
                }
            }
            Ok(())
        })?;
        step.slots = slots.unwrap_or(step.batch);
        step.indices = slots.is_some();
        step.dt_dtype = options.dt_dtype.unwrap_or(step.dtype);
        (step.d, step.z, step.dt_bias) = (options.d, options.z, options.dt_bias);
        (step.dt_softplus, step.dt_limit) = (options.dt_softplus, options.dt_limit);
        step.check()?;
        Ok(step)
    }
}

impl fmt::Display for StepProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "b={},t={},h={},p={},g={},n={},dtype={},state={}",
            self.batch,
            self.tokens,
            self.nheads,
            self.headdim,
            self.ngroups,
            self.dstate,
            self.dtype,
            self.state_dtype
        )?;
        if self.indices {
            write!(f, ",slots={}", self.slots)?;
        }
        SharedOptions {
            dt_dtype: Some(self.dt_dtype),
            d: self.d,
            z: self.z,
            dt_bias: self.dt_bias,
            dt_softplus: self.dt_softplus,
            dt_limit: self.dt_limit,
        }
        .write(self.dtype, f)
    }
}
