//! From a rendered kernel to a program for this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use mamba2_kernels::Source;
use sha2::{Digest, Sha256};

use crate::Timing;
use crate::image::{Image, Job};

/// Names the compiler, with leading arguments, as in `zig c++`.
const VARIABLE: &str = "MAMBA2_CXX";

macro_rules! runtime {
    ($($path:literal),+ $(,)?) => {
        &[$(($path, include_str!(concat!("../runtime/", $path)))),+]
    };
}

/// Files beside the templates, by the name they are included under.
pub(crate) const RUNTIME: &[(&str, &str)] = runtime![
    "cuda.h",
    "main.cpp",
    "memory_barriers.h",
    "ptx/cp_async.cuh",
    "ptx/launch.cuh",
    "ptx/ldmatrix.cuh",
    "ptx/math.cuh",
    "ptx/mma.cuh",
    "ptx/prefetch.cuh",
    "ptx/sm90_barrier.cuh",
    "ptx/grid_flag.cuh",
    "ptx/sm90_cluster.cuh",
    "ptx/sm90_tma.cuh",
    "ptx/sm90_wgmma.cuh",
    "ptx/special.cuh",
    "threads.cpp",
    "threads.h",
];

/// A C++20 compiler.
#[derive(Clone, Debug)]
pub struct Compiler {
    words: Vec<String>,
}

impl Compiler {
    /// The compiler that `MAMBA2_CXX` names, else the first of g++, clang++ and c++ that runs.
    ///
    /// # Errors
    /// What to install or set.
    pub fn find() -> Result<Compiler, String> {
        if let Some(text) = std::env::var_os(VARIABLE) {
            let words: Vec<String> = text
                .to_string_lossy()
                .split_whitespace()
                .map(str::to_string)
                .collect();
            let compiler = Compiler { words };
            return if compiler.runs() {
                Ok(compiler)
            } else {
                Err(format!(
                    "{VARIABLE} is {}, which does not run",
                    text.display()
                ))
            };
        }
        ["g++", "clang++", "c++"]
            .map(|name| Compiler {
                words: vec![name.into()],
            })
            .into_iter()
            .find(Compiler::runs)
            .ok_or_else(|| {
                format!(
                    "no C++ compiler: install g++ or clang++, or set {VARIABLE}, as to \"zig c++\""
                )
            })
    }

    fn command(&self) -> Option<Command> {
        let (program, arguments) = self.words.split_first()?;
        let mut command = Command::new(program);
        command.args(arguments);
        Some(command)
    }

    fn runs(&self) -> bool {
        self.command().is_some_and(|mut c| {
            c.arg("--version")
                .output()
                .is_ok_and(|output| output.status.success())
        })
    }

    /// Compiles a kernel, or finds it compiled. `takes_maps`: it takes tensor maps after its arguments.
    pub(crate) fn compile(
        &self,
        source: &Source,
        takes_maps: bool,
        cache: &Path,
    ) -> Result<Program, String> {
        let files = sources(source, takes_maps);
        let mut digest = Sha256::new();
        for (name, text) in &files {
            digest.update(name.as_bytes());
            digest.update([0]);
            digest.update(text.as_bytes());
            digest.update([0]);
        }
        digest.update(self.words.join(" ").as_bytes());
        let name: String = digest.finalize()[..10]
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        let folder = cache.join(format!("{}-{name}", source.entry));
        let path = folder.join("kernel");
        if path.exists() {
            return Ok(Program { path });
        }
        let io = |e: std::io::Error| format!("{}: {e}", folder.display());
        // Threads of one process, and processes, may build the same program at once.
        static PARTS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = PARTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let suffix = format!("part-{}-{number}", std::process::id());
        for (file, text) in &files {
            let to = folder.join(file);
            fs::create_dir_all(to.parent().unwrap_or(&folder)).map_err(io)?;
            let part = to.with_extension(&suffix);
            fs::write(&part, text).map_err(io)?;
            fs::rename(&part, &to).map_err(io)?; // whole at any time
        }
        let mut command = self
            .command()
            .ok_or_else(|| format!("{VARIABLE} is empty"))?;
        let part = folder.join(format!("kernel.{suffix}"));
        let output = command
            .args(["-std=c++20", "-O1", "-w", "-fno-strict-aliasing"])
            // Zig's compiler traps what CUDA defines, such as shifts by a type's width.
            .args(["-fno-sanitize=undefined", "-I"])
            .arg(&folder)
            .arg("-o")
            .arg(&part)
            .arg(folder.join("main.cpp"))
            .env("ZIG_GLOBAL_CACHE_DIR", cache.join("zig"))
            .output()
            .map_err(|e| format!("{}: {e}", self.words.join(" ")))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            let head: Vec<&str> = log.lines().take(30).collect();
            return Err(format!("{}:\n{}", folder.display(), head.join("\n")));
        }
        fs::rename(&part, &path).map_err(io)?;
        Ok(Program { path })
    }
}

/// The runtime, the templates but for their instruction wrappers, and the kernel.
fn sources(source: &Source, takes_maps: bool) -> Vec<(String, String)> {
    let headers = source
        .headers()
        .into_iter()
        .filter(|(name, _)| !name.starts_with("ptx/"))
        .map(|(name, text)| (name.to_string(), text.to_string()));
    // The one declaration that C++ has no words for: an array without a size, another for each block.
    let body: Vec<String> = source
        .source
        .lines()
        .map(|line| {
            if line.trim_start().starts_with("extern __shared__") {
                "  unsigned char* const smem = emulator::own_shared();".to_string()
            } else {
                line.to_string()
            }
        })
        .collect();
    let kernel = format!(
        "#define KERNEL {}\n#define TAKES_MAPS {}\n{}\n",
        source.entry,
        u8::from(takes_maps),
        body.join("\n")
    );
    RUNTIME
        .iter()
        .map(|(name, text)| (name.to_string(), text.to_string()))
        .chain(headers)
        .chain([("kernel.cuh".to_string(), kernel)])
        .collect()
}

/// A compiled kernel.
#[derive(Debug)]
pub(crate) struct Program {
    path: PathBuf,
}

impl Program {
    /// Runs the whole grid.
    pub fn run(&self, job: &Job, image: &mut Image, timing: Timing) -> Result<(), String> {
        let io = |e: std::io::Error| format!("{}: {e}", self.path.display());
        let folder = tempfile::tempdir().map_err(io)?;
        let (job_path, image_path) = (folder.path().join("job"), folder.path().join("image"));
        fs::write(&job_path, job.to_string()).map_err(io)?;
        fs::write(&image_path, &image.memory).map_err(io)?;
        let mut command = Command::new(&self.path);
        command.arg(&job_path).arg(&image_path);
        match timing {
            Timing::Early => command.env_remove("EMULATOR_LATE"),
            Timing::Late => command.env("EMULATOR_LATE", "1"),
        };
        let output = command.output().map_err(io)?;
        if !output.status.success() {
            return Err(format!(
                "{}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        image.memory = fs::read(&image_path).map_err(io)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_wrapper_has_its_counterpart() {
        let names = |files: &[(&'static str, &'static str)]| -> Vec<&'static str> {
            let mut names: Vec<_> = files
                .iter()
                .map(|(name, _)| *name)
                .filter(|name| name.starts_with("ptx/"))
                .collect();
            names.sort_unstable();
            names
        };
        assert_eq!(names(RUNTIME), names(mamba2_kernels::HEADERS));
    }
}
