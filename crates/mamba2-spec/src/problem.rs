use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Dtype, SpecError};

/// Rank of the skip weight D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DKind {
    /// No skip term.
    None,
    /// `D: [nheads]`.
    PerHead,
    /// `D: [nheads, headdim]`.
    PerHeaddim,
}

/// Lower and upper clamp of dt, applied after bias and softplus.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DtLimit {
    /// Lower bound.
    pub min: f32,
    /// Upper bound; `f32::INFINITY` for none. JSON has no infinity, so records store [`Problem::has_dt_limit`] instead.
    pub max: f32,
}

impl DtLimit {
    /// mamba_ssm's default `(0, inf)`.
    pub const NONE: DtLimit = DtLimit {
        min: 0.0,
        max: f32::INFINITY,
    };

    /// Checks that neither bound is NaN and `min <= max`.
    ///
    /// # Errors
    /// [`SpecError::Option`] with key `dt_limit`.
    pub fn check(self) -> Result<(), SpecError> {
        if self.min <= self.max {
            return Ok(());
        }
        Err(SpecError::Option {
            key: "dt_limit".into(),
            expected: "two numbers lo <= hi, neither NaN".into(),
            got: format!("{},{}", self.min, self.max),
        })
    }
}

/// Tokens per chunk. A tuning parameter, not a property of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkSize {
    /// The tuner, or the default of the architecture, decides.
    Tuned,
    /// Exactly this many tokens. CUDA takes 16, 32, 64, 128 and 256, the CPU backend any from 1 to 4096; others are refused.
    Fixed(u32),
}

/// How float32 products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Relative error under 1e-5 (three TF32 products per product on tensor cores).
    Float32,
    /// One TF32 product, as mamba_ssm's Triton kernels do; relative error near 1e-3. Only by request.
    Tf32,
}

/// What the caller promises about the pointers and strides of x, B, C, z and out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alignment {
    /// Every base pointer and every stride but the innermost is a multiple of 16 bytes: 16-byte copies are legal.
    Bytes16,
    /// Element alignment only.
    Element,
}

/// One forward pass of the SSD layer: sizes, dtypes and options, without data.
///
/// Tensors, in mamba_ssm's names (innermost axis contiguous, the other axes strided at will):
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | x, z, out | `[batch, seqlen, nheads, headdim]` | `dtype` |
/// | dt | `[batch, seqlen, nheads]` | `dt_dtype` |
/// | A, dt_bias | `[nheads]` | f32 |
/// | B, C | `[batch, seqlen, ngroups, dstate]` | `dtype` |
/// | D | `[nheads]` or `[nheads, headdim]` | f32 |
/// | initial_states, final_states | `[sequences, nheads, headdim, dstate]` | f32, bf16 or f16 |
/// | cu_seqlens | `[sequences + 1]` | i32 |
///
/// `sequences` is `batch` unless the call is packed ([`Problem::packed`]).
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Rows. 1 when packed. 0 is legal.
    pub batch: usize,
    /// Tokens per row; the total of all sequences (and a padded tail) when packed. 0 is legal.
    pub seqlen: usize,
    /// Heads; a multiple of `ngroups`.
    pub nheads: usize,
    /// Elements of x per head, 1..=256.
    pub headdim: usize,
    /// Groups that share B and C. Head `i` belongs to group `i / (nheads / ngroups)`.
    pub ngroups: usize,
    /// State size per headdim element, 1..=512.
    pub dstate: usize,
    /// dtype of x, B, C, z and out.
    pub dtype: Dtype,
    /// dtype of dt.
    pub dt_dtype: Dtype,
    /// Rank of D.
    pub d: DKind,
    /// True if the output is gated by `silu(z)`.
    pub z: bool,
    /// True if dt_bias is added to dt.
    pub dt_bias: bool,
    /// True if softplus (identity above 20) follows the bias.
    pub dt_softplus: bool,
    /// Clamp after softplus.
    pub dt_limit: DtLimit,
    /// dtype of initial_states, `None` if there are none (the state starts at zero).
    pub initial_states: Option<Dtype>,
    /// dtype of final_states, `None` if they are not wanted.
    pub final_states: Option<Dtype>,
    /// Number of packed sequences; `None` if the call has plain batch rows.
    pub packed: Option<usize>,
    /// Tokens per chunk.
    pub chunk_size: ChunkSize,
    /// Products of float32 inputs. Ignored for 16-bit inputs.
    pub precision: Precision,
    /// Alignment promised for x, B, C, z and out.
    pub alignment: Alignment,
}

