use super::numbers::{Stream, inverse_softplus, silu, softplus};

/// What kind of numbers the inputs are. Row ids are those of the list of publicly reported faults the project tests against.
///
/// Where a pattern names a dt, it is the one after bias and softplus: if the problem asks for those, the raw value is
/// chosen so that the pipeline gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// x, B, C = silu(normal), dt = softplus(normal), A uniform in -[1, 16].
    Plain,
    /// A = -16, dt = 0.1: a 16-bit running sum would be off by 72 % at a chunk of 256 (N4).
    StrongDecay,
    /// A = -0.01, dt = 0.05, all of x, B, C positive: drift of a state carried in 16 bits adds up (N5).
    WeakDecay,
    /// As a trained model feeds it: step sizes log-uniform in [1e-3, 0.1], through dt_bias if the problem has one (N14).
    Model,
    /// Raw dt in {-30, -5, 0, 5, 19, 21, 90}, dt_bias = 0.5: both sides of softplus's threshold, negative steps for the clamp (N13).
    RawDt,
    /// B of group k is k + 1, C = 1, x = 1, A = -1, dt = 0.1: a wrong head-to-group map is plain to see (N10).
    GroupConstant,
    /// dt zero for half of the tokens and up to 1000 for the others: decay 1 beside decay 0.
    HalfZero,
    /// x is non-zero in the first token of each row only, A = -0.001, dt = 0.05: states must be carried through all chunks (N11).
    Impulse,
    /// x = 0 and initial states 1, A = -1, dt = 0.01: the output is the decay of the initial state (N6).
    StateOnly,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Pattern; 9] = [
        Pattern::Plain,
        Pattern::StrongDecay,
        Pattern::WeakDecay,
        Pattern::Model,
        Pattern::RawDt,
        Pattern::GroupConstant,
        Pattern::HalfZero,
        Pattern::Impulse,
        Pattern::StateOnly,
    ];

    pub(super) fn x(self, stream: &Stream, i: usize, token_of_row: usize) -> f32 {
        match self {
            Pattern::GroupConstant => 1.0,
            Pattern::StateOnly => 0.0,
            Pattern::Impulse if token_of_row > 0 => 0.0,
            Pattern::Impulse => 1.0 + stream.uniform(i),
            _ => self.activation(stream, i),
        }
    }

    pub(super) fn b(self, stream: &Stream, i: usize, group: usize) -> f32 {
        match self {
            Pattern::GroupConstant => (group + 1) as f32,
            _ => self.activation(stream, i),
        }
    }

    pub(super) fn c(self, stream: &Stream, i: usize) -> f32 {
        match self {
            Pattern::GroupConstant => 1.0,
            _ => self.activation(stream, i),
        }
    }

    pub(super) fn state(self, stream: &Stream, i: usize) -> f32 {
        match self {
            Pattern::StateOnly => 1.0,
            _ => 0.5 * stream.normal(i),
        }
    }

    fn activation(self, stream: &Stream, i: usize) -> f32 {
        match self {
            // Positive products only: errors of one sign add up instead of cancelling.
            Pattern::WeakDecay | Pattern::Impulse => 0.25 + stream.uniform(i),
            _ => silu(stream.normal(i)),
        }
    }
}

/// What a pattern fixes per head.
pub(super) struct Heads {
    pattern: Pattern,
    pub(super) a: Vec<f32>,
    pub(super) bias: Option<Vec<f32>>,
    /// Model's step size per head.
    steps: Vec<f32>,
}

impl Heads {
    pub(super) fn new(pattern: Pattern, nheads: usize, with_bias: bool, stream: Stream) -> Heads {
        let a = |head: usize| match pattern {
            Pattern::StrongDecay => -16.0,
            Pattern::WeakDecay => -0.01,
            Pattern::GroupConstant | Pattern::StateOnly => -1.0,
            Pattern::Impulse => -0.001,
            _ => -1.0 - 15.0 * stream.uniform(head),
        };
        let steps: Vec<f32> = (0..nheads)
            .map(|head| 1e-3 * 100f32.powf(stream.uniform(nheads + head)))
            .collect();
        let bias = |head: usize| match pattern {
            Pattern::Model => inverse_softplus(steps[head]),
            Pattern::RawDt => 0.5,
            _ => 0.5 * stream.normal(2 * nheads + head),
        };
        Heads {
            pattern,
            a: (0..nheads).map(a).collect(),
            bias: with_bias.then(|| (0..nheads).map(bias).collect()),
            steps,
        }
    }

    /// Raw dt of element `i`, which belongs to `head`.
    pub(super) fn dt(&self, stream: &Stream, i: usize, head: usize, with_softplus: bool) -> f32 {
        let bias = self.bias.as_ref().map_or(0.0, |bias| bias[head]);
        let raw_for = |target: f32| {
            if with_softplus {
                inverse_softplus(target) - bias
            } else {
                target - bias
            }
        };
        match self.pattern {
            Pattern::Plain => {
                let v = stream.normal(i);
                if with_softplus { v } else { softplus(v) }
            }
            Pattern::StrongDecay | Pattern::GroupConstant => raw_for(0.1),
            Pattern::WeakDecay | Pattern::Impulse => raw_for(0.05),
            Pattern::StateOnly => raw_for(0.01),
            Pattern::Model => {
                // What softplus is to see: the head's own bias and half a normal.
                let v = inverse_softplus(self.steps[head]) + 0.5 * stream.normal(i);
                if with_softplus {
                    v - bias
                } else {
                    softplus(v) - bias
                }
            }
            Pattern::RawDt => {
                [-30.0, -5.0, 0.0, 5.0, 19.0, 21.0, 90.0][(stream.bits(i) % 7) as usize]
            }
            Pattern::HalfZero if stream.bits(i) & 1 == 0 => {
                // Through softplus, zero can only be approached.
                if with_softplus { -60.0 - bias } else { -bias }
            }
            Pattern::HalfZero => 1000.0 * stream.uniform(i) - bias,
        }
    }
}
