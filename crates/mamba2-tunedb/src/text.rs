//! Records as text: JSON with one record a line, sorted by key, so that `git diff` shows what a tuning changed.

use std::borrow::Cow;
use std::ops::Range;

use crate::error::{Result, TuneDbError};
use crate::key::TuneKey;
use crate::record::Record;

const HEADER: &str = r#"{"format":"mamba2-records","version":"#;
const VERSION: u32 = 1;
const LINE_START: &str = r#"{"key":""#;

/// Longest record text that is read, in bytes.
pub const MAX_TEXT_BYTES: usize = 256 << 20;

/// A text of records, indexed by line; a line is parsed when it is asked for.
#[derive(Clone, Debug)]
pub struct TextRecords {
    what: String,
    text: Cow<'static, str>,
    lines: Vec<Range<usize>>,
}

/// Writes records as text, sorted by key; of repeated keys the preferred record is kept.
///
/// # Errors
/// What [`Record::to_json`] refuses.
pub fn write_text(records: impl IntoIterator<Item = Record>) -> Result<String> {
    let mut sorted = std::collections::BTreeMap::<String, Record>::new();
    for record in records {
        let key = record.key.to_string();
        let kept = match sorted.get(&key) {
            Some(old) => old.preferred(&record).clone(),
            None => record,
        };
        sorted.insert(key, kept);
    }
    let lines: Vec<String> = sorted
        .values()
        .map(Record::to_json)
        .collect::<Result<_>>()?;
    let end = if lines.is_empty() { "]}\n" } else { "\n]}\n" };
    Ok(format!(
        "{HEADER}{VERSION},\"records\":[\n{}{end}",
        lines.join(",\n")
    ))
}

impl TextRecords {
    /// Indexes a text from an untrusted source. `what` names it in errors.
    ///
    /// # Errors
    /// [`TuneDbError::TooLarge`], [`TuneDbError::Newer`], or [`TuneDbError::Damaged`] if it is not a text of records or its
    /// keys are not sorted. Lines are not parsed yet.
    pub fn new(what: impl Into<String>, text: impl Into<Cow<'static, str>>) -> Result<TextRecords> {
        let (what, text) = (what.into(), text.into());
        if text.len() > MAX_TEXT_BYTES {
            return Err(TuneDbError::TooLarge {
                what,
                limit: MAX_TEXT_BYTES as u64,
                got: text.len() as u64,
                unit: "bytes",
            });
        }
        let bad = |detail: &str| TuneDbError::damaged(&what, detail);
        let first = text.lines().next().unwrap_or_default();
        let version = first
            .strip_prefix(HEADER)
            .and_then(|rest| rest.strip_suffix(",\"records\":["));
        let version: u32 = version
            .and_then(|v| v.parse().ok())
            .ok_or_else(|| bad("expected the first line of a text of records"))?;
        if version > VERSION {
            return Err(TuneDbError::Newer {
                what,
                expected: VERSION,
                got: version,
            });
        }
        let mut lines = Vec::new();
        let mut closed = false;
        let mut at = first.len() + 1;
        for line in text.get(at..).unwrap_or_default().split_inclusive('\n') {
            let body = line.trim_end().trim_end_matches(',');
            if closed && !body.is_empty() {
                return Err(bad("expected nothing after the closing line"));
            } else if body == "]}" {
                closed = true;
            } else if body.starts_with(LINE_START) {
                lines.push(at..at + body.len());
            } else if !body.is_empty() {
                return Err(bad("expected each line to begin with {\"key\":"));
            }
            at += line.len();
        }
        if !closed {
            return Err(bad("expected the closing line ]}: the text was cut"));
        }
        let key_of = |range: &Range<usize>| line_key(&text[range.clone()]);
        if !lines.is_sorted_by(|a, b| key_of(a) < key_of(b)) {
            return Err(bad("expected lines sorted by key, each key once"));
        }
        Ok(TextRecords { what, text, lines })
    }

    fn line(&self, i: usize) -> &str {
        &self.text[self.lines[i].clone()]
    }

    fn parse(&self, i: usize) -> Result<Record> {
        let line = self.line(i);
        let named = |e: TuneDbError| {
            TuneDbError::damaged(
                format!("{}: {:?}", self.what, line_key(line)),
                e.to_string(),
            )
        };
        let record = Record::from_json(line.as_bytes()).map_err(named)?;
        if record.key.to_string() != line_key(line) {
            return Err(TuneDbError::damaged(
                &self.what,
                format!("expected key {:?}, got {}", line_key(line), record.key),
            ));
        }
        Ok(record)
    }

    fn lower_bound(&self, key: &str) -> usize {
        self.lines
            .partition_point(|range| line_key(&self.text[range.clone()]) < key)
    }

    /// The record of `key`.
    ///
    /// # Errors
    /// [`TuneDbError::Damaged`] or [`TuneDbError::TooLarge`] if its line cannot be read.
    pub fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        let key = key.to_string();
        let at = self.lower_bound(&key);
        if at == self.lines.len() || line_key(self.line(at)) != key {
            return Ok(None);
        }
        self.parse(at).map(Some)
    }

    /// Keys with this prefix; keys that cannot be read are left out.
    pub fn keys_with_prefix(&self, prefix: &str) -> Vec<TuneKey> {
        let from = self.lower_bound(prefix);
        let keys = (from..self.lines.len())
            .map(|i| line_key(self.line(i)))
            .take_while(|key| key.starts_with(prefix));
        keys.filter_map(|key| key.parse().ok()).collect()
    }

    /// Keys of the same family as `key`.
    pub fn family(&self, key: &TuneKey) -> Vec<TuneKey> {
        let prefix = key.family_prefix();
        let from = self.lower_bound(&prefix);
        let texts = (from..self.lines.len()).map(|i| line_key(self.line(i)));
        texts
            .take_while(|text| text.starts_with(&prefix))
            .filter_map(|text| key.relative(&prefix, text))
            .collect()
    }

    /// Every record in order of its key, or why it cannot be read.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> + '_ {
        (0..self.lines.len()).map(|i| self.parse(i))
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    /// True without records.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

/// The key a line begins with. Keys hold no quotes or escapes.
fn line_key(line: &str) -> &str {
    line.strip_prefix(LINE_START)
        .and_then(|rest| rest.split('"').next())
        .unwrap_or_default()
}
