//! The only place of this crate that reads environment variables: which share of a job a process takes.
//!
//! | set by | share | of how many |
//! |---|---|---|
//! | Slurm job array | `SLURM_ARRAY_TASK_ID` - `SLURM_ARRAY_TASK_MIN` | `SLURM_ARRAY_TASK_COUNT` |
//! | Kubernetes indexed job | `JOB_COMPLETION_INDEX` | `MAMBA2_SHARDS` (Kubernetes gives no count) |
//! | torchrun | `GROUP_RANK` (the node) | `GROUP_WORLD_SIZE`, else `WORLD_SIZE` / `LOCAL_WORLD_SIZE` |
//!
//! The first row whose share is set decides. A torchrun process takes the share of its node, and only local rank 0 works,
//! because one process drives all GPUs of a host.

use crate::TunerError;
use crate::shard::Shard;

/// The share named by the environment; `None` if no scheduler is at work.
///
/// # Errors
/// [`TunerError::Shard`] naming the variable that is missing or cannot be read.
pub fn shard_from_env() -> Result<Option<Shard>, TunerError> {
    shard_from(|name| std::env::var(name).ok())
}

fn shard_from(get: impl Fn(&str) -> Option<String>) -> Result<Option<Shard>, TunerError> {
    if get("SLURM_ARRAY_TASK_ID").is_some() {
        let first = if get("SLURM_ARRAY_TASK_MIN").is_some() {
            number(&get, "SLURM_ARRAY_TASK_MIN")?
        } else {
            0
        };
        let id = number(&get, "SLURM_ARRAY_TASK_ID")?;
        let index = id.checked_sub(first).ok_or_else(|| TunerError::Shard {
            key: "SLURM_ARRAY_TASK_ID".into(),
            expected: "at least SLURM_ARRAY_TASK_MIN",
            got: id.to_string(),
        })?;
        return Shard::new(
            "SLURM_ARRAY_TASK_ID",
            index,
            number(&get, "SLURM_ARRAY_TASK_COUNT")?,
        )
        .map(Some);
    }
    if get("JOB_COMPLETION_INDEX").is_some() {
        let index = number(&get, "JOB_COMPLETION_INDEX")?;
        return Shard::new(
            "JOB_COMPLETION_INDEX",
            index,
            number(&get, "MAMBA2_SHARDS")?,
        )
        .map(Some);
    }
    if get("GROUP_RANK").is_some() {
        let nodes = if get("GROUP_WORLD_SIZE").is_some() {
            number(&get, "GROUP_WORLD_SIZE")?
        } else {
            number(&get, "WORLD_SIZE")? / number(&get, "LOCAL_WORLD_SIZE")?.max(1)
        };
        let shard = Shard::new("GROUP_RANK", number(&get, "GROUP_RANK")?, nodes)?;
        let local_rank = if get("LOCAL_RANK").is_some() {
            number(&get, "LOCAL_RANK")?
        } else {
            0
        };
        return Ok(Some(if local_rank == 0 {
            shard
        } else {
            Shard::NOTHING
        }));
    }
    Ok(None)
}

fn number(get: impl Fn(&str) -> Option<String>, name: &str) -> Result<usize, TunerError> {
    let text = get(name).unwrap_or_default();
    text.trim().parse().map_err(|_| TunerError::Shard {
        key: name.into(),
        expected: "a whole number",
        got: text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(variables: &[(&str, &str)]) -> Result<Option<Shard>, TunerError> {
        shard_from(|name| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_string())
        })
    }

    #[test]
    fn no_scheduler_means_no_shard() {
        assert_eq!(shard(&[("RANK", "3")]).unwrap(), None);
    }

    #[test]
    fn each_scheduler_names_the_share() {
        let slurm = [
            ("SLURM_ARRAY_TASK_ID", "5"),
            ("SLURM_ARRAY_TASK_MIN", "1"),
            ("SLURM_ARRAY_TASK_COUNT", "8"),
        ];
        assert_eq!(shard(&slurm).unwrap(), Some("4/8".parse().unwrap()));
        let kubernetes = [("JOB_COMPLETION_INDEX", "0"), ("MAMBA2_SHARDS", "3")];
        assert_eq!(shard(&kubernetes).unwrap(), Some("0/3".parse().unwrap()));
        let torchrun = [
            ("GROUP_RANK", "1"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("LOCAL_RANK", "0"),
        ];
        assert_eq!(shard(&torchrun).unwrap(), Some("1/2".parse().unwrap()));
    }

    #[test]
    fn only_one_process_of_a_torchrun_host_works() {
        let rank = [
            ("GROUP_RANK", "1"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("LOCAL_RANK", "3"),
        ];
        let shard = shard(&rank).unwrap().unwrap();
        assert!((0..100).all(|i| !shard.takes(i)));
    }

    #[test]
    fn what_is_missing_or_unreadable_is_named() {
        let missing = shard(&[("JOB_COMPLETION_INDEX", "0")])
            .unwrap_err()
            .to_string();
        assert!(missing.contains("MAMBA2_SHARDS"), "{missing}");
        let wrong = shard(&[
            ("SLURM_ARRAY_TASK_ID", "x"),
            ("SLURM_ARRAY_TASK_COUNT", "2"),
        ])
        .unwrap_err()
        .to_string();
        assert!(
            wrong.contains("SLURM_ARRAY_TASK_ID") && wrong.contains("\"x\""),
            "{wrong}"
        );
        let beyond = shard(&[
            ("SLURM_ARRAY_TASK_ID", "7"),
            ("SLURM_ARRAY_TASK_COUNT", "2"),
        ])
        .unwrap_err()
        .to_string();
        assert!(beyond.contains("less than"), "{beyond}");
    }
}
