//! The fuzz targets of `fuzz/` on their seeds, mutated the same way each time. On stable Rust, for some seconds; `fuzz/README.md`
//! says how to search longer.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod common;
#[path = "../../../fuzz/targets.rs"]
mod targets;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Case, bf16s, f32s, i32s, noise};
use mamba2_cuda::{Compiled, Cubin, KernelIdentity, KernelKey, NvrtcVersion};
use mamba2_spec::{Arch, DeviceFacts, Problem, StepProblem, rules};
use mamba2_tunedb::{
    Bundle, CacheDir, Committed, DEFAULT_WAIT, Evidence, FailureStage, LocalDb, Outcome,
    Provenance, Record, Snapshot, Timing, TuneKey, write_text,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use targets::{TARGETS, Target};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// Name and content of each seed, in order of the names.
fn seeds(target: &Target) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder().join("seeds").join(target.name)).unwrap();
    let mut seeds: Vec<(String, Vec<u8>)> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.display().to_string(), std::fs::read(path).unwrap())
        })
        .collect();
    seeds.sort();
    seeds
}

#[test]
fn every_seed_is_accepted() {
    for target in TARGETS {
        let seeds = seeds(target);
        assert!(!seeds.is_empty(), "{} has no seed", target.name);
        for (name, bytes) in seeds {
            assert!(
                targets::run(target.name, &bytes),
                "{name} is refused; `cargo test -p mamba2-cli --test fuzz -- --ignored` writes the seeds anew"
            );
        }
    }
}

#[test]
fn every_target_is_a_binary_of_the_fuzz_crate_and_every_folder_of_seeds_a_target() {
    let manifest = std::fs::read_to_string(folder().join("Cargo.toml")).unwrap();
    let binaries: Vec<&str> = manifest
        .split("[[bin]]")
        .skip(1)
        .map(|bin| bin.split('"').nth(1).unwrap())
        .collect();
    let names: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
    assert_eq!(binaries, names);
    for entry in std::fs::read_dir(folder().join("seeds")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&name.as_str()), "fuzz/seeds/{name}");
    }
}

/// Damage to a byte string. Places and seeds are taken modulo what there is.
#[derive(Clone, Debug)]
enum Mutation {
    Flip(usize, u8),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    Repeat(usize, usize),
    /// A piece of another seed over what is here.
    Splice(usize, usize, usize),
    /// A length or offset of 4 or 8 bytes that promises too much, or nothing.
    Length(usize, u64, bool),
    /// A number written as text.
    Digits(usize, u64),
}

/// Sizes at which counting goes wrong.
const SIZES: [u64; 12] = [
    0,
    1,
    2,
    0x7f,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    u64::MAX / 32,
    i64::MAX as u64,
    u64::MAX,
];

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<usize>;
    let size = || (0..SIZES.len()).prop_map(|i| SIZES[i]);
    prop_oneof![
        (at(), 1u8..).prop_map(|(at, bits)| Mutation::Flip(at, bits)),
        at().prop_map(Mutation::Cut),
        (at(), prop::collection::vec(any::<u8>(), 1..16))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        (at(), 1usize..64).prop_map(|(at, n)| Mutation::Remove(at, n)),
        (at(), 1usize..64).prop_map(|(at, n)| Mutation::Repeat(at, n)),
        (at(), at(), 1usize..200).prop_map(|(at, from, n)| Mutation::Splice(at, from, n)),
        (at(), size(), any::<bool>()).prop_map(|(at, n, wide)| Mutation::Length(at, n, wide)),
        (at(), size()).prop_map(|(at, n)| Mutation::Digits(at, n)),
    ]
}

