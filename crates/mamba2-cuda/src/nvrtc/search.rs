#![doc = include_str!("SEARCH.md")]

use std::path::{Path, PathBuf};

use crate::environment::Environment;

/// Names for the system loader, newest first. Runtime images ship only the versioned file.
pub(crate) const LOADER_NAMES: [&str; 4] = [
    "libnvrtc.so.13",
    "libnvrtc.so.12",
    "libnvrtc.so.11.2",
    "libnvrtc.so",
];

/// One step of the search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// A name for the system loader.
    Name(&'static str),
    /// A file.
    File(PathBuf),
    /// A directory that holds no NVRTC, or is not there.
    Nothing(PathBuf),
}

impl Candidate {
    pub fn describe(&self) -> String {
        match self {
            Candidate::Name(name) => format!("{name} (system loader)"),
            Candidate::File(path) | Candidate::Nothing(path) => path.display().to_string(),
        }
    }
}

/// Every candidate, in the documented order.
pub(crate) fn candidates(environment: &Environment) -> Vec<Candidate> {
    if let Some(path) = &environment.nvrtc_path {
        return vec![if path.is_dir() {
            in_directory(path.clone())
        } else {
            Candidate::File(path.clone())
        }];
    }
    let mut all: Vec<Candidate> = LOADER_NAMES.into_iter().map(Candidate::Name).collect();
    let mut directories = Vec::new();
    let system_roots = ["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from);
    for root in environment.cuda_roots.iter().chain(&system_roots) {
        directories.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|d| root.join(d)));
    }
    for site in python_sites(environment) {
        directories.extend(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|d| site.join(d)));
    }
    directories.extend(environment.python_roots.iter().map(|root| root.join("lib")));
    if let Some(target) = &environment.cargo_target {
        let nvrtc = target.join("nvrtc");
        directories.extend(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", ""].map(|d| nvrtc.join(d)));
    }
    all.extend(directories.into_iter().map(in_directory));
    all
}

/// site-packages and dist-packages of every Python 3 under the roots that are given or usual.
fn python_sites(environment: &Environment) -> Vec<PathBuf> {
    let mut roots = environment.python_roots.clone();
    roots.extend(environment.home.as_ref().map(|home| home.join(".local")));
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    let mut sites = Vec::new();
    for lib in roots.into_iter().map(|root| root.join("lib")) {
        let mut pythons: Vec<PathBuf> = file_names(&lib)
            .into_iter()
            .filter(|name| name.starts_with("python3"))
            .map(|name| lib.join(name))
            .collect();
        pythons.sort();
        for python in pythons.into_iter().rev() {
            sites.extend(
                ["site-packages", "dist-packages"]
                    .map(|d| python.join(d))
                    .into_iter()
                    .filter(|d| d.is_dir()),
            );
        }
    }
    sites
}

fn file_names(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect()
}

/// Numbers of `libnvrtc.so.13.0.88` as [13, 0, 88]; the bare name sorts below every version.
fn version_of(name: &str, stem: &str) -> Option<Vec<u32>> {
    match name.strip_prefix(stem)? {
        "" => Some(Vec::new()),
        rest => rest
            .strip_prefix('.')?
            .split('.')
            .map(|n| n.parse().ok())
            .collect(),
    }
}

fn newest(directory: &Path, stem: &str) -> Option<PathBuf> {
    let names = file_names(directory);
    let best = names
        .iter()
        .filter_map(|n| Some((version_of(n, stem)?, n)))
        .max()?;
    Some(directory.join(best.1))
}

fn in_directory(directory: PathBuf) -> Candidate {
    match newest(&directory, "libnvrtc.so") {
        Some(file) => Candidate::File(file),
        None => Candidate::Nothing(directory),
    }
}

/// The builtins library beside `nvrtc`. NVRTC opens it by bare name, which the loader resolves only if the directory is
/// on its path or the library is already in memory.
pub(crate) fn builtins_beside(nvrtc: &Path) -> Option<PathBuf> {
    newest(nvrtc.parent()?, "libnvrtc-builtins.so")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().expect("parent")).expect("directory");
        std::fs::write(path, b"").expect("file");
    }

    #[test]
    fn the_override_is_the_only_candidate() {
        let dir = tempfile::tempdir().expect("tempdir");
        let environment = Environment {
            nvrtc_path: Some(dir.path().to_path_buf()),
            cuda_roots: vec!["/somewhere".into()],
            ..Default::default()
        };
        assert_eq!(
            candidates(&environment),
            [Candidate::Nothing(dir.path().to_path_buf())]
        );
        touch(&dir.path().join("libnvrtc.so.12"));
        assert_eq!(
            candidates(&environment),
            [Candidate::File(dir.path().join("libnvrtc.so.12"))]
        );
    }

    #[test]
    fn i1_versioned_file_without_the_bare_name_is_found_and_the_newest_wins() {
        let dir = tempfile::tempdir().expect("tempdir");
        let lib = dir.path().join("lib64");
        for name in [
            "libnvrtc.so.9",
            "libnvrtc.so.13",
            "libnvrtc.so.12.8.93",
            "libnvrtc.alt.so.14",
            "libnvrtc-builtins.so.13.0",
        ] {
            touch(&lib.join(name));
        }
        let environment = Environment {
            cuda_roots: vec![dir.path().to_path_buf()],
            ..Default::default()
        };
        let found = candidates(&environment);
        assert_eq!(
            found[LOADER_NAMES.len()],
            Candidate::File(lib.join("libnvrtc.so.13"))
        );
        assert_eq!(
            builtins_beside(&lib.join("libnvrtc.so.13")),
            Some(lib.join("libnvrtc-builtins.so.13.0"))
        );
    }

    #[test]
    fn i1_pip_wheels_of_both_generations_are_found() {
        let dir = tempfile::tempdir().expect("tempdir");
        let site = dir.path().join("lib/python3.12/site-packages/nvidia");
        touch(&site.join("cuda_nvrtc/lib/libnvrtc.so.12"));
        touch(&site.join("cu13/lib/libnvrtc.so.13"));
        let environment = Environment {
            python_roots: vec![dir.path().to_path_buf()],
            ..Default::default()
        };
        let files: Vec<Candidate> = candidates(&environment)
            .into_iter()
            .filter(|c| matches!(c, Candidate::File(p) if p.starts_with(dir.path())))
            .collect();
        assert_eq!(
            files,
            [
                Candidate::File(site.join("cu13/lib/libnvrtc.so.13")),
                Candidate::File(site.join("cuda_nvrtc/lib/libnvrtc.so.12"))
            ]
        );
    }

    #[test]
    fn only_a_cargo_target_directory_is_searched_above_the_program() {
        let dir = tempfile::tempdir().expect("tempdir");
        let wheel = dir.path().join("nvrtc/nvidia/cu13/lib/libnvrtc.so.13");
        touch(&wheel);
        let search = || {
            let cargo_target =
                crate::environment::target_directory(&dir.path().join("debug/deps/test"));
            candidates(&Environment {
                cargo_target,
                ..Default::default()
            })
        };
        assert!(!search().contains(&Candidate::File(wheel.clone())));
        touch(&dir.path().join("CACHEDIR.TAG"));
        assert!(search().contains(&Candidate::File(wheel)));
    }
}
