use std::fmt::Write;

use super::{GroupReport, JobReport, TuneReport, time_text};

const STYLE: &str = "body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:76em;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.6em 0}th,td{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}\
th:first-child,td:first-child{text-align:left}code{font-size:12px;overflow-wrap:anywhere}h2{margin-top:2em}\
.warn{color:#a40000}svg{display:block;margin:.3em 0}svg text{font:11px system-ui,sans-serif;fill:#444}\
details{margin:.4em 0}summary{cursor:pointer}";

const BARS: usize = 40;
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 90.0;

/// Text for HTML, whatever it holds: reasons come from compilers and other processes.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

fn number(n: Option<f64>, digits: usize) -> String {
    n.map_or_else(|| "–".into(), |n| format!("{n:.digits$}"))
}

pub(super) fn of(job: &JobReport) -> String {
    let mut page = String::new();
    let device = job.shapes.first().map_or_else(String::new, |s| {
        format!(
            "{}, {}, {} multiprocessors",
            escape(&s.device.name),
            s.device.arch,
            s.device.sm_count
        )
    });
    let _ = write!(
        page,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>mamba2 tuning report</title>\
         <style>{STYLE}</style></head><body><h1>Tuning report</h1><p>{device}</p>\
         <p>{} shapes tuned, {} failed, {} left to other shards. {}</p>",
        job.shapes.len(),
        job.failed.len(),
        job.other_shards,
        escape(&time_text(job.seconds, &job.phases()))
    );
    overview(&mut page, job);
    for failed in &job.failed {
        let _ = write!(
            page,
            "<p class=\"warn\">{}: {}</p>",
            escape(&failed.shape),
            escape(&failed.reason)
        );
    }
    for shape in &job.shapes {
        section(&mut page, shape);
    }
    page.push_str("</body></html>\n");
    page
}

fn overview(page: &mut String, job: &JobReport) {
    page.push_str(
        "<table><tr><th>shape<th>tuned, us<th>spread<th>default, us<th>speedup<th>limit, us<th>over limit\
         <th>candidates<th>failed<th>seconds</tr>",
    );
    for (i, s) in job.shapes.iter().enumerate() {
        let _ = write!(
            page,
            "<tr><td><a href=\"#s{i}\">{}</a><td>{:.1}<td>{:.1} %<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.1}</tr>",
            escape(&s.shape),
            s.choice.summary.median_us,
            100.0 * s.choice.summary.relative_spread(),
            number(s.choice.default.map(|d| d.median_us), 1),
            number(s.speedup(), 3),
            number(s.limit_us, 1),
            number(s.limit_us.map(|l| s.choice.summary.median_us / l), 1),
            s.counts.candidates,
            s.counts.failed,
            s.seconds
        );
    }
    page.push_str("</table>");
    for (i, s) in job.shapes.iter().enumerate() {
        let _ = write!(
            page,
            "<!-- {i} --><svg width=\"900\" height=\"18\" role=\"img\" aria-label=\"times of {}\">",
            escape(&s.shape)
        );
        comparison(page, s);
        page.push_str("</svg>");
    }
}

/// Limit, tuned and default on one line; the default is the full width.
fn comparison(page: &mut String, s: &TuneReport) {
    let tuned = s.choice.summary.median_us;
    let full = s.choice.default.map_or(tuned, |d| d.median_us).max(tuned);
    let mut bar = |us: f64, color: &str, name: &str| {
        let _ = write!(
            page,
            "<rect x=\"0\" y=\"2\" width=\"{:.1}\" height=\"13\" fill=\"{color}\"><title>{name} {us:.1} us</title></rect>",
            (us / full * 480.0).max(1.0)
        );
    };
    bar(full, "#d8d8d8", "default");
    bar(tuned, "#6a9fd4", "tuned");
    if let Some(limit) = s.limit_us {
        bar(limit, "#2b4a6f", "limit");
    }
    let _ = write!(page, "<text x=\"490\" y=\"13\">{}</text>", escape(&s.shape));
}

