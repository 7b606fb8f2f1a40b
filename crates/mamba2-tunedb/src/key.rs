mod parse;

use std::fmt;

use mamba2_spec::{
    Alignment, Arch, ChunkSize, DKind, DeviceFacts, DtLimit, Dtype, Kernel, Precision, Problem,
    StepProblem,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Version of the key's fields. A change of meaning takes a new number, and old entries become misses.
pub const KEY_SCHEMA: u32 = 1;

/// Longest key text that is read, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;

/// What a key's entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Subject {
    /// A whole forward pass: the config is a strategy.
    Forward,
    /// One kernel of a forward pass, timed by itself.
    Kernel(Kernel),
    /// A decode step.
    Step,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Subject::Forward => "forward",
            Subject::Kernel(kernel) => kernel.name(),
            Subject::Step => "step",
        })
    }
}

/// Options that only one of forward and step has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Options {
    Forward {
        initial_states: Option<Dtype>,
        final_states: Option<Dtype>,
        packed: bool,
        /// 0: the tuner decides.
        chunk_size: u32,
        tf32: bool,
        aligned: bool,
    },
    Step {
        state_dtype: Dtype,
        indices: bool,
    },
}

/// The part of a key that must agree exactly, even for a nearest match: schema, device facts, subject, dtypes, flags and
/// the sizes that are compiled into kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Family {
    schema: u32,
    arch: Arch,
    sm_count: u32,
    shared_memory_bytes: usize,
    subject: Subject,
    dtype: Dtype,
    dt_dtype: Dtype,
    d: DKind,
    z: bool,
    dt_bias: bool,
    dt_softplus: bool,
    dt_limit: bool,
    options: Options,
    nheads: usize,
    headdim: usize,
    ngroups: usize,
    dstate: usize,
}

/// Identity of a tuned problem: what the fastest config may depend on, and nothing else.
///
/// [`TuneKey::forward`], [`TuneKey::kernel`] and [`TuneKey::step`] are the only ways from a problem to a key, for tuning
/// and for look-up alike. The product name of the GPU is not in it. Its text is `name=value,...` in a fixed order, the
/// device first and the sizes that a nearest match may vary last.
///
/// ```
/// use mamba2_spec::{Arch, DeviceFacts, Problem};
/// use mamba2_tunedb::TuneKey;
/// let problem = Problem::new(4, 16384, 8, 64, 1, 128);
/// let key = TuneKey::forward(&problem, &DeviceFacts::assumed(Arch(90)));
/// assert!(key.to_string().ends_with("h=8,p=64,g=1,n=128,b=4,s=4,l=16384"));
/// assert_eq!(key.to_string().parse::<TuneKey>().unwrap(), key);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TuneKey {
    family: Family,
    batch: usize,
    /// Independent sequences: `batch` unless packed.
    sequences: usize,
    /// Tokens per row; tokens per call for a step.
    seqlen: usize,
}

impl TuneKey {
    /// Key of a forward pass.
    ///
    /// The values of dt_limit are left out: they are run-time arguments, only whether there is a clamp is compiled in.
    /// Precision is left out for 16-bit inputs, which ignore it.
    pub fn forward(problem: &Problem, device: &DeviceFacts) -> TuneKey {
        TuneKey::of(Subject::Forward, problem, device)
    }

    /// Key of one kernel of a forward pass.
    pub fn kernel(kernel: Kernel, problem: &Problem, device: &DeviceFacts) -> TuneKey {
        TuneKey::of(Subject::Kernel(kernel), problem, device)
    }

    fn of(subject: Subject, problem: &Problem, device: &DeviceFacts) -> TuneKey {
        // Named one by one: a new field of Problem does not compile until it is placed here.
        let &Problem {
            batch,
            seqlen,
            nheads,
            headdim,
            ngroups,
            dstate,
            dtype,
            dt_dtype,
            d,
            z,
            dt_bias,
            dt_softplus,
            dt_limit,
            initial_states,
            final_states,
            packed,
            chunk_size,
            precision,
            alignment,
        } = problem;
        let options = Options::Forward {
            initial_states,
            final_states,
            packed: packed.is_some(),
            chunk_size: match chunk_size {
                ChunkSize::Tuned => 0,
                ChunkSize::Fixed(n) => n,
            },
            tf32: dtype == Dtype::F32 && precision == Precision::Tf32,
            aligned: alignment == Alignment::Bytes16,
        };
        let family = Family {
            schema: KEY_SCHEMA,
            arch: device.arch,
            sm_count: device.sm_count,
            shared_memory_bytes: device.shared_memory_optin_bytes,
            subject,
            dtype,
            dt_dtype,
            d,
            z,
            dt_bias,
            dt_softplus,
            dt_limit: dt_limit != DtLimit::NONE,
            options,
            nheads,
            headdim,
            ngroups,
            dstate,
        };
        TuneKey {
            family,
            batch,
            sequences: problem.sequences(),
            seqlen,
        }
    }

