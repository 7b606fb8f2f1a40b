//! Bundles, honest and hostile. A hostile one is refused with the reason, and nothing is written.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::fs;
use std::path::Path;

use common::{database, device, problem, record};
use mamba2_spec::Arch;
use mamba2_tunedb::{
    Bundle, CacheDir, Ladder, LocalDb, Record, Snapshot, Tier, TuneDbError, cubin_arch, ops,
};
use serde_json::json;
use sha2::{Digest, Sha256};

/// The least that passes for a cubin of `arch`: an ELF header as CUDA 13 (ABI 8) writes it.
fn cubin(arch: u8) -> Vec<u8> {
    let mut bytes = vec![0; 128];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[8] = 8;
    bytes[18] = 190;
    bytes[49] = arch;
    bytes
}

fn write(dir: &Path, records: Vec<Record>) -> std::path::PathBuf {
    let path = dir.join("made.mamba2bundle");
    Bundle::write(
        &path,
        "a test",
        records,
        [
            ("kernel one".to_string(), cubin(90)),
            ("kernel two".into(), cubin(90)),
        ],
    )
    .unwrap();
    path
}

fn short(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..16].try_into().unwrap()
}

/// A file of frames made by hand, with right digests whatever the entries say: an attacker can compute digests.
fn forge(magic: &[u8; 8], entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let (mut body, mut index) = (Vec::new(), Vec::new());
    for (key, value) in entries {
        let digest = short(&[key.as_bytes(), value]);
        let (key_len, value_len) = (
            (key.len() as u32).to_le_bytes(),
            (value.len() as u32).to_le_bytes(),
        );
        body.extend([b"\xf5M2f", &key_len[..], &value_len, &digest].concat());
        index.extend(
            [
                &(64 + body.len() as u64).to_le_bytes()[..],
                &key_len,
                &value_len,
                &digest,
            ]
            .concat(),
        );
        body.extend([key.as_bytes(), value].concat());
    }
    let mut header = [&magic[..], &1u32.to_le_bytes(), &0u32.to_le_bytes()].concat();
    header.extend((entries.len() as u64).to_le_bytes());
    header.extend((64 + body.len() as u64).to_le_bytes());
    header.extend([0; 16]);
    let digest = short(&[&header, &index]);
    [header, digest.to_vec(), body, index].concat()
}

fn manifest(records: u64, cubins: u64) -> (&'static str, Vec<u8>) {
    (
        "manifest",
        json!({ "archs": [90], "records": records, "cubins": cubins })
            .to_string()
            .into_bytes(),
    )
}

fn record_entry(record: &Record) -> (String, Vec<u8>) {
    (
        format!("record/{}", record.key),
        serde_json::to_vec(record).unwrap(),
    )
}

/// Imports the bytes and returns why they were refused; checks that nothing was written.
fn refusal(bytes: &[u8]) -> String {
    let (dir, _cache, db) = database();
    let path = dir.path().join("hostile.mamba2bundle");
    fs::write(&path, bytes).unwrap();
    let error = ops::import(&db, &path, mamba2_tunedb::DEFAULT_WAIT)
        .expect_err("a hostile bundle should be refused");
    assert!(!db.root().exists(), "nothing should be written");
    error.to_string()
}

#[test]
fn an_imported_bundle_is_a_tier_with_its_cubins() {
    let (dir, cache, db) = database();
    let path = write(dir.path(), vec![record(4, 4096, 8)]);
    let made = Bundle::open(&path).unwrap();
    assert_eq!(
        (
            made.manifest().records,
            made.manifest().cubins,
            made.manifest().archs.clone()
        ),
        (1, 2, vec![90])
    );
    assert_eq!(made.verify(), Vec::<String>::new());
    let report = ops::import(&db, &path, mamba2_tunedb::DEFAULT_WAIT).unwrap();
    assert_eq!(
        report.bundle,
        ops::import(&db, &path, mamba2_tunedb::DEFAULT_WAIT)
            .unwrap()
            .bundle,
        "repeating is harmless"
    );
    fs::remove_file(&path).unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(
        ladder.look_up(&problem(4, 4096), &device()).unwrap().tier,
        Tier::Bundle
    );
    assert_eq!(
        ladder.look_up(&problem(4, 5000), &device()).unwrap().tier,
        Tier::BundleNearest
    );
    assert_eq!(
        ladder.bundles()[0]
            .cubin("kernel one", Arch(90))
            .unwrap()
            .unwrap(),
        cubin(90)
    );
    assert_eq!(
        ladder.bundles()[0].cubin("kernel three", Arch(90)).unwrap(),
        None
    );
    assert_eq!(
        ladder.bundles()[0].cubin_keys().unwrap(),
        ["kernel one", "kernel two"]
    );
    assert!(matches!(
        ladder.bundles()[0].cubin("kernel one", Arch(100)),
        Err(TuneDbError::Refused { .. })
    ));
    assert_eq!(
        ops::verify(&db, mamba2_tunedb::DEFAULT_WAIT)
            .unwrap()
            .bundles,
        1
    );
}

