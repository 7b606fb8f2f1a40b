use std::fmt::Write;

use mamba2_kernels::Source;
use mamba2_spec::Arch;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{CompileOptions, NvrtcVersion};

/// Everything that decides a cubin, but for the compiler's version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelIdentity {
    /// Name of the kernel.
    pub kernel: String,
    /// SHA-256 over the entry template and every shared header, names and code without comments.
    pub source_digest: String,
    /// Text of the generated header: sizes, dtypes, options, tuned parameters, launch.
    pub config: String,
    /// Architecture asked for, as in `--gpu-architecture`.
    pub arch: String,
    /// Compiler options, sorted, free of paths.
    pub options: Vec<String>,
}

/// The identity of a cubin: what was compiled, and by which compiler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelKey {
    /// What was compiled.
    pub identity: KernelIdentity,
    /// By which NVRTC.
    pub nvrtc: NvrtcVersion,
}

impl KernelIdentity {
    /// Identity of a kernel for `arch`.
    pub fn of(source: &Source, arch: Arch, options: CompileOptions) -> KernelIdentity {
        KernelIdentity::with_digest(source, source.template_digest(), arch, options)
    }

    /// As [`KernelIdentity::of`], by whoever has the [`Source::template_digest`].
    pub(crate) fn with_digest(
        source: &Source,
        source_digest: String,
        arch: Arch,
        options: CompileOptions,
    ) -> KernelIdentity {
        KernelIdentity {
            kernel: source.entry.into(),
            source_digest,
            config: source.config_header.clone(),
            arch: arch.nvrtc_name(),
            options: options.to_list(),
        }
    }

    /// SHA-256 in hex over every field.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for part in [&self.kernel, &self.source_digest, &self.config, &self.arch]
            .into_iter()
            .chain(&self.options)
        {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex(&hash.finalize())
    }
}

impl KernelKey {
    /// The key as one line of JSON, with its fields in a fixed order. Bundles name cubins by it.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("a key of strings and numbers should serialise")
    }

    /// Reads a key's text, which may be anything.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub fn from_text(text: &str) -> Result<KernelKey, String> {
        serde_json::from_str(text).map_err(|e| format!("kernel key: {e}"))
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut s, b| {
            let _ = write!(s, "{b:02x}");
            s
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mamba2_kernels::render;
    use mamba2_spec::{DeviceFacts, Problem, rules};

    fn identity(problem: &Problem, arch: Arch, options: CompileOptions) -> Vec<KernelIdentity> {
        let device = DeviceFacts::assumed(arch);
        let config = rules::default_strategy(
            &"b=1,l=256,h=8,p=64,g=1,n=128".parse().expect("shape"),
            &device,
        )
        .expect("default");
        config
            .kernels()
            .iter()
            .map(|k| KernelIdentity::of(&render(k, problem, &device), arch, options))
            .collect()
    }

    /// T10: one flip at a time. The rendered header carries every template constant, so each must change at least one kernel's
    /// digest; sizes that are launch arguments (batch, seqlen, nheads, ngroups) do not: models of other sizes share cubins.
    #[test]
    fn t10_every_option_of_a_problem_changes_a_key() {
        let base = "b=1,l=256,h=8,p=64,g=1,n=128";
        let problem: Problem = base.parse().expect("shape");
        let of = |p: &Problem| identity(p, Arch(90), CompileOptions::default());
        let digests = |p: &Problem| of(p).iter().map(KernelIdentity::digest).collect::<Vec<_>>();
        let flips = [
            "dtype=f16",
            "dtype=f32",
            "dt_dtype=f32",
            "d=none",
            "d=hp",
            "z=1",
            "bias=1",
            "softplus=1",
            "limit=0.1:0.2",
            "init=none",
            "init=bf16",
            "final=none",
            "final=f16",
            "packed=3",
            "align=1",
            "tf32=1",
        ];
        let mut seen = vec![digests(&problem)];
        for flip in flips {
            let text = format!("{base},{flip}");
            let flipped = digests(&text.parse().expect("shape"));
            assert!(
                !seen.contains(&flipped),
                "{flip} shares its cubins with another problem"
            );
            seen.push(flipped);
        }
        for flip in [
            "b=1,l=256,h=8,p=32,g=1,n=128",
            "b=1,l=256,h=8,p=64,g=1,n=64",
        ] {
            assert!(
                !seen.contains(&digests(&flip.parse().expect("shape"))),
                "{flip}"
            );
        }
        for same in [
            "b=3,l=256,h=8,p=64,g=1,n=128",
            "b=1,l=300,h=16,p=64,g=2,n=128",
        ] {
            assert_eq!(digests(&same.parse().expect("shape")), seen[0], "{same}");
        }
    }

    #[test]
    fn decode_steps_of_all_head_and_row_counts_share_cubins() {
        let device = DeviceFacts::assumed(Arch(90));
        let digest = |shape: &str| {
            let problem: mamba2_spec::StepProblem = shape.parse().expect("shape");
            let config = mamba2_spec::parameters::StateUpdate::default();
            let rendered = mamba2_kernels::render_step(&config, &problem, &device);
            KernelIdentity::of(&rendered, device.arch, CompileOptions::default()).digest()
        };
        let first = digest("b=64,h=80,p=64,g=1,n=128");
        for same in [
            "b=1,h=3,p=64,g=3,n=128",
            "b=65535,h=128,p=64,g=8,n=128",
            "b=7,h=1,p=64,g=1,n=128",
        ] {
            assert_eq!(digest(same), first, "{same}");
        }
        for other in [
            "b=64,h=80,p=64,g=1,n=64",
            "b=64,h=80,p=64,g=1,n=128,slots=99",
            "b=65536,h=80,p=64,g=1,n=128",
        ] {
            assert_ne!(digest(other), first, "{other}");
        }
    }

    #[test]
    fn arch_and_options_change_the_digest_and_fields_cannot_run_into_each_other() {
        let problem: Problem = "b=1,l=256,h=8,p=64,g=1,n=128".parse().expect("shape");
        let base = identity(&problem, Arch(90), CompileOptions::default())[0].clone();
        let lineinfo = identity(
            &problem,
            Arch(90),
            CompileOptions {
                lineinfo: true,
                ..CompileOptions::default()
            },
        )[0]
        .clone();
        let other_arch = identity(&problem, Arch(80), CompileOptions::default())[0].clone();
        assert_ne!(base.digest(), lineinfo.digest());
        assert_ne!(base.digest(), other_arch.digest());
        let (mut a, mut b) = (base.clone(), base);
        (a.kernel, a.source_digest) = ("ab".into(), "c".into());
        (b.kernel, b.source_digest) = ("a".into(), "bc".into());
        assert_ne!(a.digest(), b.digest());
    }
}
