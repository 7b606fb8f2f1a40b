use mamba2_spec::StrategyConfig;

/// How look-ups are answered. Tuning itself is the tuner's work; the mode only says whether it is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Uses what is stored and never tunes: every process and rank with the same records makes the same choice.
    #[default]
    Replay,
    /// As replay, and a miss may be tuned by whoever owns the engine, outside stream capture.
    Tune,
    /// Ignores every record: always the default config of the architecture.
    DefaultOnly,
    /// Always this config, checked against today's rules; a problem it is illegal for gets the default and a warning.
    Pinned(StrategyConfig),
}
