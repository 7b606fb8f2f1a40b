//! Lists of shapes in TOML, for jobs that tune ahead of time.
//!
//! ```toml
//! [[forward]]
//! name = "Mamba-2 2.7B"
//! shape = "b=1,l=4096,h=80,p=64,g=1,n=128"
//! b = [1, 8]              # each key of the shape may be given a list; every combination is one shape
//! l = [2048, 4096]
//! tp = [1, 2, 4, 8]       # tensor parallelism: nheads / tp heads and ngroups / tp groups, at least one group, a rank
//!
//! [[step]]
//! name = "Mamba-2 2.7B decode"
//! shape = "b=64,h=80,p=64,g=1,n=128"
//! ```

use mamba2_spec::{Problem, StepProblem};
use serde::Deserialize;

use crate::{Target, TunerError};

/// Most shapes that one list may make; more is a slip of the pen, and days of tuning.
const MAX_SHAPES: usize = 10_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    forward: Vec<Entry>,
    #[serde(default)]
    step: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// For messages.
    name: String,
    shape: String,
    #[serde(default)]
    b: Vec<usize>,
    #[serde(default)]
    l: Vec<usize>,
    #[serde(default)]
    n: Vec<usize>,
    #[serde(default)]
    tp: Vec<usize>,
}

/// Reads a list. Shapes that come out twice are kept once; the order is the file's.
///
/// # Errors
/// [`TunerError::ShapeList`] naming the entry; nothing of the list is used then.
pub fn parse(text: &str) -> Result<Vec<Target>, TunerError> {
    let fault = |entry: &str, expected: &str, got: String| TunerError::ShapeList {
        entry: entry.into(),
        expected: expected.into(),
        got,
    };
    let file: File = toml::from_str(text)
        .map_err(|e| fault("the file", "[[forward]] and [[step]] tables", e.to_string()))?;
    // Before anything is multiplied out: four lists of a thousand numbers fit in a small file.
    let made = file.forward.iter().chain(&file.step).try_fold(0, |all, e| {
        e.count().and_then(|n| usize::checked_add(all, n))
    });
    if made.is_none_or(|n| n > MAX_SHAPES) {
        let got = made.map_or_else(|| "more than can be counted".into(), |n| n.to_string());
        return Err(fault(
            "the file",
            &format!("at most {MAX_SHAPES} shapes"),
            got,
        ));
    }
    let mut targets: Vec<Target> = Vec::new();
    let mut push = |name: &str, target: Target| -> Result<(), TunerError> {
        target
            .check()
            .map_err(|e| fault(name, "a shape that can be tuned", e.to_string()))?;
        if !targets.contains(&target) {
            targets.push(target);
        }
        Ok(())
    };
    for entry in &file.forward {
        let base: Problem = entry
            .shape
            .parse()
            .map_err(|e: mamba2_spec::SpecError| fault(&entry.name, "a shape", e.to_string()))?;
        for (b, l, n, tp) in entry.combinations(base.batch, base.seqlen, base.dstate) {
            let mut problem = base.clone();
            (problem.batch, problem.seqlen, problem.dstate) = (b, l, n);
            (problem.nheads, problem.ngroups) = split(&entry.name, base.nheads, base.ngroups, tp)?;
            push(&entry.name, Target::Forward(problem))?;
        }
    }
    for entry in &file.step {
        if !entry.l.is_empty() {
            return Err(fault(
                &entry.name,
                "no `l`: a decode step has no length",
                format!("{:?}", entry.l),
            ));
        }
        let base: StepProblem = entry.shape.parse().map_err(|e: mamba2_spec::SpecError| {
            fault(&entry.name, "a step shape", e.to_string())
        })?;
        for (b, _, n, tp) in entry.combinations(base.batch, 0, base.dstate) {
            let mut problem = base.clone();
            (problem.batch, problem.dstate) = (b, n);
            problem.slots = if base.indices { base.slots.max(b) } else { b };
            (problem.nheads, problem.ngroups) = split(&entry.name, base.nheads, base.ngroups, tp)?;
            push(&entry.name, Target::Step(problem))?;
        }
    }
    if targets.is_empty() {
        return Err(fault("the file", "at least one shape", "none".into()));
    }
    Ok(targets)
}

