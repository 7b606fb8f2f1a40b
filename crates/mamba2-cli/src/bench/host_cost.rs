//! `mamba2 bench --host-cost`: what a call costs the host, beside what the driver takes for as many launches of an empty kernel with as
//! many parameters, and beside a replay of the call as a CUDA graph. Calls are enqueued and not waited for in the timed part, which holds nothing but them, on a thread that has the
//! context current, as those of applications have.

use std::time::Instant;

use mamba2::{CudaError, Engine, Error, Samples, Stream};
use mamba2_cuda::Nothing;
use mamba2_reference::Pattern;
use mamba2_tuner::Target;
use serde_json::json;

use super::measure::Planned;
use crate::cli::BenchArgs;
use crate::engine::describe;
use crate::error::CliError;

/// Calls in one sample. A few hundred launches stay below the depth of a stream's queue (1024), beyond which a launch waits for
/// the GPU.
const CALLS: usize = 50;
/// Parts of a sample that are timed apart. If the queue were full, the last would take longer than the first.
const PARTS: usize = 5;
/// Beyond this, the last part of a sample over its first, calls have waited for something.
const WAITED: f64 = 1.5;

/// Host time of some batches of calls. Unit: microseconds a call.
#[derive(Default)]
struct Batches {
    all: Vec<f64>,
    first: Vec<f64>,
    last: Vec<f64>,
}

impl Batches {
    /// Adds a batch, enqueued on an empty stream.
    fn add(
        &mut self,
        stream: &Stream,
        mut call: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), CliError> {
        stream.synchronize()?;
        let mut us = [0f64; PARTS];
        let mut start = Instant::now();
        for part in &mut us {
            for _ in 0..CALLS / PARTS {
                call()?;
            }
            let end = Instant::now();
            *part = (end - start).as_secs_f64() * 1e6 / (CALLS / PARTS) as f64;
            start = end;
        }
        self.all.push(us.iter().sum::<f64>() / PARTS as f64);
        self.first.push(us[0]);
        self.last.push(us[PARTS - 1]);
        Ok(())
    }

    /// The last part of a batch over the first.
    fn late_over_early(&self) -> f64 {
        let median = |us: &Vec<f64>| Samples { us: us.clone() }.median_us();
        median(&self.last) / median(&self.first)
    }
}

/// Times `samples` batches of calls of each shape.
pub fn run(
    args: &BenchArgs,
    engine: &Engine,
    targets: &[Target],
    samples: usize,
) -> Result<(), CliError> {
    let Some((device, jit)) = engine.device().zip(engine.jit()) else {
        return Err(CliError::NoDevice(
            "--host-cost times the enqueueing of work and needs the CUDA backend".into(),
        ));
    };
    let stream = device.stream()?;
    let _current = device.make_current()?;
    let mut rows = Vec::new();
    let mut waited = false;
    let mut text = format!(
        "on {}\nhost time of one call, enqueued and not waited for, over {CALLS} calls a sample\n{:>10} {:>10} {:>10} {:>9} {:>10} {:>10} {:>10} {:>10} {:>10}  shape\n",
        describe(engine),
        "median us",
        "min us",
        "max us",
        "launches",
        "floor us",
        "a launch",
        "own us",
        "late/early",
        "graph us",
    );
    for target in targets {
        let ready = Planned::new(engine, target)?.ready(device, Pattern::Plain)?;
        let empty = ready
            .parameter_bytes()
            .into_iter()
            .map(|bytes| Nothing::load(device, jit, bytes))
            .collect::<Result<Vec<_>, CudaError>>()?;
        let graph = ready.capture(&stream)?;
        let (mut ours, mut floor, mut replays) = <(Batches, Batches, Batches)>::default();
        // The first batch meets caches of the driver that are still empty, and does not count.
        for sample in 0..=samples {
            if sample == 1 {
                (ours, floor, replays) = Default::default();
            }
            ours.add(&stream, || ready.enqueue(&stream))?;
            floor.add(&stream, || {
                empty.iter().try_for_each(|e| e.launch(&stream))?;
                Ok(())
            })?;
            replays.add(&stream, || Ok(graph.launch(&stream)?))?;
        }
        stream.synchronize()?;
        let late_over_early = ours.late_over_early();
        waited |= late_over_early > WAITED;
        let [samples, floor, replays] = [ours.all, floor.all, replays.all].map(|us| Samples { us });
        let max = samples.us.iter().copied().fold(f64::NAN, f64::max);
        let (median_us, floor_us) = (samples.median_us(), floor.median_us());
        let launch_us = floor_us / empty.len().max(1) as f64;
        text += &format!(
            "{median_us:>10.2} {:>10.2} {max:>10.2} {:>9} {floor_us:>10.2} {launch_us:>10.2} {:>10.2} {late_over_early:>10.2} {:>10.2}  {target}\n",
            samples.min_us(),
            empty.len(),
            median_us - floor_us,
            replays.median_us(),
        );
        rows.push(json!({
            "shape": target.to_string(),
            "host_us": median_us,
            "host_min_us": samples.min_us(),
            "host_max_us": max,
            "samples_us": samples.us,
            "calls_a_sample": CALLS,
            "launches": empty.len(),
            "parameter_bytes": ready.parameter_bytes(),
            "floor_us": floor_us,
            "floor_min_us": floor.min_us(),
            "floor_a_launch_us": launch_us,
            "floor_samples_us": floor.us,
            "own_us": median_us - floor_us,
            "late_over_early": late_over_early,
            "graph_us": replays.median_us(),
            "graph_min_us": replays.min_us(),
            "choice": ready.choice(),
        }));
    }
    text += "floor: as many launches of an empty kernel with as many bytes of parameters, timed in turns; own: median less floor, below 0 where calls\nin a row on one stream are launched as one graph; graph: a replay of the call that the caller captured\n";
    if waited {
        text += "late/early: the last calls of a sample took longer than the first; they waited, so the median is not the cost of a call\n";
    }
    super::publish(
        args,
        &text,
        &super::document(engine, "host_cost", rows.into()),
    )
}
