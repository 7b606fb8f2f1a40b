//! Embeds every `tuning-db/*.json`, so that adding a GPU is adding one text file.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let root = PathBuf::from(
        env::var_os("CARGO_MANIFEST_DIR").expect("cargo should name the crate's directory"),
    );
    let dir = fs::canonicalize(root.join("../../tuning-db"))
        .expect("the workspace should have tuning-db/");
    println!("cargo::rerun-if-changed={}", dir.display());
    let mut files: Vec<PathBuf> = fs::read_dir(&dir)
        .expect("tuning-db/ should be readable")
        .map(|entry| entry.expect("tuning-db/ should be readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    files.sort();
    let rows: Vec<String> = files.iter().map(|path| row(path)).collect();
    let text = format!(
        "const EMBEDDED: &[(&str, &str)] = &[{}];\n",
        rows.join(", ")
    );
    let out =
        PathBuf::from(env::var_os("OUT_DIR").expect("cargo should name the output directory"));
    fs::write(out.join("shipped_files.rs"), text).expect("the output directory should be writable");
}

fn row(path: &Path) -> String {
    let name = path.file_name().expect("a listed file should have a name");
    format!("({name:?}, include_str!({path:?}))")
}
