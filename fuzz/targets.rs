//! Every parser of bytes from outside: it may refuse them; it must not panic, hang, or accept what cannot be used.
//!
//! This file is the library of the cargo-fuzz crate beside it and a module of `crates/mamba2-cli/tests/fuzz.rs`.

use mamba2_cuda::{Cubin, KernelKey};
use mamba2_spec::launch::plan;
use mamba2_spec::{Arch, DeviceFacts, Problem, StepProblem, StrategyConfig, rules};
use mamba2_tunedb::{
    Bundle, Part, Record, Snapshot, TextRecords, Timing, TuneKey, cubin_arch, validate,
};
use mamba2_tuner::{Target as Shape, shapes};
use sha2::{Digest, Sha256};

/// A parser with what must hold of whatever it accepts.
pub struct Target {
    /// Name of the fuzz target and of its folder of seeds.
    pub name: &'static str,
    /// Feeds it. True if the bytes were accepted as good.
    pub run: fn(&[u8]) -> bool,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "key",
        run: key,
    },
    Target {
        name: "record",
        run: record,
    },
    Target {
        name: "timing",
        run: timing,
    },
    Target {
        name: "record_text",
        run: record_text,
    },
    Target {
        name: "part",
        run: part,
    },
    Target {
        name: "snapshot",
        run: snapshot,
    },
    Target {
        name: "bundle",
        run: bundle,
    },
    Target {
        name: "cubin",
        run: cubin,
    },
    Target {
        name: "kernel_key",
        run: kernel_key,
    },
    Target {
        name: "shape",
        run: shape,
    },
    Target {
        name: "shape_list",
        run: shape_list,
    },
    Target {
        name: "config",
        run: config,
    },
    Target {
        name: "safetensors_forward",
        run: safetensors_forward,
    },
    Target {
        name: "safetensors_step",
        run: safetensors_step,
    },
];

