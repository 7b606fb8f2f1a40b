//! One process per GPU, so that a candidate that hangs, crashes or destroys its context costs itself and nothing else.
//!
//! The parent ([`RemoteExecutor`]) starts workers, talks to them in lines of JSON over their standard input and output, and kills
//! and restarts one that is silent for too long. Two workers serve a GPU: one compiles (and opens no GPU), one runs.

mod channel;
mod protocol;
mod remote;
mod serve;

pub use protocol::Role;
pub use remote::{Launch, RemoteExecutor};
pub use serve::{serve, worker_main};
