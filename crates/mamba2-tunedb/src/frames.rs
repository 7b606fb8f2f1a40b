//! The file format that snapshots and bundles share: sorted `(key, value)` entries, each with its own digest, and an index.
//!
//! ```text
//! header  64 bytes: magic[8] version:u32 zero:u32 count:u64 index_offset:u64 generation:u64 zero:u64 index_digest[16]
//! body    count frames: magic:u32 key_len:u32 value_len:u32 digest[16] key value
//! index   count rows of 32 bytes, sorted by key: offset:u64 key_len:u32 value_len:u32 digest[16]
//! ```
//!
//! Little-endian. A digest is the first 16 bytes of SHA-256. `index_digest` covers the first 48 bytes of the header and the
//! index, so opening costs one read of 32 bytes an entry, and a look-up reads only the entries it compares. Frames repeat their
//! lengths and digest, so good entries can be read out of a file whose header or index is damaged.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest, Sha256};

use crate::error::{Result, TuneDbError};

pub(crate) const HEADER_BYTES: usize = 64;
const INDEX_ROW_BYTES: usize = 32;
const FRAME_HEADER_BYTES: usize = 28;
const FRAME_MAGIC: [u8; 4] = *b"\xf5M2f";
const COVERED_HEADER_BYTES: usize = 48;

/// First 16 bytes of SHA-256.
pub(crate) type ShortDigest = [u8; 16];

pub(crate) fn short_digest(parts: &[&[u8]]) -> ShortDigest {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let full = hash.finalize();
    let mut short = [0; 16];
    short.copy_from_slice(&full[..16]);
    short
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}");
        text
    })
}

/// Bounds and identity of one kind of file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub magic: [u8; 8],
    pub version: u32,
    pub max_entries: u64,
    pub max_file_bytes: u64,
    pub max_key_bytes: u32,
    pub max_value_bytes: u32,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    offset: u64,
    key_len: u32,
    value_len: u32,
    digest: ShortDigest,
}

#[derive(Debug)]
enum Source {
    File(Mutex<File>),
    Bytes(Vec<u8>),
}