impl Mutation {
    fn apply(&self, bytes: &mut Vec<u8>, other: &[u8]) {
        let len = bytes.len();
        let place = |at: usize, len: usize| at % len.max(1);
        match self {
            Mutation::Flip(at, bits) => {
                if let Some(byte) = bytes.get_mut(place(*at, len)) {
                    *byte ^= bits;
                }
            }
            Mutation::Cut(at) => bytes.truncate(place(*at, len)),
            Mutation::Insert(at, new) => {
                let at = place(*at, len);
                bytes.splice(at..at, new.iter().copied());
            }
            Mutation::Remove(at, n) => {
                let at = place(*at, len);
                bytes.drain(at..(at + n).min(len));
            }
            Mutation::Repeat(at, n) => {
                let at = place(*at, len);
                let piece = bytes[at..(at + n).min(len)].to_vec();
                bytes.splice(at..at, piece);
            }
            Mutation::Splice(at, from, n) => {
                let (at, from) = (place(*at, len), place(*from, other.len()));
                let piece = other[from..(from + n).min(other.len())].to_vec();
                bytes.splice(at..(at + n).min(len), piece);
            }
            Mutation::Length(at, n, wide) => {
                let width = if *wide { 8 } else { 4 };
                // Fields of binary formats lie at multiples of 4.
                let at = place(*at, len) / 4 * 4;
                let end = (at + width).min(len);
                bytes[at..end].copy_from_slice(&n.to_le_bytes()[..end - at]);
            }
            Mutation::Digits(at, n) => {
                // The first number at or after the place.
                let from = place(*at, len);
                let digit = |b: &u8| b.is_ascii_digit();
                if let Some(start) = bytes[from..].iter().position(digit).map(|i| from + i) {
                    let length = bytes[start..].iter().take_while(|b| digit(b)).count();
                    bytes.splice(start..start + length, n.to_string().into_bytes());
                }
            }
        }
    }
}

/// Mutated inputs of each target: half a second each.
const CASES: u32 = 4000;
/// Far above what any input takes, even on a busy machine: what exceeds it hangs.
const LONGEST: Duration = Duration::from_secs(20);

#[test]
fn no_mutated_seed_makes_a_parser_panic_or_hang() {
    for target in TARGETS {
        let seeds: Vec<Vec<u8>> = seeds(target).into_iter().map(|(_, bytes)| bytes).collect();
        let config = Config {
            cases: CASES,
            failure_persistence: None,
            ..Config::default()
        };
        let mut runner =
            TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let inputs = (
            any::<usize>(),
            any::<usize>(),
            prop::collection::vec(mutation(), 1..5),
        );
        let started = Instant::now();
        let mut accepted = 0;
        let counted = std::cell::RefCell::new(&mut accepted);
        let done = runner.run(&inputs, |(seed, other, mutations)| {
            let mut bytes = seeds[seed % seeds.len()].clone();
            for mutation in &mutations {
                mutation.apply(&mut bytes, &seeds[other % seeds.len()]);
            }
            let started = Instant::now();
            **counted.borrow_mut() += u32::from((target.run)(&bytes));
            prop_assert!(started.elapsed() < LONGEST, "{:?}", started.elapsed());
            Ok(())
        });
        if let Err(fault) = done {
            panic!("{}: {fault}", target.name);
        }
        println!(
            "{}: {accepted} of {CASES} accepted, {:.1} s",
            target.name,
            started.elapsed().as_secs_f64()
        );
    }
}

#[test]
fn bytes_without_any_form_are_refused() {
    let config = Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let bytes = prop::collection::vec(any::<u8>(), 0..300);
    runner
        .run(&bytes, |bytes| {
            for target in TARGETS {
                prop_assert!(!(target.run)(&bytes), "{}", target.name);
            }
            Ok(())
        })
        .unwrap();
    for target in TARGETS {
        assert!(
            !(target.run)(b"") && !(target.run)(&[0; 4096]),
            "{}",
            target.name
        );
    }
}

#[test]
#[ignore = "writes fuzz/seeds anew; for a wanted change of a format or of the tuning parameters"]
fn write_the_seeds() {
    let _ = std::fs::remove_dir_all(folder().join("seeds"));
    for (target, name, bytes) in made_seeds() {
        let folder = folder().join("seeds").join(target);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), bytes).unwrap();
    }
}

fn device() -> DeviceFacts {
    DeviceFacts::assumed(Arch(90))
}

fn evidence() -> Evidence {
    Evidence {
        built_with: provenance(),
        candidates: 700,
        date_unix_s: 1_790_000_000,
        default_median_us: Some(150.5),
        gpu: "NVIDIA H200".into(),
        max_error: 2.1e-3,
        median_us: 120.25,
        policy: "graph,cold-l2".into(),
        rejected: 3,
        samples: 35,
        spread_us: 0.5,
        ..Evidence::default()
    }
}

