//! What the ladder can ask for records.

use std::collections::BTreeMap;

use super::NEAREST_BOUND;
use crate::bundle::Bundle;
use crate::error::Result;
use crate::key::TuneKey;
use crate::record::Record;
use crate::shipped::Shipped;
use crate::snapshot::Snapshot;
use crate::store::Store;

/// Where records can be looked up.
pub(super) trait Source: Send + Sync {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>>;
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>>;
    /// Numbers of multiprocessors of GPUs of the same architecture that there are records for.
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>>;
}

/// Prefix of all keys of an architecture.
fn arch_prefix(key: &TuneKey) -> String {
    let text = key.to_string();
    let end = text.find(",sms=").map_or(text.len(), |i| i + ",sms=".len());
    text[..end].to_string()
}

fn sm_counts_of(keys: impl IntoIterator<Item = TuneKey>) -> Vec<u32> {
    let counts: std::collections::BTreeSet<u32> = keys.into_iter().map(|k| k.sm_count()).collect();
    counts.into_iter().collect()
}

impl Source for Snapshot {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Snapshot::get(self, key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        Snapshot::family(self, key)
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        self.keys_with_prefix(&arch_prefix(key)).map(sm_counts_of)
    }
}

impl Source for Store {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Store::get(self, key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        Store::family(self, key)
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        self.keys_with_prefix(&arch_prefix(key)).map(sm_counts_of)
    }
}

impl Source for Bundle {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        self.record(key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        Bundle::family(self, key)
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        self.keys_with_prefix(&arch_prefix(key)).map(sm_counts_of)
    }
}

impl Source for Shipped {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Shipped::get(self, key)
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        Ok(Shipped::family(self, key))
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        Ok(Shipped::sm_counts(self, key))
    }
}

impl Source for BTreeMap<String, Record> {
    fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        Ok(BTreeMap::get(self, &key.to_string()).cloned())
    }
    fn family(&self, key: &TuneKey) -> Result<Vec<TuneKey>> {
        let prefix = key.family_prefix();
        let range = self
            .range(prefix.clone()..)
            .take_while(|(text, _)| text.starts_with(&prefix));
        Ok(range.map(|(_, record)| record.key).collect())
    }
    fn sm_counts(&self, key: &TuneKey) -> Result<Vec<u32>> {
        let same_arch = self.values().filter(|r| r.key.arch() == key.arch());
        Ok(sm_counts_of(same_arch.map(|r| r.key)))
    }
}

/// Keys of the source within [`NEAREST_BOUND`], nearest first; of equals the larger problem, then the order of the keys.
pub(super) fn nearest(
    source: &dyn Source,
    key: &TuneKey,
    warnings: &mut Vec<String>,
) -> Vec<TuneKey> {
    let family = source.family(key).unwrap_or_else(|e| {
        warnings.push(e.to_string());
        Vec::new()
    });
    let mut near: Vec<(f64, TuneKey)> = family
        .into_iter()
        .filter_map(|k| {
            key.distance(&k)
                .filter(|d| *d <= NEAREST_BOUND)
                .map(|d| (d, k))
        })
        .collect();
    near.sort_by(|(a, ka), (b, kb)| a.total_cmp(b).then(kb.cmp(ka)));
    near.into_iter().map(|(_, k)| k).collect()
}