fn section(page: &mut String, s: &TuneReport) {
    let _ = write!(
        page,
        "<h2>{}</h2><p>Chosen{}: <code>{}</code></p>",
        escape(&s.shape),
        if s.default_chosen {
            " (the default)"
        } else {
            ""
        },
        escape(&s.chosen)
    );
    for warning in &s.warnings {
        let _ = write!(page, "<p class=\"warn\">{}</p>", escape(warning));
    }
    let c = &s.counts;
    let _ = write!(
        page,
        "<p>{} candidates: {} measured, {} cut after a first look ({} of them take longer alone than another strategy altogether), {} failed; {} known from earlier runs. \
         Error against float64: {:.2e}. Template <code>{}</code>, NVRTC {}, driver {}.</p>",
        c.candidates,
        c.measured,
        c.cut,
        c.cut_in_all,
        c.failed,
        c.stored,
        s.choice.max_error,
        escape(&s.choice.conditions.template_digest),
        escape(&s.choice.conditions.nvrtc),
        escape(&s.choice.conditions.driver)
    );
    let _ = write!(page, "<p>{}</p>", escape(&time_text(s.seconds, &s.phases)));
    page.push_str("<table><tr><th>finalist<th>median, us<th>spread, us</tr>");
    for f in &s.finalists {
        let _ = write!(
            page,
            "<tr><td><code>{}</code><td>{:.2}<td>{:.2}</tr>",
            escape(&f.candidate),
            f.median_us,
            f.spread_us
        );
    }
    page.push_str("</table>");
    if !s.failures.is_empty() {
        page.push_str("<table><tr><th>rejected<th>count<th>first reason</tr>");
        for f in &s.failures {
            let reason = escape(&f.reason);
            let _ = write!(
                page,
                "<tr><td>{}<td>{}<td style=\"text-align:left\"><code>{}</code>: {reason}</tr>",
                f.kind,
                f.count,
                escape(&f.candidate)
            );
        }
        page.push_str("</table>");
    }
    for group in s.groups.iter().filter(|g| !g.timed.is_empty()) {
        histogram(page, group);
    }
}

/// Distribution of a group's times. The last bar holds everything slower than three times the best.
fn histogram(page: &mut String, group: &GroupReport) {
    let best = group.timed[0].median_us;
    let mut bars = [0usize; BARS];
    for timed in &group.timed {
        let at = (timed.median_us / best - 1.0) / 2.0 * BARS as f64;
        bars[(at as usize).min(BARS - 1)] += 1;
    }
    let tallest = bars.iter().copied().max().unwrap_or(1).max(1) as f64;
    let _ = write!(
        page,
        "<details><summary>{}: best {best:.2} us of {} timed, {} cut, {} failed</summary>\
         <p><code>{}</code></p><svg width=\"{}\" height=\"{}\" role=\"img\" aria-label=\"distribution of times\">",
        escape(&group.name),
        group.timed.len(),
        group.cut,
        group.failed,
        escape(&group.timed[0].candidate),
        WIDTH + 20.0,
        HEIGHT + 24.0
    );
    let step = WIDTH / BARS as f64;
    for (i, count) in bars.iter().enumerate().filter(|(_, count)| **count > 0) {
        let height = (*count as f64 / tallest * HEIGHT).max(1.0);
        let _ = write!(
            page,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"#6a9fd4\"><title>{count}</title></rect>",
            i as f64 * step,
            HEIGHT - height,
            step - 1.0
        );
    }
    for (share, label) in [
        (0.0, format!("{best:.1} us")),
        (0.5, format!("{:.1}", 2.0 * best)),
        (0.95, "3 x and slower".into()),
    ] {
        let anchor = if share > 0.9 { "end" } else { "start" };
        let x = if share > 0.9 { WIDTH } else { share * WIDTH };
        let _ = write!(
            page,
            "<text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"{anchor}\">{label}</text>",
            HEIGHT + 16.0
        );
    }
    page.push_str("</svg></details>");
}
