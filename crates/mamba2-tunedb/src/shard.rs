use std::fmt;
use std::str::FromStr;

use crate::error::{Result, TuneDbError};

/// The share of a list that one process takes: entries `I`, `I + N`, `I + 2N`, ... Written `I/N`, `I` from 0.
///
/// Neighbours in a list cost about the same, so taking every N-th balances better than taking blocks.
///
/// ```
/// use mamba2_tunedb::Shard;
/// let shard: Shard = "1/3".parse().unwrap();
/// assert!(shard.takes(4) && !shard.takes(5));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
    source: &'static str,
}

impl Shard {
    /// Everything.
    pub const ALL: Shard = Shard {
        index: 0,
        count: 1,
        source: "the whole list",
    };

    /// Share `index` of `count`; `None` unless `index < count`. `source` says who chose it, for messages.
    pub fn new(source: &'static str, index: usize, count: usize) -> Option<Shard> {
        (index < count).then_some(Shard {
            index,
            count,
            source,
        })
    }

    /// Who chose it, as in `Slurm array`.
    pub fn source(&self) -> &'static str {
        self.source
    }

    /// True if this share holds entry `i` of the list.
    pub fn takes(&self, i: usize) -> bool {
        i % self.count == self.index
    }
}

impl FromStr for Shard {
    type Err = TuneDbError;

    fn from_str(text: &str) -> Result<Shard> {
        text.split_once('/')
            .and_then(|(i, n)| {
                Shard::new("--shard", i.trim().parse().ok()?, n.trim().parse().ok()?)
            })
            .ok_or_else(|| TuneDbError::Shard(text.into()))
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_take_every_entry_once() {
        for count in 1..6 {
            let shards: Vec<Shard> = (0..count)
                .map(|i| Shard::new("test", i, count).unwrap())
                .collect();
            for entry in 0..50 {
                assert_eq!(shards.iter().filter(|s| s.takes(entry)).count(), 1);
            }
        }
    }

    #[test]
    fn a_malformed_shard_is_refused() {
        for text in ["", "1", "2/2", "0/0", "-1/2", "a/b", "1/2/3"] {
            let error = text.parse::<Shard>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
        assert_eq!("1/3".parse::<Shard>().unwrap().to_string(), "1/3");
    }
}