impl Source {
    fn len(&self) -> std::io::Result<u64> {
        match self {
            Source::File(file) => Ok(file
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .metadata()?
                .len()),
            Source::Bytes(bytes) => Ok(bytes.len() as u64),
        }
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        match self {
            Source::File(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                file.seek(SeekFrom::Start(offset))?;
                file.read_exact(out)
            }
            Source::Bytes(bytes) => {
                let range = usize::try_from(offset)
                    .ok()
                    .and_then(|start| bytes.get(start..start.checked_add(out.len())?));
                out.copy_from_slice(range.ok_or(std::io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }
}

/// An opened file of frames. Its entries are read and checked when asked for.
#[derive(Debug)]
pub(crate) struct FrameFile {
    source: Source,
    what: String,
    rows: Vec<Row>,
    /// Where the body ends and the index begins.
    body_end: u64,
    generation: u64,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4]
        .iter()
        .rev()
        .fold(0, |n, b| n << 8 | u32::from(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn digest_at(bytes: &[u8], at: usize) -> ShortDigest {
    let mut digest = [0; 16];
    digest.copy_from_slice(&bytes[at..at + 16]);
    digest
}

impl FrameFile {
    pub fn from_file(file: File, what: String, format: &Format) -> Result<FrameFile> {
        FrameFile::open(Source::File(Mutex::new(file)), what, format)
    }

    pub fn from_bytes(bytes: Vec<u8>, what: String, format: &Format) -> Result<FrameFile> {
        FrameFile::open(Source::Bytes(bytes), what, format)
    }

    fn open(source: Source, what: String, format: &Format) -> Result<FrameFile> {
        let bad = |detail: String| TuneDbError::damaged(&what, detail);
        let too_large = |of: &str, limit: u64, got: u64, unit| TuneDbError::TooLarge {
            what: format!("{what}: {of}"),
            limit,
            got,
            unit,
        };
        let length = source.len().map_err(|e| bad(e.to_string()))?;
        if length < HEADER_BYTES as u64 {
            return Err(bad(format!(
                "expected at least {HEADER_BYTES} bytes, got {length}"
            )));
        }
        if length > format.max_file_bytes {
            return Err(too_large("file", format.max_file_bytes, length, "bytes"));
        }
        let mut header = [0; HEADER_BYTES];
        source
            .read_at(0, &mut header)
            .map_err(|e| bad(e.to_string()))?;
        if header[..8] != format.magic {
            return Err(bad(format!(
                "expected the mark {:?}, got {:?}",
                bytes_text(&format.magic),
                bytes_text(&header[..8])
            )));
        }
        let version = u32_at(&header, 8);
        if version > format.version {
            return Err(TuneDbError::Newer {
                what,
                expected: format.version,
                got: version,
            });
        }
        let (count, index_offset, generation) = (
            u64_at(&header, 16),
            u64_at(&header, 24),
            u64_at(&header, 32),
        );
        if count > format.max_entries {
            return Err(too_large("index", format.max_entries, count, "entries"));
        }
        let index_bytes = count * INDEX_ROW_BYTES as u64;
        if index_offset < HEADER_BYTES as u64
            || index_offset.checked_add(index_bytes) != Some(length)
        {
            return Err(bad(format!(
                "expected {index_offset} bytes and an index of {count} entries, got {length} bytes"
            )));
        }
        let mut index = vec![0; index_bytes as usize];
        source
            .read_at(index_offset, &mut index)
            .map_err(|e| bad(e.to_string()))?;
        if short_digest(&[&header[..COVERED_HEADER_BYTES], &index]) != digest_at(&header, 48) {
            return Err(bad(
                "header and index do not have the digest written in the header".into(),
            ));
        }
        let mut rows = Vec::with_capacity(count as usize);
        for chunk in index.chunks_exact(INDEX_ROW_BYTES) {
            let row = Row {
                offset: u64_at(chunk, 0),
                key_len: u32_at(chunk, 8),
                value_len: u32_at(chunk, 12),
                digest: digest_at(chunk, 16),
            };
            if row.key_len > format.max_key_bytes || row.value_len > format.max_value_bytes {
                return Err(bad(format!(
                    "an entry claims a key of {} bytes and a value of {} bytes",
                    row.key_len, row.value_len
                )));
            }
            let end = row
                .offset
                .checked_add(u64::from(row.key_len) + u64::from(row.value_len));
            if row.offset < (HEADER_BYTES + FRAME_HEADER_BYTES) as u64
                || end.is_none_or(|end| end > index_offset)
            {
                return Err(bad(format!(
                    "an entry at {} lies outside the body",
                    row.offset
                )));
            }
            rows.push(row);
        }
        Ok(FrameFile {
            source,
            what,
            rows,
            body_end: index_offset,
            generation,
        })
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// SHA-256 over the digests of all entries in order: equal for equal contents, whoever wrote them.
    pub fn content_digest(&self) -> String {
        let mut hash = Sha256::new();
        self.rows.iter().for_each(|row| hash.update(row.digest));
        hex(&hash.finalize())
    }

    fn read(&self, offset: u64, len: u32) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len as usize];
        self.source
            .read_at(offset, &mut bytes)
            .map_err(|e| TuneDbError::damaged(&self.what, format!("entry at {offset}: {e}")))?;
        Ok(bytes)
    }

    /// The unchecked key of entry `i`: good enough to search by, since [`FrameFile::entry`] checks what is found.
    pub fn key(&self, i: usize) -> Result<Vec<u8>> {
        self.read(self.rows[i].offset, self.rows[i].key_len)
    }

    /// Key and value of entry `i`.
    pub fn entry(&self, i: usize) -> Result<(Vec<u8>, Vec<u8>)> {
        let row = self.rows[i];
        let mut key = self.read(row.offset, row.key_len + row.value_len)?;
        let value = key.split_off(row.key_len as usize);
        if short_digest(&[&key, &value]) != row.digest {
            return Err(TuneDbError::damaged(
                &self.what,
                format!("entry {i} at {} does not have its digest", row.offset),
            ));
        }
        Ok((key, value))
    }

    /// First entry whose key is not below `key`.
    pub fn lower_bound(&self, key: &[u8]) -> Result<usize> {
        let (mut low, mut high) = (0, self.rows.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.key(middle)?.as_slice() < key {
                low = middle + 1
            } else {
                high = middle
            }
        }
        Ok(low)
    }

    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let at = self.lower_bound(key)?;
        if at == self.rows.len() || self.key(at)? != key {
            return Ok(None);
        }
        self.entry(at).map(|(_, value)| Some(value))
    }

    /// Keys that begin with `prefix`.
    pub fn keys_with_prefix(&self, prefix: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut keys = Vec::new();
        // Entries of neighbouring keys lie side by side: one read serves many.
        let mut window = Window::default();
        for row in &self.rows[self.lower_bound(prefix)?..] {
            let key = window.read(self, row)?;
            if !key.starts_with(prefix) {
                break;
            }
            keys.push(key.to_vec());
        }
        Ok(keys)
    }
}

const WINDOW_BYTES: u64 = 64 * 1024;

/// A stretch of the file held in memory.
#[derive(Default)]
struct Window {
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    /// The key of `row`.
    fn read(&mut self, file: &FrameFile, row: &Row) -> Result<&[u8]> {
        let (key_len, end) = (row.key_len as usize, self.start + self.bytes.len() as u64);
        if row.offset < self.start || row.offset + key_len as u64 > end {
            let length = file
                .body_end
                .saturating_sub(row.offset)
                .min(WINDOW_BYTES.max(key_len as u64));
            self.bytes = file.read(row.offset, length as u32)?;
            self.start = row.offset;
        }
        let from = (row.offset - self.start) as usize;
        Ok(&self.bytes[from..from + key_len])
    }
}

fn bytes_text(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|b| std::ascii::escape_default(*b))
        .map(char::from)
        .collect()
}

/// Writes entries, which must come sorted by key without repeats.
pub(crate) fn write_frames(
    out: &mut dyn Write,
    format: &Format,
    generation: u64,
    entries: &std::collections::BTreeMap<Vec<u8>, Vec<u8>>,
) -> std::io::Result<()> {
    let mut index = Vec::with_capacity(entries.len() * INDEX_ROW_BYTES);
    let mut offset = HEADER_BYTES as u64;
    let mut digests = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        let fits = |len: usize, max: u32| u32::try_from(len).ok().filter(|n| *n <= max);
        let (Some(key_len), Some(value_len)) = (
            fits(key.len(), format.max_key_bytes),
            fits(value.len(), format.max_value_bytes),
        ) else {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "an entry is larger than its format allows",
            ));
        };
        let digest = short_digest(&[key, value]);
        index.extend_from_slice(&(offset + FRAME_HEADER_BYTES as u64).to_le_bytes());
        index.extend_from_slice(&key_len.to_le_bytes());
        index.extend_from_slice(&value_len.to_le_bytes());
        index.extend_from_slice(&digest);
        digests.push(digest);
        offset += FRAME_HEADER_BYTES as u64 + u64::from(key_len) + u64::from(value_len);
    }
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(&format.magic);
    header.extend_from_slice(&format.version.to_le_bytes());
    header.extend_from_slice(&0u32.to_le_bytes());
    header.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    header.extend_from_slice(&offset.to_le_bytes());
    header.extend_from_slice(&generation.to_le_bytes());
    header.extend_from_slice(&0u64.to_le_bytes());
    let digest = short_digest(&[&header, &index]);
    header.extend_from_slice(&digest);
    out.write_all(&header)?;
    for ((key, value), digest) in entries.iter().zip(&digests) {
        out.write_all(&FRAME_MAGIC)?;
        out.write_all(&(key.len() as u32).to_le_bytes())?;
        out.write_all(&(value.len() as u32).to_le_bytes())?;
        out.write_all(digest)?;
        out.write_all(key)?;
        out.write_all(value)?;
    }
    out.write_all(&index)
}

/// Every entry of a damaged file whose own digest still holds, wherever it lies.
pub(crate) fn salvage(bytes: &[u8], format: &Format) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = bytes
        .get(at..)
        .filter(|rest| rest.len() >= FRAME_HEADER_BYTES)
    {
        match frame_at(rest, format) {
            Some((key, value, length)) => {
                found.push((key.to_vec(), value.to_vec()));
                at += length;
            }
            None => at += 1,
        }
    }
    found
}

fn frame_at<'a>(rest: &'a [u8], format: &Format) -> Option<(&'a [u8], &'a [u8], usize)> {
    if rest[..4] != FRAME_MAGIC {
        return None;
    }
    let (key_len, value_len) = (u32_at(rest, 4), u32_at(rest, 8));
    if key_len > format.max_key_bytes || value_len > format.max_value_bytes {
        return None;
    }
    let key_end = FRAME_HEADER_BYTES + key_len as usize;
    let end = key_end.checked_add(value_len as usize)?;
    let (key, value) = (
        rest.get(FRAME_HEADER_BYTES..key_end)?,
        rest.get(key_end..end)?,
    );
    (short_digest(&[key, value]) == digest_at(rest, 12)).then_some((key, value, end))
}
