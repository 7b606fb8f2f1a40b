//! Helper process of the tests, which follows a script instead of driving a GPU.
//!
//! With the script (JSON) as its only argument it is a worker; with a directory and a batch size after it, a whole job on one
//! shape with the tuning database there.

use mamba2_tunedb::{CacheDir, LocalDb};
use mamba2_tuner::fake::{FakeExecutor, Script};
use mamba2_tuner::{DbSink, Policy, Silent, Target, tune_target, worker::serve};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let script: Script = serde_json::from_str(&arguments[0]).expect("the script should be JSON");
    if script.device.name == "refuses to start" {
        println!("{{\"error\":\"scripted refusal\"}}");
        return;
    }
    if let [_, directory, batch] = &arguments[..] {
        return job(script, directory, batch);
    }
    println!("some library's chatter");
    serve(&FakeExecutor::new(script)).expect("standard output should be there");
}

fn job(script: Script, directory: &str, batch: &str) {
    let target = Target::Forward("b=1,l=100,h=2,p=32,g=1,n=32".parse().expect("a shape"));
    let db = LocalDb::in_cache(&CacheDir::fixed(directory)).expect("a database");
    let policy = Policy {
        batch: batch.parse().expect("a number"),
        ..Policy::default()
    };
    tune_target(
        &target,
        &FakeExecutor::new(script),
        &DbSink::new(db),
        &Silent,
        &policy,
    )
    .expect("a tuned shape");
}
