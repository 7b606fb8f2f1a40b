//! The cubin cache under races, damage and unwritable directories. Needs neither GPU nor NVRTC.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{child, made_up, passed};
use mamba2_cuda::{Cubin, CubinCache, KernelKey, NvrtcVersion, Wanted};

fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(directory)
        .expect("directory")
        .map(|e| e.expect("entry").path())
        .collect();
    all.sort();
    all
}

fn version(cubin: &Cubin) -> Wanted {
    Wanted::Exactly(cubin.key.nvrtc)
}

#[test]
fn what_was_put_comes_back_whole_and_only_under_its_own_key() {
    let directory = tempfile::tempdir().expect("directory");
    let cache = CubinCache::new(directory.path().join("made/on/demand"));
    assert!(cache.is_empty());
    let cubin = made_up("A = 1;\n", (13, 0), b"some code");
    cache.put(&cubin);
    assert!(!cache.is_empty());
    assert_eq!(
        cache.get(&cubin.key.identity, version(&cubin)),
        Some(cubin.clone())
    );
    for other in [
        made_up("A = 2;\n", (13, 0), b""),
        {
            let mut c = cubin.clone();
            c.key.identity.arch = "sm_80".into();
            c
        },
        {
            let mut c = cubin.clone();
            c.key.identity.source_digest = "01".into();
            c
        },
        {
            let mut c = cubin.clone();
            c.key.identity.options.push("--generate-line-info".into());
            c
        },
        {
            let mut c = cubin.clone();
            c.key.identity.kernel = "other".into();
            c
        },
    ] {
        assert_eq!(
            cache.get(&other.key.identity, version(&other)),
            None,
            "{:?}",
            other.key
        );
    }
    assert_eq!(
        cache.get(
            &cubin.key.identity,
            Wanted::Exactly(NvrtcVersion {
                major: 12,
                minor: 8
            })
        ),
        None
    );
}

#[test]
fn a_host_without_nvrtc_takes_the_newest_version_there_is() {
    let directory = tempfile::tempdir().expect("directory");
    let cache = CubinCache::new(directory.path());
    for v in [(12, 9), (13, 0), (12, 10)] {
        cache.put(&made_up("A = 1;\n", v, format!("{v:?}").as_bytes()));
    }
    let found = cache
        .get(
            &made_up("A = 1;\n", (0, 0), b"").key.identity,
            Wanted::Newest,
        )
        .expect("one of them");
    assert_eq!(found.compiled.cubin, b"(13, 0)");
}

#[test]
fn a_damaged_file_is_a_miss_and_is_replaced() {
    let directory = tempfile::tempdir().expect("directory");
    let cache = CubinCache::new(directory.path());
    let cubin = made_up("A = 1;\n", (13, 0), &[7; 300]);
    let whole = cubin.to_bytes();
    let mut damaged: Vec<Vec<u8>> = (0..whole.len())
        .step_by(17)
        .map(|n| whole[..n].to_vec())
        .collect();
    damaged.extend((0..whole.len()).map(|i| {
        let mut bytes = whole.clone();
        bytes[i] ^= 0x20;
        bytes
    }));
    damaged.push([whole.clone(), vec![0]].concat());
    damaged.push(b"foreign".to_vec());
    cache.put(&cubin);
    let path = files(directory.path()).pop().expect("one file");
    for bytes in damaged {
        std::fs::write(&path, &bytes).expect("write");
        if let Some(found) = cache.get(&cubin.key.identity, version(&cubin)) {
            // Only the compiler's report is not covered by key or digest; code and key must be right.
            assert_eq!(
                (found.key, found.compiled.cubin),
                (cubin.key.clone(), cubin.compiled.cubin.clone())
            );
        }
        cache.put(&cubin);
        assert_eq!(
            cache.get(&cubin.key.identity, version(&cubin)),
            Some(cubin.clone())
        );
    }
}

#[test]
fn a_file_with_another_key_under_our_name_is_neither_used_nor_removed() {
    let directory = tempfile::tempdir().expect("directory");
    let cache = CubinCache::new(directory.path());
    let (ours, theirs) = (
        made_up("A = 1;\n", (13, 0), b"ours"),
        made_up("A = 2;\n", (13, 0), b"theirs"),
    );
    cache.put(&ours);
    let path = files(directory.path()).pop().expect("one file");
    std::fs::write(&path, theirs.to_bytes()).expect("write");
    assert_eq!(cache.get(&ours.key.identity, version(&ours)), None);
    assert!(path.exists());
}