/// Feeds the target of a name.
///
/// # Panics
/// If there is no such target, or it finds a fault.
pub fn run(name: &str, bytes: &[u8]) -> bool {
    let target = TARGETS.iter().find(|t| t.name == name);
    (target.expect("a target should have this name").run)(bytes)
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// A key has one spelling, and its problem can be planned for without an overflow.
fn use_key(key: &TuneKey) {
    assert_eq!(key.to_string().parse::<TuneKey>().ok().as_ref(), Some(key));
    assert_eq!(key.distance(key), Some(0.0));
    assert!(key.to_string().starts_with(&key.family_prefix()));
}

/// What a reader returned can be asked for everything, written, and read again.
fn use_record(record: &Record) -> bool {
    use_key(&record.key);
    let _ = (record.strategy(), record.step_config());
    assert!(std::ptr::eq(record.preferred(record), record));
    if let Ok(line) = record.to_json() {
        let back = Record::from_json(line.as_bytes()).expect("what was written should be read");
        assert_eq!(
            back.to_json().ok().as_ref(),
            Some(&line),
            "a record should have one spelling"
        );
    }
    let legal = validate::check_record(record).is_ok();
    if legal && let (Some(problem), Ok(config)) = (record.key.problem(), record.strategy()) {
        let _ = plan(&config, &problem, &record.key.device());
    }
    legal
}

fn key(bytes: &[u8]) -> bool {
    let Some(Ok(key)) = text(bytes).map(str::parse::<TuneKey>) else {
        return false;
    };
    assert_eq!(
        key.to_string().as_bytes(),
        bytes,
        "a key should have one spelling"
    );
    use_key(&key);
    true
}

fn record(bytes: &[u8]) -> bool {
    Record::from_json(bytes).is_ok_and(|record| use_record(&record))
}

fn timing(bytes: &[u8]) -> bool {
    let Ok(timing) = Timing::from_json(bytes) else {
        return false;
    };
    use_key(&timing.key);
    if let Ok(line) = timing.to_json() {
        let back = Timing::from_json(line.as_bytes()).expect("what was written should be read");
        assert_eq!(back.config_text(), timing.config_text());
    }
    true
}

fn record_text(bytes: &[u8]) -> bool {
    let Some(Ok(records)) = text(bytes).map(|t| TextRecords::new("bytes", t.to_string())) else {
        return false;
    };
    let mut legal = true;
    for record in records.records() {
        match record {
            Ok(record) => {
                legal &= use_record(&record);
                assert_eq!(
                    records.get(&record.key).ok().flatten().as_ref(),
                    Some(&record),
                    "a listed record should be found"
                );
                assert!(records.family(&record.key).contains(&record.key));
            }
            Err(_) => legal = false,
        }
    }
    legal
}

/// A part as it is, and with the digest that its body should have.
fn part(bytes: &[u8]) -> bool {
    let accepted = use_part(bytes);
    if let Some(end) = bytes.iter().position(|b| *b == b'\n') {
        let body = &bytes[end + 1..];
        let mut sealed = format!("mamba2-tunedb part 1 {}\n", hex(&digest(&[body]))).into_bytes();
        sealed.extend_from_slice(body);
        use_part(&sealed);
    }
    accepted
}

fn use_part(bytes: &[u8]) -> bool {
    let Ok(part) = Part::from_bytes(bytes, "bytes") else {
        return false;
    };
    part.timings.iter().for_each(|t| use_key(&t.key));
    part.records.iter().all(use_record)
}

/// A snapshot as it is, and with the digests that its index and entries should have: what a forger would send.
fn snapshot(bytes: &[u8]) -> bool {
    use_snapshot(&resealed(bytes));
    use_snapshot(bytes)
}

fn use_snapshot(bytes: &[u8]) -> bool {
    for record in Snapshot::salvage_bytes(bytes) {
        use_record(&record);
    }
    let Ok(snapshot) = Snapshot::from_bytes(bytes.to_vec(), "bytes") else {
        return false;
    };
    let mut legal = true;
    for record in snapshot.records() {
        match record {
            Ok(record) => {
                legal &= use_record(&record);
                let _ = (snapshot.get(&record.key), snapshot.family(&record.key));
            }
            Err(_) => legal = false,
        }
    }
    let _ = (snapshot.keys_with_prefix("schema="), snapshot.digest());
    legal
}

/// A bundle as it is, and forged as [`snapshot`] does.
fn bundle(bytes: &[u8]) -> bool {
    use_bundle(&resealed(bytes));
    use_bundle(bytes)
}

fn use_bundle(bytes: &[u8]) -> bool {
    let Ok(bundle) = Bundle::from_bytes(bytes.to_vec(), "bytes") else {
        return false;
    };
    let clean = bundle.verify().is_empty();
    let records = bundle.records();
    for record in records.iter().flatten().flatten() {
        let legal = use_record(record);
        assert!(legal || !clean, "verify should refuse an illegal record");
        let _ = (bundle.record(&record.key), bundle.family(&record.key));
    }
    for name in bundle.cubin_keys().unwrap_or_default() {
        let _ = KernelKey::from_text(&name);
        for arch in [80, 90] {
            if let Ok(Some(cubin)) = bundle.cubin(&name, Arch(arch)) {
                assert_eq!(cubin_arch(&cubin), Ok(Arch(arch)));
            }
        }
    }
    let _ = bundle.digest();
    clean
}

/// A file of the cubin cache, or a cubin alone.
fn cubin(bytes: &[u8]) -> bool {
    let alone = cubin_arch(bytes).is_ok();
    match Cubin::from_bytes(bytes) {
        Ok(cubin) => {
            let again = Cubin::from_bytes(&cubin.to_bytes());
            assert_eq!(again.as_ref(), Ok(&cubin));
            true
        }
        Err(_) => alone,
    }
}

fn kernel_key(bytes: &[u8]) -> bool {
    let Some(Ok(key)) = text(bytes).map(KernelKey::from_text) else {
        return false;
    };
    assert_eq!(KernelKey::from_text(&key.to_text()).as_ref(), Ok(&key));
    let _ = key.identity.digest();
    true
}

/// A shape of the command line.
fn shape(bytes: &[u8]) -> bool {
    let Some(text) = text(bytes) else {
        return false;
    };
    let shape = match text.strip_prefix("step:") {
        Some(step) => step.parse::<StepProblem>().map(Shape::Step),
        None => text.parse::<Problem>().map(Shape::Forward),
    };
    shape.is_ok_and(|shape| use_shape(&shape))
}

fn use_shape(shape: &Shape) -> bool {
    if shape.check().is_err() {
        return false;
    }
    let device = DeviceFacts::assumed(Arch(90));
    use_key(&match shape {
        Shape::Forward(p) => TuneKey::forward(p, &device),
        Shape::Step(p) => TuneKey::step(p, &device),
    });
    // Whatever passed the check can be sized without an overflow.
    let _ = (shape.tensor_bytes(), shape.limit_us(&device));
    if let Shape::Forward(p) = shape {
        assert_eq!(
            p.to_string().parse::<Problem>().ok().as_ref(),
            Some(p),
            "a shape should survive its text"
        );
        if let Ok(config) = rules::default_strategy(p, &device) {
            let _ = plan(&config, p, &device);
        }
    }
    true
}

fn shape_list(bytes: &[u8]) -> bool {
    let Some(Ok(listed)) = text(bytes).map(shapes::parse) else {
        return false;
    };
    listed.iter().all(use_shape)
}

/// A config of `--pin`.
fn config(bytes: &[u8]) -> bool {
    let Ok(config) = serde_json::from_slice::<StrategyConfig>(bytes) else {
        return false;
    };
    let again = serde_json::to_vec(&config).expect("a config should be JSON");
    assert_eq!(
        serde_json::from_slice::<StrategyConfig>(&again).ok(),
        Some(config)
    );
    let problem = Problem::new(2, 300, 8, 64, 1, 128);
    let device = DeviceFacts::assumed(Arch(90));
    let legal = rules::check_strategy(&config, &problem, &device).is_ok();
    if legal {
        let _ = plan(&config, &problem, &device);
    }
    legal
}

fn safetensors_forward(bytes: &[u8]) -> bool {
    let Ok(problem) = mamba2_cli::untrusted::forward_problem(bytes) else {
        return false;
    };
    problem
        .check()
        .expect("what was read should have been checked");
    true
}

fn safetensors_step(bytes: &[u8]) -> bool {
    let Ok(problem) = mamba2_cli::untrusted::step_problem(bytes) else {
        return false;
    };
    problem
        .check()
        .expect("what was read should have been checked");
    true
}

/// First 16 bytes of SHA-256 over the parts, each after its length.
fn digest(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize()[..16]);
    short
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A file of frames whose every digest is what it should be for the bytes it covers; `crates/mamba2-tunedb/src/frames.rs` has the
/// format. Without this the first digest would stop whatever a mutation of a length or an offset could reach.
fn resealed(bytes: &[u8]) -> Vec<u8> {
    const HEADER: usize = 64;
    const COVERED: usize = 48;
    const ROW: usize = 32;
    /// Rows beyond are left alone: a forged index may name the same bytes over and over.
    const MAX_ROWS: u64 = 64;
    let mut out = bytes.to_vec();
    let number = |out: &[u8], at: usize, len: usize| {
        let bytes = out.get(at..at + len)?;
        let value = bytes.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
        usize::try_from(value).ok()
    };
    let (Some(count), Some(index)) = (number(&out, 16, 8), number(&out, 24, 8)) else {
        return out;
    };
    for row in 0..(count as u64).min(MAX_ROWS) as usize {
        let Some(at) = row.checked_mul(ROW).and_then(|n| n.checked_add(index)) else {
            break;
        };
        if at.checked_add(ROW).is_none_or(|end| end > out.len()) {
            break;
        }
        let field = |at, len| number(&out, at, len).unwrap_or(0);
        let (offset, key_len, value_len) = (field(at, 8), field(at + 8, 4), field(at + 12, 4));
        let key = offset
            .checked_add(key_len)
            .and_then(|end| out.get(offset..end));
        let value = offset
            .checked_add(key_len)
            .and_then(|start| out.get(start..start.checked_add(value_len)?));
        let (Some(key), Some(value)) = (key, value) else {
            continue;
        };
        let of_entry = digest(&[key, value]);
        out[at + 16..at + ROW].copy_from_slice(&of_entry);
        // The frame repeats it, right before the key.
        if let Some(start) = offset.checked_sub(16) {
            out[start..offset].copy_from_slice(&of_entry);
        }
    }
    if let Some(rows) = out.get(index..).filter(|_| out.len() >= HEADER) {
        let of_index = digest(&[&out[..COVERED], rows]);
        out[COVERED..HEADER].copy_from_slice(&of_index);
    }
    out
}
