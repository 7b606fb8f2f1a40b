//! THE table of tuning parameters. One row is one parameter: name, documentation, unit, default, domain, CUDA constant.
//!
//! The structs, the search space, the rendered CUDA constants, (de)serialisation and the documentation all come from the
//! rows below. To add a parameter, add a row here and use its constant in the kernel's template.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Kernel, SpecError};

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    /// Name in configs, records and on the command line.
    pub name: &'static str,
    /// What it does.
    pub doc: &'static str,
    /// Unit of the value.
    pub unit: &'static str,
    /// Value of the untuned config.
    pub default: u32,
    /// Legal values, in the fixed order that breaks ties.
    pub domain: &'static [u32],
    /// Names of the values of `domain`, for parameters that are not numbers.
    pub value_names: &'static [&'static str],
    /// Constant in the generated CUDA header; `None` for a launch argument, all values of which share one compiled kernel.
    pub cuda: Option<&'static str>,
}

/// What the table writes for a parameter that is a launch argument.
const fn header_constant(name: &'static str) -> Option<&'static str> {
    match name.as_bytes() {
        b"AT_LAUNCH" => None,
        _ => Some(name),
    }
}

impl Row {
    /// The value as people write it: its name if it has one, else the number.
    pub fn display(&self, value: u32) -> String {
        match self.domain.iter().position(|v| *v == value) {
            Some(i) if i < self.value_names.len() => self.value_names[i].to_string(),
            _ => value.to_string(),
        }
    }

    /// Reads a value by name or number and checks the domain.
    ///
    /// # Errors
    /// [`SpecError::Option`] naming the row and its domain.
    pub fn parse(&self, text: &str) -> Result<u32, SpecError> {
        let named = self
            .value_names
            .iter()
            .position(|n| *n == text)
            .map(|i| self.domain[i]);
        named
            .or_else(|| text.parse().ok().filter(|v| self.domain.contains(v)))
            .ok_or_else(|| SpecError::Option {
                key: self.name.into(),
                expected: if self.value_names.is_empty() {
                    format!("one of {:?}", self.domain)
                } else {
                    format!("one of {:?}", self.value_names)
                },
                got: text.into(),
            })
    }
}

/// A struct made from rows of the table.
pub trait Parameters: Default + Clone + PartialEq + Eq + std::hash::Hash + fmt::Debug {
    /// The kernel these parameters belong to.
    const KERNEL: Kernel;
    /// The rows, in order.
    const ROWS: &'static [Row];
    /// Value of row `i`.
    fn value(&self, row: usize) -> u32;
    /// Sets row `i`, without checking the domain.
    fn set_value(&mut self, row: usize, value: u32);

    /// Every combination of the domains, the first row varying slowest. Legality is for [`crate::rules`].
    fn space() -> Vec<Self> {
        let mut all = vec![Self::default()];
        for (i, row) in Self::ROWS.iter().enumerate() {
            all = all
                .iter()
                .flat_map(|config| {
                    row.domain.iter().map(move |v| {
                        let mut next = config.clone();
                        next.set_value(i, *v);
                        next
                    })
                })
                .collect();
        }
        all
    }

    /// `(CUDA constant, value)` of every row that is one.
    fn constants(&self) -> Vec<(&'static str, u32)> {
        Self::ROWS
            .iter()
            .enumerate()
            .filter_map(|(i, row)| Some((row.cuda?, self.value(i))))
            .collect()
    }

    /// `name=value,...` in row order.
    fn to_text(&self) -> String {
        let pairs: Vec<String> = Self::ROWS
            .iter()
            .enumerate()
            .map(|(i, r)| format!("{}={}", r.name, r.display(self.value(i))))
            .collect();
        pairs.join(",")
    }

    /// Sets one parameter by name.
    ///
    /// # Errors
    /// [`SpecError::Option`] for an unknown name or a value outside the domain.
    fn set(&mut self, name: &str, value: &str) -> Result<(), SpecError> {
        let i = Self::ROWS
            .iter()
            .position(|r| r.name == name)
            .ok_or_else(|| SpecError::Option {
                key: name.into(),
                expected: format!(
                    "a parameter of {}: {:?}",
                    Self::KERNEL,
                    Self::ROWS.iter().map(|r| r.name).collect::<Vec<_>>()
                ),
                got: name.into(),
            })?;
        self.set_value(i, Self::ROWS[i].parse(value)?);
        Ok(())
    }

    /// Reads `name=value,...` on top of the defaults.
    ///
    /// # Errors
    /// As [`Parameters::set`].
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let mut config = Self::default();
        crate::problem::for_each_pair(text, |name, value| config.set(name, value))?;
        Ok(config)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawValue {
    Number(u32),
    Name(String),
}

fn deserialize_rows<'de, D: Deserializer<'de>, P: Parameters>(
    deserializer: D,
) -> Result<P, D::Error> {
    let raw = std::collections::BTreeMap::<String, RawValue>::deserialize(deserializer)?;
    let mut config = P::default();
    for (name, value) in raw {
        let text = match value {
            RawValue::Number(n) => n.to_string(),
            RawValue::Name(s) => s,
        };
        config.set(&name, &text).map_err(serde::de::Error::custom)?;
    }
    Ok(config)
}

fn serialize_rows<S: Serializer, P: Parameters>(
    config: &P,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    use serde::ser::SerializeMap;
    let mut map = serializer.serialize_map(Some(P::ROWS.len()))?;
    let mut order: Vec<usize> = (0..P::ROWS.len()).collect();
    order.sort_by_key(|i| P::ROWS[*i].name);
    for i in order {
        let (row, value) = (&P::ROWS[i], config.value(i));
        if row.value_names.is_empty() {
            map.serialize_entry(row.name, &value)?;
        } else {
            map.serialize_entry(row.name, &row.display(value))?;
        }
    }
    map.end()
}

macro_rules! parameter_table {
    ($(
        $(#[doc = $struct_doc:literal])+
        $name:ident for $kernel:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $cuda:ident = $default:literal in [$($value:literal),+] unit $unit:literal
                    $(names [$($value_name:literal),+])?;
            )+
        }
    )+) => {$(
        $(#[doc = $struct_doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            $( $(#[doc = $doc])+ #[doc = concat!("\nUnit: ", $unit, ".")] pub $field: u32, )+
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default),+ }
            }
        }

        impl Parameters for $name {
            const KERNEL: Kernel = Kernel::$kernel;
            const ROWS: &'static [Row] = &[$(Row {
                name: stringify!($field),
                doc: concat!($($doc),+),
                unit: $unit,
                default: $default,
                domain: &[$($value),+],
                value_names: &[$($($value_name),+)?],
                cuda: header_constant(stringify!($cuda)),
            }),+];

            fn value(&self, row: usize) -> u32 {
                [$(self.$field),+][row]
            }

            fn set_value(&mut self, row: usize, value: u32) {
                let fields: &mut [&mut u32] = &mut [$(&mut self.$field),+];
                *fields[row] = value;
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serialize_rows(self, serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserialize_rows(deserializer)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.to_text())
            }
        }
    )+};
}