impl Problem {
    /// A plain problem: bf16, D per head, f32 initial and final states, no other option.
    pub fn new(
        batch: usize,
        seqlen: usize,
        nheads: usize,
        headdim: usize,
        ngroups: usize,
        dstate: usize,
    ) -> Problem {
        Problem {
            batch,
            seqlen,
            nheads,
            headdim,
            ngroups,
            dstate,
            dtype: Dtype::Bf16,
            dt_dtype: Dtype::Bf16,
            d: DKind::PerHead,
            z: false,
            dt_bias: false,
            dt_softplus: false,
            dt_limit: DtLimit::NONE,
            initial_states: Some(Dtype::F32),
            final_states: Some(Dtype::F32),
            packed: None,
            chunk_size: ChunkSize::Tuned,
            precision: Precision::Float32,
            alignment: Alignment::Bytes16,
        }
    }

    /// The same problem with `dtype` for x, B, C, z, out and dt.
    pub fn with_dtype(mut self, dtype: Dtype) -> Problem {
        self.dtype = dtype;
        self.dt_dtype = dtype;
        self
    }

    /// Independent sequences: `packed`, or `batch`.
    pub fn sequences(&self) -> usize {
        self.packed.unwrap_or(self.batch)
    }

    /// Heads that share one B and C. Call after [`Problem::check`].
    pub fn heads_per_group(&self) -> usize {
        self.nheads / self.ngroups.max(1)
    }

    /// True if dt is clamped to anything but `(0, inf)`.
    pub fn has_dt_limit(&self) -> bool {
        self.dt_limit != DtLimit::NONE
    }

    /// Upper bound of chunks over all sequences for chunks of `chunk_size` tokens.
    ///
    /// The chunk grid starts anew at each sequence. Packed sequence `s` owns chunk slots from `cu_seqlens[s] / chunk_size + s`,
    /// which leaves at least `ceil(len / chunk_size)` slots for it, so kernels find their chunk from device-side offsets
    /// without a table.
    pub fn chunk_slots(&self, chunk_size: usize) -> usize {
        match self.packed {
            Some(sequences) if self.seqlen > 0 => self.seqlen / chunk_size + sequences,
            Some(_) => 0,
            None => self.batch * self.seqlen.div_ceil(chunk_size),
        }
    }

    /// Checks every size and option against the limits of the operator.
    ///
    /// # Errors
    /// [`SpecError::Size`] or [`SpecError::Option`], naming the size, its limit and what came.
    pub fn check(&self) -> Result<(), SpecError> {
        size("nheads", self.nheads, 1, 1 << 20)?;
        size("headdim", self.headdim, 1, 256)?;
        size("ngroups", self.ngroups, 1, self.nheads)?;
        size("dstate", self.dstate, 1, 512)?;
        size("batch", self.batch, 0, 1 << 30)?;
        size("seqlen", self.seqlen, 0, (1 << 31) - 4096)?;
        if !self.nheads.is_multiple_of(self.ngroups) {
            return Err(SpecError::Size {
                name: "nheads",
                expected: format!("a multiple of ngroups = {}", self.ngroups),
                got: self.nheads.to_string(),
            });
        }
        if let Some(sequences) = self.packed {
            size("batch of a packed call", self.batch, 1, 1)?;
            size("sequences", sequences, 0, 1 << 30)?;
        }
        if let ChunkSize::Fixed(n) = self.chunk_size {
            size("chunk_size", n as usize, 1, 4096)?;
        }
        self.dt_limit.check()
    }
}

pub(crate) fn size(
    name: &'static str,
    got: usize,
    min: usize,
    max: usize,
) -> Result<(), SpecError> {
    if (min..=max).contains(&got) {
        return Ok(());
    }
    Err(SpecError::Size {
        name,
        expected: format!("{min}..={max}"),
        got: got.to_string(),
    })
}

