//! `mamba2 bench`: how long forward passes and decode steps take, beside the physical limit.

mod first_call;
mod host_cost;
mod measure;

use mamba2::{DKind, DtLimit, Engine, Problem, Samples};
use mamba2_reference::Pattern;
use mamba2_spec::limit::Limit;
use mamba2_tuner::{Target, shapes};
use serde_json::{Value, json};

use crate::cli::{BenchArgs, Sweep};
use crate::engine::{backend_name, describe, open};
use crate::error::CliError;
use crate::print;
use crate::progress::bar;
use crate::shape::{parse_step, parse_target};
use crate::tensor_file::write_whole;
pub use first_call::child as first_call_child;
use measure::Bench;

/// Timed calls per shape, unless the command line says otherwise.
const SAMPLES: usize = 30;
/// Decode rows, with the options that models decode with.
const DECODE: [&str; 3] = [
    "b=1,h=80,p=64,g=1,n=128,bias=1,softplus=1",
    "b=64,h=80,p=64,g=1,n=128,bias=1,softplus=1",
    "b=256,h=128,p=64,g=8,n=128,bias=1,softplus=1",
];
/// Shapes on which the cost of each option is measured.
const OPTIONS: [&str; 3] = [
    "b=4,l=16384,h=8,p=64,g=1,n=128",
    "b=8,l=2048,h=80,p=64,g=1,n=128",
    "b=1,l=8192,h=128,p=64,g=8,n=128",
];

/// Rows of the table, timed in turns with one another.
struct Group {
    targets: Vec<Target>,
    /// True: the first is the plain call that the others are held against.
    against_first: bool,
}

impl Group {
    /// Inputs. Where calls are held against each other, all have step sizes that the dt pipeline leaves much as they are without it, those of trained
    /// models, so that no difference can come from the numbers.
    fn pattern(&self) -> Pattern {
        if self.against_first {
            Pattern::Model
        } else {
            Pattern::Plain
        }
    }
}

struct Row {
    target: Target,
    samples: Samples,
    choice: Value,
    /// Speed of a plain copy by a kernel that was timed in turns with this row, bytes read plus bytes written.
    copy_bytes_per_s: Option<f64>,
    /// Time of an empty kernel in the same turns.
    nothing_us: Option<f64>,
    /// The plain row: median in microseconds, and bytes.
    plain: Option<(f64, f64)>,
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    let groups = groups(args)?;
    let targets = || groups.iter().flat_map(|g| g.targets.iter().cloned());
    if args.first_call {
        return first_call::run(args, &targets().collect::<Vec<_>>());
    }
    let engine = open(&args.engine)?;
    let samples = args.samples.map_or(SAMPLES, |n| n as usize);
    if args.host_cost {
        return host_cost::run(args, &engine, &targets().collect::<Vec<_>>(), samples);
    }
    let bench = Bench::new(&engine, samples)?;
    let progress = bar(targets().count() as u64);
    let mut rows: Vec<Row> = Vec::new();
    for group in &groups {
        progress.set_message(group.targets[0].to_string());
        let measured = bench.together(&group.targets, group.pattern())?;
        let first = rows.len();
        for (target, (samples, choice)) in group.targets.iter().zip(measured.rows) {
            rows.push(Row {
                target: target.clone(),
                samples,
                choice,
                copy_bytes_per_s: measured.copy_bytes_per_s,
                nothing_us: measured.nothing_us,
                plain: None,
            });
        }
        if group.against_first {
            let plain = (rows[first].samples.median_us(), bytes(&rows[first].target));
            for row in &mut rows[first + 1..] {
                row.plain = Some(plain);
            }
        }
        progress.inc(group.targets.len() as u64);
    }
    progress.finish_and_clear();
    publish(args, &table(&engine, &rows), &to_json(&engine, &rows))
}

/// Prints the table and writes the JSON, or prints only the JSON.
fn publish(args: &BenchArgs, table: &str, json: &Value) -> Result<(), CliError> {
    match &args.json {
        Some(path) if path.as_os_str() == "-" => print::json(json),
        Some(path) => {
            print::out(table)?;
            write_whole(path, format!("{json:#}\n").as_bytes())
        }
        None => print::out(table),
    }
}

