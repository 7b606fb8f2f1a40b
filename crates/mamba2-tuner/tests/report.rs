//! Reports of a scripted job: table, JSON, HTML.

#![allow(clippy::unwrap_used)] // helpers of tests are tests

use mamba2_tuner::fake::{Act, FakeExecutor, Rule, Script};
use mamba2_tuner::{
    FailureKind, JobReport, MemorySink, Phase, Policy, Shard, Silent, Target, run_job,
};

fn job() -> JobReport {
    let targets: Vec<Target> = [
        "b=1,l=100,h=2,p=32,g=1,n=32",
        "b=1,l=64,h=2,p=32,g=1,n=32,q=100",
        "b=1,l=300,h=2,p=32,g=1,n=32",
    ]
    .map(|s| Target::Forward(s.parse().unwrap()))
    .to_vec();
    let act = Act::Fails(FailureKind::Compile);
    let rules = vec![Rule {
        matches: "compute_out(chunk_size=64".into(),
        act,
    }];
    let mut script = Script {
        rules,
        ..Script::default()
    };
    script.device.name = "NVIDIA H200 <&\">".into();
    let executor = FakeExecutor::new(script);
    run_job(
        &targets,
        "0/1".parse::<Shard>().unwrap(),
        &[&executor],
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap()
}

#[test]
fn the_table_has_a_line_for_every_shape_also_for_failed_ones() {
    let table = job().table();
    for shape in ["b=1,l=100", "b=1,l=64", "b=1,l=300"] {
        assert_eq!(
            table.lines().filter(|l| l.starts_with(shape)).count(),
            1,
            "{table}"
        );
    }
    assert!(table.contains("2 shapes tuned, 1 failed"), "{table}");
}

#[test]
fn the_json_carries_choice_default_counts_and_failures() {
    let value: serde_json::Value = serde_json::from_str(&job().to_json().unwrap()).unwrap();
    let shape = &value["shapes"][0];
    assert!(shape["choice"]["summary"]["median_us"].as_f64().unwrap() > 0.0);
    assert!(shape["choice"]["default"]["median_us"].as_f64().unwrap() > 0.0);
    assert!(shape["counts"]["candidates"].as_u64().unwrap() > 0);
    assert_eq!(shape["failures"][0]["kind"], "compile");
    assert_eq!(
        value["failed"][0]["shape"],
        "b=1,l=64,h=2,p=32,g=1,n=32,dtype=bf16,q=100"
    );
}

#[test]
fn all_three_say_where_the_time_went() {
    let target = Target::Forward("b=1,l=100,h=2,p=32,g=1,n=32".parse().unwrap());
    let executor = FakeExecutor::new(Script {
        delay_ms: 1,
        ..Script::default()
    });
    let job = run_job(
        &[target],
        Shard::ALL,
        &[&executor],
        &MemorySink::default(),
        &Silent,
        &Policy::default(),
    )
    .unwrap();
    let phases = job.phases();
    for phase in [Phase::Probing, Phase::Measuring, Phase::Finals] {
        assert!(phases.seconds(phase) > 0.0, "{}", phase.name());
    }
    let seconds = job.shapes[0].seconds;
    assert!(phases.total() <= seconds, "phases do not overlap");
    assert!(phases.total() > 0.8 * seconds, "{phases:?} of {seconds} s");
    let json: serde_json::Value = serde_json::from_str(&job.to_json().unwrap()).unwrap();
    for phase in Phase::ALL {
        let value = &json["shapes"][0]["phases"][phase.name()];
        assert!((value.as_f64().unwrap() - phases.seconds(phase)).abs() < 1e-3);
    }
    let words = phases.text();
    assert!(words.contains("probing "), "{words}");
    assert!(job.table().contains(&words), "{}", job.table());
    assert_eq!(job.to_html().matches(&words).count(), 2, "job and shape");
}

#[test]
fn the_html_is_one_file_without_scripts_or_links_and_escapes_what_it_is_given() {
    let html = job().to_html();
    for forbidden in ["<script", "http://", "https://", "src=", "@import", "<&\">"] {
        assert!(!html.contains(forbidden), "{forbidden}");
    }
    for wanted in [
        "<svg",
        "compile",
        "scripted",
        "b=1,l=300",
        "H200 &lt;&amp;&quot;&gt;",
    ] {
        assert!(html.contains(wanted), "{wanted}");
    }
    for tag in ["table", "svg", "details", "html", "body", "p", "h2"] {
        let open =
            html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
        assert_eq!(open, html.matches(&format!("</{tag}>")).count(), "{tag}");
    }
}
