//! The operations behind `mamba2 db`.
#![allow(clippy::unwrap_used)] // clippy does not see that helpers of tests are tests

mod common;

use std::fs;

use common::{database, device, problem, record};
use mamba2_tunedb::ops::{self, Difference};
use mamba2_tunedb::{
    DEFAULT_WAIT, LocalDb, Outcome, Provenance, Record, Shipped, TextRecords, Timing, TuneKey,
    validate, write_text,
};
use serde_json::json;

fn timing(batch: usize, median_us: f64, date_unix_s: u64) -> Timing {
    let outcome = Outcome::Measured {
        median_us,
        spread_us: 0.0,
        samples: 1,
        max_error: 0.0,
    };
    let key = TuneKey::forward(&problem(batch, 4096), &device());
    let mut timing = Timing::new(
        key,
        &json!({ "candidate": 1 }),
        outcome,
        Provenance::default(),
    );
    timing.date_unix_s = date_unix_s;
    timing
}

fn batches(db: &LocalDb) -> Vec<usize> {
    ops::list(db)
        .unwrap()
        .iter()
        .map(|r| r.key.problem().unwrap().batch)
        .collect()
}

#[test]
fn exported_text_is_sorted_one_record_a_line_and_comes_back_the_same() {
    let (dir, _cache, db) = database();
    db.commit(
        &[record(9, 4096, 8), record(1, 64, 2), record(4, 4096, 8)],
        &[],
        DEFAULT_WAIT,
    )
    .unwrap();
    let (texts, faults) = ops::export(&ops::list(&db).unwrap()).unwrap();
    assert_eq!((texts.len(), faults), (1, vec![]));
    let text = &texts["sm80-108sm.json"];
    let parsed: serde_json::Value =
        serde_json::from_str(text).expect("the text should be JSON as a whole");
    assert_eq!(parsed["records"].as_array().unwrap().len(), 3);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5);
    assert!(lines[1..4].is_sorted());
    let (path, (_dir2, _cache2, other)) = (dir.path().join("export.json"), database());
    ops::write_file(&path, text).unwrap();
    let report = ops::import(&other, &path, DEFAULT_WAIT).unwrap();
    assert_eq!((report.added, report.kept, report.refused.len()), (3, 0, 0));
    assert_eq!(ops::export(&ops::list(&other).unwrap()).unwrap().0, texts);
    assert_eq!(ops::import(&other, &path, DEFAULT_WAIT).unwrap().kept, 3);
}

#[test]
fn an_import_takes_the_good_records_and_names_the_bad_ones() {
    let (dir, _cache, db) = database();
    let mut illegal = record(4, 4096, 8);
    illegal.config["chunk_cumsum"]["block_h"] = json!(3);
    let path = dir.path().join("records.json");
    fs::write(&path, write_text([record(1, 64, 2), illegal]).unwrap()).unwrap();
    let report = ops::import(&db, &path, DEFAULT_WAIT).unwrap();
    assert_eq!((report.added, report.refused.len()), (1, 1));
    assert!(
        report.refused[0].contains("block_h"),
        "{:?}",
        report.refused
    );
    assert_eq!(batches(&db), vec![1]);
}

#[test]
fn a_cut_or_unsorted_text_is_refused_as_a_whole() {
    let good = write_text([record(1, 64, 2), record(4, 4096, 8)]).unwrap();
    let lines: Vec<&str> = good.lines().collect();
    let unsorted = [
        lines[0],
        &format!("{},", lines[2]),
        lines[1].trim_end_matches(','),
        lines[3],
        "",
    ]
    .join("\n");
    for bad in [
        &good[..good.len() - 3],
        &unsorted,
        &good.replace("\"version\":1", "\"version\":2"),
        "",
        "[]",
    ] {
        assert!(TextRecords::new("text", bad.to_string()).is_err(), "{bad}");
    }
    assert!(TextRecords::new("text", good).is_ok());
}

#[test]
fn shards_merge_in_any_order_with_their_timings() {
    let shard = |batches: &[usize], median_us, date| {
        let (dir, _cache, db) = database();
        let records: Vec<Record> = batches.iter().map(|b| record(*b, 4096, 8)).collect();
        db.commit(
            &records,
            &[
                timing(batches[0], median_us, date),
                timing(7, median_us, date),
            ],
            DEFAULT_WAIT,
        )
        .unwrap();
        dir
    };
    let (one, two) = (shard(&[1, 2], 5.0, 10), shard(&[2, 3], 6.0, 20));
    for order in [[&one, &two], [&two, &one]] {
        let (_dir, _cache, db) = database();
        let sources: Vec<_> = order.iter().map(|d| d.path().to_path_buf()).collect();
        let report = ops::merge(&db, &sources, DEFAULT_WAIT).unwrap();
        assert_eq!((report.added, report.kept, report.refused.len()), (3, 1, 0));
        assert_eq!(batches(&db), vec![1, 2, 3]);
        let key = TuneKey::forward(&problem(7, 4096), &device());
        let kept = db.timings(&[key], DEFAULT_WAIT).unwrap();
        assert_eq!(
            kept.iter().map(|t| t.date_unix_s).collect::<Vec<_>>(),
            vec![20],
            "the later timing stays"
        );
    }
}