fn groups(args: &BenchArgs) -> Result<Vec<Group>, CliError> {
    let step = |text: &str| -> Result<Target, CliError> {
        let target = Target::Step(parse_step(text)?);
        target.check()?;
        Ok(target)
    };
    let mut targets: Vec<Target> = Vec::new();
    for text in &args.shape {
        targets.push(parse_target(text)?);
    }
    for text in &args.step {
        targets.push(step(text)?);
    }
    match args.sweep {
        None => {}
        Some(Sweep::Seed) => targets.extend(shapes::parse(include_str!(
            "../../../../tuning-db/shapes/sweep.toml"
        ))?),
        Some(Sweep::Models) => targets.extend(shapes::parse(include_str!(
            "../../../../tuning-db/shapes/bench.toml"
        ))?),
        Some(Sweep::Decode) => {
            for text in DECODE {
                targets.push(step(text)?);
            }
        }
        Some(Sweep::Options) => {
            for text in OPTIONS {
                targets.push(parse_target(text)?);
            }
        }
    }
    let each_option = args.options || args.sweep == Some(Sweep::Options);
    let group = |target: Target| match target {
        Target::Forward(problem) if each_option => Group {
            targets: with_each_option(&problem),
            against_first: true,
        },
        other => Group {
            targets: vec![other],
            against_first: false,
        },
    };
    Ok(targets.into_iter().map(group).collect())
}

/// The shape without options, with D, with z, with the dt pipeline, and with all three.
fn with_each_option(problem: &Problem) -> Vec<Target> {
    let plain = Problem {
        d: DKind::None,
        z: false,
        dt_bias: false,
        dt_softplus: false,
        dt_limit: DtLimit::NONE,
        ..problem.clone()
    };
    let limit = DtLimit {
        min: 0.001,
        max: 0.1,
    };
    let add = |d: bool, z: bool, pipeline: bool| {
        let mut p = plain.clone();
        if d {
            p.d = DKind::PerHead;
        }
        p.z = z;
        if pipeline {
            (p.dt_bias, p.dt_softplus, p.dt_limit) = (true, true, limit);
        }
        Target::Forward(p)
    };
    vec![
        add(false, false, false),
        add(true, false, false),
        add(false, true, false),
        add(false, false, true),
        add(true, true, true),
    ]
}

/// Fewest bytes that must move. Of a decode step only the state, read and written: the rest is below one percent of it, and
/// is left out in favour of the limit.
fn bytes(target: &Target) -> f64 {
    match target {
        Target::Forward(p) => Limit::of(p).bytes,
        Target::Step(p) => {
            let elems = p.batch * p.nheads * p.headdim * p.dstate;
            2.0 * (elems * p.state_dtype.size_bytes()) as f64
        }
    }
}

impl Row {
    fn per_s(&self, what: f64) -> f64 {
        what / (self.samples.median_us() * 1e-6)
    }

    fn bytes_per_s(&self) -> f64 {
        self.per_s(bytes(&self.target))
    }

    /// Share of the speed of a copy.
    fn of_copy(&self) -> Option<f64> {
        self.copy_bytes_per_s.map(|copy| self.bytes_per_s() / copy)
    }

    /// Matrix operations a second, by the fewest that the forward pass can do with.
    fn flops_per_s(&self) -> Option<f64> {
        match &self.target {
            Target::Forward(p) => Some(self.per_s(Limit::of(p).flops)),
            Target::Step(_) => None,
        }
    }

    /// Time over that of the plain row plus the time a copy would take for the bytes that this row moves and that one does not.
    fn over_plain(&self) -> Option<f64> {
        let ((plain_us, plain_bytes), copy) = (self.plain?, self.copy_bytes_per_s?);
        let traffic_us = (bytes(&self.target) - plain_bytes) / copy * 1e6;
        Some(self.samples.median_us() / (plain_us + traffic_us))
    }

    fn max_us(&self) -> f64 {
        self.samples.us.iter().copied().fold(f64::NAN, f64::max)
    }
}

/// Known for GPUs whose ceilings were measured.
fn limit_us(engine: &Engine, target: &Target) -> Option<f64> {
    engine
        .device_facts()
        .and_then(|facts| target.limit_us(facts))
}

fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |v| format!("{v:.digits$}"))
}

fn table(engine: &Engine, rows: &[Row]) -> String {
    let options = rows.iter().any(|r| r.plain.is_some());
    let mut text = format!("on {}\n", describe(engine));
    text += &format!(
        "{:>10} {:>10} {:>10} {:>10} {:>8} {:>8} {:>8} {:>8}",
        "median us", "min us", "max us", "limit us", "x limit", "GB/s", "of copy", "TFLOP/s"
    );
    if options {
        text += &format!(" {:>8}", "x plain");
    }
    text += "  shape\n";
    for row in rows {
        let median = row.samples.median_us();
        let limit = limit_us(engine, &row.target);
        text += &format!(
            "{median:>10.1} {:>10.1} {:>10.1} {:>10} {:>8} {:>8.0} {:>8} {:>8}",
            row.samples.min_us(),
            row.max_us(),
            or_dash(limit, 1),
            or_dash(limit.map(|l| median / l), 2),
            row.bytes_per_s() * 1e-9,
            or_dash(row.of_copy(), 3),
            or_dash(row.flops_per_s().map(|f| f * 1e-12), 1),
        );
        if options {
            text += &format!(" {:>8}", or_dash(row.over_plain(), 3));
        }
        text += &format!("  {}\n", row.target);
    }
    if options {
        text += "x plain: time over that of the plain row plus the option's own traffic at the speed of a copy\n";
    }
    if let Some((low, high)) = range(rows, |r| r.copy_bytes_per_s) {
        text += &format!(
            "copy: {:.0} to {:.0} GB/s, read plus written, timed in turns with each row\n",
            low * 1e-9,
            high * 1e-9
        );
    }
    if let Some((low, high)) = range(rows, |r| r.nothing_us) {
        text += &format!("empty kernel: {low:.1} to {high:.1} us, timed in turns with each row\n");
    }
    text
}

