//! Look-ups that no longer do what makes them fast. The bounds are far above what `cargo bench -p mamba2-tunedb` measures (and
//! writes down), because test machines are busy; a look-up that reads a file, or a start that reads every record, exceeds them.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::time::{Duration, Instant};

use common::{database, device, problem, record};
use mamba2_tunedb::{Ladder, Snapshot, Tier};

#[test]
fn p1_a_warm_look_up_touches_no_file_and_a_first_one_reads_few_of_10000_records() {
    let (dir, cache, db) = database();
    let records = (0..10_000).map(|i| record(1 + i % 100, 64 * (1 + i / 100), 8));
    Snapshot::publish(&db.snapshot_path(), 1, records).unwrap();
    let started = Instant::now();
    let ladder = Ladder::builder().cache(&cache).build();
    let answer = ladder.look_up(&problem(77, 64 * 50), &device()).unwrap();
    let first = started.elapsed();
    assert_eq!(answer.tier, Tier::Local);
    assert!(first < Duration::from_millis(500), "{first:?}");
    // Without any file left.
    drop(dir);
    let started = Instant::now();
    for _ in 0..10_000 {
        let again = ladder.look_up(&problem(77, 64 * 50), &device()).unwrap();
        assert_eq!(again.tier, Tier::Local);
    }
    let each = started.elapsed() / 10_000;
    println!("first {first:?}, then {each:?} each");
    assert!(each < Duration::from_micros(100), "{each:?}");
}
