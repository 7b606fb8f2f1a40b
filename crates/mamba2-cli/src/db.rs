//! `mamba2 db`: the tuning records of this machine. No command here needs a GPU.

use std::collections::BTreeMap;
use std::path::Path;

use mamba2::{CUBIN_DIRECTORY, CacheDir, CubinCache};
use mamba2_tunedb::{
    Bundle, DEFAULT_WAIT, Environment, LocalDb, Record, Shipped, TextRecords, TuneDbError, validate, write_text,
};
use serde_json::{Value, json};

use crate::cli::{DbArgs, DbCommand};
use crate::error::CliError;
use crate::print;
use crate::tensor_file::write_whole;

impl From<TuneDbError> for CliError {
    fn from(error: TuneDbError) -> CliError {
        CliError::Failed(error.to_string())
    }
}

/// Runs the command.
pub fn run(args: &DbArgs) -> Result<(), CliError> {
    let db = Db { cache: CacheDir::decide(&Environment::from_process()), json: args.json };
    match &args.command {
        DbCommand::List => db.list(),
        DbCommand::Show { key } => db.show(key),
        DbCommand::Export { output } => db.export(output),
        DbCommand::Import { file } => db.import(file),
        DbCommand::Merge { files } => db.merge(files.iter().map(AsRef::as_ref)),
        DbCommand::Diff { left, right } => db.diff(left, right.as_deref()),
        DbCommand::Verify => db.verify(),
        DbCommand::Prune => db.prune(),
        DbCommand::Path => db.path(),
        DbCommand::Bundle { output } => db.bundle(output),
    }
}

struct Db {
    cache: CacheDir,
    json: bool,
}

impl Db {
    /// Prints `value` with `--json`, else `text`.
    fn say(&self, text: &str, value: &Value) -> Result<(), CliError> {
        if self.json { print::json(value) } else { print::out(text) }
    }

    fn local(&self) -> Result<LocalDb, CliError> {
        Ok(LocalDb::in_cache(&self.cache)?)
    }

    /// Records tuned or imported here; none where there is no cache directory.
    fn local_records(&self) -> Result<Vec<Record>, CliError> {
        if self.cache.path.is_none() {
            return Ok(Vec::new());
        }
        match self.local()?.snapshot()? {
            Some(snapshot) => Ok(snapshot.records().collect::<Result<_, _>>()?),
            None => Ok(Vec::new()),
        }
    }

