//! `mamba2 bench --host-cost`: what a call costs the host. Calls are enqueued and not waited for in the timed part.

use std::time::Instant;

use mamba2::{Engine, Samples};
use mamba2_tuner::Target;
use serde_json::json;

use super::measure::Planned;
use crate::cli::BenchArgs;
use crate::engine::describe;
use crate::error::CliError;

/// Calls in one sample. A few hundred launches stay below the depth of a stream's queue (1024), beyond which a launch waits for
/// the GPU.
const CALLS: usize = 50;

/// Times `samples` batches of calls of each shape.
pub fn run(
    args: &BenchArgs,
    engine: &Engine,
    targets: &[Target],
    samples: usize,
) -> Result<(), CliError> {
    let Some(device) = engine.device() else {
        return Err(CliError::NoDevice(
            "--host-cost times the enqueueing of work and needs the CUDA backend".into(),
        ));
    };
    let stream = device.stream()?;
    let mut rows = Vec::new();
    let mut text = format!(
        "on {}\nhost time of one call, enqueued and not waited for, over {CALLS} calls a sample\n{:>10} {:>10} {:>10} {:>9}  shape\n",
        describe(engine),
        "median us",
        "min us",
        "max us",
        "launches"
    );
    for target in targets {
        let ready = Planned::new(engine, target)?.ready(device)?;
        let mut us = Vec::with_capacity(samples);
        // The first batch meets caches of the driver that are still empty, and does not count.
        for sample in 0..=samples {
            stream.synchronize()?;
            let start = Instant::now();
            for _ in 0..CALLS {
                ready.enqueue(&stream)?;
            }
            let one = start.elapsed().as_secs_f64() * 1e6 / CALLS as f64;
            if sample > 0 {
                us.push(one);
            }
        }
        stream.synchronize()?;
        let samples = Samples { us };
        let max = samples.us.iter().copied().fold(f64::NAN, f64::max);
        text += &format!(
            "{:>10.2} {:>10.2} {max:>10.2} {:>9}  {target}\n",
            samples.median_us(),
            samples.min_us(),
            ready.launches()
        );
        rows.push(json!({
            "shape": target.to_string(),
            "host_us": samples.median_us(),
            "host_min_us": samples.min_us(),
            "host_max_us": max,
            "samples_us": samples.us,
            "calls_a_sample": CALLS,
            "launches": ready.launches(),
            "choice": ready.choice(),
        }));
    }
    super::publish(
        args,
        &text,
        &super::document(engine, "host_cost", rows.into()),
    )
}
