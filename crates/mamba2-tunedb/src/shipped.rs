use std::sync::OnceLock;

use crate::error::Result;
use crate::key::TuneKey;
use crate::record::Record;
use crate::text::TextRecords;

// `EMBEDDED: &[(file name, text)]`, every `*.json` of `tuning-db/`, sorted; made by build.rs.
include!(concat!(env!("OUT_DIR"), "/shipped_files.rs"));

/// Records that come with the program: one text file per kind of GPU, named `sm90-132sm.json` by compute capability and
/// multiprocessors. A file is indexed when first asked for.
#[derive(Debug)]
pub struct Shipped {
    files: Vec<ShippedFile>,
}

#[derive(Debug)]
struct ShippedFile {
    name: String,
    text: std::borrow::Cow<'static, str>,
    parsed: OnceLock<Option<TextRecords>>,
}

impl ShippedFile {
    fn records(&self) -> Option<&TextRecords> {
        let parse = || match TextRecords::new(format!("shipped {}", self.name), self.text.clone()) {
            Ok(records) => Some(records),
            Err(e) => {
                tracing::warn!("{e}; going on without it");
                None
            }
        };
        self.parsed.get_or_init(parse).as_ref()
    }
}

impl Shipped {
    /// The records embedded in this program.
    pub fn embedded() -> Shipped {
        let file = |(name, text): &(&'static str, &'static str)| ShippedFile {
            name: (*name).into(),
            text: (*text).into(),
            parsed: OnceLock::new(),
        };
        Shipped {
            files: EMBEDDED.iter().map(file).collect(),
        }
    }

    /// Records from `(file name, text)` pairs.
    pub fn from_texts(files: impl IntoIterator<Item = (String, String)>) -> Shipped {
        let file = |(name, text): (String, String)| ShippedFile {
            name,
            text: text.into(),
            parsed: OnceLock::new(),
        };
        Shipped {
            files: files.into_iter().map(file).collect(),
        }
    }

    /// Name of the file that a key's record is shipped in.
    pub fn file_name(key: &TuneKey) -> String {
        format!("sm{}-{}sm.json", key.arch().0, key.sm_count())
    }

    fn file(&self, key: &TuneKey) -> Option<&TextRecords> {
        let name = Shipped::file_name(key);
        self.files.iter().find(|file| file.name == name)?.records()
    }

    /// The record of `key`.
    ///
    /// # Errors
    /// As [`TextRecords::get`].
    pub fn get(&self, key: &TuneKey) -> Result<Option<Record>> {
        self.file(key).map_or(Ok(None), |records| records.get(key))
    }

    /// Shipped keys of the same family.
    pub fn family(&self, key: &TuneKey) -> Vec<TuneKey> {
        self.file(key)
            .map_or_else(Vec::new, |records| records.family(key))
    }

    /// Numbers of multiprocessors that records of the key's architecture are shipped for.
    pub fn sm_counts(&self, key: &TuneKey) -> Vec<u32> {
        let prefix = format!("sm{}-", key.arch().0);
        let number = |file: &ShippedFile| {
            file.name
                .strip_prefix(&prefix)?
                .strip_suffix("sm.json")?
                .parse()
                .ok()
        };
        self.files.iter().filter_map(number).collect()
    }

    /// Every record of every file, or why it cannot be read.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> + '_ {
        self.files
            .iter()
            .filter_map(ShippedFile::records)
            .flat_map(TextRecords::records)
    }
}
