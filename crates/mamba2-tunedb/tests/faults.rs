//! Kills, races, damage and hostile surroundings. Computing always works; good entries survive; nothing panics.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{database, device, problem, record};
use mamba2_tunedb::{
    CacheDir, Committed, DEFAULT_WAIT, Environment, Ladder, LocalDb, Tier, TuneDbError, TuneKey,
    ops,
};

/// `(short, long)` counts: the long ones with the feature `long-tests`.
fn count(short: usize, long: usize) -> usize {
    if cfg!(feature = "long-tests") {
        long
    } else {
        short
    }
}

fn helper(arguments: &[&str], dir: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mamba2-tunedb-fault-helper"));
    command
        .arg(arguments[0])
        .arg(dir)
        .args(&arguments[1..])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn batches(db: &LocalDb) -> Vec<usize> {
    let mut all: Vec<usize> = ops::list(db)
        .unwrap()
        .iter()
        .map(|r| r.key.problem().unwrap().batch)
        .collect();
    all.sort_unstable();
    all
}

/// Small and fast; good enough to spread kills and flips.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path))
        } else {
            files.push(path)
        }
    }
    files.sort();
    files
}

#[test]
fn t1_eight_processes_and_a_library_at_once_all_finish() {
    let (dir, cache, db) = database();
    let children: Vec<Child> = (0..8)
        .map(|i| helper(&["commit", &(100 * i + 1).to_string(), "4"], dir.path()))
        .collect();
    // The library looks up and commits meanwhile.
    for i in 0..4 {
        db.commit(&[record(1000 + i, 4096, 8)], &[], DEFAULT_WAIT)
            .unwrap();
        let answer = Ladder::builder()
            .cache(&cache)
            .build()
            .look_up(&problem(1000 + i, 4096), &device())
            .unwrap();
        assert_eq!(answer.tier, Tier::Local);
    }
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    drop(db.open_store(DEFAULT_WAIT).unwrap());
    let mut expected: Vec<usize> = (0..8)
        .flat_map(|i| 100 * i + 1..100 * i + 5)
        .chain(1000..1004)
        .collect();
    expected.sort_unstable();
    assert_eq!(batches(&db), expected);
    let report = ops::verify(&db, DEFAULT_WAIT).unwrap();
    assert_eq!(
        (report.faults, report.leftovers, report.timings),
        (vec![], 0, Some(32))
    );
}

#[test]
fn t1_readers_never_wait_for_the_store() {
    let (_dir, cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let store = db.open_store(DEFAULT_WAIT).unwrap();
    let started = Instant::now();
    let answer = Ladder::builder()
        .cache(&cache)
        .build()
        .look_up(&problem(4, 4096), &device())
        .unwrap();
    assert_eq!(answer.tier, Tier::Local);
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "{:?}",
        started.elapsed()
    );
    assert!(matches!(
        db.open_store(Duration::from_millis(50)),
        Err(TuneDbError::Busy { .. })
    ));
    drop(store);
    drop(db.open_store(DEFAULT_WAIT).unwrap());
}

#[test]
fn t2_open_insert_drop_open_again_and_again_succeeds() {
    let (_dir, _cache, db) = database();
    for i in 1..=count(60, 1000) {
        let store = db.open_store(DEFAULT_WAIT).unwrap();
        assert_eq!(store.len(), i - 1);
        store.put(&record(i, 4096, 8)).unwrap();
    }
}

#[test]
fn t2_a_killed_owner_does_not_block_the_next() {
    let (dir, _cache, db) = database();
    for i in 0..count(3, 20) {
        let mut child = helper(&["write", &(1000 * i + 1).to_string()], dir.path());
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut first)
            .unwrap();
        child.kill().unwrap();
        drop(db.open_store(DEFAULT_WAIT).unwrap());
        child.wait().unwrap();
    }
}

