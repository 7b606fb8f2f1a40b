//! A process that the fault tests start, and kill.
//!
//! `write DIR FIRST`: commits record after record, with one timing each, and prints the number of each that is durable.
//! `commit DIR FIRST COUNT`: commits that many records one by one, looks each up, and ends.
//! `look DIR NUMBER`: prints which tier answers for that record's problem, and how many warnings there were.

use std::io::Write;
use std::time::Duration;

use mamba2_spec::{Arch, DeviceFacts, Problem, StrategyConfig, ThreeKernelConfig};
use mamba2_tunedb::{
    CacheDir, Evidence, Ladder, LocalDb, Outcome, Provenance, Record, Tier, Timing, TuneKey,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, command, dir, rest @ ..] = arguments.as_slice() else {
        return Err("expected a command and a directory".into());
    };
    let cache = CacheDir::fixed(dir);
    let first: usize = rest.first().ok_or("expected a first number")?.parse()?;
    match command.as_str() {
        "write" => (first..).try_for_each(|i| commit(&cache, i)),
        "commit" => {
            let count: usize = rest.get(1).ok_or("expected a count")?.parse()?;
            for i in first..first + count {
                commit(&cache, i)?;
                let answer = Ladder::builder()
                    .cache(&cache)
                    .build()
                    .look_up(&problem(i), &device())?;
                if answer.tier != Tier::Local {
                    return Err(
                        format!("record {i} was committed and not found: {answer:?}").into(),
                    );
                }
            }
            Ok(())
        }
        "look" => {
            let ladder = Ladder::builder().cache(&cache).build();
            let answer = ladder.look_up(&problem(first), &device())?;
            println!("{}, {} warnings", answer.tier, ladder.warnings().len());
            Ok(())
        }
        other => Err(format!("unknown command {other}").into()),
    }
}

fn device() -> DeviceFacts {
    DeviceFacts::assumed(Arch(80))
}

fn problem(i: usize) -> Problem {
    Problem::new(i, 4096, 8, 64, 1, 96)
}

fn commit(cache: &CacheDir, i: usize) -> Result<(), Box<dyn std::error::Error>> {
    let config = StrategyConfig::ThreeKernel(ThreeKernelConfig::default());
    let evidence = Evidence {
        median_us: i as f64,
        date_unix_s: 1_700_000_000,
        ..Evidence::default()
    };
    let record = Record::forward(&problem(i), &device(), &config, evidence);
    let outcome = Outcome::Measured {
        median_us: i as f64,
        spread_us: 0.0,
        samples: 1,
        max_error: 0.0,
    };
    let timing = Timing::new(
        TuneKey::forward(&problem(i), &device()),
        &config,
        outcome,
        Provenance::default(),
    );
    LocalDb::in_cache(cache)?.commit(&[record], &[timing], Duration::from_secs(20))?;
    println!("{i}");
    Ok(std::io::stdout().flush()?)
}