fn provenance() -> Provenance {
    Provenance {
        driver: "13.0".into(),
        nvrtc: "13.0".into(),
        template_digest: "0123456789abcdef".into(),
    }
}

const SHAPES: [&str; 4] = [
    "b=4,l=16384,h=8,p=64,g=1,n=128",
    "b=1,l=777,h=24,p=80,g=3,n=256,dtype=f16,dt_dtype=f32,d=hp,z=1,bias=1,softplus=1,limit=0.001:0.1,packed=5,init=bf16,final=none",
    "b=2,l=300,h=4,p=48,g=4,n=20,dtype=f32,d=none,init=none,tf32=1",
    "b=1,l=1,h=1,p=1,g=1,n=1,q=64",
];

fn records() -> Vec<Record> {
    let forward = SHAPES.map(|shape| {
        let problem: Problem = shape.parse().unwrap();
        let config = rules::default_strategy(&problem, &device()).unwrap();
        Record::forward(&problem, &device(), &config, evidence())
    });
    let step = StepProblem::new(64, 80, 64, 1, 128);
    let config = rules::default_step(&step, &device()).unwrap();
    let mut records = forward.to_vec();
    records.push(Record::step(&step, &device(), &config, evidence()));
    records
}

fn timings() -> Vec<Timing> {
    let key = records()[0].key;
    let config = records()[0].strategy().unwrap();
    let measured = Outcome::Measured {
        median_us: 120.25,
        spread_us: 0.5,
        samples: 35,
        max_error: 2.1e-3,
    };
    let failed = Outcome::Failed {
        stage: FailureStage::Spill,
        reason: "spill: 12 bytes of \"spill\" stores\nand more".into(),
    };
    let kernel = config.kernels()[0];
    let problem: Problem = SHAPES[0].parse().unwrap();
    let of_kernel = TuneKey::kernel(kernel.kernel(), &problem, &device());
    vec![
        Timing::new(key, &config, measured, provenance()),
        Timing::of_kernel(of_kernel, &kernel, failed, provenance()),
    ]
}

/// What a part file holds: made by a writer that could not have the store.
fn part_bytes() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let cache = CacheDir {
        network_file_system: Some("nfs4".into()),
        ..CacheDir::fixed(dir.path())
    };
    let db = LocalDb::in_cache(&cache).unwrap();
    match db.commit(&records(), &timings(), DEFAULT_WAIT).unwrap() {
        Committed::Part(path) => std::fs::read(path).unwrap(),
        Committed::Store => panic!("there should be no store on a network file system"),
    }
}

/// The header of a cubin and nothing behind it.
fn elf() -> Vec<u8> {
    let mut elf = vec![0; 80];
    elf[..9].copy_from_slice(b"\x7fELF\x02\x01\x00\x00\x08");
    (elf[18], elf[49]) = (190, 90);
    elf
}

fn kernel_key() -> KernelKey {
    KernelKey {
        identity: KernelIdentity {
            kernel: "compute_out".into(),
            source_digest: "00ff".into(),
            config: "#define CHUNK_SIZE 64\n".into(),
            arch: "sm_90a".into(),
            options: vec!["--std=c++17".into()],
        },
        nvrtc: NvrtcVersion {
            major: 13,
            minor: 0,
        },
    }
}

fn cubin_file() -> Vec<u8> {
    Cubin {
        key: kernel_key(),
        compiled: Compiled {
            cubin: elf(),
            log: "a word of the compiler's".into(),
            resources: None,
            target: Arch(90),
        },
    }
    .to_bytes()
}

fn packed_case() -> Case {
    let mut case = Case::default();
    case.set("x", bf16s(&[1, 7, 2, 3], noise));
    case.set("dt", f32s(&[1, 7, 2], |i| noise(i).abs()));
    case.set("A", f32s(&[2], |i| -1.0 - i as f32));
    case.set("B", bf16s(&[1, 7, 1, 4], noise));
    case.set("C", bf16s(&[1, 7, 1, 4], noise));
    case.set("D", f32s(&[2, 3], noise));
    case.set("z", bf16s(&[1, 7, 2, 3], noise));
    case.set("dt_bias", f32s(&[2], noise));
    case.set("initial_states", f32s(&[3, 2, 3, 4], noise));
    case.set("cu_seqlens", i32s(&[0, 2, 2, 7]));
    case.option("dt_softplus", "true");
    case.option("dt_limit", "0.001,0.1");
    case.option("chunk_size", "256");
    case
}