/// Splits `k=v,k=v` and hands each pair to `set`; used by every shape string.
pub(crate) fn for_each_pair(
    text: &str,
    mut set: impl FnMut(&str, &str) -> Result<(), SpecError>,
) -> Result<(), SpecError> {
    let mut seen = Vec::new();
    for item in text.split(',').map(str::trim).filter(|s| !s.is_empty()) {
        let (key, value) = item.split_once('=').ok_or_else(|| SpecError::Option {
            key: item.into(),
            expected: "key=value".into(),
            got: item.into(),
        })?;
        if seen.contains(&key) {
            return Err(SpecError::Option {
                key: key.into(),
                expected: "each key once".into(),
                got: text.into(),
            });
        }
        seen.push(key);
        set(key, value)?;
    }
    Ok(())
}

/// Parses one value of a `k=v` list.
pub(crate) fn parse_value<T: FromStr>(
    key: &str,
    value: &str,
    expected: &str,
) -> Result<T, SpecError> {
    value.parse().map_err(|_| SpecError::Option {
        key: key.into(),
        expected: expected.into(),
        got: value.into(),
    })
}

fn parse_optional_dtype(key: &str, value: &str) -> Result<Option<Dtype>, SpecError> {
    match value {
        "none" => Ok(None),
        other => parse_value(key, other, "none, bf16, f16 or f32").map(Some),
    }
}

fn parse_flag(key: &str, value: &str) -> Result<bool, SpecError> {
    match value {
        "0" | "false" => Ok(false),
        "1" | "true" => Ok(true),
        _ => Err(SpecError::Option {
            key: key.into(),
            expected: "0 or 1".into(),
            got: value.into(),
        }),
    }
}

/// What shape strings of forward passes and of decode steps have in common.
pub(crate) struct SharedOptions {
    /// x's, if it is not named.
    pub dt_dtype: Option<Dtype>,
    pub d: DKind,
    pub z: bool,
    pub dt_bias: bool,
    pub dt_softplus: bool,
    pub dt_limit: DtLimit,
}

impl Default for SharedOptions {
    fn default() -> Self {
        SharedOptions {
            dt_dtype: None,
            d: DKind::PerHead,
            z: false,
            dt_bias: false,
            dt_softplus: false,
            dt_limit: DtLimit::NONE,
        }
    }
}

impl SharedOptions {
    pub const KEYS: &str =
        "dt_dtype, d (none|h|hp), z (0|1), bias (0|1), softplus (0|1), limit (lo:hi)";