/// Least and greatest of what rows have.
fn range(rows: &[Row], of: impl Fn(&Row) -> Option<f64>) -> Option<(f64, f64)> {
    let values = rows.iter().filter_map(of);
    values.fold(None, |range, v| {
        let (low, high) = range.unwrap_or((v, v));
        Some((low.min(v), high.max(v)))
    })
}

fn to_json(engine: &Engine, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        json!({
            "shape": row.target.to_string(),
            "median_us": row.samples.median_us(),
            "min_us": row.samples.min_us(),
            "max_us": row.max_us(),
            "samples_us": row.samples.us,
            "limit_us": limit_us(engine, &row.target),
            "bytes": bytes(&row.target),
            "gb_s": row.bytes_per_s() * 1e-9,
            "copy_gb_s": row.copy_bytes_per_s.map(|c| c * 1e-9),
            "of_copy": row.of_copy(),
            "empty_kernel_us": row.nothing_us,
            "tflop_s": row.flops_per_s().map(|f| f * 1e-12),
            "plain_us": row.plain.map(|(us, _)| us),
            "over_plain": row.over_plain(),
            "choice": row.choice,
        })
    };
    document(
        engine,
        "time",
        rows.iter().map(row).collect::<Vec<Value>>().into(),
    )
}

/// What every kind of result has around its rows.
fn document(engine: &Engine, kind: &str, rows: Value) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "kind": kind,
        "backend": backend_name(engine),
        "device": describe(engine),
        "facts": engine.device_facts(),
        "rows": rows,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn row(text: &str, us: f64) -> Row {
        Row {
            target: parse_target(text).unwrap(),
            samples: Samples { us: vec![us; 3] },
            choice: Value::Null,
            copy_bytes_per_s: Some(4e12),
            nothing_us: Some(2.0),
            plain: None,
        }
    }

    #[test]
    fn speed_of_a_decode_step_counts_its_state_once_each_way() {
        // 64 * 80 * 64 * 128 f32 values both ways are 335.5 MB: 83.9 us at 4 TB/s.
        let row = row("step:b=64,h=80,p=64,g=1,n=128", 100.0);
        assert_eq!(bytes(&row.target), 335_544_320.0);
        assert!((row.of_copy().unwrap() - 0.8389).abs() < 1e-4);
        assert!(row.flops_per_s().is_none());
    }

    #[test]
    fn an_option_is_held_against_the_plain_call_plus_its_own_traffic() {
        let plain = row("b=4,l=16384,h=8,p=64,g=1,n=128,d=none", 100.0);
        let mut gated = row("b=4,l=16384,h=8,p=64,g=1,n=128,d=none,z=1", 129.0);
        gated.plain = Some((100.0, bytes(&plain.target)));
        // z: 4 * 16384 * 8 * 64 bf16 values are 67.1 MB, 16.8 us at 4 TB/s.
        assert!((gated.over_plain().unwrap() - 129.0 / 116.777).abs() < 1e-4);
    }

    #[test]
    fn every_option_is_measured_alone_and_all_together_beside_the_plain_shape() {
        let problem: Problem = "b=1,l=64,h=8,p=64,g=1,n=64,z=1,bias=1".parse().unwrap();
        let texts: Vec<String> = with_each_option(&problem)
            .iter()
            .map(Target::to_string)
            .collect();
        assert_eq!(texts.len(), 5);
        assert!(!texts[0].contains("z=1") && !texts[0].contains("bias=1"));
        assert!(texts[4].contains("z=1") && texts[4].contains("bias=1,softplus=1"));
        for (i, text) in texts.iter().enumerate() {
            assert!(!texts[..i].contains(text), "{text} twice");
        }
    }

    #[test]
    fn the_built_in_decode_and_option_shapes_are_legal() {
        for text in DECODE {
            parse_target(&format!("step:{text}")).unwrap();
        }
        for text in OPTIONS {
            parse_target(text).unwrap();
        }
    }
}
