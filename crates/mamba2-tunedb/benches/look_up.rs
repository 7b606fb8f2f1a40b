//! Time of look-ups: in a warm process, and the first one of a new process with 10,000 records.
//!
//! Medians on two busy cores of an AMD EPYC, 2026-11-30, files in the page cache: warm 0.5 us (at best 0.29), first exact 0.59 ms,
//! first nearest 1.2 ms. Wanted: under 1 us and under 5 ms.
//!
//! Size, from `cargo test -p mamba2-tunedb --features long-tests --test faults t5_retuning -- --nocapture` on the same machine: 500
//! keys retuned 1000 times leave 3.2 MB, 2.3 MB after prune, which open in 7 ms. Wanted: under 50 MB and 50 ms.

use divan::{Bencher, black_box};
use mamba2_spec::{Arch, DeviceFacts, Problem, StrategyConfig, ThreeKernelConfig};
use mamba2_tunedb::{CacheDir, Evidence, Ladder, LocalDb, Record, Snapshot, Tier};

fn main() {
    divan::main();
}

fn device() -> DeviceFacts {
    DeviceFacts::assumed(Arch(90))
}

fn record(problem: &Problem) -> Record {
    let config = StrategyConfig::ThreeKernel(ThreeKernelConfig::default());
    let evidence = Evidence {
        median_us: 300.0,
        policy: "rounds=5,flush=l2".into(),
        ..Evidence::default()
    };
    Record::forward(problem, &device(), &config, evidence)
}

/// A database of 10,000 records in 10 families.
fn database() -> (tempfile::TempDir, CacheDir, Problem) {
    let dir = tempfile::tempdir().expect("a temporary directory should be possible");
    let cache = CacheDir::fixed(dir.path());
    let db = LocalDb::in_cache(&cache).expect("a fixed directory should do");
    let problem = |i: usize| {
        Problem::new(
            1 + i % 100,
            64 * (1 + i / 100 % 10),
            8 * (1 + i / 1000),
            64,
            1,
            128,
        )
    };
    let records = (0..10_000).map(|i| record(&problem(i)));
    Snapshot::publish(&db.snapshot_path(), 1, records).expect("the snapshot should be written");
    (dir, cache, problem(7777))
}

#[divan::bench]
fn tuned_shape_in_a_warm_process(bencher: Bencher) {
    let (_dir, cache, problem) = database();
    let ladder = Ladder::builder().cache(&cache).build();
    let device = device();
    let tier = ladder.look_up(&problem, &device).map(|answer| answer.tier);
    assert!(matches!(tier, Ok(Tier::Local)), "{tier:?}");
    bencher.bench(|| ladder.look_up(black_box(&problem), black_box(&device)));
}

#[divan::bench]
fn first_look_up_of_a_process_with_10000_records(bencher: Bencher) {
    let (_dir, cache, problem) = database();
    let device = device();
    bencher.bench(|| {
        let answer = Ladder::builder()
            .cache(&cache)
            .build()
            .look_up(&problem, &device);
        assert!(answer.as_ref().is_ok_and(|a| a.tier == Tier::Local));
        answer
    });
}

#[divan::bench]
fn first_nearest_look_up_with_10000_records(bencher: Bencher) {
    let (_dir, cache, mut problem) = database();
    problem.seqlen += 1;
    let device = device();
    bencher.bench(|| {
        Ladder::builder()
            .cache(&cache)
            .build()
            .look_up(&problem, &device)
    });
}