parameter_table! {
    /// Parameters of `chunk_cumsum`: dt after bias, softplus and limit, and its running sum G per chunk.
    ChunkCumsum for ChunkCumsum {
        /// Tokens per chunk.
        chunk_size: CHUNK_SIZE = 128 in [64, 128, 256] unit "tokens";
        /// Order of the axes of dt_out and da_cumsum: bht = [chunk, head, token], bth = [chunk, token, head].
        layout: LAYOUT = 0 in [0, 1] unit "enum" names ["bht", "bth"];
        /// Heads per block.
        block_h: BLOCK_H = 4 in [1, 2, 4, 8] unit "heads";
    }

    /// Parameters of `fwd_pass_state`: the state at each chunk start and the final state, serial over chunks.
    FwdPassState for FwdPassState {
        /// Tokens per chunk.
        chunk_size: CHUNK_SIZE = 128 in [64, 128, 256] unit "tokens";
        /// Order of the axes of dt_out and da_cumsum: bht = [chunk, head, token], bth = [chunk, token, head].
        layout: LAYOUT = 0 in [0, 1] unit "enum" names ["bht", "bth"];
        /// headdim elements per block.
        block_head: BLOCK_HEAD = 64 in [32, 64, 128] unit "elements of headdim";
        /// dstate elements per block.
        block_state: BLOCK_STATE = 32 in [32, 64, 128] unit "elements of dstate";
        /// 0: h[p, n] = (w x)^T B, x is scaled in registers. 1: h^T[n, p] = (w B)^T x, B is scaled in registers.
        swap_ab: SWAP_AB = 0 in [0, 1] unit "flag";
        /// Token tiles in flight.
        stages: STAGES = 4 in [2, 3, 4] unit "tiles";
        /// Warps per block.
        warps: WARPS = 4 in [4, 8] unit "warps";
    }

    /// Parameters of `compute_out`: Y of one chunk; C B^T stays in registers.
    ComputeOut for ComputeOut {
        /// Tokens per chunk.
        chunk_size: CHUNK_SIZE = 128 in [64, 128, 256] unit "tokens";
        /// Order of the axes of dt_out and da_cumsum: bht = [chunk, head, token], bth = [chunk, token, head].
        layout: LAYOUT = 0 in [0, 1] unit "enum" names ["bht", "bth"];
        /// Heads of one group that share one C B^T tile.
        block_h: BLOCK_H = 1 in [1, 2] unit "heads";
        /// headdim elements per block.
        block_head: BLOCK_HEAD = 64 in [32, 64, 128] unit "elements of headdim";
        /// dstate elements per shared-memory tile.
        block_state: BLOCK_STATE = 64 in [32, 64, 128] unit "elements of dstate";
        /// 0: Y[l, p] = S x. 1: Y^T[p, l] = x^T S^T; S is the register operand on the other side.
        swap_ab: SWAP_AB = 0 in [0, 1] unit "flag";
        /// 1: as many blocks as fit the GPU, each looping over work; 0: one block a tile.
        persistent: PERSISTENT = 0 in [0, 1] unit "flag";
        /// Blocks per multiprocessor that the compiler makes room for.
        occupancy: OCCUPANCY = 2 in [1, 2] unit "blocks";
        /// Shared-memory tiles in flight.
        stages: STAGES = 3 in [2, 3] unit "tiles";
        /// Warps per block; each owns 16 rows of the chunk. 2 only where the C rows of 4 do not fit shared memory.
        warps: WARPS = 4 in [2, 4, 8] unit "warps";
    }

    /// Parameters of `sm90_segment_state`: the state each segment adds, from a zero start.
    Sm90SegmentState for Sm90SegmentState {
        /// Tokens of a sequence that one block takes; 0: the whole sequence, and this kernel is not launched.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
        /// Heads per consumer warpgroup.
        heads: HEADS = 1 in [1, 2] unit "heads";
        /// Consumer warpgroups per block.
        warpgroups: WARPGROUPS = 2 in [1, 2] unit "warpgroups";
        /// 64-token chunks in flight.
        stages: STAGES = 4 in [2, 3, 4] unit "chunks";
    }

    /// Parameters of `segment_scan`: the state at each segment's start.
    SegmentScan for SegmentScan {
        /// Tokens per segment.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
    }

    /// Parameters of `sm90_fused_forward`: Y and the final state, states in registers from chunk to chunk.
    Sm90FusedForward for Sm90FusedForward {
        /// Tokens of a sequence that one block takes; 0: the whole sequence.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
        /// Heads per consumer warpgroup.
        heads: HEADS = 1 in [1, 2] unit "heads";
        /// Consumer warpgroups per block; they share the B and C tiles and one C B^T. With a dstate above 128 two share a head.
        warpgroups: WARPGROUPS = 2 in [1, 2] unit "warpgroups";
        /// 64-token chunks in flight.
        stages: STAGES = 3 in [2, 3, 4] unit "chunks";
    }

    /// Parameters of `sm90_swap_segment_state`: as sm90_segment_state, with the state as h^T[n, p].
    Sm90SwapSegmentState for Sm90SwapSegmentState {
        /// Tokens of a sequence that one block takes; 0: the whole sequence, and this kernel is not launched.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
        /// headdim elements per consumer warpgroup.
        block_head: BLOCK_HEAD = 64 in [32, 48, 64, 80, 96] unit "elements of headdim";
        /// Consumer warpgroups per block; they share the B tiles.
        warpgroups: WARPGROUPS = 2 in [1, 2, 3] unit "warpgroups";
        /// 64-token chunks in flight.
        stages: STAGES = 3 in [1, 2, 3, 4] unit "chunks";
    }

    /// Parameters of `sm90_swap_fused_forward`: as sm90_fused_forward, with the state as h^T[n, p].
    Sm90SwapFusedForward for Sm90SwapFusedForward {
        /// Tokens of a sequence that one block takes; 0: the whole sequence.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
        /// headdim elements per consumer warpgroup.
        block_head: BLOCK_HEAD = 64 in [32, 48, 64, 80, 96] unit "elements of headdim";
        /// Consumer warpgroups per block; they share the B and C tiles. Two that share a head also share S.
        warpgroups: WARPGROUPS = 2 in [1, 2, 3] unit "warpgroups";
        /// 64-token chunks in flight.
        stages: STAGES = 2 in [1, 2, 3] unit "chunks";
    }

    /// Parameters of `sm90_split_segment_state`: as sm90_segment_state, for 64 elements of headdim and 256 of dstate at a time.
    Sm90SplitSegmentState for Sm90SplitSegmentState {
        /// Tokens of a sequence that one block takes; 0: the whole sequence, and this kernel is not launched.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
        /// Consumer warpgroups per block, of 64 elements of a head each; they share the B tiles.
        warpgroups: WARPGROUPS = 2 in [1, 2] unit "warpgroups";
        /// 64-token chunks in flight.
        stages: STAGES = 4 in [2, 3, 4] unit "chunks";
    }

    /// Parameters of `sm90_split_fused_forward`: as sm90_fused_forward, for 64 elements of headdim and 256 of dstate at a time.
    Sm90SplitFusedForward for Sm90SplitFusedForward {
        /// Tokens of a sequence that one block takes; 0: the whole sequence.
        segment: AT_LAUNCH = 1024 in [0, 128, 192, 256, 384, 512, 704, 1024, 1408, 1536, 2048, 3072, 4096, 8192] unit "tokens";
        /// Consumer warpgroups per block, of 64 elements of a head each; they share the B and C tiles and one C B^T.
        warpgroups: WARPGROUPS = 2 in [1, 2] unit "warpgroups";
        /// 64-token chunks in flight.
        stages: STAGES = 2 in [2, 3, 4] unit "chunks";
    }

    /// Parameters of `sm90_chain_forward`: the whole forward pass in one launch, a chain of blocks a sequence.
    Sm90ChainForward for Sm90ChainForward {
        /// Segments that a sequence is split into, a block each.
        segments: AT_LAUNCH = 4 in [2, 3, 4] unit "blocks";
        /// Consumer warpgroups per block; they share the B and C tiles. With a dstate above 128, or halves, two share a head.
        warpgroups: WARPGROUPS = 2 in [1, 2] unit "warpgroups";
        /// 64-token chunks in flight; with halves, those of a whole segment.
        stages: STAGES = 2 in [2, 3, 4] unit "chunks";
        /// 2: a segment stays in shared memory, and two consumers take half of its tokens each. 1: it goes through a ring of stages, twice.
        halves: HALVES = 1 in [1, 2] unit "halves";
    }

    /// Parameters of `state_update`: one decode step on a paged state cache.
    StateUpdate for StateUpdate {
        /// headdim rows of the state per block.
        block_head: BLOCK_HEAD = 16 in [4, 8, 16, 32, 64] unit "elements of headdim";
        /// Threads that share one row of the state.
        row_threads: ROW_THREADS = 8 in [4, 8, 16, 32] unit "threads";
        /// Warps per block.
        warps: WARPS = 4 in [1, 2, 4, 8] unit "warps";
    }
}
