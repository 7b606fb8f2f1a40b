//! Readers of damaged files invent nothing. What the parsers do with arbitrary bytes is the work of `fuzz/`.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::sync::LazyLock;

use common::record;
use mamba2_tunedb::{Bundle, Record, Snapshot, TuneKey, ops, validate, write_text};
use proptest::prelude::*;
use proptest::sample::Index;

fn records() -> Vec<Record> {
    vec![record(1, 64, 1), record(4, 4096, 8), record(64, 1, 2)]
}

static SNAPSHOT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    Snapshot::publish(&path, 7, records()).unwrap();
    std::fs::read(path).unwrap()
});

static BUNDLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("b.mamba2bundle");
    let mut cubin = vec![0; 80];
    cubin[..9].copy_from_slice(b"\x7fELF\x02\x01\x00\x00\x08");
    (cubin[18], cubin[49]) = (190, 90);
    Bundle::write(&path, "seed", records(), [("kernel".to_string(), cubin)]).unwrap();
    std::fs::read(path).unwrap()
});

/// Places of flips with their bits, place and length of a loss, place of a cut.
type Damage = (Vec<(Index, u8)>, Option<(Index, usize)>, Option<Index>);

/// Flipped bits, a lost piece, and the end cut off: what disks do, and not what forgers do.
fn damage() -> impl Strategy<Value = Damage> {
    (
        prop::collection::vec((any::<Index>(), 1u8..), 0..4),
        prop::option::of((any::<Index>(), 1usize..64)),
        prop::option::weighted(0.2, any::<Index>()),
    )
}

fn damaged(seed: &[u8], (flips, lost, cut): Damage) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for (at, bits) in flips {
        let at = at.index(bytes.len());
        bytes[at] ^= bits;
    }
    if let Some((at, n)) = lost {
        let at = at.index(bytes.len());
        bytes.drain(at..(at + n).min(seed.len()));
    }
    if let Some(at) = cut {
        bytes.truncate(at.index(bytes.len().max(1)));
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn t3_a_damaged_snapshot_gives_only_records_that_were_written(damage in damage()) {
        let bytes = damaged(&SNAPSHOT, damage);
        let good = records();
        for record in Snapshot::salvage_bytes(&bytes) {
            prop_assert!(good.contains(&record));
        }
        if let Ok(snapshot) = Snapshot::from_bytes(bytes, "seed") {
            for record in snapshot.records().flatten() {
                prop_assert!(good.contains(&record));
            }
        }
    }

    #[test]
    fn a_damaged_bundle_that_passes_verify_is_the_one_that_was_written(damage in damage()) {
        let bytes = damaged(&BUNDLE, damage);
        if let Ok(bundle) = Bundle::from_bytes(bytes, "seed")
            && bundle.verify().is_empty()
        {
            let found: Vec<Record> = bundle.records().unwrap().into_iter().flatten().collect();
            prop_assert_eq!(found, records());
            prop_assert_eq!(bundle.cubin_keys().unwrap(), vec!["kernel".to_string()]);
        }
    }
}

#[test]
fn damaged_files_are_read_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let text = write_text(records()).unwrap().into_bytes();
    let path = dir.path().join("seed");
    let mut faults = Vec::new();
    for seed in [&*SNAPSHOT, &*BUNDLE, &text] {
        for at in (0..seed.len()).step_by(5) {
            let mut flipped = seed.to_vec();
            flipped[at] ^= 0xff;
            std::fs::write(&path, &flipped).unwrap();
            for record in ops::read_records(&path, &mut faults).unwrap_or_default() {
                let _ = (validate::check_record(&record), record.strategy());
                let key = record.key.to_string().parse::<TuneKey>().unwrap();
                assert_eq!(key, record.key);
            }
        }
    }
    assert!(
        faults.len() <= 100,
        "faults told should be bounded, got {}",
        faults.len()
    );
}
