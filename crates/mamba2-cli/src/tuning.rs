//! `mamba2 tune`, the worker behind it, and tuning on first use (`--mode tune`).

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar};
use mamba2::{
    CUBIN_DIRECTORY, CacheDir, Device, DeviceFacts, Jit, Ladder, Problem, Record, StepProblem,
    Tier, TuneHook,
};
use mamba2_tunedb::{Environment, LocalDb, TuneDbError, TuneKey};
use mamba2_tuner::worker::{Launch, RemoteExecutor, worker_main};
use mamba2_tuner::{
    DbSink, Executor, JobReport, Policy, Progress, Shard, Target, TunerError, run_hold_out,
    run_job, shapes, tune_target,
};

use crate::cli::TuneArgs;
use crate::error::CliError;
use crate::print;
use crate::progress::bar;
use crate::shape::parse_target;
use crate::tensor_file::write_whole;

impl From<TunerError> for CliError {
    fn from(error: TunerError) -> CliError {
        match error {
            TunerError::Device(_) => CliError::NoDevice(error.to_string()),
            other => CliError::Failed(other.to_string()),
        }
    }
}

/// Runs the command.
pub fn run(args: &TuneArgs) -> Result<(), CliError> {
    let job = Job::read(args)?;
    let devices = devices(&args.device)?;
    let executors: Vec<RemoteExecutor> = devices
        .iter()
        .map(|d| start(d.info().ordinal, cubins(&job.cache), &job.policy))
        .collect::<Result<_, _>>()?;
    drop(devices);
    let executors: Vec<&dyn Executor> = executors.iter().map(|e| e as &dyn Executor).collect();
    job.run(args, &executors)
}

/// Runs the command on devices of the caller's.
pub fn run_on(args: &TuneArgs, executors: &[&dyn Executor]) -> Result<(), CliError> {
    Job::read(args)?.run(args, executors)
}

/// What is to be done, before any device is touched.
struct Job {
    targets: Vec<Target>,
    shard: Shard,
    cache: CacheDir,
    db: LocalDb,
    policy: Policy,
}

impl Job {
    fn read(args: &TuneArgs) -> Result<Job, CliError> {
        let targets = targets(args)?;
        let environment = Environment::from_process();
        let shard = shard(args, &environment)?;
        let cache = CacheDir::decide(&environment);
        // Without a place to keep results there is no point in measuring for minutes.
        let db = LocalDb::in_cache(&cache)?;
        if let (Some(path), Some(kind)) = (&cache.path, &cache.network_file_system) {
            eprintln!(
                "mamba2: {} is on {kind}, where the store cannot live: results go into part files; set MAMBA2_CACHE_DIR \
                 to a local folder and use `mamba2 db merge`",
                path.display()
            );
        }
        Ok(Job {
            targets,
            shard,
            cache,
            db,
            policy: Policy::default(),
        })
    }

    fn run(mut self, args: &TuneArgs, executors: &[&dyn Executor]) -> Result<(), CliError> {
        let Some(device) = executors.first().map(|e| e.device()) else {
            return Err(CliError::NoDevice("no device to tune on".into()));
        };
        let ladder = Ladder::builder()
            .cache(&self.cache)
            .templates(mamba2_kernels::template_digest)
            .build();
        if args.hold_out {
            return self.hold_out(args, executors, &ladder);
        }
        if args.resume {
            self.leave_out_done(&ladder, device);
        }
        let job = run_job(
            &self.targets,
            self.shard,
            executors,
            &DbSink::new(self.db),
            &Bars::new(),
            &self.policy,
        )?;
        report(args, &job)
    }

    /// Keeps the shapes of this shard that have no up-to-date record.
    fn leave_out_done(&mut self, ladder: &Ladder, device: &DeviceFacts) {
        let before = self.targets.len();
        let todo = |(i, target): (usize, Target)| {
            (self.shard.takes(i) && !is_done(ladder, &target, device)).then_some(target)
        };
        // Only whole entries go, so that the shards of a list stay what they are.
        self.targets = std::mem::take(&mut self.targets)
            .into_iter()
            .enumerate()
            .filter_map(todo)
            .collect();
        self.shard = Shard::ALL;
        eprintln!(
            "mamba2: {} of {before} shapes to tune here",
            self.targets.len()
        );
    }