#[test]
fn t3_kill_9_at_random_moments_loses_nothing_that_was_committed() {
    let (dir, cache, db) = database();
    let mut random = Random(7);
    let mut committed: Vec<usize> = Vec::new();
    for round in 0..count(20, 200) {
        // Fewer than 100 commits fit the time, and batches this large still make real problems.
        let first = 100 * round + 1;
        let mut child = helper(&["write", &first.to_string()], dir.path());
        std::thread::sleep(Duration::from_millis(20 + random.below(180)));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(
            output.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        committed.extend(
            String::from_utf8(output.stdout)
                .unwrap()
                .lines()
                .map(|line| line.parse::<usize>().unwrap()),
        );
        // Readers, before anybody repaired anything.
        let ladder = Ladder::builder().cache(&cache).build();
        assert_eq!(ladder.warnings(), Vec::<String>::new(), "round {round}");
        if let Some(last) = committed.last() {
            assert_eq!(
                ladder
                    .look_up(&problem(*last, 4096), &device())
                    .unwrap()
                    .tier,
                Tier::Local,
                "round {round}"
            );
        }
    }
    assert!(
        committed.len() > 5,
        "the helper should have got somewhere: {committed:?}"
    );
    let found = batches(&db);
    assert!(
        committed.iter().all(|i| found.binary_search(i).is_ok()),
        "{committed:?} in {found:?}"
    );
    let keys: Vec<TuneKey> = committed
        .iter()
        .map(|i| TuneKey::forward(&problem(*i, 4096), &device()))
        .collect();
    assert_eq!(
        db.timings(&keys, DEFAULT_WAIT).unwrap().len(),
        keys.len(),
        "a resumed job repeats nothing"
    );
    assert_eq!(
        ops::verify(&db, DEFAULT_WAIT).unwrap().faults,
        Vec::<String>::new()
    );
    ops::prune(&db, &ops::PrunePolicy::default(), DEFAULT_WAIT).unwrap();
    assert_eq!(ops::verify(&db, DEFAULT_WAIT).unwrap().leftovers, 0);
    // The commit that the last kill cut off may have reached the store and not the snapshot, which prune writes anew: it was not
    // acknowledged, so it may be there or not. Everything else is as before.
    let after = batches(&db);
    let gained: Vec<usize> = after
        .iter()
        .copied()
        .filter(|i| found.binary_search(i).is_err())
        .collect();
    assert!(
        found.iter().all(|i| after.binary_search(i).is_ok()),
        "{found:?} in {after:?}"
    );
    assert!(
        gained.len() <= 1 && gained.iter().all(|i| !committed.contains(i)),
        "{gained:?} came from nowhere"
    );
}

/// Cuts, empties and flips every file, one at a time. `sealed`: the store was closed in order.
fn damage_every_file(original: &Path, expected: &[usize], flips: usize) {
    let mut random = Random(11);
    for file in files_below(original) {
        let name = file.strip_prefix(original).unwrap();
        let bytes = fs::read(&file).unwrap();
        let mut variants: Vec<(String, Vec<u8>)> = vec![
            ("emptied".into(), vec![]),
            ("cut to half".into(), bytes[..bytes.len() / 2].to_vec()),
            ("foreign".into(), vec![0x5a; 4096]),
        ];
        for _ in 0..flips.min(bytes.len()) {
            let mut flipped = bytes.clone();
            let at = random.below(bytes.len() as u64) as usize;
            flipped[at] ^= 1 << random.below(8);
            variants.push((format!("bit flipped at {at}"), flipped));
        }
        for (what, damaged) in variants {
            let dir = tempfile::tempdir().unwrap();
            copy_tree(original, dir.path());
            fs::write(dir.path().join(name), damaged).unwrap();
            let what = format!("{} {what}", name.display());
            let cache = CacheDir::fixed(dir.path());
            let db = LocalDb::in_cache(&cache).unwrap();
            // A reader first: it repairs nothing.
            let ladder = Ladder::builder().cache(&cache).build();
            assert!(
                ladder.warnings().len() <= 1,
                "{what}: {:?}",
                ladder.warnings()
            );
            let answer = ladder
                .look_up(&problem(expected[0], 4096), &device())
                .unwrap();
            assert!(
                matches!(
                    answer.tier,
                    Tier::Local | Tier::LocalNearest | Tier::Default
                ),
                "{what}"
            );
            // Then a writer.
            assert_eq!(
                db.commit(&[record(999, 4096, 8)], &[], DEFAULT_WAIT)
                    .unwrap(),
                Committed::Store,
                "{what}"
            );
            let mut all = expected.to_vec();
            all.push(999);
            assert_eq!(batches(&db), all, "{what}");
            assert_eq!(
                ops::verify(&db, DEFAULT_WAIT).unwrap().faults,
                Vec::<String>::new(),
                "{what}"
            );
        }
    }
}

#[test]
fn t3_each_file_emptied_cut_flipped_or_replaced_costs_no_record() {
    let (dir, _cache, db) = database();
    let records: Vec<_> = (1..=30).map(|i| record(i, 4096, 8)).collect();
    db.commit(&records, &[], DEFAULT_WAIT).unwrap();
    damage_every_file(dir.path(), &(1..=30).collect::<Vec<_>>(), count(12, 150));
}

#[test]
fn t3_damage_to_files_of_a_killed_writer_costs_no_record() {
    let (dir, _cache, db) = database();
    let records: Vec<_> = (1..=30).map(|i| record(i, 4096, 8)).collect();
    db.commit(&records, &[], DEFAULT_WAIT).unwrap();
    // What a kill right after a commit leaves: no seal.
    fs::remove_file(db.root().join("store.seal")).unwrap();
    damage_every_file(dir.path(), &(1..=30).collect::<Vec<_>>(), count(4, 60));
}

#[test]
fn t3_leftovers_of_killed_writers_are_harmless_and_pruned() {
    let (_dir, cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    fs::write(db.root().join(".new-abc"), b"half a snapshot").unwrap();
    fs::create_dir_all(db.parts_path()).unwrap();
    fs::write(db.parts_path().join("host-1-00.part"), b"half a part").unwrap();
    fs::write(db.store_path().join("snap.0000.generating"), b"").unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(
        ladder.look_up(&problem(4, 4096), &device()).unwrap().tier,
        Tier::Local
    );
    assert_eq!(ladder.warnings().len(), 1);
    drop(db.open_store(DEFAULT_WAIT).unwrap());
    let report = ops::prune(&db, &ops::PrunePolicy::default(), DEFAULT_WAIT).unwrap();
    assert_eq!(
        report.leftovers, 2,
        "the temporary file and the part that was set aside"
    );
    assert_eq!(batches(&db), vec![4]);
}

#[test]
fn t3_a_process_killed_while_compacting_leaves_one_whole_store() {
    let (_dir, _cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    // Killed while copying: half a copy.
    fs::create_dir_all(db.root().join("store.new")).unwrap();
    fs::write(db.root().join("store.new/db"), b"half").unwrap();
    assert_eq!(db.open_store(DEFAULT_WAIT).unwrap().len(), 1);
    // Killed between the renames: the old store is gone, the whole copy waits.
    fs::rename(db.store_path(), db.root().join("store.ready")).unwrap();
    fs::remove_file(db.root().join("store.seal")).unwrap();
    assert_eq!(db.open_store(DEFAULT_WAIT).unwrap().len(), 1);
    assert!(!db.root().join("store.new").exists() && !db.root().join("store.ready").exists());
}

#[test]
fn a_foreign_sled_database_is_set_aside_with_its_contents() {
    let (_dir, _cache, db) = database();
    let foreign = sled::open(db.store_path()).unwrap();
    foreign.insert("theirs", "precious").unwrap();
    foreign.flush().unwrap();
    drop(foreign);
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    assert_eq!(batches(&db), vec![4]);
    let aside = sled::open(db.root().join("store.damaged-1")).unwrap();
    assert_eq!(aside.get("theirs").unwrap().unwrap(), "precious");
}

#[test]
fn t5_retuning_the_same_keys_stays_bounded() {
    let (_dir, _cache, db) = database();
    let (keys, rounds) = (500, count(20, 1000));
    let mut records: Vec<_> = (1..=keys).map(|i| record(i, 4096, 8)).collect();
    for round in 0..rounds {
        records
            .iter_mut()
            .for_each(|r| r.evidence.median_us = round as f64);
        db.commit(&records, &[], DEFAULT_WAIT).unwrap();
    }
    let report = ops::prune(&db, &ops::PrunePolicy::default(), DEFAULT_WAIT).unwrap();
    println!("{keys} keys, {rounds} rounds: {report:?}");
    assert!(
        report.bytes_before < 200 << 20,
        "bounded even before prune: {report:?}"
    );
    assert!(report.bytes_after < 50 << 20, "{report:?}");
    let files = files_below(db.root()).len();
    assert!(files < 20, "{files} files");
    let started = Instant::now();
    let store = db.open_store(DEFAULT_WAIT).unwrap();
    let opened = started.elapsed();
    println!("opened in {opened:?}");
    assert_eq!(store.len(), keys);
    // 50 ms on a quiet machine; test machines are not.
    assert!(opened < Duration::from_millis(500), "{opened:?}");
}

#[test]
fn t5_prune_bounds_the_number_of_timings_and_drops_the_oldest() {
    use mamba2_tunedb::{Outcome, Provenance, Timing};
    let (_dir, _cache, db) = database();
    let key = TuneKey::forward(&problem(4, 4096), &device());
    let timing = |i: u64| {
        let outcome = Outcome::Measured {
            median_us: 1.0,
            spread_us: 0.0,
            samples: 1,
            max_error: 0.0,
        };
        let mut timing = Timing::new(
            key,
            &serde_json::json!({ "candidate": i }),
            outcome,
            Provenance::default(),
        );
        timing.date_unix_s = i;
        timing
    };
    db.commit(&[], &(0..100).map(timing).collect::<Vec<_>>(), DEFAULT_WAIT)
        .unwrap();
    let policy = ops::PrunePolicy {
        max_timings: 40,
        ..Default::default()
    };
    assert_eq!(ops::prune(&db, &policy, DEFAULT_WAIT).unwrap().timings, 60);
    let left = db.timings(&[key], DEFAULT_WAIT).unwrap();
    assert_eq!(
        (left.len(), left.iter().map(|t| t.date_unix_s).min()),
        (40, Some(60))
    );
}

#[test]
fn t6_a_writer_without_the_store_leaves_a_part_that_everybody_sees() {
    let (_dir, cache, db) = database();
    db.commit(&[record(1, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let store = db.open_store(DEFAULT_WAIT).unwrap();
    let committed = db
        .commit(&[record(2, 4096, 8)], &[], Duration::ZERO)
        .unwrap();
    let Committed::Part(part) = committed else {
        panic!("{committed:?}")
    };
    assert_eq!(batches(&db), vec![1, 2]);
    let answer = Ladder::builder()
        .cache(&cache)
        .build()
        .look_up(&problem(2, 4096), &device())
        .unwrap();
    assert_eq!(answer.tier, Tier::Local);
    drop(store);
    assert_eq!(db.open_store(DEFAULT_WAIT).unwrap().len(), 2);
    assert!(!part.exists());
    assert_eq!(db.snapshot().unwrap().unwrap().len(), 2);
}

#[test]
fn t6_a_directory_swapped_while_in_use_changes_nothing_for_its_users() {
    let (dir, cache, db) = database();
    db.commit(
        &(1..=50).map(|i| record(i, 4096, 8)).collect::<Vec<_>>(),
        &[],
        DEFAULT_WAIT,
    )
    .unwrap();
    let ladder = Ladder::builder().cache(&cache).build();
    fs::rename(db.root(), dir.path().join("elsewhere")).unwrap();
    for i in 1..=50 {
        assert_eq!(
            ladder.look_up(&problem(i, 4096), &device()).unwrap().tier,
            Tier::Local,
            "{i}"
        );
    }
    db.commit(&[record(60, 4096, 8)], &[], DEFAULT_WAIT)
        .unwrap();
    assert_eq!(batches(&db), vec![60]);
}

#[test]
fn t6_on_a_network_file_system_commits_are_parts_that_everybody_reads_and_nobody_locks() {
    use mamba2_tunedb::{Outcome, Provenance, Timing};
    let dir = tempfile::tempdir().unwrap();
    // What `CacheDir` finds out from the mount table.
    let cache = CacheDir {
        network_file_system: Some("nfs4".into()),
        ..CacheDir::fixed(dir.path())
    };
    let db = LocalDb::in_cache(&cache).unwrap();
    let key = TuneKey::forward(&problem(1, 4096), &device());
    let timing = |us: f64, date| {
        let outcome = Outcome::Measured {
            median_us: us,
            spread_us: 0.0,
            samples: 1,
            max_error: 0.0,
        };
        let mut timing = Timing::new(key, &"candidate", outcome, Provenance::default());
        timing.date_unix_s = date;
        timing
    };
    for (batch, us, date) in [(1, 2.0, 20), (2, 1.0, 10)] {
        let committed = db.commit(&[record(batch, 4096, 8)], &[timing(us, date)], DEFAULT_WAIT);
        assert!(matches!(committed, Ok(Committed::Part(_))), "{committed:?}");
    }
    assert!(!db.store_path().exists() && !db.root().join("lock").exists());
    let refused = db.open_store(DEFAULT_WAIT).unwrap_err();
    assert!(
        refused.to_string().contains("nfs4") && refused.to_string().contains("MAMBA2_CACHE_DIR"),
        "{refused}"
    );
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(
        ladder.look_up(&problem(2, 4096), &device()).unwrap().tier,
        Tier::Local
    );
    assert_eq!(ladder.warnings(), Vec::<String>::new());
    assert_eq!(batches(&db), vec![1, 2]);
    let timings = db.timings(&[key], DEFAULT_WAIT).unwrap();
    assert_eq!(timings.last().unwrap(), &timing(2.0, 20), "the latest last");
    // A host with a local disk takes everything over.
    let (_local_dir, _local_cache, local) = database();
    let report = ops::merge(&local, &[dir.path().to_path_buf()], DEFAULT_WAIT).unwrap();
    assert_eq!((report.added, report.refused), (2, vec![]));
    assert_eq!(
        local.timings(&[key], DEFAULT_WAIT).unwrap(),
        vec![timing(2.0, 20)]
    );
}

#[test]
fn t13_the_directory_is_decided_in_one_order_and_says_why() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().to_str().unwrap();
    let decide =
        |pairs: &[(&str, &str)]| CacheDir::decide(&Environment::from_pairs(pairs.iter().copied()));
    let path = |pairs: &[(&str, &str)]| decide(pairs).path.map(|p| p.to_str().unwrap().to_string());
    let home_cache = format!("{home}/.cache/mamba2");
    assert_eq!(path(&[("HOME", home)]), Some(home_cache.clone()));
    assert_eq!(
        path(&[("HOME", home), ("XDG_CACHE_HOME", home)]),
        Some(format!("{home}/mamba2"))
    );
    let all = [
        ("HOME", home),
        ("XDG_CACHE_HOME", home),
        ("MAMBA2_CACHE_DIR", "/somewhere/else"),
    ];
    assert_eq!(path(&all), Some("/somewhere/else".into()));
    assert_eq!(
        path(&[("HOME", home), ("XDG_CACHE_HOME", "relative")]),
        Some(home_cache)
    );
    let none = decide(&[]);
    assert_eq!(none.path, None);
    assert!(none.reason.contains("HOME is not set"), "{}", none.reason);
    let absent = decide(&[("HOME", "/nonexistent")]);
    assert_eq!(absent.path, None);
    assert!(absent.reason.contains("/nonexistent"), "{}", absent.reason);
    assert_eq!(decide(&[("HOME", "/dev/null")]).path, None);
}

#[test]
fn t13_without_a_directory_computing_works_with_one_warning() {
    let cache = CacheDir::decide(&Environment::from_pairs([]));
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(ladder.warnings().len(), 1);
    let answer = ladder.look_up(&problem(4, 4096), &device()).unwrap();
    assert!(answer.warnings.is_empty());
    assert!(matches!(
        LocalDb::in_cache(&cache),
        Err(TuneDbError::NoDirectory(_))
    ));
    assert_eq!(ops::path(&cache).cache_dir, None);
}

#[test]
fn t13_an_unwritable_directory_is_an_error_of_the_writer_only() {
    // Nobody, root included, makes directories in /proc.
    let cache = CacheDir::fixed("/proc/mamba2-cache");
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(ladder.warnings(), Vec::<String>::new());
    assert!(ladder.look_up(&problem(4, 4096), &device()).is_ok());
    let db = LocalDb::in_cache(&cache).unwrap();
    assert!(matches!(
        db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT),
        Err(TuneDbError::Io { .. })
    ));
    assert_eq!(ops::list(&db).unwrap(), vec![]);
    // A path through a file.
    let file = tempfile::NamedTempFile::new().unwrap();
    let db = LocalDb::in_cache(&CacheDir::fixed(file.path())).unwrap();
    assert!(matches!(
        db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT),
        Err(TuneDbError::Io { .. })
    ));
    assert!(db.snapshot().unwrap().is_none());
}

#[test]
#[cfg(target_os = "linux")]
fn t13_another_users_directory_is_passed_over() {
    use std::os::unix::fs::MetadataExt;
    let home = tempfile::tempdir().unwrap();
    let cache = home.path().join(".cache/mamba2");
    fs::create_dir_all(&cache).unwrap();
    let decide = || {
        CacheDir::decide(&Environment::from_pairs([(
            "HOME",
            home.path().to_str().unwrap(),
        )]))
    };
    assert_eq!(decide().path, Some(cache.clone()));
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        println!("SKIPPED: only root can give a directory to another user");
        return;
    }
    std::os::unix::fs::chown(&cache, Some(12345), None).unwrap();
    let decided = decide();
    assert_eq!(decided.path, None);
    assert!(
        decided.reason.contains("belongs to another user"),
        "{}",
        decided.reason
    );
}

/// A file system of 1 MiB, if this process may mount one.
#[cfg(target_os = "linux")]
struct SmallDisk(tempfile::TempDir);

#[cfg(target_os = "linux")]
impl SmallDisk {
    fn mount(options: &str) -> Option<SmallDisk> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "none"])
            .arg(dir.path())
            .output();
        mounted
            .is_ok_and(|o| o.status.success())
            .then_some(SmallDisk(dir))
    }
}

