//! Shipped records through an edit of templates that leaves their kernels as they were. A record holds for the templates it was measured with, which
//! it names by a digest over the text of its kernels and of what they include; an edit for one kind of problem makes the records of all others
//! of these kernels stale. Those whose kernels compile to the same machine code before and after were measured with today's kernels and may say so.
//!
//! `cargo xtask carry-over before FILE` writes to FILE what the kernels of every record compile to; after the edit `carry-over after FILE` gives the
//! records whose code is the same today's digest. The others stay stale until they are tuned anew, and so do records of a tuning in which
//! candidates were rejected: the edit may have been for them. What else an edit does for configs that did not win is not looked at.

use std::collections::BTreeMap;
use std::path::Path;

use mamba2_cuda::Nvrtc;
use mamba2_kernels::{Rendered, render, render_step};
use mamba2_spec::launch::plan;
use mamba2_tunedb::{Record, TextRecords, joint_template_digest, write_text};
use object::{Object, ObjectSection, ObjectSymbol};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// What a record's config comes to with some version of the templates and of this program.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Code {
    /// As records name it.
    template_digest: String,
    /// Over the machine code, and over how it is launched.
    code_digest: String,
    /// Constants of the templates that the compiler left in device memory, whether or not code reads them, by kernel and name.
    constants: BTreeMap<String, Vec<u8>>,
    /// That compiled them.
    nvrtc: String,
}

type Codes = BTreeMap<String, Code>;

/// Which side of the edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Writes the file.
    Before,
    /// Reads it.
    After,
}

/// `cargo xtask carry-over before|after FILE`, with the path of NVRTC in the environment.
///
/// # Errors
/// Files that cannot be read or written, no NVRTC, or a record whose kernels do not compile.
pub fn run(side: Side, file: &Path) -> Result<(), String> {
    let nvrtc = Nvrtc::load().map_err(|e| e.to_string())?;
    let mut shipped = shipped()?;
    let records: Vec<&Record> = shipped.iter().flat_map(|(_, records)| records).collect();
    println!("{} records, NVRTC {}", records.len(), nvrtc.version());
    let now = codes(&records, &nvrtc)?;
    if side == Side::Before {
        let text = serde_json::to_vec_pretty(&now).map_err(|e| e.to_string())?;
        std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))?;
        println!(
            "wrote {}: edit the templates, then `carry-over after`",
            file.display()
        );
        return Ok(());
    }
    let before = std::fs::read(file).map_err(|e| {
        let first = "run `carry-over before` with this file on the commit before the edit";
        format!("{}: {e}: {first}", file.display())
    })?;
    let before: Codes =
        serde_json::from_slice(&before).map_err(|e| format!("{}: {e}", file.display()))?;
    let (mut carried, mut stale, mut fresh) = (0, vec![], 0);
    for record in shipped.iter_mut().flat_map(|(_, records)| records) {
        let key = record.key.to_string();
        match verdict(record, before.get(&key), &now[&key]) {
            Verdict::Fresh => fresh += 1,
            Verdict::Same => {
                let digest = &now[&key].template_digest;
                record
                    .evidence
                    .built_with
                    .template_digest
                    .clone_from(digest);
                carried += 1;
            }
            Verdict::Stale => stale.push(key),
        }
    }
    for (path, records) in shipped {
        let text = write_text(records).map_err(|e| e.to_string())?;
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    for key in &stale {
        println!("stale: {key}");
    }
    println!(
        "{fresh} were fresh, {carried} have the same code and were carried over, {} are stale",
        stale.len()
    );
    Ok(())
}

#[derive(Debug, PartialEq)]
enum Verdict {
    /// Of today's templates already.
    Fresh,
    /// Of the templates before, with code that did not change.
    Same,
    Stale,
}

impl Code {
    /// True if a record of `self` holds for `now`: the same instructions, which read the same constants if they read any.
    fn same_as(&self, now: &Code) -> bool {
        let (few, many) = if self.constants.len() <= now.constants.len() {
            (&self.constants, &now.constants)
        } else {
            (&now.constants, &self.constants)
        };
        let mut kept = few
            .iter()
            .map(|(name, value)| many.get(name) == Some(value));
        self.code_digest == now.code_digest && kept.all(|same| same)
    }
}

