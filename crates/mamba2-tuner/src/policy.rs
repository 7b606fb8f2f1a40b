use serde::{Deserialize, Serialize};

/// How candidates are measured and compared. Stored with every timing, because timings of different policies do not compare.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// Samples of the first look at a candidate.
    pub probe_samples: u32,
    /// A candidate slower than this times the best of its group at the first look is measured no further; nor is a kernel that takes
    /// longer alone than this times the best whole pass.
    pub cut_factor: f64,
    /// Samples of a candidate that was not cut.
    pub samples: u32,
    /// Candidates within this share of their group's best are measured again, interleaved.
    pub near_tie: f64,
    /// At most this many candidates of a group are measured again.
    pub refine_top: usize,
    /// Whole forward passes that reach the final rounds, beside the default.
    pub finalists: usize,
    /// Interleaved rounds of the finals.
    pub final_rounds: u32,
    /// Samples of a finalist in each round.
    pub final_samples: u32,
    /// More finals for the candidates that are still within the noise of the best.
    pub tie_rounds: u32,
    /// Times that differ by less than this share are equal, however small their spread.
    pub noise_floor: f64,
    /// Above this spread of the default's samples, relative to their median, the machine was not quiet and the record is
    /// marked as low confidence.
    pub quiet_spread: f64,
    /// Candidates that are verified, measured and stored as one batch, while others compile.
    pub batch: usize,
    /// Longest time one candidate may take in one request to the device. Unit: seconds.
    pub candidate_timeout_s: u64,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            probe_samples: 3,
            cut_factor: 1.5,
            samples: 11,
            near_tie: 0.05,
            refine_top: 5,
            finalists: 10,
            final_rounds: 5,
            final_samples: 7,
            tie_rounds: 2,
            noise_floor: 0.01,
            quiet_spread: 0.1,
            batch: 64,
            candidate_timeout_s: 20,
        }
    }
}

impl Policy {
    /// Names what a timing depends on: how a sample is taken and how many there are. Two timings with the same text compare.
    pub fn measurement(&self) -> String {
        format!(
            "graph,cold-l2,probe={},samples={},final={}x{}",
            self.probe_samples, self.samples, self.final_rounds, self.final_samples
        )
    }
}
