//! Helper process of the tests, which follows a script instead of driving a GPU.
//!
//! With the script (JSON) as its only argument it is a worker; with a directory, a batch size and a shape after it, a whole job
//! on that shape with the tuning database there. A job says which kernels it compiles (`compile NAME`), and which results are
//! durable (`stored NAME`), one a line, at once: whoever kills it knows what must not be done again.

use std::io::Write;

use mamba2_spec::{DeviceFacts, Kernel};
use mamba2_tunedb::{CacheDir, LocalDb};
use mamba2_tuner::fake::{FakeExecutor, Script};
use mamba2_tuner::{
    Candidate, Check, Choice, Compiling, Conditions, DbSink, Executor, Failure, Policy, Rounds,
    Silent, Sink, Stored, Target, Tell, TunerError, Verified, tune_target, worker::serve,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let script: Script = serde_json::from_str(&arguments[0]).expect("the script should be JSON");
    if script.device.name == "refuses to start" {
        println!("{{\"error\":\"scripted refusal\"}}");
        return;
    }
    if let [_, directory, batch, shape] = &arguments[..] {
        return job(script, directory, batch, shape);
    }
    println!("some library's chatter");
    serve(&FakeExecutor::new(script)).expect("standard output should be there");
}

fn job(script: Script, directory: &str, batch: &str, shape: &str) {
    let target = Target::Forward(shape.parse().expect("a shape"));
    let db = LocalDb::in_cache(&CacheDir::fixed(directory)).expect("a database");
    let policy = Policy {
        batch: batch.parse().expect("a number"),
        ..Policy::default()
    };
    tune_target(
        &target,
        &Telling(FakeExecutor::new(script)),
        &Telling(DbSink::new(db)),
        &Silent,
        &policy,
    )
    .expect("a tuned shape");
}

/// Says on standard output what passes through it.
struct Telling<T>(T);

fn tell(what: &str, candidate: &Candidate) {
    // Whole passes are compiled again for the finals; only kernels are done once.
    if matches!(candidate, Candidate::Kernel { .. }) {
        println!("{what} {candidate}");
        std::io::stdout()
            .flush()
            .expect("standard output should be there");
    }
}

impl Executor for Telling<FakeExecutor> {
    fn device(&self) -> &DeviceFacts {
        self.0.device()
    }

    fn kernel_conditions(&self, kernel: Kernel) -> Conditions {
        self.0.kernel_conditions(kernel)
    }

    fn memory_bytes(&self) -> Option<u64> {
        self.0.memory_bytes()
    }

    fn compile(
        &self,
        target: &Target,
        candidates: &[Candidate],
        told: Tell<'_>,
    ) -> Result<(), TunerError> {
        self.0.compile(target, candidates, &|step| {
            if let Compiling::Started(members) = &step {
                members
                    .iter()
                    .for_each(|i| tell("compile", &candidates[*i]));
            }
            told(step)
        })
    }

    fn verify(
        &self,
        target: &Target,
        candidate: &Candidate,
        check: Check,
    ) -> Result<Result<Verified, Failure>, TunerError> {
        self.0.verify(target, candidate, check)
    }

    fn measure(
        &self,
        target: &Target,
        candidates: &[Candidate],
        rounds: Rounds,
    ) -> Result<Vec<Result<Vec<f64>, Failure>>, TunerError> {
        self.0.measure(target, candidates, rounds)
    }
}

impl Sink for Telling<DbSink> {
    fn result(
        &self,
        device: &DeviceFacts,
        target: &Target,
        candidate: &Candidate,
    ) -> Result<Option<Stored>, TunerError> {
        self.0.result(device, target, candidate)
    }

    fn put_results(
        &self,
        device: &DeviceFacts,
        target: &Target,
        results: &[(Candidate, Stored)],
    ) -> Result<(), TunerError> {
        self.0.put_results(device, target, results)?;
        results.iter().for_each(|(c, _)| tell("stored", c));
        Ok(())
    }

    fn put_choice(
        &self,
        device: &DeviceFacts,
        target: &Target,
        choice: &Choice,
    ) -> Result<(), TunerError> {
        self.0.put_choice(device, target, choice)
    }
}