    fn hold_out(
        &self,
        args: &TuneArgs,
        executors: &[&dyn Executor],
        ladder: &Ladder,
    ) -> Result<(), CliError> {
        let report = run_hold_out(
            &self.targets,
            self.shard,
            executors,
            ladder,
            &Bars::new(),
            &self.policy,
        )?;
        if args.json {
            print::out(
                &report
                    .to_json()
                    .map_err(|e| CliError::Failed(format!("report: {e}")))?,
            )?;
        } else {
            print::out(&report.table())?;
        }
        if let Some(failed) = report.failed.first() {
            return Err(CliError::Failed(format!(
                "{} shapes could not be measured, such as {}: {}",
                report.failed.len(),
                failed.shape,
                failed.reason
            )));
        }
        match report.losses().first() {
            None => Ok(()),
            Some(first) => Err(CliError::CheckFailed(format!(
                "the nearest match loses to the default on {} of {} shapes, such as {}",
                report.losses().len(),
                report.shapes.len(),
                first.shape
            ))),
        }
    }
}

/// The worker process of a tuner: speaks lines of JSON on standard input and output.
pub fn worker(role: &str) -> Result<(), CliError> {
    Ok(worker_main(role)?)
}

fn report(args: &TuneArgs, job: &JobReport) -> Result<(), CliError> {
    if let Some(path) = &args.report {
        write_whole(path, job.to_html().as_bytes())?;
    }
    if args.json {
        print::out(
            &job.to_json()
                .map_err(|e| CliError::Failed(format!("report: {e}")))?,
        )?;
    } else {
        print::out(&job.table())?;
    }
    match job.failed.first() {
        None => Ok(()),
        Some(first) => Err(CliError::Failed(format!(
            "{} shapes could not be tuned, such as {}: {}",
            job.failed.len(),
            first.shape,
            first.reason
        ))),
    }
}

fn targets(args: &TuneArgs) -> Result<Vec<Target>, CliError> {
    if let Some(path) = &args.shapes {
        let text = std::fs::read_to_string(path).map_err(CliError::io(path, "read"))?;
        return shapes::parse(&text).map_err(|e| CliError::File {
            path: path.clone(),
            reason: e.to_string(),
        });
    }
    args.shape.iter().map(|text| parse_target(text)).collect()
}

/// `--shard`, else what the job scheduler says, else everything.
fn shard(args: &TuneArgs, environment: &Environment) -> Result<Shard, CliError> {
    if let Some(text) = &args.shard {
        return text
            .parse()
            .map_err(|e: TuneDbError| CliError::Usage(e.to_string()));
    }
    // A single shape is no job: it is tuned wherever it is asked for.
    let found = if args.shapes.is_some() {
        environment.shard()?
    } else {
        None
    };
    match found {
        None => Ok(Shard::ALL),
        Some(shard) => {
            eprintln!("mamba2: shard {shard} ({})", shard.source());
            Ok(shard)
        }
    }
}

/// The named GPUs; without names, every visible GPU with the facts of the first, because a record counts for one kind.
fn devices(ordinals: &[usize]) -> Result<Vec<Device>, CliError> {
    if !ordinals.is_empty() {
        return Ok(ordinals
            .iter()
            .map(|n| Device::open(*n))
            .collect::<Result<_, _>>()?);
    }
    let first = Device::open(0)?;
    let mut devices = Vec::new();
    for ordinal in 1..Device::count()? {
        let device = Device::open(ordinal)?;
        if device.facts().same_for_tuning(first.facts()) {
            devices.push(device);
        } else {
            eprintln!(
                "mamba2: device {ordinal} ({}) is of another kind; tune it with --device {ordinal}",
                device.facts().name
            );
        }
    }
    devices.insert(0, first);
    Ok(devices)
}

