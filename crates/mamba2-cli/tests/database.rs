//! `mamba2 db`: records go from one machine to another as text.
#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

mod common;

use common::Bench;
use mamba2_spec::{Arch, DeviceFacts, Problem, rules};
use mamba2_tunedb::{Evidence, Record, write_text};

fn record(shape: &str, median_us: f64) -> Record {
    let device = DeviceFacts::assumed(Arch(90));
    let problem: Problem = shape.parse().unwrap();
    let config = rules::default_strategy(&problem, &device).unwrap();
    let evidence = Evidence {
        median_us,
        samples: 20,
        gpu: "NVIDIA H200".into(),
        ..Evidence::default()
    };
    Record::forward(&problem, &device, &config, evidence)
}

/// None of those whose records are shipped, nor near one.
const SHAPE: &str = "b=1,l=4096,h=72,p=64,g=1,n=128";

#[test]
fn imported_records_are_listed_explained_exported_and_the_same() {
    let bench = Bench::new();
    let text = write_text([
        record(SHAPE, 100.0),
        record("b=2,l=512,h=8,p=64,g=1,n=64", 20.0),
    ])
    .unwrap();
    bench.write("in.json", text.as_bytes());
    bench.run(&["db", "import", "in.json"]).ok();
    let list = bench.run(&["db", "list"]).ok().stdout;
    assert_eq!(
        list.lines().filter(|l| l.starts_with("local")).count(),
        2,
        "{list}"
    );
    let explained = bench
        .run(&["explain", "--arch", "90", "--shape", SHAPE])
        .ok()
        .stdout;
    assert!(
        explained.contains("tier        local") && explained.contains("100.00 us"),
        "{explained}"
    );
    bench.run(&["db", "verify"]).ok();
    bench.run(&["db", "export", "-o", "out.json"]).ok();
    assert!(
        bench
            .run(&["db", "diff", "in.json", "out.json"])
            .ok()
            .stdout
            .contains("the same configs")
    );
    assert!(
        bench
            .run(&["db", "diff", "in.json"])
            .ok()
            .stdout
            .contains("the same configs")
    );
    let key = list.split_whitespace().nth(3).unwrap();
    let shown = bench.run(&["db", "show", key]).ok().json();
    assert!(shown["record"]["evidence"]["median_us"].as_f64().unwrap() > 0.0);
    bench.run(&["db", "prune"]).ok();
    assert_eq!(
        bench.run(&["db", "list"]).ok().stdout,
        list,
        "pruning should keep good records"
    );
}

#[test]
fn shards_are_merged_from_files_and_from_cache_directories() {
    let shards: Vec<Bench> = ["b=1,l=512,h=8,p=64,g=1,n=64", "b=2,l=512,h=8,p=64,g=1,n=64"]
        .into_iter()
        .map(|shape| {
            let bench = Bench::new();
            bench.write(
                "in.json",
                write_text([record(shape, 20.0)]).unwrap().as_bytes(),
            );
            bench.run(&["db", "import", "in.json"]).ok();
            bench
        })
        .collect();
    let bench = Bench::new();
    let (file, folder) = (shards[0].path("in.json"), shards[1].path("cache"));
    let done = bench
        .run(&[
            "db",
            "merge",
            file.to_str().unwrap(),
            folder.to_str().unwrap(),
        ])
        .ok();
    assert!(done.stdout.contains("took 2 records"), "{done:?}");
    assert_eq!(
        bench
            .run(&["db", "list", "--json"])
            .ok()
            .json()
            .as_array()
            .unwrap()
            .len(),
        2 + shipped(&bench)
    );
}

fn shipped(bench: &Bench) -> usize {
    let rows = bench.run(&["db", "list", "--json"]).ok().json();
    rows.as_array()
        .unwrap()
        .iter()
        .filter(|r| r["origin"] == "shipped")
        .count()
}

#[test]
fn an_exported_folder_has_one_file_per_kind_of_gpu() {
    let bench = Bench::new();
    bench.write(
        "in.json",
        write_text([record(SHAPE, 100.0)]).unwrap().as_bytes(),
    );
    bench.run(&["db", "import", "in.json"]).ok();
    std::fs::create_dir(bench.path("tuning-db")).unwrap();
    bench.run(&["db", "export", "-o", "tuning-db"]).ok();
    assert!(bench.path("tuning-db/sm90-132sm.json").exists());
}

#[test]
fn a_file_that_is_no_record_text_changes_nothing() {
    let bench = Bench::new();
    for text in ["", "hello", "{}", "[1,2,3]"] {
        bench.write("bad.json", text.as_bytes());
        let done = bench.run(&["db", "import", "bad.json"]);
        assert_ne!(done.code, 0, "{text:?}: {done:?}");
        let done = bench.run(&["db", "merge", "bad.json"]);
        assert_ne!(done.code, 0, "{text:?}: {done:?}");
    }
    assert!(
        bench
            .run(&["db", "list"])
            .ok()
            .stdout
            .lines()
            .all(|l| !l.starts_with("local"))
    );
}

#[test]
fn a_bundle_travels() {
    let bench = Bench::new();
    let done = bench.run(&["db", "bundle", "-o", "empty.mamba2bundle"]);
    assert_eq!(done.code, 2, "there is nothing to bundle: {done:?}");
    bench.write(
        "in.json",
        write_text([record(SHAPE, 100.0)]).unwrap().as_bytes(),
    );
    bench.run(&["db", "import", "in.json"]).ok();
    bench.run(&["db", "bundle", "-o", "h200.mamba2bundle"]).ok();
    let other = Bench::new();
    let path = bench.path("h200.mamba2bundle");
    other.run(&["db", "import", path.to_str().unwrap()]).ok();
    let explained = other
        .run(&["explain", "--arch", "90", "--shape", SHAPE])
        .ok()
        .stdout;
    assert!(explained.contains("tier        bundle"), "{explained}");
    // A flipped bit anywhere is refused, and nothing is written.
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 4;
    let third = Bench::new();
    third.write("bad.mamba2bundle", &bytes);
    let done = third.run(&["db", "import", "bad.mamba2bundle"]);
    assert_ne!(done.code, 0, "{done:?}");
    assert!(
        third
            .run(&["db", "verify"])
            .ok()
            .stdout
            .contains("0 bundles")
    );
}
