use std::collections::BTreeMap;

use serde::Serialize;

use crate::key::TuneKey;
use crate::record::Record;

/// How two sets of records differ at one key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
pub enum Difference {
    /// Only the left set has a record.
    OnlyLeft {
        /// The key.
        key: TuneKey,
    },
    /// Only the right set has a record.
    OnlyRight {
        /// The key.
        key: TuneKey,
    },
    /// Both have one, with other configs.
    Config {
        /// The key.
        key: TuneKey,
        /// Median of the left config, in microseconds.
        left_us: f64,
        /// Median of the right config, in microseconds.
        right_us: f64,
        /// Parameters that differ: dotted name to (left, right).
        parameters: BTreeMap<String, (serde_json::Value, serde_json::Value)>,
    },
}

/// Differences in configs, in order of the keys. Evidence alone is no difference.
pub fn diff(left: &[Record], right: &[Record]) -> Vec<Difference> {
    let index = |records: &[Record]| {
        records
            .iter()
            .map(|r| (r.key.to_string(), r.clone()))
            .collect::<BTreeMap<_, _>>()
    };
    let (left, right) = (index(left), index(right));
    let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    let compare = |key: &String| match (left.get(key), right.get(key)) {
        (Some(l), None) => Some(Difference::OnlyLeft { key: l.key }),
        (None, Some(r)) => Some(Difference::OnlyRight { key: r.key }),
        (Some(l), Some(r)) => {
            let parameters = differing_parameters(&l.config, &r.config);
            let (left_us, right_us) = (l.evidence.median_us, r.evidence.median_us);
            (!parameters.is_empty()).then_some(Difference::Config {
                key: l.key,
                left_us,
                right_us,
                parameters,
            })
        }
        (None, None) => None,
    };
    keys.into_iter().filter_map(compare).collect()
}

fn differing_parameters(
    left: &serde_json::Value,
    right: &serde_json::Value,
) -> BTreeMap<String, (serde_json::Value, serde_json::Value)> {
    let (mut l, mut r) = (BTreeMap::new(), BTreeMap::new());
    flatten("", left, &mut l);
    flatten("", right, &mut r);
    let names: std::collections::BTreeSet<String> = l.keys().chain(r.keys()).cloned().collect();
    let pair = |name: String| {
        let of = |map: &BTreeMap<String, serde_json::Value>| {
            map.get(&name).cloned().unwrap_or(serde_json::Value::Null)
        };
        let (a, b) = (of(&l), of(&r));
        (a != b).then_some((name, (a, b)))
    };
    names.into_iter().filter_map(pair).collect()
}

fn flatten(prefix: &str, value: &serde_json::Value, out: &mut BTreeMap<String, serde_json::Value>) {
    match value {
        serde_json::Value::Object(map) => map.iter().for_each(|(name, inner)| {
            let dotted = if prefix.is_empty() {
                name.clone()
            } else {
                format!("{prefix}.{name}")
            };
            flatten(&dotted, inner, out);
        }),
        other => drop(out.insert(prefix.to_string(), other.clone())),
    }
}