fn is_done(ladder: &Ladder, target: &Target, device: &DeviceFacts) -> bool {
    let fresh = |tier: Tier, stale: bool| tier == Tier::Local && !stale;
    match target {
        Target::Forward(problem) => ladder
            .look_up(problem, device)
            .is_ok_and(|a| fresh(a.tier, a.stale)),
        Target::Step(problem) => ladder
            .look_up_step(problem, device)
            .is_ok_and(|a| fresh(a.tier, a.stale)),
    }
}

fn cubins(cache: &CacheDir) -> Option<PathBuf> {
    cache.path.as_ref().map(|path| path.join(CUBIN_DIRECTORY))
}

/// Workers are this very program with a hidden subcommand.
fn start(
    ordinal: usize,
    cubins: Option<PathBuf>,
    policy: &Policy,
) -> Result<RemoteExecutor, TunerError> {
    let program = std::env::current_exe()
        .map_err(|e| TunerError::Device(format!("cannot find this program: {e}")))?;
    let launch: Launch = Box::new(move |role| {
        let mut command = Command::new(&program);
        // A role is plain data: names, numbers and a path.
        command
            .arg("tune-worker")
            .arg(serde_json::to_string(role).expect("a role should be JSON"));
        command
    });
    RemoteExecutor::start(
        launch,
        ordinal,
        cubins,
        Duration::from_secs(policy.candidate_timeout_s),
    )
}

/// One bar per stage of each shape in hand.
struct Bars {
    all: MultiProgress,
    bar: ProgressBar,
}

impl Bars {
    fn new() -> Bars {
        let all = MultiProgress::new();
        let bar = all.add(bar(0));
        Bars { all, bar }
    }
}

impl Progress for Bars {
    fn stage(&self, shape: &str, stage: &str, total: usize, stored: usize) {
        self.bar.reset();
        self.bar.set_length(total as u64);
        self.bar.set_position(stored as u64);
        self.bar.set_message(format!("{shape}: {stage}"));
    }

    fn advance(&self, done: usize, best_us: Option<f64>) {
        self.bar.inc(done as u64);
        if let Some(best) = best_us {
            let message = self.bar.message();
            let stage = message.split(", best").next().unwrap_or_default();
            self.bar.set_message(format!("{stage}, best {best:.1} us"));
        }
    }

    fn warn(&self, text: &str) {
        let text = format!("mamba2: {text}");
        // Without a terminal there are no bars to keep clear of.
        if self.bar.is_hidden() {
            eprintln!("{text}");
        } else {
            let _ = self.all.println(text);
        }
    }
}

/// Tunes a problem when an engine in mode `tune` meets it for the first time.
pub fn hook() -> Arc<dyn TuneHook> {
    Arc::new(Hook)
}

struct Hook;

impl Hook {
    fn tune(
        target: &Target,
        key: &TuneKey,
        device: &Device,
        jit: &Jit,
    ) -> Result<Option<Record>, String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let cache = CacheDir::decide(&Environment::from_process());
        let db = LocalDb::in_cache(&cache).map_err(|e| text(&e))?;
        let policy = Policy::default();
        let cubins = jit.cache().directory().map(PathBuf::from);
        let executor = start(device.info().ordinal, cubins, &policy).map_err(|e| text(&e))?;
        tune_target(
            target,
            &executor,
            &DbSink::new(db.clone()),
            &Bars::new(),
            &policy,
        )
        .map_err(|e| text(&e))?;
        let records = mamba2_tunedb::ops::list(&db).map_err(|e| text(&e))?;
        Ok(records.into_iter().find(|record| record.key == *key))
    }
}

impl TuneHook for Hook {
    fn tune(
        &self,
        problem: &Problem,
        device: &Device,
        jit: &Jit,
    ) -> Result<Option<Record>, String> {
        Hook::tune(
            &Target::Forward(problem.clone()),
            &TuneKey::forward(problem, device.facts()),
            device,
            jit,
        )
    }

    fn tune_step(
        &self,
        problem: &StepProblem,
        device: &Device,
        jit: &Jit,
    ) -> Result<Option<Record>, String> {
        Hook::tune(
            &Target::Step(problem.clone()),
            &TuneKey::step(problem, device.facts()),
            device,
            jit,
        )
    }
}