impl Entry {
    /// Number of combinations; `None` if it overflows.
    fn count(&self) -> Option<usize> {
        [&self.b, &self.l, &self.n, &self.tp]
            .iter()
            .try_fold(1usize, |all, list| all.checked_mul(list.len().max(1)))
    }

    fn combinations(&self, b: usize, l: usize, n: usize) -> Vec<(usize, usize, usize, usize)> {
        let or = |list: &[usize], base: usize| {
            if list.is_empty() {
                vec![base]
            } else {
                list.to_vec()
            }
        };
        let (bs, ls, ns, tps) = (
            or(&self.b, b),
            or(&self.l, l),
            or(&self.n, n),
            or(&self.tp, 1),
        );
        let mut all = Vec::new();
        for &tp in &tps {
            for &b in &bs {
                for &l in &ls {
                    all.extend(ns.iter().map(|&n| (b, l, n, tp)));
                }
            }
        }
        all
    }
}

/// Heads and groups of one tensor-parallel rank. Groups fewer than ranks are replicated, as model code does.
fn split(
    name: &str,
    nheads: usize,
    ngroups: usize,
    tp: usize,
) -> Result<(usize, usize), TunerError> {
    let splits = tp > 0
        && nheads.is_multiple_of(tp)
        && (ngroups.is_multiple_of(tp) || tp.is_multiple_of(ngroups));
    if splits {
        return Ok((nheads / tp, (ngroups / tp).max(1)));
    }
    Err(TunerError::ShapeList {
        entry: name.into(),
        expected: format!("tp that divides nheads = {nheads} and fits ngroups = {ngroups}"),
        got: tp.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(text: &str) -> Vec<String> {
        parse(text)
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn lists_multiply_and_tensor_parallel_ranks_split_heads_and_groups() {
        let text = "[[forward]]\nname = \"m\"\nshape = \"b=1,l=8,h=8,p=64,g=2,n=128\"\nl = [8, 16]\ntp = [1, 4]\n\
                    [[step]]\nname = \"d\"\nshape = \"b=4,h=8,p=64,g=1,n=128\"\nb = [1, 2]\n";
        let got = strings(text);
        assert_eq!(got.len(), 6, "{got:?}");
        assert!(got[0].starts_with("b=1,l=8,h=8,p=64,g=2"), "{got:?}");
        assert!(got[3].starts_with("b=1,l=16,h=2,p=64,g=1"), "{got:?}");
        assert!(
            got[4].starts_with("step:b=1,") && got[5].starts_with("step:b=2,"),
            "{got:?}"
        );
    }

    #[test]
    fn a_shape_is_tuned_once_however_often_it_is_listed() {
        let entry = "[[forward]]\nname = \"m\"\nshape = \"b=1,l=8,h=8,p=64,g=1,n=128\"\n";
        assert_eq!(strings(&entry.repeat(3)).len(), 1);
    }

    #[test]
    fn a_fault_names_the_entry() {
        let hundred = "1, ".repeat(100);
        let bomb = format!(
            "[[forward]]\nname = \"m\"\nshape = \"b=1,l=8,h=6,p=64,g=1,n=128\"\nb = [{hundred}]\nl = [{hundred}]\nn = [{hundred}]\n"
        );
        for (text, part) in [
            ("", "at least one shape"),
            ("[[forward]]\nname = \"m\"\nshape = \"b=1\"\n", "m:"),
            (
                "[[forward]]\nname = \"m\"\nshape = \"b=1,l=8,h=6,p=64,g=1,n=128\"\ntp = [4]\n",
                "tp that divides nheads = 6",
            ),
            (
                "[[forward]]\nname = \"m\"\nshape = \"b=0,l=8,h=6,p=64,g=1,n=128\"\n",
                "can be tuned",
            ),
            (
                "[[step]]\nname = \"d\"\nshape = \"b=4,h=8,p=64,g=1,n=128\"\nl = [1]\n",
                "no `l`",
            ),
            ("[[forwards]]\nname = \"m\"\n", "the file"),
            ("not toml", "the file"),
            (&bomb, "at most 10000 shapes, got 1000000"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
