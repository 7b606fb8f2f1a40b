//! The tuning database: what was tuned, for which problem on which GPU, with what evidence, and how a launcher finds it.
//!
//! | piece | is | written by | read by |
//! |---|---|---|---|
//! | [`Store`] | sled, one process at a time, opened late and closed early | tuner, `mamba2 db` | its owner |
//! | [`Snapshot`] | the records of one commit in one immutable file | each commit, by rename | any number of processes |
//! | parts | commits that could not have the store | writers beside it | everybody; the next owner takes them in |
//! | [`Shipped`] | text records of `tuning-db/` inside the program | people, by `mamba2 db export` | everybody |
//! | [`Bundle`] | records and cubins in one untrusted file | `mamba2 db bundle` | hosts without NVRTC |
//! | [`Ladder`] | asks them all, in a fixed order, and checks every record by today's rules | | the launcher |
//!
//! A fault of any of them costs time, never an answer: damaged pieces are set aside or passed over with one warning.
//!
//! ```
//! use mamba2_spec::{Arch, DeviceFacts, Problem, rules};
//! use mamba2_tunedb::{CacheDir, DEFAULT_WAIT, Evidence, Ladder, LocalDb, Record, Tier};
//!
//! let directory = tempfile::tempdir()?;
//! let cache = CacheDir::fixed(directory.path());
//! let (problem, device) = (Problem::new(4, 4096, 8, 64, 1, 128), DeviceFacts::assumed(Arch(90)));
//!
//! // What a tuner does at the end:
//! let winner = rules::default_strategy(&problem, &device)?;
//! let record = Record::forward(&problem, &device, &winner, Evidence { median_us: 310.0, ..Evidence::default() });
//! LocalDb::in_cache(&cache)?.commit(&[record], &[], DEFAULT_WAIT)?;
//!
//! // What a launcher does, in any process:
//! let ladder = Ladder::builder().cache(&cache).build();
//! assert_eq!(ladder.look_up(&problem, &device)?.tier, Tier::Local);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod bucket;
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
mod shard;
mod shipped;
mod snapshot;
mod store;
mod text;
pub mod validate;

pub use bucket::{tuning_shape, tuning_step_shape};
pub use bundle::{Bundle, Manifest, cubin_arch};
pub use env::Environment;
pub use error::{Result, TuneDbError};
pub use key::{Family, KEY_SCHEMA, MAX_KEY_BYTES, Subject, TuneKey};
pub use ladder::{Answer, Ladder, LadderBuilder, NEAREST_BOUND, Tier};
pub use local::{Committed, DEFAULT_WAIT, LocalDb};
pub use mode::Mode;
pub use parts::Part;
pub use paths::{CacheDir, network_file_system};
pub use record::{
    Evidence, FailureStage, MAX_RECORD_BYTES, Outcome, Provenance, Record, Timing, config_text,
    joint_template_digest, kernel_config_text,
};
pub use shard::Shard;
pub use shipped::Shipped;
pub use snapshot::Snapshot;
pub use store::Store;
pub use text::{MAX_TEXT_BYTES, TextRecords, write_text};