#[test]
fn names_in_a_bundle_never_become_paths() {
    let (dir, _cache, db) = database();
    let path = dir.path().join("made.mamba2bundle");
    let evil = ["../../escape", "/etc/escape", "a\0b", "..\\..\\escape"];
    Bundle::write(
        &path,
        "../note",
        vec![],
        evil.map(|name| (name.to_string(), cubin(90))),
    )
    .unwrap();
    let report = ops::import(&db, &path, mamba2_tunedb::DEFAULT_WAIT).unwrap();
    let written: Vec<_> = fs::read_dir(db.bundles_path())
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    assert_eq!(written, vec![report.bundle.unwrap()]);
    let name = written[0].file_name().unwrap().to_str().unwrap();
    assert!(
        name.strip_suffix(".mamba2bundle")
            .unwrap()
            .bytes()
            .all(|b| b.is_ascii_hexdigit()),
        "{name}"
    );
    assert_eq!(
        Bundle::open(&written[0])
            .unwrap()
            .cubin("../../escape", Arch(90))
            .unwrap()
            .unwrap(),
        cubin(90)
    );
}

#[test]
fn a_cut_or_flipped_bundle_is_refused_wherever_it_is_hit() {
    let (dir, _cache, _db) = database();
    let bytes = fs::read(write(dir.path(), vec![record(4, 4096, 8)])).unwrap();
    for cut in [0, 7, 63, 64, 100, bytes.len() / 2, bytes.len() - 1] {
        refusal(&bytes[..cut]);
    }
    // Bytes 12..16 and 40..48 of the header are covered too; only the marks of frames are spare, for salvage.
    for at in (0..bytes.len()).step_by(7) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 0x10;
        let (dir, _cache, db) = database();
        let path = dir.path().join("flipped.mamba2bundle");
        fs::write(&path, &flipped).unwrap();
        match ops::import(&db, &path, mamba2_tunedb::DEFAULT_WAIT) {
            Err(_) => assert!(!db.root().exists()),
            // A flip in a frame's own header, which readers do not use, changes nothing that is read.
            Ok(report) => {
                let bundle = Bundle::open(&report.bundle.unwrap()).unwrap();
                assert_eq!(
                    bundle.record(&record(4, 4096, 8).key).unwrap().unwrap(),
                    record(4, 4096, 8),
                    "{at}"
                );
            }
        }
    }
}