#[cfg(target_os = "linux")]
impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
#[cfg(target_os = "linux")]
fn t13_a_full_disk_keeps_what_was_there_and_computes() {
    let Some(disk) = SmallDisk::mount("size=2m") else {
        println!("SKIPPED: may not mount; a failing writer is tested in files.rs");
        return;
    };
    let cache = CacheDir::fixed(disk.0.path());
    let db = LocalDb::in_cache(&cache).unwrap();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let _ = fs::write(disk.0.path().join("filler"), vec![0u8; 4 << 20]);
    let many: Vec<_> = (1..400).map(|i| record(i, 8192, 8)).collect();
    let result = db.commit(&many, &[], DEFAULT_WAIT);
    assert!(result.is_err(), "{result:?}");
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(
        ladder.look_up(&problem(4, 4096), &device()).unwrap().tier,
        Tier::Local
    );
    fs::remove_file(disk.0.path().join("filler")).unwrap();
    db.commit(&[record(5, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let found = batches(&db);
    assert!(found.contains(&4) && found.contains(&5), "{found:?}");
}

/// Names and contents of every file.
#[cfg(target_os = "linux")]
fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    files_below(dir)
        .into_iter()
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// Every write beyond a limit fails, as on a disk that fills up at that very byte: in sled's log, in the snapshot, in the seal.
#[test]
#[cfg(target_os = "linux")]
fn t13_a_write_that_fails_at_any_size_keeps_what_was_there() {
    let (dir, _cache, db) = database();
    let records: Vec<_> = (1..=30).map(|i| record(i, 4096, 8)).collect();
    db.commit(&records, &[], DEFAULT_WAIT).unwrap();
    let mut failures = 0;
    // Units of 512 bytes (dash) or 1 KiB (bash).
    for blocks in [
        0, 1, 2, 5, 13, 31, 60, 100, 500, 700, 1023, 1024, 1030, 1500,
    ] {
        let copy = tempfile::tempdir().unwrap();
        copy_tree(dir.path(), copy.path());
        let limited = Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f $0; exec \"$@\""])
            .arg(blocks.to_string())
            .arg(env!("CARGO_BIN_EXE_mamba2-tunedb-fault-helper"))
            .arg("commit")
            .arg(copy.path())
            .args(["100", "1"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&limited.stderr).into_owned();
        assert!(!said.contains("panicked"), "{blocks} blocks: {said}");
        failures += usize::from(!limited.status.success());
        let cache = CacheDir::fixed(copy.path());
        let db = LocalDb::in_cache(&cache).unwrap();
        let ladder = Ladder::builder().cache(&cache).build();
        let answer = ladder.look_up(&problem(7, 4096), &device()).unwrap();
        assert_eq!(answer.tier, Tier::Local, "{blocks} blocks: {said}");
        assert!(ladder.warnings().len() <= 1, "{:?}", ladder.warnings());
        assert_eq!(
            db.commit(&[record(200, 4096, 8)], &[], DEFAULT_WAIT)
                .unwrap(),
            Committed::Store,
            "{blocks} blocks"
        );
        let found = batches(&db);
        assert!(
            (1..=30)
                .chain([200])
                .all(|i| found.binary_search(&i).is_ok()),
            "{blocks} blocks: {found:?}"
        );
        assert_eq!(
            ops::verify(&db, DEFAULT_WAIT).unwrap().faults,
            Vec::<String>::new(),
            "{blocks} blocks"
        );
    }
    assert!(failures > 3, "only {failures} commits met the limit");
}

/// As a user who may read and not write. Root may always write, so root's test runs the helper as nobody.
#[test]
#[cfg(target_os = "linux")]
fn t13_a_read_only_directory_answers_and_tells_the_writer() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65_534;
    let (dir, _cache, db) = database();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    // Where this was built may be private.
    let helper_copy = dir.path().join("helper");
    fs::copy(
        env!("CARGO_BIN_EXE_mamba2-tunedb-fault-helper"),
        &helper_copy,
    )
    .unwrap();
    let mode = |writable: bool| {
        for path in [dir.path().to_path_buf(), db.root().into(), db.store_path()] {
            let mode = if writable { 0o755 } else { 0o555 };
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    mode(false);
    let before = contents(db.root());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&helper_copy);
        command
            .arg(arguments[0])
            .arg(dir.path())
            .args(&arguments[1..]);
        if fs::metadata("/proc/self").unwrap().uid() == 0 {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.output().unwrap()
    };
    let looked = run(&["look", "4"]);
    let wrote = run(&["commit", "5", "1"]);
    mode(true);
    assert_eq!(
        String::from_utf8_lossy(&looked.stdout),
        "local, 0 warnings\n",
        "{looked:?}"
    );
    let said = String::from_utf8_lossy(&wrote.stderr);
    assert!(
        !wrote.status.success() && said.contains("Permission denied") && !said.contains("panicked"),
        "{wrote:?}"
    );
    assert_eq!(contents(db.root()), before, "nothing was written");
}

#[test]
#[cfg(target_os = "linux")]
fn t13_read_only_media_answer() {
    let Some(disk) = SmallDisk::mount("size=8m") else {
        println!("SKIPPED: may not mount");
        return;
    };
    let cache = CacheDir::fixed(disk.0.path());
    let db = LocalDb::in_cache(&cache).unwrap();
    db.commit(&[record(4, 4096, 8)], &[], DEFAULT_WAIT).unwrap();
    let remount = Command::new("mount")
        .args(["-o", "remount,ro"])
        .arg(disk.0.path())
        .status()
        .unwrap();
    assert!(remount.success());
    let ladder = Ladder::builder().cache(&cache).build();
    assert_eq!(
        ladder.look_up(&problem(4, 4096), &device()).unwrap().tier,
        Tier::Local
    );
    assert_eq!(ladder.warnings(), Vec::<String>::new());
    assert!(matches!(
        db.commit(&[record(5, 4096, 8)], &[], DEFAULT_WAIT),
        Err(TuneDbError::Io { .. })
    ));
    assert_eq!(batches(&db), vec![4]);
}