fn verdict(record: &Record, before: Option<&Code>, now: &Code) -> Verdict {
    let built_with = &record.evidence.built_with;
    if built_with.template_digest == now.template_digest {
        return Verdict::Fresh;
    }
    match before {
        _ if record.evidence.rejected > 0 => Verdict::Stale,
        // That two compilers agree on one of them says nothing of a third, which the record was measured with.
        Some(before)
            if before.template_digest == built_with.template_digest
                && before.same_as(now)
                && [&before.nvrtc, &now.nvrtc] == [&built_with.nvrtc; 2] =>
        {
            Verdict::Same
        }
        _ => Verdict::Stale,
    }
}

/// Every file of shipped records.
fn shipped() -> Result<Vec<(std::path::PathBuf, Vec<Record>)>, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tuning-db");
    let mut files = vec![];
    for entry in std::fs::read_dir(&folder).map_err(|e| e.to_string())? {
        let path = entry.map_err(|e| e.to_string())?.path();
        if path.extension().is_none_or(|e| e != "json") {
            continue;
        }
        let text = std::fs::read_to_string(&path).map_err(|e| e.to_string())?;
        let records = TextRecords::new(path.display().to_string(), text)
            .and_then(|text| text.records().collect::<Result<Vec<_>, _>>())
            .map_err(|e| e.to_string())?;
        files.push((path, records));
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(files)
}

/// The kernels of a record's config, and how they are launched.
fn kernels(record: &Record) -> Result<(Vec<Rendered>, String), String> {
    let facts = record.key.device();
    let fault = |e: &dyn std::fmt::Display| format!("{}: {e}", record.key);
    if let Some(problem) = record.key.problem() {
        let config = record.strategy().map_err(|e| fault(&e))?;
        let kernels = config.kernels();
        let rendered = kernels.iter().map(|k| render(k, &problem, &facts));
        let plan = plan(&config, &problem, &facts);
        return Ok((rendered.collect(), format!("{plan:?}")));
    }
    let problem = record
        .key
        .step_problem()
        .ok_or_else(|| fault(&"neither a forward pass nor a step"))?;
    let config = record.step_config().map_err(|e| fault(&e))?;
    let rendered = render_step(&config, &problem, &facts);
    let launch = format!("{:?}", rendered.launch);
    Ok((vec![rendered], launch))
}

/// Instructions of a cubin with the sizes of parameters and shared memory, and constants in device memory. Symbol tables, and what counts in them, change
/// with every constant that a template gets. (So does the table of addresses through which code would read a constant from memory; what none of ours does.)
fn parts(cubin: &[u8]) -> Result<(Sha256, BTreeMap<String, Vec<u8>>), String> {
    let file = object::File::parse(cubin).map_err(|e| e.to_string())?;
    let mut code = Sha256::new();
    for section in file.sections() {
        let name = section.name().map_err(|e| e.to_string())?;
        let wanted = [
            ".text.",
            ".nv.constant0",
            ".nv.constant2",
            ".nv.constant3",
            ".nv.shared",
        ];
        if wanted.iter().any(|w| name.starts_with(w)) {
            code.update(name);
            code.update(section.size().to_le_bytes());
            code.update(section.data().map_err(|e| e.to_string())?);
        }
    }
    let mut constants = BTreeMap::new();
    for symbol in file.symbols().filter(|s| s.size() > 0) {
        let Some(index) = symbol.section_index() else {
            continue;
        };
        let section = file.section_by_index(index).map_err(|e| e.to_string())?;
        if section.name() == Ok(".nv.global.init") {
            let value = section
                .data_range(symbol.address(), symbol.size())
                .map_err(|e| e.to_string())?;
            let name = symbol.name().map_err(|e| e.to_string())?;
            let value = value.ok_or_else(|| format!("{name} lies outside its section"))?;
            constants.insert(name.to_string(), value.to_vec());
        }
    }
    Ok((code, constants))
}