/// No tokens at all: legal, and where sizes hide.
fn empty_case() -> Case {
    let mut case = Case::default();
    case.set("x", f32s(&[3, 0, 2, 3], noise));
    case.set("dt", f32s(&[3, 0, 2], noise));
    case.set("A", f32s(&[2], |i| -1.0 - i as f32));
    case.set("B", f32s(&[3, 0, 1, 4], noise));
    case.set("C", f32s(&[3, 0, 1, 4], noise));
    case
}

/// Target, file name and bytes of every seed.
fn made_seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let dir = tempfile::tempdir().unwrap();
    let (snapshot, bundle) = (dir.path().join("s"), dir.path().join("b"));
    Snapshot::publish(&snapshot, 7, records()).unwrap();
    let cubins = [
        (kernel_key().to_text(), elf()),
        ("another".to_string(), elf()),
    ];
    Bundle::write(&bundle, "seed", records(), cubins).unwrap();
    let mut all: Vec<(&'static str, String, Vec<u8>)> = vec![
        (
            "record_text",
            "records.json".into(),
            write_text(records()).unwrap().into_bytes(),
        ),
        (
            "record_text",
            "empty.json".into(),
            write_text([]).unwrap().into_bytes(),
        ),
        ("part", "both.part".into(), part_bytes()),
        (
            "snapshot",
            "records".into(),
            std::fs::read(snapshot).unwrap(),
        ),
        (
            "bundle",
            "records-and-cubins".into(),
            std::fs::read(bundle).unwrap(),
        ),
        ("cubin", "header.elf".into(), elf()),
        ("cubin", "cached.cubin".into(), cubin_file()),
        (
            "kernel_key",
            "key.json".into(),
            kernel_key().to_text().into_bytes(),
        ),
        (
            "safetensors_forward",
            "plain".into(),
            Case::forward().to_bytes(),
        ),
        (
            "safetensors_forward",
            "packed".into(),
            packed_case().to_bytes(),
        ),
        (
            "safetensors_forward",
            "empty".into(),
            empty_case().to_bytes(),
        ),
        ("safetensors_step", "plain".into(), Case::step().to_bytes()),
    ];
    for (i, record) in records().iter().enumerate() {
        all.push(("key", format!("{i}"), record.key.to_string().into_bytes()));
        all.push((
            "record",
            format!("{i}.json"),
            record.to_json().unwrap().into_bytes(),
        ));
    }
    for (i, timing) in timings().iter().enumerate() {
        all.push((
            "timing",
            format!("{i}.json"),
            timing.to_json().unwrap().into_bytes(),
        ));
    }
    for (i, shape) in SHAPES.iter().enumerate() {
        all.push(("shape", format!("{i}"), shape.as_bytes().to_vec()));
    }
    let step = "step:b=64,h=80,p=64,g=1,n=128,t=2,slots=99,dtype=bf16,state=f16";
    all.push(("shape", "step".into(), step.as_bytes().to_vec()));
    let lists = "[[forward]]\nname = \"m\"\nshape = \"b=1,l=8,h=8,p=64,g=2,n=128\"\nl = [8, 16]\ntp = [1, 4]\n\
                 [[step]]\nname = \"d\"\nshape = \"b=4,h=8,p=64,g=1,n=128\"\nb = [1, 2]\n";
    all.push(("shape_list", "both.toml".into(), lists.as_bytes().to_vec()));
    // Of the problem that the target checks a config with.
    let problem = Problem::new(2, 300, 8, 64, 1, 128);
    for (i, config) in rules::agreement_defaults(&problem, &device())
        .iter()
        .take(8)
        .enumerate()
    {
        all.push((
            "config",
            format!("{i}.json"),
            serde_json::to_vec(config).unwrap(),
        ));
    }
    all
}
