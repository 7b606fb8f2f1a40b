//! Tuning a list of shapes on all GPUs of a host.

use std::sync::Mutex;
use std::time::Instant;

use crate::report::{FailedShape, JobReport, TuneReport};
use crate::shard::Shard;
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
    let mine: Vec<&Target> = targets
        .iter()
        .enumerate()
        .filter(|(i, _)| shard.takes(*i))
        .map(|(_, t)| t)
        .collect();
    let other_shards = targets.len() - mine.len();
    let work = Work {
        queue: Mutex::new((0..mine.len()).rev().collect()),
        done: Mutex::default(),
        fatal: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for executor in executors {
            scope.spawn(|| work.take_shapes(&mine, *executor, sink, progress, policy));
        }
    });
    let left = work
        .queue
        .into_inner()
        .expect("no holder of this lock should panic")
        .len();
    if let Some(error) = work
        .fatal
        .into_inner()
        .expect("no holder of this lock should panic")
        && (matches!(error, TunerError::Store(_)) || left > 0)
    {
        return Err(error);
    }
    let mut done = work
        .done
        .into_inner()
        .expect("no holder of this lock should panic");
    done.sort_by_key(|(i, _)| *i);
    let mut job = JobReport {
        other_shards,
        ..JobReport::default()
    };
    for (i, result) in done {
        match result {
            Ok(report) => job.shapes.push(report),
            Err(error) => job.failed.push(FailedShape {
                shape: mine[i].to_string(),
                reason: error.to_string(),
            }),
        }
    }
    job.seconds = started.elapsed().as_secs_f64();
    Ok(job)
}

/// What the executors of a job share.
struct Work {
    /// Shapes that nobody has taken; the next one is the last.
    queue: Mutex<Vec<usize>>,
    done: Mutex<Vec<(usize, Result<TuneReport, TunerError>)>>,
    fatal: Mutex<Option<TunerError>>,
}

impl Work {
    fn take_shapes(
        &self,
        mine: &[&Target],
        executor: &dyn Executor,
        sink: &dyn Sink,
        progress: &dyn Progress,
        policy: &Policy,
    ) {
        loop {
            let next = self
                .queue
                .lock()
                .expect("no holder of this lock should panic")
                .pop();
            let Some(i) = next else { return };
            match tune_target(mine[i], executor, sink, progress, policy) {
                Err(error @ TunerError::Store(_)) => {
                    self.queue
                        .lock()
                        .expect("no holder of this lock should panic")
                        .clear();
                    *self
                        .fatal
                        .lock()
                        .expect("no holder of this lock should panic") = Some(error);
                    return;
                }
                Err(error @ TunerError::Device(_)) => {
                    progress.warn(&format!("{}: {error}", mine[i]));
                    self.queue
                        .lock()
                        .expect("no holder of this lock should panic")
                        .push(i);
                    self.fatal
                        .lock()
                        .expect("no holder of this lock should panic")
                        .get_or_insert(error);
                    return;
                }
                result => self
                    .done
                    .lock()
                    .expect("no holder of this lock should panic")
                    .push((i, result)),
            }
        }
    }
}
