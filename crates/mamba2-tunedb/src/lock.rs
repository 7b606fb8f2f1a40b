//! The lock around the store. sled has one of its own, but gives it up at a time of its own choosing; this one is held from
//! before sled opens until its files are sealed.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

use fs2::FileExt;

use crate::error::{Result, TuneDbError};

const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Held while it lives. The kernel frees it when the process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock file `path`, waiting up to `wait`; errors name what it protects.
    pub fn acquire(path: &Path, protects: &Path, wait: Duration) -> Result<Lock> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(TuneDbError::io("create directory", dir))?;
        }
        let open = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path);
        let file = open.map_err(TuneDbError::io("open for writing", path))?;
        let taken = retry(wait, || match file.try_lock_exclusive() {
            Ok(()) => Some(Ok(())),
            Err(e) if e.kind() == fs2::lock_contended_error().kind() => None,
            Err(e) => Some(Err(e)),
        });
        match taken {
            Some(Ok(())) => Ok(Lock { _file: file }),
            Some(Err(e)) => Err(TuneDbError::io("lock", path)(e)),
            None => Err(TuneDbError::Busy {
                path: protects.into(),
                waited_ms: wait.as_millis() as u64,
            }),
        }
    }
}

/// Tries until it answers or `wait` is over, with growing pauses. At least once.
pub(crate) fn retry<T>(wait: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let started = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        if let Some(done) = attempt() {
            return Some(done);
        }
        let left = wait
            .checked_sub(started.elapsed())
            .filter(|left| !left.is_zero())?;
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Waits until nobody holds a lock on the file. False if it was held the whole time or cannot be opened.
pub(crate) fn wait_until_free(path: &Path, wait: Duration) -> bool {
    let Ok(file) = OpenOptions::new().write(true).open(path) else {
        return false;
    };
    // Dropping the file lets go again.
    retry(wait, || file.try_lock_exclusive().ok()).is_some()
}