    /// Key of a decode step. The number of slots is left out: it only bounds addresses.
    pub fn step(problem: &StepProblem, device: &DeviceFacts) -> TuneKey {
        let &StepProblem {
            batch,
            tokens,
            slots: _,
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
        } = problem;
        let family = Family {
            schema: KEY_SCHEMA,
            arch: device.arch,
            sm_count: device.sm_count,
            shared_memory_bytes: device.shared_memory_optin_bytes,
            subject: Subject::Step,
            dtype,
            dt_dtype,
            d,
            z,
            dt_bias,
            dt_softplus,
            dt_limit: dt_limit != DtLimit::NONE,
            options: Options::Step {
                state_dtype,
                indices,
            },
            nheads,
            headdim,
            ngroups,
            dstate,
        };
        TuneKey {
            family,
            batch,
            sequences: batch,
            seqlen: tokens,
        }
    }

    /// What the entry is about.
    pub fn subject(&self) -> Subject {
        self.family.subject
    }

    /// What must agree for a nearest match.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The text that every key of this family, and no other, begins with.
    pub fn family_prefix(&self) -> String {
        format!("{},", self.family)
    }

    /// The key of the same family that `text`, which begins with `prefix` = [`TuneKey::family_prefix`], names. As
    /// [`str::parse`], but only the sizes need reading.
    pub(crate) fn relative(&self, prefix: &str, text: &str) -> Option<TuneKey> {
        let mut sizes = text.strip_prefix(prefix)?.splitn(3, ',');
        let mut size = |name: &str| {
            let digits = sizes.next()?.strip_prefix(name)?;
            // One spelling per number.
            let canonical = digits.len() == 1 || !digits.starts_with(['0', '+']);
            digits
                .parse::<usize>()
                .ok()
                .filter(|_| canonical && digits.starts_with(|c: char| c.is_ascii_digit()))
        };
        let (batch, sequences, seqlen) = (size("b=")?, size("s=")?, size("l=")?);
        let packed = matches!(self.family.options, Options::Forward { packed: true, .. });
        (packed || batch == sequences).then_some(TuneKey {
            family: self.family,
            batch,
            sequences,
            seqlen,
        })
    }

    /// Architecture the entry was measured on.
    pub fn arch(&self) -> Arch {
        self.family.arch
    }

    /// Multiprocessors of the GPU the entry was measured on.
    pub fn sm_count(&self) -> u32 {
        self.family.sm_count
    }

    /// True if both keys are of GPUs that tune alike.
    pub fn same_device(&self, other: &TuneKey) -> bool {
        let facts = |k: &TuneKey| {
            (
                k.family.arch,
                k.family.sm_count,
                k.family.shared_memory_bytes,
            )
        };
        facts(self) == facts(other)
    }

    /// The same key for a GPU with another number of multiprocessors.
    #[must_use]
    pub fn with_sm_count(mut self, sm_count: u32) -> TuneKey {
        self.family.sm_count = sm_count;
        self
    }

    /// How far `other` is: the largest |log2 ratio| over batch, sequences and seqlen. 0 is the same key, 1 a factor of 2.
    /// `None` if the families differ, so that no bound makes the match legal.
    pub fn distance(&self, other: &TuneKey) -> Option<f64> {
        if self.family != other.family {
            return None;
        }
        let axis = |a: usize, b: usize| match (a, b) {
            _ if a == b => 0.0,
            // Nothing to compute on one side only: no other size resembles it.
            (0, _) | (_, 0) => f64::INFINITY,
            _ => (a as f64 / b as f64).log2().abs(),
        };
        let axes = [
            axis(self.batch, other.batch),
            axis(self.sequences, other.sequences),
            axis(self.seqlen, other.seqlen),
        ];
        Some(axes.into_iter().fold(0.0, f64::max))
    }

