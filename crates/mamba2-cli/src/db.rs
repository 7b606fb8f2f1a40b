//! `mamba2 db`: the tuning records of this machine. No command here needs a GPU.

use std::path::{Path, PathBuf};

use mamba2::{CUBIN_DIRECTORY, CacheDir, CubinCache};
use mamba2_tunedb::ops::{self, Difference, ImportReport, PrunePolicy};
use mamba2_tunedb::{
    Bundle, DEFAULT_WAIT, Environment, LocalDb, Record, Shipped, TuneDbError, TuneKey, validate,
    write_text,
};
use serde_json::{Value, json};

use crate::cli::{DbArgs, DbCommand};
use crate::error::CliError;
use crate::print;

impl From<TuneDbError> for CliError {
    fn from(error: TuneDbError) -> CliError {
        CliError::Failed(error.to_string())
    }
}

/// Runs the command.
pub fn run(args: &DbArgs) -> Result<(), CliError> {
    let db = Db {
        cache: CacheDir::decide(&Environment::from_process()),
        json: args.json,
    };
    match &args.command {
        DbCommand::List { filter } => db.list(filter),
        DbCommand::Show { key } => db.show(key),
        DbCommand::Export { output, filter } => db.export(output, filter),
        DbCommand::Import { file } => {
            db.report_import(&ops::import(&db.local()?, file, DEFAULT_WAIT)?)
        }
        DbCommand::Merge { sources } => db.merge(sources),
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
        if self.json {
            print::json(value)
        } else {
            print::out(text)
        }
    }

    fn local(&self) -> Result<LocalDb, CliError> {
        Ok(LocalDb::in_cache(&self.cache)?)
    }

    /// Records tuned or imported here; none where there is no cache directory.
    fn local_records(&self) -> Result<Vec<Record>, CliError> {
        match &self.cache.path {
            Some(_) => Ok(ops::list(&self.local()?)?),
            None => Ok(Vec::new()),
        }
    }

    fn list(&self, filter: &str) -> Result<(), CliError> {
        let shipped = Shipped::embedded()
            .records()
            .collect::<Result<Vec<_>, _>>()?;
        let mut rows = Vec::new();
        let mut lines = Vec::new();
        for (origin, records) in [("local", self.local_records()?), ("shipped", shipped)] {
            for r in ops::select(records, filter) {
                lines.push(format!(
                    "{origin:<8} {:>10.2} us  {}",
                    r.evidence.median_us, r.key
                ));
                rows.push(json!({
                    "origin": origin, "key": r.key, "config": r.config, "median_us": r.evidence.median_us,
                    "default_median_us": r.evidence.default_median_us, "gpu": r.evidence.gpu,
                }));
            }
        }
        if lines.is_empty() {
            lines.push(
                "no records; `mamba2 tune` makes some, `mamba2 db import` brings some".into(),
            );
        }
        self.say(&lines.join("\n"), &rows.into_iter().collect())
    }

    fn show(&self, text: &str) -> Result<(), CliError> {
        let key: TuneKey = text.parse()?;
        let mut shown = match &self.cache.path {
            // Where nothing was tuned, looking must not make a store.
            Some(_) if self.local()?.root().is_dir() => {
                ops::show(&self.local()?, &key, DEFAULT_WAIT)?
            }
            _ => ops::Shown {
                record: None,
                timings: Vec::new(),
            },
        };
        if shown.record.is_none() {
            shown.record = Shipped::embedded().get(&key)?;
        }
        if shown.record.is_none() && shown.timings.is_empty() {
            return Err(CliError::Usage(format!(
                "nothing is known for {key}; see `mamba2 db list`"
            )));
        }
        // Named data: JSON is how people read it, too.
        print::json(&json!(shown))
    }

    fn export(&self, output: &Path, filter: &str) -> Result<(), CliError> {
        let records = ops::select(self.local_records()?, filter);
        let count = records.len();
        let (mut files, mut faults) = (Vec::new(), Vec::new());
        if output.is_dir() {
            let (texts, refused) = ops::export(&records)?;
            faults = refused;
            for (name, text) in texts {
                let path = output.join(name);
                ops::write_file(&path, &text)?;
                files.push(path);
            }
        } else {
            ops::write_file(output, &write_text(records)?)?;
            files.push(output.to_path_buf());
        }
        let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
        let text = format!(
            "wrote {} records to {}{}",
            count - faults.len(),
            names.join(", "),
            list_faults(&faults)
        );
        self.say(
            &text,
            &json!({ "records": count - faults.len(), "files": files, "refused": faults }),
        )
    }

    fn merge(&self, sources: &[PathBuf]) -> Result<(), CliError> {
        let db = self.local()?;
        let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) =
            sources.iter().cloned().partition(|p| p.is_dir());
        // Everything must be readable before anything is written.
        for file in &files {
            ops::read_records(file, &mut Vec::new())?;
        }
        let mut report = ops::merge(&db, &folders, DEFAULT_WAIT)?;
        for file in &files {
            let one = ops::import(&db, file, DEFAULT_WAIT)?;
            report.added += one.added;
            report.kept += one.kept;
            report.refused.extend(one.refused);
        }
        self.report_import(&report)
    }

    fn report_import(&self, report: &ImportReport) -> Result<(), CliError> {
        let text = match &report.bundle {
            Some(path) => format!("imported the bundle as {}", path.display()),
            None => format!(
                "took {} records and {} timings, kept what is here for {} records, refused {}{}",
                report.added,
                report.timings,
                report.kept,
                report.refused.len(),
                list_faults(&report.refused)
            ),
        };
        self.say(&text, &json!(report))
    }

    fn diff(&self, left: &Path, right: Option<&Path>) -> Result<(), CliError> {
        let mut faults = Vec::new();
        let left = ops::read_records(left, &mut faults)?;
        let right = match right {
            Some(path) => ops::read_records(path, &mut faults)?,
            None => self.local_records()?,
        };
        let differences = ops::diff(&left, &right);
        let mut lines = Vec::new();
        for difference in &differences {
            match difference {
                Difference::OnlyLeft { key } => lines.push(format!("only left   {key}")),
                Difference::OnlyRight { key } => lines.push(format!("only right  {key}")),
                Difference::Config {
                    key,
                    left_us,
                    right_us,
                    parameters,
                } => {
                    lines.push(format!(
                        "differs     {key}: {left_us:.2} us, {right_us:.2} us"
                    ));
                    lines.extend(
                        parameters
                            .iter()
                            .map(|(name, (l, r))| format!("            {name}: {l} -> {r}")),
                    );
                }
            }
        }
        if lines.is_empty() {
            lines.push("the same configs".into());
        }
        let text = format!("{}{}", lines.join("\n"), list_faults(&faults));
        self.say(
            &text,
            &json!({ "differences": differences, "unreadable": faults }),
        )
    }

    fn verify(&self) -> Result<(), CliError> {
        let mut report = match &self.cache.path {
            Some(_) => ops::verify(&self.local()?, DEFAULT_WAIT)?,
            None => ops::VerifyReport::default(),
        };
        let mut shipped = 0;
        for record in Shipped::embedded().records() {
            match record.and_then(|r| validate::check_record(&r)) {
                Ok(()) => shipped += 1,
                Err(fault) => report.faults.push(format!("shipped: {fault}")),
            }
        }
        let text = format!(
            "{} local records, {} timings, {} bundles and {shipped} shipped records are good, {} faults{}",
            report.records,
            report.timings.unwrap_or(0),
            report.bundles,
            report.faults.len(),
            list_faults(&report.faults)
        );
        let mut value = json!(report);
        value["shipped"] = json!(shipped);
        self.say(&text, &value)?;
        match report.faults.len() {
            0 => Ok(()),
            n => Err(CliError::CheckFailed(format!(
                "{n} faults in the tuning database; `mamba2 db prune` drops what cannot be used"
            ))),
        }
    }

    fn prune(&self) -> Result<(), CliError> {
        let db = self.local()?;
        let kernels = match &self.cache.path {
            Some(path) => CubinCache::new(path.join(CUBIN_DIRECTORY))
                .prune(mamba2_cuda::DEFAULT_CACHE_BYTES)?,
            None => mamba2_cuda::Pruned::default(),
        };
        let report = ops::prune(&db, &PrunePolicy::default(), DEFAULT_WAIT)?;
        let text = format!(
            "removed {} records, {} timings, {} left-over files, {} kernels; the database has {} bytes, had {}",
            report.records,
            report.timings,
            report.leftovers,
            kernels.files_removed,
            report.bytes_after,
            report.bytes_before
        );
        let mut value = json!(report);
        value["kernels"] = json!(kernels.files_removed);
        value["kernel_bytes"] = json!(kernels.bytes_removed);
        self.say(&text, &value)
    }

    fn path(&self) -> Result<(), CliError> {
        let report = ops::path(&self.cache);
        let text = match &report.cache_dir {
            Some(path) => format!(
                "{}\n({}; the database has {} bytes{})",
                path.display(),
                report.reason,
                report.bytes,
                report
                    .network_file_system
                    .as_ref()
                    .map_or_else(String::new, |kind| format!(
                        "; on {kind}, so there can be no store here: commits leave part files"
                    ))
            ),
            None => format!("none\n({})", report.reason),
        };
        self.say(&text, &json!(report))
    }

    fn bundle(&self, output: &Path) -> Result<(), CliError> {
        let records = self.local_records()?;
        let cubins = match &self.cache.path {
            Some(path) => CubinCache::new(path.join(CUBIN_DIRECTORY)).export(),
            None => Vec::new(),
        };
        if records.is_empty() && cubins.is_empty() {
            return Err(CliError::Usage(
                "nothing to bundle yet: tune or run on the GPU first".into(),
            ));
        }
        let cubins = cubins
            .into_iter()
            .map(|c| (c.key.to_text(), c.compiled.cubin));
        let manifest = Bundle::write(
            output,
            &format!("mamba2 {}", env!("CARGO_PKG_VERSION")),
            records,
            cubins,
        )?;
        self.say(
            &format!("wrote {} records and {} kernels to {}", manifest.records, manifest.cubins, output.display()),
            &json!({ "records": manifest.records, "kernels": manifest.cubins, "archs": manifest.archs, "file": output }),
        )
    }
}

/// One fault a line, after the summary.
fn list_faults(faults: &[String]) -> String {
    faults.iter().map(|f| format!("\n  {f}")).collect()
}
