//! Keys from their text, which may come from anywhere.

use std::str::FromStr;

use mamba2_spec::{Arch, DKind, Dtype};

use super::{Family, KEY_SCHEMA, MAX_KEY_BYTES, Options, Subject, TuneKey};
use crate::error::{Result, TuneDbError};

/// Reads `name=value` pairs that must come in exactly the order asked for.
struct Pairs<'a> {
    text: &'a str,
    rest: std::str::Split<'a, char>,
}

impl<'a> Pairs<'a> {
    fn bad(&self, name: &str, got: &str) -> TuneDbError {
        TuneDbError::damaged(
            format!("key {:?}", self.text),
            format!("expected {name}=..., got {got:?}"),
        )
    }

    fn text(&mut self, name: &str) -> Result<&'a str> {
        let item = self.rest.next().unwrap_or_default();
        match item.split_once('=') {
            Some((found, value)) if found == name => Ok(value),
            _ => Err(self.bad(name, item)),
        }
    }

    fn parse<T: FromStr>(&mut self, name: &str) -> Result<T> {
        let value = self.text(name)?;
        value.parse().map_err(|_| self.bad(name, value))
    }

    fn flag(&mut self, name: &str) -> Result<bool> {
        match self.text(name)? {
            "0" => Ok(false),
            "1" => Ok(true),
            other => Err(self.bad(name, other)),
        }
    }

    fn optional_dtype(&mut self, name: &str) -> Result<Option<Dtype>> {
        match self.text(name)? {
            "none" => Ok(None),
            other => other.parse().map(Some).map_err(|_| self.bad(name, other)),
        }
    }
}

impl FromStr for TuneKey {
    type Err = TuneDbError;

    fn from_str(text: &str) -> Result<TuneKey> {
        if text.len() > MAX_KEY_BYTES {
            return Err(TuneDbError::TooLarge {
                what: "key".into(),
                limit: MAX_KEY_BYTES as u64,
                got: text.len() as u64,
                unit: "bytes",
            });
        }
        let mut p = Pairs {
            text,
            rest: text.split(','),
        };
        let schema = p.parse("schema")?;
        if schema > KEY_SCHEMA {
            return Err(TuneDbError::Newer {
                what: format!("key {text:?}"),
                expected: KEY_SCHEMA,
                got: schema,
            });
        }
        let arch = Arch(p.parse("arch")?);
        let sm_count = p.parse("sms")?;
        let shared_memory_bytes = p.parse("smem")?;
        if arch.0 > 9999 || sm_count > 1 << 16 || shared_memory_bytes > 1 << 30 {
            return Err(p.bad("arch, sms and smem", "numbers of no GPU"));
        }
        let subject = match p.text("subject")? {
            "forward" => Subject::Forward,
            "step" => Subject::Step,
            other => Subject::Kernel(other.parse().map_err(|_| p.bad("subject", other))?),
        };
        let dtype = p.parse("dtype")?;
        let dt_dtype = p.parse("dt_dtype")?;
        let d = match p.text("d")? {
            "none" => DKind::None,
            "h" => DKind::PerHead,
            "hp" => DKind::PerHeaddim,
            other => return Err(p.bad("d", other)),
        };
        let z = p.flag("z")?;
        let dt_bias = p.flag("bias")?;
        let dt_softplus = p.flag("softplus")?;
        let dt_limit = p.flag("limit")?;
        let options = if subject == Subject::Step {
            Options::Step {
                state_dtype: p.parse("state")?,
                indices: p.flag("indices")?,
            }
        } else {
            Options::Forward {
                initial_states: p.optional_dtype("init")?,
                final_states: p.optional_dtype("final")?,
                packed: p.flag("packed")?,
                chunk_size: p.parse("q")?,
                tf32: p.flag("tf32")?,
                aligned: match p.text("align")? {
                    "16" => true,
                    "1" => false,
                    other => return Err(p.bad("align", other)),
                },
            }
        };
        let (nheads, headdim, ngroups, dstate) =
            (p.parse("h")?, p.parse("p")?, p.parse("g")?, p.parse("n")?);
        let family = Family {
            schema,
            arch,
            sm_count,
            shared_memory_bytes,
            subject,
            dtype,
            dt_dtype,
            d,
            z,
            dt_bias,
            dt_softplus,
            dt_limit,
            options,
            nheads,
            headdim,
            ngroups,
            dstate,
        };
        let key = TuneKey {
            family,
            batch: p.parse("b")?,
            sequences: p.parse("s")?,
            seqlen: p.parse("l")?,
        };
        let packed = matches!(options, Options::Forward { packed: true, .. });
        if !packed && key.sequences != key.batch {
            return Err(p.bad("s", "another number than b, though not packed"));
        }
        // One spelling per key: "+1", "01" and trailing pairs would give two texts for one problem.
        let canonical = key.to_string();
        if canonical != text {
            return Err(TuneDbError::damaged(
                format!("key {text:?}"),
                format!("expected the canonical form {canonical:?}"),
            ));
        }
        Ok(key)
    }
}