    fn all_records(&self) -> Result<Vec<(&'static str, Record)>, CliError> {
        let mut all: Vec<(&'static str, Record)> = self.local_records()?.into_iter().map(|r| ("local", r)).collect();
        for record in Shipped::embedded().records() {
            all.push(("shipped", record?));
        }
        Ok(all)
    }

    fn list(&self) -> Result<(), CliError> {
        let records = self.all_records()?;
        let line = |(origin, r): &(&str, Record)| format!("{origin:<8} {:>10.2} us  {}  {}", r.evidence.median_us, r.key, r.evidence.gpu);
        let mut lines: Vec<String> = records.iter().map(line).collect();
        if lines.is_empty() {
            lines.push("no records; `mamba2 tune` makes some, `mamba2 db import` brings some".into());
        }
        let rows = records.iter().map(|(origin, r)| {
            json!({
                "origin": origin, "key": r.key, "config": r.config, "median_us": r.evidence.median_us, "gpu": r.evidence.gpu,
            })
        });
        self.say(&lines.join("\n"), &rows.collect())
    }

    fn show(&self, wanted: &str) -> Result<(), CliError> {
        let mut found: Vec<(&str, Record)> =
            self.all_records()?.into_iter().filter(|(_, r)| r.key.to_string().starts_with(wanted)).collect();
        if found.is_empty() {
            return Err(CliError::Usage(format!("no record has a key that starts with {wanted:?}; see `mamba2 db list`")));
        }
        let rows: Vec<Value> = found.drain(..).map(|(origin, r)| json!({ "origin": origin, "record": r })).collect();
        // A record is named data; JSON is how people read it too.
        print::json(&rows.into_iter().collect())
    }

    fn export(&self, output: &Path) -> Result<(), CliError> {
        let records = self.local_records()?;
        let count = records.len();
        write_whole(output, write_text(records)?.as_bytes())?;
        self.say(&format!("wrote {count} records to {}", output.display()), &json!({ "records": count, "file": output }))
    }

    fn import(&self, file: &Path) -> Result<(), CliError> {
        let mut start = [0u8; 8];
        let read = std::fs::File::open(file).and_then(|mut f| std::io::Read::read(&mut f, &mut start));
        read.map_err(CliError::io(file, "read"))?;
        // Records are JSON text; a bundle is not.
        if start[0] == b'{' || start[0] == b'[' {
            return self.merge([file].into_iter());
        }
        let path = Bundle::import(file, &self.local()?.bundles_path())?;
        let bundle = Bundle::open(&path)?;
        let m = bundle.manifest();
        self.say(
            &format!("imported a bundle of {} records and {} kernels as {}", m.records, m.cubins, path.display()),
            &json!({ "bundle": path, "records": m.records, "kernels": m.cubins, "digest": bundle.digest() }),
        )
    }

    /// All files are read and checked before anything is written.
    fn merge<'a>(&self, files: impl Iterator<Item = &'a Path>) -> Result<(), CliError> {
        let mut records = Vec::new();
        for file in files {
            for record in read_text(file)? {
                validate::check_record(&record).map_err(|e| CliError::File { path: file.into(), reason: e.to_string() })?;
                records.push(record);
            }
        }
        let store = self.local()?.open_store(DEFAULT_WAIT)?;
        let mut taken = 0;
        for record in &records {
            taken += usize::from(store.merge(record)?);
        }
        store.commit()?;
        let kept = records.len() - taken;
        self.say(
            &format!("took {taken} records, kept the local one for {kept}; {} in all", store.len()),
            &json!({ "taken": taken, "kept": kept, "total": store.len() }),
        )
    }

    fn diff(&self, left: &Path, right: Option<&Path>) -> Result<(), CliError> {
        let by_key = |records: Vec<Record>| -> BTreeMap<String, Record> {
            records.into_iter().map(|r| (r.key.to_string(), r)).collect()
        };
        let left = by_key(read_text(left)?);
        let right = by_key(right.map_or_else(|| self.local_records(), read_text)?);
        let (mut lines, mut rows) = (Vec::new(), Vec::new());
        let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
        for key in keys {
            let (l, r) = (left.get(key), right.get(key));
            if let (Some(l), Some(r)) = (l, r)
                && l.config == r.config
            {
                continue;
            }
            let side = |mark: char, record: Option<&Record>| {
                record.map(|r| format!("  {mark} {:.2} us  {}", r.evidence.median_us, r.config))
            };
            lines.push(key.clone());
            lines.extend([side('-', l), side('+', r)].into_iter().flatten());
            rows.push(json!({ "key": key, "left": l, "right": r }));
        }
        if lines.is_empty() {
            lines.push("no difference in what is chosen".into());
        }
        self.say(&lines.join("\n"), &rows.into_iter().collect())
    }

    fn verify(&self) -> Result<(), CliError> {
        let mut faults = Vec::new();
        let mut checked = 0;
        let mut check = |origin: &str, record: Result<Record, TuneDbError>| {
            checked += 1;
            if let Err(fault) = record.and_then(|r| validate::check_record(&r)) {
                faults.push(format!("{origin}: {fault}"));
            }
        };
        if self.cache.path.is_some() {
            match self.local()?.snapshot() {
                Ok(Some(snapshot)) => snapshot.records().for_each(|r| check("local", r)),
                Ok(None) => {}
                Err(error) => check("local", Err(error)),
            }
        }
        Shipped::embedded().records().for_each(|r| check("shipped", r));
        for (path, bundle) in self.bundles()? {
            let bundle_faults = match bundle {
                Ok(bundle) => bundle.verify(),
                Err(error) => vec![error.to_string()],
            };
            checked += 1;
            faults.extend(bundle_faults.into_iter().map(|f| format!("{path}: {f}")));
        }
        let summary = format!("checked {checked} records and bundles, {} faults", faults.len());
        let text = faults.iter().chain([&summary]).cloned().collect::<Vec<_>>().join("\n");
        self.say(&text, &json!({ "checked": checked, "faults": faults }))?;
        if faults.is_empty() { Ok(()) } else { Err(CliError::CheckFailed(format!("{} faults in the tuning database", faults.len()))) }
    }