    /// Sets an option; false if `key` is none of these.
    pub fn set(&mut self, key: &str, value: &str) -> Result<bool, SpecError> {
        match key {
            "dt_dtype" => self.dt_dtype = Some(parse_value(key, value, "bf16, f16 or f32")?),
            "d" => {
                self.d = match value {
                    "none" => DKind::None,
                    "h" => DKind::PerHead,
                    "hp" => DKind::PerHeaddim,
                    _ => {
                        return Err(SpecError::Option {
                            key: key.into(),
                            expected: "none, h or hp".into(),
                            got: value.into(),
                        });
                    }
                }
            }
            "z" => self.z = parse_flag(key, value)?,
            "bias" => self.dt_bias = parse_flag(key, value)?,
            "softplus" => self.dt_softplus = parse_flag(key, value)?,
            "limit" => {
                let (lo, hi) = value.split_once(':').ok_or_else(|| SpecError::Option {
                    key: key.into(),
                    expected: "lo:hi".into(),
                    got: value.into(),
                })?;
                self.dt_limit = DtLimit {
                    min: parse_value(key, lo, "a number")?,
                    max: parse_value(key, hi, "a number or inf")?,
                };
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Writes what differs from the default, in the order of [`SharedOptions::KEYS`].
    pub fn write(&self, dtype: Dtype, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dt_dtype) = self.dt_dtype.filter(|dt_dtype| *dt_dtype != dtype) {
            write!(f, ",dt_dtype={dt_dtype}")?;
        }
        match self.d {
            DKind::None => f.write_str(",d=none")?,
            DKind::PerHead => {}
            DKind::PerHeaddim => f.write_str(",d=hp")?,
        }
        for (key, on) in [
            ("z", self.z),
            ("bias", self.dt_bias),
            ("softplus", self.dt_softplus),
        ] {
            if on {
                write!(f, ",{key}=1")?;
            }
        }
        if self.dt_limit != DtLimit::NONE {
            write!(f, ",limit={}:{}", self.dt_limit.min, self.dt_limit.max)?;
        }
        Ok(())
    }
}

const SHAPE_KEYS: &str = "b, l, h, p, g, n, dtype, dt_dtype, d (none|h|hp), z (0|1), bias (0|1), softplus (0|1), \
     limit (lo:hi), init (none|dtype), final (none|dtype), packed (sequences), q (chunk size), tf32 (0|1), align (16|1)";

/// Shape strings: `b=4,l=16384,h=8,p=64,g=1,n=128[,dtype=bf16][,z=1]...`. `b`, `l`, `h`, `p`, `g`, `n` are required.
impl FromStr for Problem {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Problem, SpecError> {
        let mut sizes = [None::<usize>; 6];
        let mut problem = Problem::new(0, 0, 1, 1, 1, 1);
        let mut options = SharedOptions::default();
        for_each_pair(text, |key, value| {
            if let Some(i) = ["b", "l", "h", "p", "g", "n"]
                .iter()
                .position(|k| *k == key)
            {
                sizes[i] = Some(parse_value(key, value, "a whole number")?);
                return Ok(());
            }
            if options.set(key, value)? {
                return Ok(());
            }
            match key {
                "dtype" => problem.dtype = value.parse()?,
                "init" => problem.initial_states = parse_optional_dtype(key, value)?,
                "final" => problem.final_states = parse_optional_dtype(key, value)?,
                "packed" => {
                    problem.packed = Some(parse_value(key, value, "a number of sequences")?)
                }
                "q" => {
                    problem.chunk_size =
                        ChunkSize::Fixed(parse_value(key, value, "a number of tokens")?)
                }
                "tf32" => {
                    problem.precision = if parse_flag(key, value)? {
                        Precision::Tf32
                    } else {
                        Precision::Float32
                    }
                }
                "align" => {
                    problem.alignment = match value {
                        "16" => Alignment::Bytes16,
                        "1" => Alignment::Element,
                        _ => {
                            return Err(SpecError::Option {
                                key: key.into(),
                                expected: "16 or 1".into(),
                                got: value.into(),
                            });
                        }
                    }
                }
                _ => {
                    return Err(SpecError::Option {
                        key: key.into(),
                        expected: format!("one of {SHAPE_KEYS}"),
                        got: text.into(),
                    });
                }
            }
            Ok(())
        })?;
        let need = |i: usize, name: &str| {
            sizes[i].ok_or_else(|| SpecError::Option {
                key: name.into(),
                expected: "b, l, h, p, g and n in the shape".into(),
                got: text.into(),
            })
        };
        problem.batch = need(0, "b")?;
        problem.seqlen = need(1, "l")?;
        problem.nheads = need(2, "h")?;
        problem.headdim = need(3, "p")?;
        problem.ngroups = need(4, "g")?;
        problem.dstate = need(5, "n")?;
        problem.dt_dtype = options.dt_dtype.unwrap_or(problem.dtype);
        (problem.d, problem.z, problem.dt_bias) = (options.d, options.z, options.dt_bias);
        (problem.dt_softplus, problem.dt_limit) = (options.dt_softplus, options.dt_limit);
        problem.check()?;
        Ok(problem)
    }
}

/// The canonical shape string: what differs from [`Problem::new`] is printed, in a fixed order; parsing it gives the problem back.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "b={},l={},h={},p={},g={},n={},dtype={}",
            self.batch,
            self.seqlen,
            self.nheads,
            self.headdim,
            self.ngroups,
            self.dstate,
            self.dtype
        )?;
        let optional = |d: Option<Dtype>| d.map_or("none", Dtype::name);
        SharedOptions {
            dt_dtype: Some(self.dt_dtype),
            d: self.d,
            z: self.z,
            dt_bias: self.dt_bias,
            dt_softplus: self.dt_softplus,
            dt_limit: self.dt_limit,
        }
        .write(self.dtype, f)?;
        if self.initial_states != Some(Dtype::F32) {
            write!(f, ",init={}", optional(self.initial_states))?;
        }
        if self.final_states != Some(Dtype::F32) {
            write!(f, ",final={}", optional(self.final_states))?;
        }
        if let Some(sequences) = self.packed {
            write!(f, ",packed={sequences}")?;
        }
        if let ChunkSize::Fixed(n) = self.chunk_size {
            write!(f, ",q={n}")?;
        }
        if self.precision == Precision::Tf32 {
            f.write_str(",tf32=1")?;
        }
        if self.alignment == Alignment::Element {
            f.write_str(",align=1")?;
        }
        Ok(())
    }
}