#[test]
fn merging_a_database_with_itself_or_with_nothing_is_told() {
    let (dir, _cache, db) = database();
    db.commit(&[record(1, 64, 2)], &[], DEFAULT_WAIT).unwrap();
    let report = ops::merge(
        &db,
        &[dir.path().to_path_buf(), dir.path().join("absent")],
        DEFAULT_WAIT,
    )
    .unwrap();
    assert_eq!((report.added, report.refused.len()), (0, 2));
}

#[test]
fn a_difference_names_the_parameters() {
    let (left, right) = (
        [record(1, 64, 2), record(4, 4096, 8)],
        [record(4, 4096, 2), record(9, 64, 2)],
    );
    let found = ops::diff(&left, &right);
    assert_eq!(found.len(), 3);
    assert_eq!(found[0], Difference::OnlyLeft { key: left[0].key });
    assert_eq!(found[2], Difference::OnlyRight { key: right[1].key });
    let Difference::Config { parameters, .. } = &found[1] else {
        panic!("{found:?}")
    };
    assert_eq!(parameters.len(), 1);
    assert_eq!(parameters["chunk_cumsum.block_h"], (json!(8), json!(2)));
    assert_eq!(ops::diff(&left, &left), vec![]);
}

#[test]
fn verify_names_what_prune_takes_out() {
    let (_dir, _cache, db) = database();
    let mut illegal = record(4, 4096, 8);
    illegal.config["chunk_cumsum"]["block_h"] = json!(3);
    db.commit(
        &[record(1, 64, 2), illegal],
        &[timing(1, 1.0, 1)],
        DEFAULT_WAIT,
    )
    .unwrap();
    let report = ops::verify(&db, DEFAULT_WAIT).unwrap();
    assert_eq!(
        (report.records, report.timings, report.faults.len()),
        (1, Some(1), 1)
    );
    let pruned = ops::prune(&db, &ops::PrunePolicy::default(), DEFAULT_WAIT).unwrap();
    assert_eq!((pruned.records, pruned.timings), (1, 0));
    let report = ops::verify(&db, DEFAULT_WAIT).unwrap();
    assert_eq!(
        (report.records, report.timings, report.faults.len()),
        (1, Some(1), 0)
    );
}

#[test]
fn operations_on_an_empty_directory_find_nothing_and_make_nothing() {
    let (dir, cache, db) = database();
    assert_eq!(ops::list(&db).unwrap(), vec![]);
    assert_eq!(
        ops::verify(&db, DEFAULT_WAIT).unwrap(),
        ops::VerifyReport::default()
    );
    let key = TuneKey::forward(&problem(1, 64), &device());
    assert!(ops::show(&db, &key, DEFAULT_WAIT).unwrap().record.is_none());
    assert_eq!(ops::path(&cache).bytes, 0);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_selection_matches_whole_pairs() {
    let records = vec![record(1, 64, 2), record(16, 64, 2), record(1, 640, 2)];
    assert_eq!(ops::select(records.clone(), "b=1").len(), 2);
    assert_eq!(ops::select(records.clone(), "b=1, l=64").len(), 1);
    assert_eq!(ops::select(records, "").len(), 3);
}

#[test]
fn every_shipped_record_is_whole_legal_and_in_the_file_of_its_gpu() {
    let shipped = Shipped::embedded();
    for record in shipped.records() {
        let record = record.unwrap();
        validate::check_record(&record).unwrap();
        assert_eq!(
            shipped.get(&record.key).unwrap().as_ref(),
            Some(&record),
            "{}",
            record.key
        );
    }
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tuning-db")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "json") {
            let text = fs::read_to_string(&path).unwrap();
            let records: Vec<Record> = TextRecords::new("shipped", text.clone())
                .unwrap()
                .records()
                .collect::<Result<_, _>>()
                .unwrap();
            assert_eq!(
                write_text(records).unwrap(),
                text,
                "{} should be canonical",
                path.display()
            );
        }
    }
}