#[test]
fn a_key_survives_its_text_and_a_foreign_text_is_refused() {
    let key = made_up("A = 1;\n", (13, 0), b"").key;
    assert_eq!(KernelKey::from_text(&key.to_text()), Ok(key.clone()));
    for bad in [
        "",
        "{}",
        "[1]",
        &key.to_text()[1..],
        &key.to_text().replace("\"arch\"", "\"arc\""),
    ] {
        assert!(KernelKey::from_text(bad).is_err(), "{bad}");
    }
}

#[test]
fn threads_that_publish_and_read_one_key_see_nothing_or_all() {
    let directory = tempfile::tempdir().expect("directory");
    race(directory.path());
    assert_eq!(
        files(directory.path()).len(),
        4,
        "one file a key and nothing left over"
    );
}

#[test]
fn i8_processes_that_publish_and_read_one_directory_see_nothing_or_all() {
    let directory = tempfile::tempdir().expect("directory");
    let variables = [("MAMBA2_TEST_CACHE", Some(directory.path().to_path_buf()))];
    let children: Vec<_> = (0..8)
        .map(|_| {
            let mut command = child("child_races", &variables);
            command
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
            command.spawn().expect("child")
        })
        .collect();
    for child in children {
        passed(&child.wait_with_output().expect("child"));
    }
    assert_eq!(files(directory.path()).len(), 4);
}

#[test]
#[ignore = "run by i8_processes_that_publish_and_read_one_directory_see_nothing_or_all"]
fn child_races() {
    race(Path::new(
        &std::env::var_os("MAMBA2_TEST_CACHE").expect("directory"),
    ));
}

fn race(directory: &Path) {
    let cubins: Vec<Cubin> = (0..4u8)
        .map(|i| made_up(&format!("A = {i};\n"), (13, 0), &vec![i; 20_000]))
        .collect();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let cubins = &cubins;
            scope.spawn(move || {
                let cache = CubinCache::new(directory);
                for i in 0..100 {
                    let cubin = &cubins[(i + t) % 4];
                    cache.put(cubin);
                    let found = cache
                        .get(&cubin.key.identity, version(cubin))
                        .expect("just published");
                    assert_eq!(found, *cubin);
                }
            });
        }
    });
}

#[test]
fn the_directory_stays_below_its_bound_and_what_dead_writers_left_goes() {
    let directory = tempfile::tempdir().expect("directory");
    let leftover = directory.path().join(".tmpdead");
    std::fs::write(&leftover, b"half").expect("write");
    let two_hours_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    std::fs::File::options()
        .write(true)
        .open(&leftover)
        .and_then(|f| f.set_modified(two_hours_ago))
        .expect("date");
    let cache = CubinCache::new(directory.path()).with_limit(200_000);
    for i in 0..200 {
        cache.put(&made_up(&format!("A = {i};\n"), (13, 0), &[1; 5000]));
    }
    let pruned = cache.prune(200_000).expect("prune");
    let bytes: u64 = files(directory.path())
        .iter()
        .map(|f| f.metadata().expect("file").len())
        .sum();
    assert!(bytes <= 200_000 && bytes > 190_000, "{bytes}");
    assert_eq!(pruned.bytes_before - pruned.bytes_removed, bytes);
    assert!(!leftover.exists());
    // The newest survive.
    let last = made_up("A = 199;\n", (13, 0), &[1; 5000]);
    assert!(cache.get(&last.key.identity, version(&last)).is_some());
    assert_eq!(cache.export().len(), files(directory.path()).len());
}

/// Counts warnings.
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn t13_an_unwritable_directory_costs_one_warning_and_nothing_else() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("file");
    std::fs::write(&file, b"").expect("write");
    let count = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(Warnings(count.clone()), || {
        // Below a file nothing can be made, whoever asks (permission bits do not stop root).
        let cache = CubinCache::new(file.join("cubins"));
        for i in 0..5 {
            let cubin = made_up(&format!("A = {i};\n"), (13, 0), b"code");
            cache.clone().put(&cubin);
            assert_eq!(cache.get(&cubin.key.identity, version(&cubin)), None);
        }
        assert!(cache.prune(0).is_err() || cache.is_empty());
    });
    assert_eq!(count.load(Ordering::Relaxed), 1);
    assert_eq!(std::fs::read(&file).expect("still there"), b"");
}

#[test]
fn a_disabled_cache_forgets_everything() {
    let cache = CubinCache::disabled();
    let cubin = made_up("A = 1;\n", (13, 0), b"code");
    cache.put(&cubin);
    assert_eq!(cache.get(&cubin.key.identity, version(&cubin)), None);
    assert_eq!(cache.prune(0).expect("nothing to do").files_before, 0);
    assert!(cache.export().is_empty());
}