fn codes(records: &[&Record], nvrtc: &Nvrtc) -> Result<Codes, String> {
    let of_records = records
        .iter()
        .map(|r| kernels(r))
        .collect::<Result<Vec<_>, String>>()?;
    // Most records share their kernels with others.
    let name = |arch: mamba2_spec::Arch, r: &Rendered| (arch, r.entry, r.config_header.clone());
    let mut distinct = BTreeMap::new();
    for (record, (rendered, _)) in records.iter().zip(&of_records) {
        for r in rendered {
            distinct.insert(name(record.key.arch(), r), r);
        }
    }
    let cubins = distinct
        .into_par_iter()
        .map(|(name, rendered)| {
            let compiled = nvrtc.compile(rendered, name.0).map_err(|e| e.to_string())?;
            let (code, constants) = parts(&compiled.cubin)?;
            Ok((name, (code.finalize(), constants)))
        })
        .collect::<Result<BTreeMap<_, _>, String>>()?;
    let code = |(record, (rendered, launches)): (&&Record, (Vec<Rendered>, String))| {
        let mut hash = Sha256::new();
        let mut constants = BTreeMap::new();
        for r in &rendered {
            let (code, of_kernel) = &cubins[&name(record.key.arch(), r)];
            hash.update(code);
            let of_kernel = of_kernel.iter();
            constants.extend(of_kernel.map(|(k, v)| (format!("{}.{k}", r.entry), v.clone())));
        }
        hash.update(launches);
        let code_digest = hash.finalize().into_iter().map(|b| format!("{b:02x}"));
        let code = Code {
            template_digest: joint_template_digest(rendered.iter().map(|r| r.template_digest())),
            code_digest: code_digest.collect(),
            constants,
            nvrtc: nvrtc.version().to_string(),
        };
        (record.key.to_string(), code)
    };
    Ok(records.iter().zip(of_records).map(code).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(template: &str, code: &str, nvrtc: &str) -> Code {
        Code {
            template_digest: template.into(),
            code_digest: code.into(),
            constants: BTreeMap::new(),
            nvrtc: nvrtc.into(),
        }
    }

    #[test]
    fn a_constant_more_or_less_is_no_other_code_but_another_value_is() {
        let with = |constants: &[(&str, u8)]| {
            let mut code = code("", "same", "");
            code.constants = constants
                .iter()
                .map(|(k, v)| (k.to_string(), vec![*v]))
                .collect();
            code
        };
        let one = with(&[("a", 1)]);
        assert!(one.same_as(&with(&[("a", 1), ("b", 2)])));
        assert!(with(&[("a", 1), ("b", 2)]).same_as(&one));
        assert!(!one.same_as(&with(&[("a", 2), ("b", 2)])));
        assert!(!one.same_as(&with(&[("b", 1)])));
    }

    #[test]
    fn only_a_record_of_the_templates_before_with_the_same_code_is_carried_over() {
        let (_, mut records) = shipped().expect("records").swap_remove(0);
        let mut record = records.swap_remove(0);
        record.evidence.built_with.template_digest = "old".into();
        record.evidence.built_with.nvrtc = "13.0".into();
        record.evidence.rejected = 0;
        let now = code("new", "same", "13.0");
        let of = |before: &Code| verdict(&record, Some(before), &now);
        assert_eq!(of(&code("old", "same", "13.0")), Verdict::Same);
        assert_eq!(of(&code("old", "other", "13.0")), Verdict::Stale);
        assert_eq!(of(&code("older", "same", "13.0")), Verdict::Stale);
        assert_eq!(of(&code("old", "same", "12.8")), Verdict::Stale);
        assert_eq!(verdict(&record, None, &now), Verdict::Stale);
        let mut others_failed = record.clone();
        others_failed.evidence.rejected = 1;
        let before = code("old", "same", "13.0");
        assert_eq!(verdict(&others_failed, Some(&before), &now), Verdict::Stale);
        record.evidence.built_with.template_digest = "new".into();
        assert_eq!(verdict(&record, None, &now), Verdict::Fresh);
    }

    #[test]
    fn every_shipped_record_has_kernels_that_can_be_rendered() {
        for (path, records) in shipped().expect("records") {
            assert!(!records.is_empty(), "{}", path.display());
            for record in &records {
                let (rendered, _) = kernels(record).expect("kernels");
                assert!(!rendered.is_empty(), "{}", record.key);
            }
        }
    }
}
