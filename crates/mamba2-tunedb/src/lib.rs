//! The tuning database: what was tuned, for which problem on which GPU, with what evidence, and how a launcher finds it.
#![forbid(unsafe_code)]

mod bundle;
mod compact;
pub mod env;
mod error;
mod files;
mod frames;
mod key;
mod ladder;
mod local;
mod lock;
mod mode;
pub mod ops;
mod parts;
mod paths;
mod record;
mod seal;
mod shipped;
mod snapshot;
mod store;
mod text;
pub mod validate;

pub use bundle::{Bundle, Manifest, cubin_arch};
pub use env::{Environment, Shard};
pub use error::{Result, TuneDbError};
pub use key::{Family, KEY_SCHEMA, MAX_KEY_BYTES, Subject, TuneKey};
pub use ladder::{Answer, Ladder, LadderBuilder, NEAREST_BOUND, Tier};
pub use local::{Committed, DEFAULT_WAIT, LocalDb};
pub use mode::Mode;
pub use paths::{CacheDir, network_file_system};
pub use record::{
    Evidence, FailureStage, MAX_RECORD_BYTES, Outcome, Provenance, Record, Timing, config_text, kernel_config_text,
};
pub use shipped::Shipped;
pub use snapshot::Snapshot;
pub use store::Store;
pub use text::{MAX_TEXT_BYTES, TextRecords, write_text};