    /// The device facts of the key; the name is made up and L2 unknown.
    pub fn device(&self) -> DeviceFacts {
        DeviceFacts {
            arch: self.family.arch,
            sm_count: self.family.sm_count,
            shared_memory_optin_bytes: self.family.shared_memory_bytes,
            l2_bytes: 0,
            name: format!(
                "{} with {} multiprocessors",
                self.family.arch, self.family.sm_count
            ),
        }
    }

    /// A problem with this key, or `None` for a step's key. A dt_limit stands for any.
    pub fn problem(&self) -> Option<Problem> {
        let f = &self.family;
        let Options::Forward {
            initial_states,
            final_states,
            packed,
            chunk_size,
            tf32,
            aligned,
        } = f.options
        else {
            return None;
        };
        Some(Problem {
            batch: self.batch,
            seqlen: self.seqlen,
            nheads: f.nheads,
            headdim: f.headdim,
            ngroups: f.ngroups,
            dstate: f.dstate,
            dtype: f.dtype,
            dt_dtype: f.dt_dtype,
            d: f.d,
            z: f.z,
            dt_bias: f.dt_bias,
            dt_softplus: f.dt_softplus,
            dt_limit: some_limit(f.dt_limit),
            initial_states,
            final_states,
            packed: packed.then_some(self.sequences),
            chunk_size: if chunk_size == 0 {
                ChunkSize::Tuned
            } else {
                ChunkSize::Fixed(chunk_size)
            },
            precision: if tf32 {
                Precision::Tf32
            } else {
                Precision::Float32
            },
            alignment: if aligned {
                Alignment::Bytes16
            } else {
                Alignment::Element
            },
        })
    }

    /// A step with this key, or `None` for a forward key.
    pub fn step_problem(&self) -> Option<StepProblem> {
        let f = &self.family;
        let Options::Step {
            state_dtype,
            indices,
        } = f.options
        else {
            return None;
        };
        Some(StepProblem {
            batch: self.batch,
            tokens: self.seqlen,
            slots: self.batch,
            nheads: f.nheads,
            headdim: f.headdim,
            ngroups: f.ngroups,
            dstate: f.dstate,
            dtype: f.dtype,
            dt_dtype: f.dt_dtype,
            state_dtype,
            d: f.d,
            z: f.z,
            dt_bias: f.dt_bias,
            dt_softplus: f.dt_softplus,
            dt_limit: some_limit(f.dt_limit),
            indices,
        })
    }
}

fn some_limit(limited: bool) -> DtLimit {
    if limited {
        DtLimit {
            min: 0.001,
            max: 0.1,
        }
    } else {
        DtLimit::NONE
    }
}

fn optional_dtype(dtype: Option<Dtype>) -> &'static str {
    dtype.map_or("none", Dtype::name)
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = match self.d {
            DKind::None => "none",
            DKind::PerHead => "h",
            DKind::PerHeaddim => "hp",
        };
        write!(
            f,
            "schema={},arch={},sms={},smem={},subject={},dtype={},dt_dtype={},d={d},z={},bias={},softplus={},limit={}",
            self.schema,
            self.arch.0,
            self.sm_count,
            self.shared_memory_bytes,
            self.subject,
            self.dtype,
            self.dt_dtype,
            u8::from(self.z),
            u8::from(self.dt_bias),
            u8::from(self.dt_softplus),
            u8::from(self.dt_limit),
        )?;
        match self.options {
            Options::Forward {
                initial_states,
                final_states,
                packed,
                chunk_size,
                tf32,
                aligned,
            } => write!(
                f,
                ",init={},final={},packed={},q={chunk_size},tf32={},align={}",
                optional_dtype(initial_states),
                optional_dtype(final_states),
                u8::from(packed),
                u8::from(tf32),
                if aligned { 16 } else { 1 },
            )?,
            Options::Step {
                state_dtype,
                indices,
            } => write!(f, ",state={state_dtype},indices={}", u8::from(indices))?,
        }
        write!(
            f,
            ",h={},p={},g={},n={}",
            self.nheads, self.headdim, self.ngroups, self.dstate
        )
    }
}

impl fmt::Display for TuneKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{},b={},s={},l={}",
            self.family, self.batch, self.sequences, self.seqlen
        )
    }
}

impl Serialize for TuneKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TuneKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}
