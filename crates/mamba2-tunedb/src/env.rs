//! The one place where environment variables are read. Other code takes an [`Environment`], so tests never touch the
//! process's own.
//!
//! | variable | meaning |
//! |---|---|
//! | `MAMBA2_CACHE_DIR` | the cache directory; wins over all others |
//! | `XDG_CACHE_HOME` | if absolute, the cache is `$XDG_CACHE_HOME/mamba2` |
//! | `HOME` | else the cache is `$HOME/.cache/mamba2` |
//! | `MAMBA2_MODE` | `replay`, `tune` or `default-only`: how the library answers look-ups |
//! | `SLURM_ARRAY_TASK_ID`, `_MIN`, `_COUNT` | shard of an offline tuning job: Slurm job array |
//! | `JOB_COMPLETION_INDEX`, `JOB_COMPLETIONS` | the same: Kubernetes indexed job |
//! | `RANK`, `WORLD_SIZE` | the same: torchrun |

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use crate::error::{Result, TuneDbError};
use crate::mode::Mode;
use crate::shard::Shard;

const NAMES: [&str; 11] = [
    "MAMBA2_CACHE_DIR",
    "XDG_CACHE_HOME",
    "HOME",
    "MAMBA2_MODE",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_COUNT",
    "JOB_COMPLETION_INDEX",
    "JOB_COMPLETIONS",
    "RANK",
    "WORLD_SIZE",
];

/// The environment variables this project knows, as they were at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    values: BTreeMap<&'static str, OsString>,
}

impl Environment {
    /// The variables of this process.
    pub fn from_process() -> Environment {
        let get = |name: &'static str| std::env::var_os(name).map(|value| (name, value));
        Environment {
            values: NAMES.into_iter().filter_map(get).collect(),
        }
    }

    /// An environment made of the given pairs; names this project does not know are left out.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Environment {
        let mut values = BTreeMap::new();
        for (name, value) in pairs {
            if let Some(known) = NAMES.into_iter().find(|n| *n == name) {
                values.insert(known, OsString::from(value));
            }
        }
        Environment { values }
    }

    /// A variable that is set and not empty.
    fn get(&self, name: &str) -> Option<&OsStr> {
        self.values
            .get(name)
            .map(OsString::as_os_str)
            .filter(|v| !v.is_empty())
    }

    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name).map(PathBuf::from)
    }

    /// `MAMBA2_MODE`, `None` if unset.
    ///
    /// # Errors
    /// [`TuneDbError::Environment`] if it holds anything but `replay`, `tune` or `default-only`.
    pub fn mode(&self) -> Result<Option<Mode>> {
        let Some(value) = self.get("MAMBA2_MODE") else {
            return Ok(None);
        };
        match value.to_str() {
            Some("replay") => Ok(Some(Mode::Replay)),
            Some("tune") => Ok(Some(Mode::Tune)),
            Some("default-only") => Ok(Some(Mode::DefaultOnly)),
            _ => Err(TuneDbError::Environment {
                name: "MAMBA2_MODE",
                expected: "replay, tune or default-only",
                got: value.to_string_lossy().into_owned(),
            }),
        }
    }

    /// The shard that the job scheduler assigns, in the order Slurm, Kubernetes, torchrun; `None` outside such jobs.
    ///
    /// # Errors
    /// [`TuneDbError::Environment`] if a variable is no number, a count is missing or 0, or the index is beyond it.
    pub fn shard(&self) -> Result<Option<Shard>> {
        if let Some(id) = self.number("SLURM_ARRAY_TASK_ID")? {
            let first = self.number("SLURM_ARRAY_TASK_MIN")?.unwrap_or(0);
            return self.make_shard(
                "SLURM_ARRAY_TASK_ID",
                id.checked_sub(first),
                "SLURM_ARRAY_TASK_COUNT",
                "Slurm array",
            );
        }
        if let Some(index) = self.number("JOB_COMPLETION_INDEX")? {
            return self.make_shard(
                "JOB_COMPLETION_INDEX",
                Some(index),
                "JOB_COMPLETIONS",
                "Kubernetes indexed job",
            );
        }
        if let Some(rank) = self.number("RANK")? {
            return self.make_shard("RANK", Some(rank), "WORLD_SIZE", "torchrun");
        }
        Ok(None)
    }

    fn make_shard(
        &self,
        name: &'static str,
        index: Option<usize>,
        count_name: &'static str,
        source: &'static str,
    ) -> Result<Option<Shard>> {
        let count = self.number(count_name)?.filter(|n| *n > 0).ok_or_else(|| {
            TuneDbError::Environment {
                name: count_name,
                expected: "the number of tasks, at least 1, beside the task's index",
                got: self
                    .get(count_name)
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
            }
        })?;
        index
            .and_then(|i| Shard::new(source, i, count))
            .map(Some)
            .ok_or_else(|| TuneDbError::Environment {
                name,
                expected: "an index within the number of tasks",
                got: self
                    .get(name)
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
            })
    }

    fn number(&self, name: &'static str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let parsed = value.to_str().and_then(|text| text.parse().ok());
        parsed.map(Some).ok_or_else(|| TuneDbError::Environment {
            name,
            expected: "a whole number",
            got: value.to_string_lossy().into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheduler_names_its_shard() {
        let shard = |pairs: &[(&str, &str)]| Environment::from_pairs(pairs.iter().copied()).shard();
        let slurm = [
            ("SLURM_ARRAY_TASK_ID", "3"),
            ("SLURM_ARRAY_TASK_MIN", "1"),
            ("SLURM_ARRAY_TASK_COUNT", "4"),
        ];
        let said = |pairs| {
            let shard: Shard = shard(pairs).unwrap().unwrap();
            (shard.to_string(), shard.source())
        };
        assert_eq!(said(&slurm), ("2/4".into(), "Slurm array"));
        let kubernetes = [("JOB_COMPLETION_INDEX", "0"), ("JOB_COMPLETIONS", "2")];
        assert_eq!(said(&kubernetes), ("0/2".into(), "Kubernetes indexed job"));
        let torchrun = [("RANK", "7"), ("WORLD_SIZE", "8")];
        assert_eq!(said(&torchrun), ("7/8".into(), "torchrun"));
        assert_eq!(shard(&[]).unwrap(), None);
    }

    #[test]
    fn a_shard_without_its_count_or_out_of_range_is_refused() {
        for pairs in [
            vec![("RANK", "0")],
            vec![("RANK", "8"), ("WORLD_SIZE", "8")],
            vec![("RANK", "one"), ("WORLD_SIZE", "8")],
            vec![("RANK", "0"), ("WORLD_SIZE", "0")],
            vec![
                ("SLURM_ARRAY_TASK_ID", "0"),
                ("SLURM_ARRAY_TASK_MIN", "1"),
                ("SLURM_ARRAY_TASK_COUNT", "4"),
            ],
        ] {
            assert!(
                Environment::from_pairs(pairs.clone()).shard().is_err(),
                "{pairs:?}"
            );
        }
    }

    #[test]
    fn the_mode_is_parsed_strictly() {
        let mode = |text| Environment::from_pairs([("MAMBA2_MODE", text)]).mode();
        assert_eq!(mode("default-only").unwrap(), Some(Mode::DefaultOnly));
        assert_eq!(mode("").unwrap(), None);
        assert!(mode("Replay").is_err());
    }
}
