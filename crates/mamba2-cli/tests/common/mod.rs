//! Made input files and a clean environment for the binary under test.
#![allow(dead_code)] // each test program uses its part

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::{Dtype, TensorView};

/// A tensor as it stands in a file.
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub fn f32s(shape: &[usize], values: impl Fn(usize) -> f32) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor {
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        bytes: (0..n).flat_map(|i| values(i).to_le_bytes()).collect(),
    }
}

pub fn bf16s(shape: &[usize], values: impl Fn(usize) -> f32) -> Tensor {
    let n: usize = shape.iter().product();
    let bytes = (0..n)
        .flat_map(|i| half::bf16::from_f32(values(i)).to_le_bytes())
        .collect();
    Tensor {
        dtype: Dtype::BF16,
        shape: shape.to_vec(),
        bytes,
    }
}

pub fn i32s(values: &[i32]) -> Tensor {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor {
        dtype: Dtype::I32,
        shape: vec![values.len()],
        bytes,
    }
}

/// Numbers without a pattern, in [-1, 1).
pub fn noise(i: usize) -> f32 {
    let x = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(12345);
    let x = (x ^ (x >> 15)).wrapping_mul(2_246_822_519);
    (x >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// A safetensors file to be.
#[derive(Default)]
pub struct Case {
    pub tensors: BTreeMap<&'static str, Tensor>,
    pub metadata: HashMap<String, String>,
}

pub const SEQLEN: usize = 21;
pub const NHEADS: usize = 4;
pub const HEADDIM: usize = 6;
pub const NGROUPS: usize = 2;
pub const DSTATE: usize = 5;

impl Case {
    /// A small legal forward call in f32.
    pub fn forward() -> Case {
        let mut case = Case::default();
        case.set("x", f32s(&[1, SEQLEN, NHEADS, HEADDIM], noise));
        case.set("dt", f32s(&[1, SEQLEN, NHEADS], |i| noise(i).abs()));
        case.set("A", f32s(&[NHEADS], |i| -1.0 - 5.0 * i as f32));
        case.set("B", f32s(&[1, SEQLEN, NGROUPS, DSTATE], |i| noise(i + 7)));
        case.set("C", f32s(&[1, SEQLEN, NGROUPS, DSTATE], |i| noise(i + 99)));
        case
    }

    /// A small legal decode call: two rows, one token each, three slots.
    pub fn step() -> Case {
        let mut case = Case::default();
        case.set("state", f32s(&[3, NHEADS, HEADDIM, DSTATE], noise));
        case.set("x", f32s(&[2, 1, NHEADS, HEADDIM], |i| noise(i + 3)));
        case.set("dt", f32s(&[2, 1, NHEADS], |i| noise(i).abs()));
        case.set("A", f32s(&[NHEADS], |i| -1.0 - i as f32));
        case.set("B", f32s(&[2, 1, NGROUPS, DSTATE], |i| noise(i + 7)));
        case.set("C", f32s(&[2, 1, NGROUPS, DSTATE], |i| noise(i + 99)));
        case.set("state_batch_indices", i32s(&[2, -1]));
        case
    }

    pub fn set(&mut self, name: &'static str, tensor: Tensor) {
        self.tensors.insert(name, tensor);
    }

    pub fn option(&mut self, key: &str, value: &str) {
        self.metadata.insert(key.into(), value.into());
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let views: Vec<(&str, TensorView)> = self
            .tensors
            .iter()
            .map(|(name, t)| {
                (
                    *name,
                    TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap(),
                )
            })
            .collect();
        safetensors::serialize(views, Some(self.metadata.clone())).unwrap()
    }
}

/// A folder of its own for each test, and the binary in a clean environment: no GPU, no cache but the test's.
pub struct Bench {
    pub folder: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        Bench {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mamba2"));
        command
            .env_clear()
            .current_dir(self.folder.path())
            .env("HOME", self.folder.path())
            .env("MAMBA2_CACHE_DIR", self.path("cache"))
            .env("CUDA_VISIBLE_DEVICES", "")
            .env("MAMBA2_NVRTC_PATH", "/nonexistent/nvrtc");
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Done {
        Done::of(self.command().args(arguments).output().unwrap())
    }

    /// Writes the case and runs it on the CPU.
    pub fn run_case(&self, case: &Case, more: &[&str]) -> Done {
        self.write("in.safetensors", &case.to_bytes());
        let mut arguments = vec!["run", "in.safetensors", "--backend", "cpu"];
        arguments.extend(more);
        self.run(&arguments)
    }
}

/// What a finished command left.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    pub fn of(output: Output) -> Done {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let done = Done {
            // A signal has no code.
            code: output.status.code().unwrap_or(-1),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        };
        for text in [&done.stdout, &done.stderr] {
            assert!(
                !text.contains("panicked") && !text.contains("RUST_BACKTRACE"),
                "{done:?}"
            );
        }
        done
    }

    pub fn ok(self) -> Done {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// Reads an f32 tensor back.
pub fn read_f32(path: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    assert_eq!(view.dtype(), Dtype::F32);
    (
        view.shape().to_vec(),
        view.data()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect(),
    )
}
