//! What tests need and a machine may lack, from PyPI wheels unpacked into the target folder: NVRTC and a C++ compiler.
//!
//! pip does the fetching, so that a configured index, proxy or certificate works as it does for everything else. Versions and
//! digests are pinned; nothing of a wheel is run but the files named here.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable that names a folder or a file for mamba2-cuda's search.
pub const NVRTC_VARIABLE: &str = "MAMBA2_NVRTC_PATH";
/// The variable that names the compiler of mamba2-emulator.
pub const COMPILER_VARIABLE: &str = "MAMBA2_CXX";

/// A pinned wheel.
struct Wheel {
    what: &'static str,
    requirement: &'static str,
    megabytes: u32,
    /// Where it is unpacked, below the target folder.
    folder: &'static str,
    /// What tests use of it, below that.
    file: &'static str,
    /// What else would do.
    instead: &'static str,
}

/// x86_64 and aarch64 Linux.
const NVRTC: Wheel = Wheel {
    what: "NVRTC",
    requirement: "nvidia-cuda-nvrtc==13.0.88 \
         --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575 \
         --hash=sha256:d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b\n",
    megabytes: 90,
    folder: "nvrtc",
    file: "nvidia/cu13/lib/libnvrtc.so.13",
    instead: "install CUDA 12.8 or newer, or set MAMBA2_NVRTC_PATH to a folder with libnvrtc",
};

/// Zig's C++ compiler, a Clang that needs nothing of the system. x86_64 and aarch64 Linux.
const ZIG: Wheel = Wheel {
    what: "a C++ compiler",
    requirement: "ziglang==0.14.1 \
         --hash=sha256:6eb9d4d759b292c83810dbee2e9e8e3fbfbf01d864e6e9811bae711fd74e1c2f \
         --hash=sha256:7994b27f3cbfcedea43f9b7552e38b45857bdf0e9a45065474092dd74e7048cf\n",
    megabytes: 80,
    folder: "zig",
    file: "ziglang/zig",
    instead: "install g++ or clang++, or set MAMBA2_CXX",
};

/// The environment that lets tests find NVRTC: this machine's, or one fetched below `target`.
///
/// # Errors
/// Why it could not be fetched and what to do about it.
pub fn nvrtc(target: &Path) -> Result<Vec<(&'static str, String)>, String> {
    if mamba2_cuda::availability().nvrtc.is_ok() {
        return Ok(vec![]);
    }
    let library = NVRTC.find_or_fetch(target)?;
    let folder = library.parent().unwrap_or(target).display().to_string();
    Ok(vec![(NVRTC_VARIABLE, folder)])
}

/// The environment that lets tests find a C++ compiler: this machine's, or one fetched below `target`.
///
/// # Errors
/// As [`nvrtc`].
pub fn compiler(target: &Path) -> Result<Vec<(&'static str, String)>, String> {
    if mamba2_emulator::Compiler::find().is_ok() {
        return Ok(vec![]);
    }
    let zig = ZIG.find_or_fetch(target)?;
    Ok(vec![(COMPILER_VARIABLE, format!("{} c++", zig.display()))])
}

impl Wheel {
    fn find_or_fetch(&self, target: &Path) -> Result<PathBuf, String> {
        let home = target.join(self.folder);
        let file = home.join(self.file);
        if !file.exists() {
            self.fetch(target, &home)?;
        }
        if file.exists() {
            Ok(file)
        } else {
            Err(format!(
                "the fetched wheel should hold {}, but does not",
                file.display()
            ))
        }
    }

    /// Unpacks beside `home` and renames, so that an interrupted fetch leaves nothing that looks whole.
    fn fetch(&self, target: &Path, home: &Path) -> Result<(), String> {
        let python = find_pip().ok_or_else(|| {
            format!(
                "no {} on this machine, and no Python with pip to fetch it: install python3-pip; or {}",
                self.what, self.instead
            )
        })?;
        let pinned = self
            .requirement
            .split_whitespace()
            .next()
            .unwrap_or(self.what);
        println!(
            "xtask: fetching {pinned} (about {} MB) from PyPI into {}",
            self.megabytes,
            home.display()
        );
        let part = target.join(format!("{}.part-{}", self.folder, std::process::id()));
        let requirements = target.join(format!(
            "{}.requirements-{}.txt",
            self.folder,
            std::process::id()
        ));
        let io = |path: &Path| {
            let path = path.display().to_string();
            move |e: std::io::Error| format!("{path}: {e}")
        };
        std::fs::create_dir_all(target).map_err(io(target))?;
        std::fs::write(&requirements, self.requirement).map_err(io(&requirements))?;
        let status = Command::new(python)
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary=:all:",
            ])
            .args(["--require-hashes", "--target"])
            .arg(&part)
            .arg("-r")
            .arg(&requirements)
            // --target does not go with a user-wide install that a configuration file asks for.
            .env("PIP_USER", "0")
            .env("PIP_ROOT_USER_ACTION", "ignore")
            .status();
        let _ = std::fs::remove_file(&requirements);
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => {
                let _ = std::fs::remove_dir_all(&part);
                return Err(format!(
                    "pip could not fetch {pinned} ({status}): check the network or index; or {}",
                    self.instead
                ));
            }
            Err(e) => return Err(format!("{python}: {e}")),
        }
        // Another run may have won the race; its copy is as good.
        if std::fs::rename(&part, home).is_err() {
            let _ = std::fs::remove_dir_all(&part);
        }
        Ok(())
    }
}

fn find_pip() -> Option<&'static str> {
    ["python3", "python"].into_iter().find(|python| {
        Command::new(python)
            .args(["-m", "pip", "--version"])
            .output()
            .is_ok_and(|output| output.status.success())
    })
}
