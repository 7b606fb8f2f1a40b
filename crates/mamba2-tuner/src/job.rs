//! Tuning a list of shapes on all GPUs of a host.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use mamba2_tunedb::Shard;

use crate::report::{FailedShape, JobReport};
use crate::{Executor, Policy, Progress, Sink, Target, TunerError, tune_target};

/// Tunes the shapes of this shard, one at a time on each executor. A shape that cannot be tuned is reported and costs only
/// itself; an executor that is lost leaves the rest to the others.
///
/// # Errors
/// [`TunerError::Store`] as soon as results cannot be kept; [`TunerError::Device`] if every executor is lost before the
/// list is done.
pub fn run_job(
    targets: &[Target],
    shard: Shard,
    executors: &[&dyn Executor],
    sink: &dyn Sink,
    progress: &dyn Progress,
    policy: &Policy,
) -> Result<JobReport, TunerError> {
    let started = Instant::now();
    let tune = |target: &Target, executor: &dyn Executor| {
        tune_target(target, executor, sink, progress, policy)
    };
    let done = share(targets, shard, executors, progress, tune)?;
    Ok(JobReport {
        shapes: done.results,
        failed: done.failed,
        other_shards: done.other_shards,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// What came of a shared list, in the order of the list.
pub(crate) struct Shared<T> {
    pub results: Vec<T>,
    pub failed: Vec<FailedShape>,
    pub other_shards: usize,
}

/// Does `work` for the shapes of a shard, each executor taking the next shape when it is free.
pub(crate) fn share<T: Send>(
    targets: &[Target],
    shard: Shard,
    executors: &[&dyn Executor],
    progress: &dyn Progress,
    work: impl Fn(&Target, &dyn Executor) -> Result<T, TunerError> + Sync,
) -> Result<Shared<T>, TunerError> {
    let mine: Vec<&Target> = targets
        .iter()
        .enumerate()
        .filter(|(i, _)| shard.takes(*i))
        .map(|(_, t)| t)
        .collect();
    let queue = Queue {
        left: Mutex::new((0..mine.len()).rev().collect()),
        done: Mutex::default(),
        fatal: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for executor in executors {
            scope.spawn(|| queue.take_shapes(&mine, *executor, progress, &work));
        }
    });
    let left = unlocked(queue.left).len();
    if let Some(error) = unlocked(queue.fatal)
        && (matches!(error, TunerError::Store(_)) || left > 0)
    {
        return Err(error);
    }
    let mut done = unlocked(queue.done);
    done.sort_by_key(|(i, _)| *i);
    let mut shared = Shared {
        results: Vec::new(),
        failed: Vec::new(),
        other_shards: targets.len() - mine.len(),
    };
    for (i, result) in done {
        match result {
            Ok(result) => shared.results.push(result),
            Err(error) => shared.failed.push(FailedShape {
                shape: mine[i].to_string(),
                reason: error.to_string(),
            }),
        }
    }
    Ok(shared)
}

const NO_PANIC: &str = "no holder of this lock should panic";

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect(NO_PANIC)
}

fn unlocked<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().expect(NO_PANIC)
}

/// What the executors of a job share.
struct Queue<T> {
    /// Shapes that nobody has taken; the next one is the last.
    left: Mutex<Vec<usize>>,
    done: Mutex<Vec<(usize, Result<T, TunerError>)>>,
    fatal: Mutex<Option<TunerError>>,
}

impl<T> Queue<T> {
    fn take_shapes(
        &self,
        mine: &[&Target],
        executor: &dyn Executor,
        progress: &dyn Progress,
        work: impl Fn(&Target, &dyn Executor) -> Result<T, TunerError>,
    ) {
        loop {
            let next = lock(&self.left).pop();
            let Some(i) = next else { return };
            match work(mine[i], executor) {
                Err(error @ TunerError::Store(_)) => {
                    lock(&self.left).clear();
                    *lock(&self.fatal) = Some(error);
                    return;
                }
                Err(error @ TunerError::Device(_)) => {
                    progress.warn(&format!("{}: {error}", mine[i]));
                    lock(&self.left).push(i);
                    lock(&self.fatal).get_or_insert(error);
                    return;
                }
                result => lock(&self.done).push((i, result)),
            }
        }
    }
}
