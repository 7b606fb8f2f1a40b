use std::sync::{Mutex, PoisonError};

/// Works off `tasks` on the threads of the current rayon pool, each with one `scratch` that it keeps from task to task.
///
/// Tasks are made lazily, one at a time, so that their number costs no memory. Which thread runs a task is left to chance;
/// results must not depend on it.
pub(crate) fn run<T: Send, S>(
    tasks: impl Iterator<Item = T> + Send,
    at_most: usize,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let queue = Mutex::new(tasks);
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    rayon::scope(|scope| {
        for _ in 0..rayon::current_num_threads().min(at_most) {
            scope.spawn(|_| {
                let mut scratch = scratch();
                while let Some(task) = next() {
                    work(&mut scratch, task);
                }
            });
        }
    });
}
