use std::fmt;
use std::str::FromStr;

use crate::TunerError;

/// The share of a job that one process takes: shapes `I`, `I + N`, `I + 2N`, ... of the list. Written `I/N`, `I` from 0.
///
/// Neighbours in a list cost about the same, so taking every N-th balances better than taking blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// Everything.
    pub const ALL: Shard = Shard { index: 0, count: 1 };

    /// Share `index` of `count`; `key` names where the numbers are from.
    ///
    /// # Errors
    /// [`TunerError::Shard`] unless `index < count`.
    pub fn new(key: &str, index: usize, count: usize) -> Result<Shard, TunerError> {
        if index < count {
            return Ok(Shard { index, count });
        }
        Err(TunerError::Shard {
            key: key.into(),
            expected: "I/N with I from 0 and less than N",
            got: format!("{index}/{count}"),
        })
    }

    /// True if this share holds entry `i` of the list.
    pub fn takes(&self, i: usize) -> bool {
        i % self.count == self.index
    }
}

/// The share that a job scheduler assigns, read from the environment by [`mamba2_tunedb::Environment::shard`].
impl From<mamba2_tunedb::Shard> for Shard {
    fn from(shard: mamba2_tunedb::Shard) -> Shard {
        Shard {
            index: shard.index as usize,
            count: shard.count as usize,
        }
    }
}

impl FromStr for Shard {
    type Err = TunerError;

    fn from_str(text: &str) -> Result<Shard, TunerError> {
        let numbers = text
            .split_once('/')
            .and_then(|(i, n)| Some((i.trim().parse().ok()?, n.trim().parse().ok()?)));
        let (index, count) = numbers.ok_or_else(|| TunerError::Shard {
            key: "--shard".into(),
            expected: "I/N with I from 0 and less than N",
            got: text.into(),
        })?;
        Shard::new("--shard", index, count)
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
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
        assert_eq!("1/3".parse::<Shard>().unwrap().to_string(), "1/3");
    }
}
