//! NVRTC for tests: the one of this machine, or the PyPI wheel unpacked into the target folder.
//!
//! pip does the fetching, so that a configured index, proxy or certificate works as it does for everything else. Version and
//! digests are pinned; nothing of the wheel is run but the two libraries in it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable that names a folder or a file for mamba2-cuda's search.
pub const PATH_VARIABLE: &str = "MAMBA2_NVRTC_PATH";

/// x86_64 and aarch64 Linux.
const REQUIREMENT: &str = "nvidia-cuda-nvrtc==13.0.88 \
     --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575 \
     --hash=sha256:d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b\n";

/// Where an NVRTC comes from.
#[derive(Debug)]
pub enum Found {
    /// mamba2-cuda's own search finds one.
    Installed,
    /// In this folder.
    Folder(PathBuf),
}

/// Finds NVRTC, or fetches it below `target`.
///
/// # Errors
/// Why it could not be fetched and what to do about it.
pub fn find_or_fetch(target: &Path) -> Result<Found, String> {
    if mamba2_cuda::availability().nvrtc.is_ok() {
        return Ok(Found::Installed);
    }
    let home = target.join("nvrtc");
    let libraries = home.join("nvidia/cu13/lib");
    if !libraries.join("libnvrtc.so.13").exists() {
        fetch(target, &home)?;
    }
    Ok(Found::Folder(libraries))
}

/// Unpacks beside `home` and renames, so that an interrupted fetch leaves nothing that looks whole.
fn fetch(target: &Path, home: &Path) -> Result<(), String> {
    let python = find_pip().ok_or_else(|| {
        format!(
            "no NVRTC on this machine, and no Python with pip to fetch it: install python3-pip, or CUDA 12.8 or newer, or set {PATH_VARIABLE}"
        )
    })?;
    println!(
        "xtask: fetching NVRTC 13.0.88 (about 90 MB) from PyPI into {}",
        home.display()
    );
    let part = target.join(format!("nvrtc.part-{}", std::process::id()));
    let requirements = target.join(format!("nvrtc-requirements-{}.txt", std::process::id()));
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |e: std::io::Error| format!("{path}: {e}")
    };
    std::fs::create_dir_all(target).map_err(io(target))?;
    std::fs::write(&requirements, REQUIREMENT).map_err(io(&requirements))?;
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
                "pip could not fetch nvidia-cuda-nvrtc 13.0.88 ({status}): check the network or index, or set {PATH_VARIABLE} to a folder with libnvrtc"
            ));
        }
        Err(e) => return Err(format!("{python}: {e}")),
    }
    // Another run may have won the race; its copy is as good.
    if std::fs::rename(&part, home).is_err() {
        let _ = std::fs::remove_dir_all(&part);
    }
    let library = home.join("nvidia/cu13/lib/libnvrtc.so.13");
    if library.exists() {
        Ok(())
    } else {
        Err(format!(
            "the fetched wheel should hold {}, but does not",
            library.display()
        ))
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
