//! What parent and worker say to each other: one line of JSON each.

use std::path::PathBuf;

use mamba2_spec::{DeviceFacts, Kernel};
use serde::{Deserialize, Serialize};

use crate::executor::{Check, Compiling, Conditions, Failure, Rounds, Verified};
use crate::{Candidate, Target};

/// What a worker is for: the argument of the hidden subcommand that starts it, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Runs candidates on a GPU.
    Gpu {
        /// Ordinal of the device among the visible ones.
        ordinal: usize,
        /// Directory of compiled kernels; `None` to keep none.
        cubins: Option<PathBuf>,
    },
    /// Compiles candidates. Opens no GPU.
    Compile {
        /// The device to compile for.
        device: DeviceFacts,
        /// Version of the driver, part of the conditions of a result.
        driver: String,
        /// Directory of compiled kernels, where the other worker finds them.
        cubins: Option<PathBuf>,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Prepare {
        target: Target,
    },
    Compile {
        target: Target,
        candidates: Vec<Candidate>,
    },
    Load {
        target: Target,
        candidates: Vec<Candidate>,
    },
    Verify {
        target: Target,
        candidate: Candidate,
        check: Check,
    },
    Measure {
        target: Target,
        candidates: Vec<Candidate>,
        rounds: Rounds,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Response {
    /// The worker is ready.
    Hello(Hello),
    /// It cannot start, or the request cannot be served by it, ever.
    Error(String),
    /// The shape cannot be tuned here.
    Unfit(String),
    Prepared,
    /// How far a [`Request::Compile`] is.
    Compiling(Compiling),
    Loaded,
    Verified(Result<Verified, Failure>),
    Measured(Vec<Result<Vec<f64>, Failure>>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub device: DeviceFacts,
    pub memory_bytes: Option<u64>,
    pub conditions: Vec<(Kernel, Conditions)>,
}
