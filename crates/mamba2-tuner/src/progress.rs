/// Told how a search goes on; draws a bar, writes a log, or does nothing.
pub trait Progress: Sync {
    /// A stage begins with `total` candidates, `stored` of which have their result from an earlier run.
    fn stage(&self, shape: &str, stage: &str, total: usize, stored: usize);
    /// `done` more candidates of the stage have their result; `best_us` is the fastest so far.
    fn advance(&self, done: usize, best_us: Option<f64>);
    /// Something a person should see.
    fn warn(&self, text: &str);
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn stage(&self, _shape: &str, _stage: &str, _total: usize, _stored: usize) {}
    fn advance(&self, _done: usize, _best_us: Option<f64>) {}
    fn warn(&self, _text: &str) {}
}
