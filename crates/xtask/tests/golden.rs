//! The rendered headers against their golden files.

#[test]
fn rendered_headers_are_the_golden_files() {
    let files = xtask::golden::headers().unwrap();
    for (path, text) in &files {
        let kept = std::fs::read_to_string(path)
            .unwrap_or_else(|e| panic!("{}: {e}; run `cargo xtask bless`", path.display()));
        assert_eq!(
            &kept,
            text,
            "{} differs; if that is wanted, run `cargo xtask bless`",
            path.display()
        );
    }
    let folder = files[0].0.parent().unwrap();
    assert_eq!(
        std::fs::read_dir(folder).unwrap().count(),
        files.len(),
        "{} holds files nobody renders",
        folder.display()
    );
}