    fn bundles(&self) -> Result<Vec<(String, Result<Bundle, TuneDbError>)>, CliError> {
        let Ok(entries) = (match &self.cache.path {
            Some(_) => std::fs::read_dir(self.local()?.bundles_path()),
            None => return Ok(Vec::new()),
        }) else {
            return Ok(Vec::new());
        };
        let mut paths: Vec<_> = entries.flatten().map(|e| e.path()).collect();
        paths.retain(|p| p.extension().is_some_and(|e| e == Bundle::EXTENSION));
        paths.sort();
        Ok(paths.into_iter().map(|p| (p.display().to_string(), Bundle::open(&p))).collect())
    }

    fn path(&self) -> Result<(), CliError> {
        let value = json!({
            "path": self.cache.path, "reason": self.cache.reason, "network_file_system": self.cache.network_file_system,
        });
        match &self.cache.path {
            Some(path) => self.say(&format!("{}\n({})", path.display(), self.cache.reason), &value),
            None => self.say(&format!("none ({})", self.cache.reason), &value),
        }
    }

    fn prune(&self) -> Result<(), CliError> {
        let db = self.local()?;
        let cubins = CubinCache::new(db.root().with_file_name(CUBIN_DIRECTORY));
        let kernels = cubins.prune(mamba2_cuda::DEFAULT_CACHE_BYTES)?;
        let store = db.open_store(DEFAULT_WAIT)?;
        let before = store.size_bytes();
        // A timing of a candidate that today's tables no longer know can never be used again.
        let removed = store.retain_timings(|t| t.key.problem().is_some() || t.key.step_problem().is_some())?;
        store.commit()?;
        let after = store.size_bytes();
        self.say(
            &format!(
                "removed {removed} timings and {} kernels ({} bytes); the store has {after} bytes, had {before}",
                kernels.files_removed, kernels.bytes_removed
            ),
            &json!({
                "timings_removed": removed, "kernels_removed": kernels.files_removed,
                "kernel_bytes_removed": kernels.bytes_removed, "store_bytes_before": before, "store_bytes_after": after,
            }),
        )
    }

    fn bundle(&self, output: &Path) -> Result<(), CliError> {
        let records = self.local_records()?;
        let cubins = match &self.cache.path {
            Some(path) => CubinCache::new(path.join(CUBIN_DIRECTORY)).export(),
            None => Vec::new(),
        };
        if records.is_empty() && cubins.is_empty() {
            return Err(CliError::Usage("nothing to bundle: tune or run on the GPU first".into()));
        }
        let cubins = cubins.into_iter().map(|c| (c.key.to_text(), c.compiled.cubin));
        let manifest = Bundle::write(output, &format!("mamba2 {}", env!("CARGO_PKG_VERSION")), records, cubins)?;
        self.say(
            &format!("wrote {} records and {} kernels to {}", manifest.records, manifest.cubins, output.display()),
            &json!({ "records": manifest.records, "kernels": manifest.cubins, "archs": manifest.archs, "file": output }),
        )
    }
}

/// Every record of an exported file.
fn read_text(file: &Path) -> Result<Vec<Record>, CliError> {
    let text = std::fs::read_to_string(file).map_err(CliError::io(file, "read"))?;
    let records = TextRecords::new(file.display().to_string(), text)?;
    Ok(records.records().collect::<Result<_, _>>()?)
}