#[test]
fn sizes_that_a_bundle_claims_are_bounded_before_anything_is_allocated() {
    let honest = forge(b"mamba2bn", &[manifest(0, 0)]);
    let patched = |at: usize, value: u64| {
        let mut bytes = honest.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    // Number of entries, offset of the index, and both near overflow.
    for value in [u64::MAX, u64::MAX / 32, 1 << 40, 1 << 21] {
        refusal(&patched(16, value));
        refusal(&patched(24, value));
    }
    // An entry that claims 4 GiB, with the index digest made right.
    let mut bomb = honest.clone();
    let row = bomb.len() - 32;
    bomb[row + 12..row + 16].copy_from_slice(&u32::MAX.to_le_bytes());
    let digest = short(&[&bomb[..48], &bomb[row..]]);
    bomb[48..64].copy_from_slice(&digest);
    assert!(refusal(&bomb).contains("claims"), "{}", refusal(&bomb));
    let mut outside = honest;
    outside[row..row + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    let digest = short(&[&outside[..48], &outside[row..]]);
    outside[48..64].copy_from_slice(&digest);
    assert!(
        refusal(&outside).contains("outside"),
        "{}",
        refusal(&outside)
    );
}

#[test]
fn cubins_for_another_architecture_or_of_no_kind_are_refused() {
    let forged = |value: Vec<u8>| forge(b"mamba2bn", &[("cubin/k", value), manifest(0, 1)]);
    assert!(
        refusal(&forged(cubin(80))).contains("sm_80"),
        "{}",
        refusal(&forged(cubin(80)))
    );
    assert!(refusal(&forged(b"#!/bin/sh".to_vec())).contains("ELF"));
    let mut host_program = cubin(90);
    host_program[18] = 62;
    assert!(refusal(&forged(host_program.clone())).contains("machine 62"));
    assert!(
        Bundle::write(
            Path::new("/proc/none"),
            "",
            vec![],
            [("k".to_string(), host_program)]
        )
        .is_err()
    );
    let mut older_abi = cubin(0);
    (older_abi[8], older_abi[48]) = (7, 86);
    assert_eq!(cubin_arch(&older_abi).unwrap(), Arch(86));
}

#[test]
fn records_that_break_rules_or_ask_for_absurd_sizes_are_refused() {
    let refuse = |record: &Record| {
        let (key, value) = record_entry(record);
        let mut entries = vec![manifest(1, 0), (key.as_str(), value)];
        entries.sort_by_key(|e| e.0.to_string());
        refusal(&forge(b"mamba2bn", &entries))
    };
    let mut illegal = record(4, 4096, 8);
    illegal.config["compute_out"]["chunk_size"] = json!(64);
    assert!(refuse(&illegal).contains("S01"), "{}", refuse(&illegal));
    let absurd = |batch, seqlen| {
        let mut absurd = record(4, 4096, 8);
        absurd.key = mamba2_tunedb::TuneKey::forward(&problem(batch, seqlen), &device());
        absurd
    };
    assert!(refuse(&absurd(1 << 30, (1 << 31) - 4096)).contains("elements"));
    assert!(
        refuse(&absurd(1 << 17, 4096)).contains("workspace"),
        "{}",
        refuse(&absurd(1 << 17, 4096))
    );
    let mut infinite = record(4, 4096, 8);
    infinite.evidence.median_us = -1.0;
    assert!(
        refuse(&infinite).contains("finite"),
        "{}",
        refuse(&infinite)
    );
}

#[test]
fn a_bundle_with_other_contents_than_its_manifest_says_is_refused() {
    let (key, value) = record_entry(&record(4, 4096, 8));
    let entry = (key.as_str(), value);
    assert!(refusal(&forge(b"mamba2bn", std::slice::from_ref(&entry))).contains("manifest"));
    assert!(
        refusal(&forge(b"mamba2bn", &[manifest(2, 0), entry.clone()]))
            .contains("expected 2 records")
    );
    assert!(
        refusal(&forge(
            b"mamba2bn",
            &[manifest(1, 0), entry.clone(), ("stowaway", vec![1])]
        ))
        .contains("stowaway")
    );
    assert!(
        refusal(&forge(
            b"mamba2bn",
            &[manifest(1, 0), entry.clone(), entry.clone()]
        ))
        .contains("sorted")
    );
    let swapped = (key.replace("l=4096", "l=8192"), entry.1.clone());
    assert!(
        refusal(&forge(
            b"mamba2bn",
            &[manifest(1, 0), (swapped.0.as_str(), swapped.1)]
        ))
        .contains("filed under")
    );
}

#[test]
fn links_and_devices_are_no_bundles() {
    let (dir, _cache, db) = database();
    assert!(ops::import(&db, Path::new("/dev/zero"), mamba2_tunedb::DEFAULT_WAIT).is_err());
    assert!(ops::import(&db, dir.path(), mamba2_tunedb::DEFAULT_WAIT).is_err());
    assert!(ops::import(&db, &dir.path().join("absent"), mamba2_tunedb::DEFAULT_WAIT).is_err());
    #[cfg(unix)]
    {
        // A link planted where the import will write is replaced, not followed.
        let path = write(dir.path(), vec![record(4, 4096, 8)]);
        let digest = Bundle::open(&path).unwrap().digest();
        let victim = dir.path().join("victim");
        fs::write(&victim, b"precious").unwrap();
        fs::create_dir_all(db.bundles_path()).unwrap();
        std::os::unix::fs::symlink(
            &victim,
            db.bundles_path().join(format!("{digest}.mamba2bundle")),
        )
        .unwrap();
        ops::import(&db, &path, mamba2_tunedb::DEFAULT_WAIT).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }
}

#[test]
fn a_forged_snapshot_gives_only_legal_records() {
    let dir = tempfile::tempdir().unwrap();
    let cache = CacheDir::fixed(dir.path());
    let db = LocalDb::in_cache(&cache).unwrap();
    let mut illegal = record(4, 4096, 8);
    illegal.config["compute_out"]["chunk_size"] = json!(64);
    let (key, value) = record_entry(&illegal);
    let bytes = forge(
        b"mamba2sn",
        &[(key.strip_prefix("record/").unwrap(), value)],
    );
    assert_eq!(
        Snapshot::from_bytes(bytes.clone(), "forged").unwrap().len(),
        1
    );
    fs::create_dir_all(db.root()).unwrap();
    fs::write(db.snapshot_path(), bytes).unwrap();
    let answer = Ladder::builder()
        .cache(&cache)
        .build()
        .look_up(&problem(4, 4096), &device())
        .unwrap();
    assert_eq!(answer.tier, Tier::Default);
}
