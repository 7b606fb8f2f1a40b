//! Every parser of untrusted bytes, on mutated good inputs: it may refuse, it must not panic, hang or invent records.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::path::Path;
use std::sync::OnceLock;

use common::record;
use mamba2_tunedb::{
    Bundle, Record, Snapshot, TextRecords, TuneKey, cubin_arch, validate, write_text,
};
use proptest::prelude::*;

/// Damage to a byte string.
#[derive(Clone, Debug)]
enum Mutation {
    Flip(usize, u8),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    Repeat(usize, usize),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        (any::<usize>(), 1u8..).prop_map(|(at, bits)| Mutation::Flip(at, bits)),
        any::<usize>().prop_map(Mutation::Cut),
        (any::<usize>(), prop::collection::vec(any::<u8>(), 1..16))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        (any::<usize>(), 1usize..64).prop_map(|(at, n)| Mutation::Remove(at, n)),
        (any::<usize>(), 1usize..64).prop_map(|(at, n)| Mutation::Repeat(at, n)),
    ]
}

fn mutate(seed: &[u8], mutations: &[Mutation]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for mutation in mutations {
        let place = |at: usize, len: usize| at % len.max(1);
        let len = bytes.len();
        match mutation {
            Mutation::Flip(at, bits) if len > 0 => bytes[place(*at, len)] ^= bits,
            Mutation::Cut(at) => bytes.truncate(place(*at, len)),
            Mutation::Insert(at, new) => {
                drop(bytes.splice(place(*at, len)..place(*at, len), new.iter().copied()))
            }
            Mutation::Remove(at, n) => {
                drop(bytes.drain(place(*at, len)..(place(*at, len) + n).min(len)))
            }
            Mutation::Repeat(at, n) => {
                let piece = bytes[place(*at, len)..(place(*at, len) + n).min(len)].to_vec();
                bytes.extend(piece);
            }
            Mutation::Flip(..) => {}
        }
    }
    bytes
}

fn records() -> Vec<Record> {
    vec![record(1, 64, 1), record(4, 4096, 8), record(64, 1, 2)]
}

fn snapshot_bytes() -> Vec<u8> {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(make_snapshot).clone()
}

fn bundle_bytes() -> Vec<u8> {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(make_bundle).clone()
}

fn make_snapshot() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot");
    Snapshot::publish(&path, 7, records()).unwrap();
    std::fs::read(path).unwrap()
}

fn make_bundle() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("b.mamba2bundle");
    let mut cubin = vec![0; 80];
    cubin[..9].copy_from_slice(b"\x7fELF\x02\x01\x00\x00\x08");
    (cubin[18], cubin[49]) = (190, 90);
    Bundle::write(&path, "seed", records(), [("kernel".to_string(), cubin)]).unwrap();
    std::fs::read(path).unwrap()
}

/// A record that some reader returned must be usable: written again, checked, looked at.
fn use_record(record: &Record) {
    let _ = record.to_json();
    let _ = validate::check_record(record);
    let _ = (record.strategy(), record.step_config());
    assert_eq!(
        record.key.to_string().parse::<TuneKey>().unwrap(),
        record.key
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn keys(mutations in prop::collection::vec(mutation(), 0..4)) {
        let bytes = mutate(record(4, 4096, 8).key.to_string().as_bytes(), &mutations);
        if let Ok(key) = String::from_utf8_lossy(&bytes).parse::<TuneKey>() {
            // What parses is canonical, and whatever it asks for can be checked without overflow.
            prop_assert_eq!(key.to_string().into_bytes(), bytes);
            let mut any = record(4, 4096, 8);
            any.key = key;
            use_record(&any);
        }
    }

    #[test]
    fn record_lines(mutations in prop::collection::vec(mutation(), 0..4)) {
        let bytes = mutate(record(4, 4096, 8).to_json().unwrap().as_bytes(), &mutations);
        if let Ok(record) = Record::from_json(&bytes) {
            use_record(&record);
        }
    }

    #[test]
    fn record_texts(mutations in prop::collection::vec(mutation(), 0..4)) {
        let bytes = mutate(write_text(records()).unwrap().as_bytes(), &mutations);
        if let Ok(text) = TextRecords::new("seed", String::from_utf8_lossy(&bytes).into_owned()) {
            text.records().flatten().for_each(|record| use_record(&record));
            let _ = text.get(&record(4, 4096, 8).key);
            let _ = text.keys_with_prefix("schema=1,");
        }
    }

    #[test]
    fn snapshots(mutations in prop::collection::vec(mutation(), 0..4)) {
        let bytes = mutate(&snapshot_bytes(), &mutations);
        let good = records();
        for record in Snapshot::salvage_bytes(&bytes) {
            prop_assert!(good.contains(&record), "salvage should find only what was written");
        }
        if let Ok(snapshot) = Snapshot::from_bytes(bytes, "seed") {
            for record in snapshot.records().flatten() {
                prop_assert!(good.contains(&record));
            }
            let _ = (snapshot.get(&good[1].key), snapshot.keys_with_prefix("schema"), snapshot.digest());
        }
    }

    #[test]
    fn bundles(mutations in prop::collection::vec(mutation(), 0..4)) {
        let bytes = mutate(&bundle_bytes(), &mutations);
        if let Ok(bundle) = Bundle::from_bytes(bytes, "seed") {
            if bundle.verify().is_empty() {
                prop_assert_eq!(bundle.records().unwrap().into_iter().collect::<Result<Vec<_>, _>>().unwrap().len(), 3);
            }
            let _ = (bundle.cubin("kernel", mamba2_spec::Arch(90)), bundle.cubin_keys(), bundle.record(&record(1, 64, 1).key));
        }
    }

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = (Record::from_json(&bytes), Snapshot::salvage_bytes(&bytes), cubin_arch(&bytes));
        prop_assert!(Snapshot::from_bytes(bytes.clone(), "arbitrary").is_err());
        prop_assert!(Bundle::from_bytes(bytes, "arbitrary").is_err());
    }
}

#[test]
fn damaged_files_are_read_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let seeds = [
        snapshot_bytes(),
        bundle_bytes(),
        write_text(records()).unwrap().into_bytes(),
    ];
    let path = dir.path().join("seed");
    let mut faults = Vec::new();
    for seed in seeds {
        for at in (0..seed.len()).step_by(5) {
            let mut flipped = seed.clone();
            flipped[at] ^= 0xff;
            std::fs::write(&path, &flipped).unwrap();
            if let Ok(found) = mamba2_tunedb::ops::read_records(Path::new(&path), &mut faults) {
                found.iter().for_each(use_record);
            }
        }
    }
    assert!(
        faults.len() <= 100,
        "faults told should be bounded, got {}",
        faults.len()
    );
}
