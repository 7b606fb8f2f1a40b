//! What the tests of this crate share.
#![allow(dead_code)] // each test binary uses its part

use mamba2_spec::{Arch, DeviceFacts, Dtype, Problem, StrategyConfig, ThreeKernelConfig, rules};
use mamba2_tunedb::{CacheDir, Evidence, LocalDb, Provenance, Record};

/// An A100 as this project sees it: a GPU whose default strategy is the three kernels.
pub fn device() -> DeviceFacts {
    DeviceFacts::assumed(Arch(80))
}

/// A problem like the headline's at `batch` and `seqlen`, with a dstate for which no records are shipped.
pub fn problem(batch: usize, seqlen: usize) -> Problem {
    Problem::new(batch, seqlen, 8, 64, 1, 96)
}

/// The same in float32, whose default strategy is the three kernels.
pub fn problem_f32(batch: usize, seqlen: usize) -> Problem {
    let mut problem = problem(batch, seqlen);
    problem.dtype = Dtype::F32;
    problem.dt_dtype = Dtype::F32;
    problem
}

/// A record for `problem_f32(batch, seqlen)`: its default with `block_h` heads per block of chunk_cumsum.
pub fn record_f32(batch: usize, seqlen: usize, block_h: u32) -> Record {
    let problem = problem_f32(batch, seqlen);
    let config = config_f32(&problem, block_h);
    Record::forward(&problem, &device(), &config, evidence(100.0, 1_700_000_000))
}

/// A legal config of a float32 problem.
pub fn config_f32(problem: &Problem, block_h: u32) -> StrategyConfig {
    let mut config = rules::default_three_kernel(problem, &device()).unwrap();
    config.chunk_cumsum.block_h = block_h;
    StrategyConfig::ThreeKernel(config)
}

/// A legal three-kernel config: the table's defaults with `block_h` heads per block of chunk_cumsum.
pub fn config(problem: &Problem, block_h: u32) -> StrategyConfig {
    let mut config = ThreeKernelConfig::default();
    config.chunk_cumsum.block_h = block_h;
    let config = StrategyConfig::ThreeKernel(config);
    rules::check_strategy(&config, problem, &device()).unwrap();
    config
}

/// Evidence of a calm measurement.
pub fn evidence(median_us: f64, date_unix_s: u64) -> Evidence {
    Evidence {
        built_with: provenance("t1"),
        candidates: 100,
        date_unix_s,
        default_median_us: Some(2.0 * median_us),
        gpu: "NVIDIA H200".into(),
        max_error: 2e-3,
        median_us,
        policy: "rounds=5".into(),
        rejected: 3,
        samples: 50,
        spread_us: 0.1,
        ..Evidence::default()
    }
}

pub fn provenance(template: &str) -> Provenance {
    Provenance {
        driver: "13.0".into(),
        nvrtc: "13.0".into(),
        template_digest: template.into(),
    }
}

/// A record for `problem(batch, seqlen)`.
pub fn record(batch: usize, seqlen: usize, block_h: u32) -> Record {
    let problem = problem(batch, seqlen);
    Record::forward(
        &problem,
        &device(),
        &config(&problem, block_h),
        evidence(100.0, 1_700_000_000),
    )
}

/// A local database in a fresh directory.
pub fn database() -> (tempfile::TempDir, CacheDir, LocalDb) {
    let dir = tempfile::tempdir().unwrap();
    let cache = CacheDir::fixed(dir.path());
    let db = LocalDb::in_cache(&cache).unwrap();
    (dir, cache, db)
}

/// How `config(.., block_h)` of an answer reads back; 0 for another strategy, as the default may be.
pub fn block_h(config: &StrategyConfig) -> u64 {
    serde_json::to_value(config).unwrap()["chunk_cumsum"]["block_h"]
        .as_u64()
        .unwrap_or(0)
}
