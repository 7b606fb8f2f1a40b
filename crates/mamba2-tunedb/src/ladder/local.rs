//! The local tier: where it is read from when pieces of it are missing or damaged.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::Ladder;
use super::source::Source;
use crate::local::LocalDb;
use crate::parts;
use crate::record::Record;
use crate::snapshot::Snapshot;

/// The local tier: what this process learned, parts, and the store or the snapshot.
#[derive(Default)]
pub(super) struct Local {
    /// Wins over what lies below for the same key.
    pub learned: BTreeMap<String, Record>,
    pub published: Option<Arc<dyn Source>>,
    pub digest: Option<String>,
    pub warnings: Vec<String>,
}

impl Ladder {
    pub(super) fn read_local(&self, learned: BTreeMap<String, Record>) -> Local {
        let mut local = Local {
            learned,
            ..Local::default()
        };
        if let Some(store) = &self.store {
            local.published = Some(store.clone());
            return local;
        }
        let Some(db) = &self.db else { return local };
        for path in parts::list(&db.parts_path()) {
            match parts::read(&path) {
                Ok(part) => part
                    .records
                    .into_iter()
                    .for_each(|record| merge_into(&mut local.learned, record)),
                Err(e) => local.warnings.push(format!("{e}; passed over")),
            }
        }
        match db.snapshot() {
            Ok(Some(snapshot)) => {
                // A part may be older than what was committed since.
                local.learned.retain(|_, record| {
                    let published = snapshot.get(&record.key).ok().flatten();
                    published.is_none_or(|published| {
                        !std::ptr::eq(published.preferred(record), &published)
                    })
                });
                local.digest = Some(snapshot.digest());
                local.published = Some(Arc::new(snapshot));
            }
            Ok(None) => self.read_store(db, &mut local),
            Err(e) => {
                let saved = Snapshot::salvage(&db.snapshot_path()).unwrap_or_default();
                local
                    .warnings
                    .push(format!("{e}; using {} good records of it", saved.len()));
                saved
                    .into_iter()
                    .for_each(|record| merge_into(&mut local.learned, record));
                self.read_store(db, &mut local);
            }
        }
        local
    }

    /// Without a good snapshot the store itself is asked, if it is there and nobody holds it.
    fn read_store(&self, db: &LocalDb, local: &mut Local) {
        if !db.store_path().is_dir() {
            return;
        }
        match db.open_store(Duration::ZERO) {
            Ok(store) => store
                .records()
                .flatten()
                .for_each(|record| merge_into(&mut local.learned, record)),
            Err(e) => local
                .warnings
                .push(format!("{e}; going on without the local store")),
        }
    }
}

fn merge_into(records: &mut BTreeMap<String, Record>, record: Record) {
    let key = record.key.to_string();
    match records.get(&key) {
        Some(old) if std::ptr::eq(old.preferred(&record), old) => {}
        _ => drop(records.insert(key, record)),
    }
}
