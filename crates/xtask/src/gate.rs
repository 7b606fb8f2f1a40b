//! The compile gate: every kernel, dtype and architecture, with configs and options in a covering set, compiled to cubins by
//! NVRTC. No GPU is needed. It fails on a compile error, a register spill, shared memory or registers beyond the
//! architecture, and on a config that Rust calls illegal but the CUDA template accepts.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use mamba2_cuda::{Nvrtc, gate_fault};
use mamba2_kernels::{Rendered, Tool, render, render_step};
use mamba2_spec::parameters::StateUpdate;
use mamba2_spec::rules::{RULES, check_kernel, check_step_config};
use mamba2_spec::{
    Arch, DKind, DeviceFacts, DtLimit, Kernel, KernelConfig, Problem, SpecError, StepProblem,
};
use rayon::prelude::*;

use crate::covering::{self, Row};

/// A factor outside the config: a key of the shape strings below, and its values.
type Factor = (&'static str, &'static [&'static str]);

/// Options of a forward pass, as keys of its shape string. `hpg` is heads per group. Sizes do not change the code but for
/// headdim and dstate: 64 and 128 are what models have, 80 and 48 do not fill tiles, 33 and 20 allow no 16-byte rows.
const FORWARD: &[Factor] = &[
    ("dtype", &["bf16", "f16", "f32"]),
    ("dt_dtype", &["bf16", "f16", "f32"]),
    ("d", &["h", "none", "hp"]),
    ("z", &["0", "1"]),
    ("bias", &["0", "1"]),
    ("softplus", &["0", "1"]),
    ("limit", &["0:inf", "0.001:0.1"]),
    ("init", &["f32", "none", "bf16", "f16"]),
    ("final", &["f32", "none", "bf16", "f16"]),
    ("packed", &["0", "3"]),
    ("tf32", &["0", "1"]),
    ("align", &["16", "1"]),
    ("hpg", &["8", "1", "3", "4"]),
    ("p", &["64", "80", "48", "128", "33"]),
    ("n", &["128", "16", "64", "256", "512", "20"]),
];

/// Options of a decode step.
const STEP: &[Factor] = &[
    ("dtype", &["bf16", "f16", "f32"]),
    ("dt_dtype", &["bf16", "f16", "f32"]),
    ("state", &["f32", "bf16", "f16"]),
    ("d", &["h", "none", "hp"]),
    ("z", &["0", "1"]),
    ("bias", &["0", "1"]),
    ("softplus", &["0", "1"]),
    ("limit", &["0:inf", "0.001:0.1"]),
    ("indices", &["0", "1"]),
    ("t", &["1", "4"]),
    ("p", &["64", "80", "48", "128", "33"]),
    ("n", &["128", "16", "64", "256", "512", "20"]),
];

/// Random completions before a pair counts as forbidden by the legality rules.
const TRIES: usize = 400;

/// What is compiled: a config and the problem it is for.
enum Case {
    Forward(KernelConfig, Problem),
    Step(StateUpdate, StepProblem),
}

impl Case {
    fn check(&self, device: &DeviceFacts) -> Result<(), SpecError> {
        match self {
            Case::Forward(config, problem) => check_kernel(config, problem, device),
            Case::Step(config, problem) => check_step_config(config, problem, device),
        }
    }

    fn render(&self, device: &DeviceFacts) -> Rendered {
        match self {
            Case::Forward(config, problem) => render(config, problem, device),
            Case::Step(config, problem) => render_step(config, problem, device),
        }
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Case::Forward(config, problem) => {
                write!(f, "{} {} for {problem}", config.kernel(), config.to_text())
            }
            Case::Step(config, problem) => write!(f, "state_update {config} for {problem}"),
        }
    }
}

fn factors(kernel: Kernel) -> &'static [Factor] {
    if kernel == Kernel::StateUpdate {
        STEP
    } else {
        FORWARD
    }
}

/// The case of a row: first the kernel's parameters, then the options.
fn case(kernel: Kernel, row: &[usize]) -> Result<Case, SpecError> {
    let parameters = KernelConfig::rows(kernel);
    let text: Vec<String> = parameters
        .iter()
        .zip(row)
        .map(|(p, v)| format!("{}={}", p.name, p.domain[*v]))
        .collect();
    let config = KernelConfig::from_text(kernel, &text.join(","))?;
    let options: BTreeMap<&str, &str> = factors(kernel)
        .iter()
        .zip(&row[parameters.len()..])
        .map(|((key, values), v)| (*key, values[*v]))
        .collect();
    // Halves of a segment are in shared memory as a whole.
    let seqlen = match config {
        KernelConfig::Sm90ChainForward(c) if c.halves > 1 => 64 * c.segments * c.stages,
        _ => 9000,
    };
    Ok(match config {
        KernelConfig::StateUpdate(config) => Case::Step(config, step_problem(&options)?),
        config => Case::Forward(config, forward_problem(&options, seqlen)?),
    })
}

fn forward_problem(options: &BTreeMap<&str, &str>, seqlen: u32) -> Result<Problem, SpecError> {
    let groups = 2;
    let heads = groups * number(options["hpg"]);
    let packed = options["packed"] != "0";
    let mut shape = format!(
        "b={},l={seqlen},h={heads},g={groups}",
        if packed { 1 } else { 2 }
    );
    for (key, value) in options
        .iter()
        .filter(|(key, value)| **key != "hpg" && (**key != "packed" || **value != "0"))
    {
        shape += &format!(",{key}={value}");
    }
    shape.parse()
}

fn step_problem(options: &BTreeMap<&str, &str>) -> Result<StepProblem, SpecError> {
    let groups = 2;
    let mut step = StepProblem::new(
        5,
        4 * groups,
        number(options["p"]),
        groups,
        number(options["n"]),
    );
    step.tokens = number(options["t"]);
    step.dtype = options["dtype"].parse()?;
    step.dt_dtype = options["dt_dtype"].parse()?;
    step.state_dtype = options["state"].parse()?;
    step.d = match options["d"] {
        "h" => DKind::PerHead,
        "hp" => DKind::PerHeaddim,
        _ => DKind::None,
    };
    step.z = options["z"] == "1";
    step.dt_bias = options["bias"] == "1";
    step.dt_softplus = options["softplus"] == "1";
    if options["limit"] != "0:inf" {
        step.dt_limit = DtLimit {
            min: 0.001,
            max: 0.1,
        };
    }
    step.indices = options["indices"] == "1";
    Ok(step)
}

fn number(text: &str) -> usize {
    text.parse()
        .expect("sizes in the tables above should be numbers")
}

/// The covering set of a kernel on an architecture.
fn covering_cases(kernel: Kernel, device: &DeviceFacts) -> (Vec<Case>, usize) {
    let mut sizes: Vec<usize> = KernelConfig::rows(kernel)
        .iter()
        .map(|p| p.domain.len())
        .collect();
    sizes.extend(factors(kernel).iter().map(|(_, values)| values.len()));
    let covering = covering::pairs(&sizes, TRIES, |row| {
        case(kernel, row).is_ok_and(|case| case.check(device).is_ok())
    });
    // The templates have no code for one architecture but the sm90_ kernels, so what pairs of values do is seen on the oldest
    // and on Hopper; elsewhere every value occurs at least once.
    let all_pairs = device.arch == Arch::MINIMUM || device.arch.has_wgmma();
    let rows = if all_pairs {
        covering.rows
    } else {
        covering::every_value(&covering.rows)
    };
    let mut cases: Vec<Case> = rows
        .iter()
        .filter_map(|row| case(kernel, row).ok())
        .collect();
    if kernel.needs_wgmma() && device.arch.has_wgmma() {
        cases.extend(crowded_cases(kernel, device));
    }
    (cases, covering.not_covered)
}

/// Most of what decides the registers of a Hopper kernel, all together: which of these spill hangs on more than two of them (with bf16 initial
/// states and 128 of dstate two consumers spilled, where each pair was seen not to; and with the gate but without D, of all things). A headdim that
/// fills no tile and a D per headdim need the most. Packed sequences and final states come in pairs only, for the time it takes.
const CROWDING: &[Factor] = &[
    ("dtype", &["bf16", "f16"]),
    ("d", &["hp", "none"]),
    ("z", &["0", "1"]),
    ("init", &["f32", "bf16"]),
    ("p", &["48", "80"]),
    ("n", &["128", "64", "256", "512"]),
];

/// Every combination of the compiled parameters of a Hopper kernel and of [`CROWDING`] that is legal with some value of what only moves
/// copies ahead, `stages`, and of what is a launch argument.
fn crowded_cases(kernel: Kernel, device: &DeviceFacts) -> Vec<Case> {
    let parameters = KernelConfig::rows(kernel);
    let options = factors(kernel);
    // (position in a row, values to try), for those that are combined and those of which one legal value will do.
    let mut combined: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut any: Vec<(usize, Vec<usize>)> = Vec::new();
    for (i, p) in parameters.iter().enumerate() {
        let values = (0..p.domain.len()).collect();
        match p.cuda {
            Some(_) if p.name != "stages" => combined.push((i, values)),
            _ => any.push((i, values)),
        }
    }
    // The sums over segments have no Y, and so neither gate nor D.
    let sums = matches!(
        kernel,
        Kernel::Sm90SegmentState | Kernel::Sm90SwapSegmentState | Kernel::Sm90SplitSegmentState
    );
    let of_output = |key: &str| key == "z" || key == "d";
    for (key, values) in CROWDING.iter().filter(|(key, _)| !(sums && of_output(key))) {
        let (at, (_, all)) = options
            .iter()
            .enumerate()
            .find(|(_, (k, _))| k == key)
            .expect("a crowding factor should be one of the options");
        let of = |v: &&str| {
            all.iter()
                .position(|a| a == v)
                .expect("its values should be the option's")
        };
        combined.push((parameters.len() + at, values.iter().map(of).collect()));
    }
    let first: Row = vec![0; parameters.len() + options.len()];
    // Without the gate, a Y without D is but the easier one.
    let at = |key: &str| {
        let option = options.iter().position(|(k, _)| *k == key);
        parameters.len() + option.expect("d and z should be options")
    };
    let easier = |row: &Row| row[at("z")] == 0 && row[at("d")] > 0;
    combinations(&first, &combined)
        .iter()
        .filter(|row| !easier(row))
        .filter_map(|row| {
            combinations(row, &any)
                .iter()
                .filter_map(|row| case(kernel, row).ok())
                .find(|case| case.check(device).is_ok())
        })
        .collect()
}

/// `row` with every combination of values at the given positions.
fn combinations(row: &Row, positions: &[(usize, Vec<usize>)]) -> Vec<Row> {
    let mut rows = vec![row.clone()];
    for (at, values) in positions {
        rows = rows
            .iter()
            .flat_map(|row| {
                values.iter().map(|v| {
                    let mut next = row.clone();
                    next[*at] = *v;
                    next
                })
            })
            .collect();
    }
    rows
}

/// A config whose first broken rule is `id`, with a problem and device that break no other.
fn case_against_rule(id: &str) -> Option<Case> {
    let device = DeviceFacts::assumed(Arch(90));
    let breaks = |case: &Case| matches!(case.check(&device), Err(SpecError::Rule { rule, .. }) if rule == id);
    // The second and later ones break the rules about the problem itself.
    let problems = ["", ",dtype=f32", ",align=1", ",p=80"].map(|change| {
        let p = if change.contains("p=80") { "" } else { "p=64," };
        format!("b=2,l=9000,h=6,{p}g=2,n=128{change}")
            .parse::<Problem>()
            .expect("the shape should be readable")
    });
    let step = StepProblem::new(5, 6, 64, 2, 128);
    Kernel::ALL
        .into_iter()
        .flat_map(KernelConfig::space)
        .flat_map(|config| {
            // Values outside the domain stand for the rules that the domain itself keeps.
            let mut odd = config;
            match &mut odd {
                KernelConfig::ChunkCumsum(c) => c.chunk_size = 96,
                KernelConfig::FwdPassState(c) => c.chunk_size = 96,
                KernelConfig::ComputeOut(c) => c.chunk_size = 96,
                KernelConfig::Sm90SegmentState(_)
                | KernelConfig::SegmentScan(_)
                | KernelConfig::Sm90FusedForward(_)
                | KernelConfig::Sm90SwapSegmentState(_)
                | KernelConfig::Sm90SwapFusedForward(_)
                | KernelConfig::Sm90SplitSegmentState(_)
                | KernelConfig::Sm90SplitFusedForward(_) => {}
                KernelConfig::Sm90ChainForward(c) => c.segments = 5,
                KernelConfig::StateUpdate(c) => c.row_threads = 6,
            }
            [config, odd]
        })
        .flat_map(|config| match config {
            KernelConfig::StateUpdate(c) => vec![Case::Step(c, step.clone())],
            config => problems
                .iter()
                .map(|p| Case::Forward(config, p.clone()))
                .collect(),
        })
        .find(breaks)
}

/// Every rule that both languages state must make NVRTC refuse a config that breaks it, under the same number.
fn check_rules(nvrtc: &Nvrtc) -> Vec<String> {
    let device = DeviceFacts::assumed(Arch(90));
    let check = |id: &'static str| -> Result<(), String> {
        let case = case_against_rule(id).ok_or_else(|| {
            format!("{id}: no config breaks this rule first, so it cannot be tested")
        })?;
        match nvrtc.compile(&case.render(&device), device.arch) {
            Ok(_) => Err(format!(
                "{id}: Rust refuses this config, the CUDA template compiles it: {case}"
            )),
            Err(e) if e.to_string().contains(id) => Ok(()),
            Err(e) => Err(format!(
                "{id}: expected the CUDA template to name the rule for {case}, got:\n{e}"
            )),
        }
    };
    RULES
        .par_iter()
        .filter(|rule| rule.in_cuda)
        .filter_map(|rule| check(rule.id).err())
        .collect()
}

/// Every tool on every architecture, by the same measure as the kernels.
fn check_tools(nvrtc: &Nvrtc) -> Vec<String> {
    let check = |tool: Tool, arch: Arch| -> Result<(), String> {
        let compiled = nvrtc
            .compile(&tool.render(arch), arch)
            .map_err(|e| e.to_string())?;
        let limit = arch.shared_memory_optin_bytes();
        match gate_fault(compiled.resources, Tool::THREADS, 0, limit) {
            Some(fault) => Err(format!("{tool:?} on {arch}: {fault}")),
            None => Ok(()),
        }
    };
    Arch::GATED
        .into_par_iter()
        .flat_map_iter(|arch| Tool::ALL.map(|tool| (tool, arch)))
        .filter_map(|(tool, arch)| check(tool, arch).err())
        .collect()
}

/// Compiles the covering sets of some kernels or, if none is named, of all.
///
/// # Errors
/// An unknown kernel, or the number of faults; each is printed.
pub fn run(kernels: &[&str]) -> Result<(), String> {
    let kernels = match kernels {
        [] => Kernel::ALL.to_vec(),
        names => names
            .iter()
            .map(|name| name.parse().map_err(|e: SpecError| e.to_string()))
            .collect::<Result<_, _>>()?,
    };
    let nvrtc = Nvrtc::load().map_err(|e| format!("NVRTC: {e}"))?;
    let sets: Vec<(Kernel, DeviceFacts)> = kernels
        .into_iter()
        .flat_map(|k| Arch::GATED.map(|arch| (k, DeviceFacts::assumed(arch))))
        .filter(|(k, device)| !k.needs_wgmma() || device.arch.has_wgmma())
        .collect();
    let sets: Vec<(Kernel, DeviceFacts, Vec<Case>, usize)> = sets
        .into_par_iter()
        .map(|(kernel, device)| {
            let (cases, forbidden) = covering_cases(kernel, &device);
            (kernel, device, cases, forbidden)
        })
        .collect();
    let jobs: Vec<(&DeviceFacts, &Case)> = sets
        .iter()
        .flat_map(|(_, d, cases, _)| cases.iter().map(move |c| (d, c)))
        .collect();
    println!("gate: {} compilations", jobs.len());
    let done = AtomicUsize::new(0);
    let registers: Vec<Result<u32, String>> = jobs
        .par_iter()
        .map(|(device, case)| {
            let rendered = case.render(device);
            // An NVRTC that knows no sm_103 would quietly compile for sm_100; that is not what the gate promises.
            let result = match nvrtc.compile_gate(&rendered, device.arch) {
                Ok(compiled) if compiled.target == device.arch => {
                    Ok(compiled.resources.map_or(0, |r| r.registers))
                }
                Ok(compiled) => Err(format!(
                    "NVRTC {} knows {} only",
                    nvrtc.version(),
                    compiled.target
                )),
                Err(e) => Err(e.to_string()),
            };
            let n = done.fetch_add(1, Ordering::Relaxed) + 1;
            if n.is_multiple_of(100) {
                println!("gate: {n} of {}", jobs.len());
            }
            result.map_err(|fault| {
                let fault = format!("{case}: {fault}");
                eprintln!("gate: {}", fault.lines().next().unwrap_or_default());
                fault
            })
        })
        .collect();
    report(&sets, &registers);
    let mut faults: Vec<&String> = registers.iter().filter_map(|r| r.as_ref().err()).collect();
    let others = [check_tools(&nvrtc), check_rules(&nvrtc)].concat();
    faults.extend(&others);
    for fault in &faults {
        eprintln!("gate: {fault}");
    }
    if faults.is_empty() {
        Ok(())
    } else {
        Err(format!(
            "{} faults in {} compilations",
            faults.len(),
            jobs.len()
        ))
    }
}

fn report(sets: &[(Kernel, DeviceFacts, Vec<Case>, usize)], results: &[Result<u32, String>]) {
    println!(
        "gate: kernel                  arch     compiled  faults  most registers  pairs no legal config has"
    );
    let mut at = 0;
    for (kernel, device, cases, forbidden) in sets {
        let mine = &results[at..at + cases.len()];
        at += cases.len();
        let faults = mine.iter().filter(|r| r.is_err()).count();
        let most = mine.iter().flatten().max().copied().unwrap_or(0);
        println!(
            "gate: {:<23} {:<8} {:>8}  {faults:>6}  {most:>14}  {forbidden:>25}",
            kernel.name(),
            device.arch.nvrtc_name(),
            cases.len() - faults
        );
    }
}

#[cfg(test)]
mod tests {
    use mamba2_spec::Dtype;

    use super::*;

    #[test]
    fn every_value_that_some_shape_may_use_is_compiled_on_hopper() {
        let device = DeviceFacts::assumed(Arch(90));
        let problems: Vec<Problem> = [
            "b=2,l=9000,h=16,p=64,g=2,n=128",
            "b=2,l=9000,h=16,p=128,g=2,n=256,dtype=f32",
            "b=2,l=300,h=16,p=64,g=2,n=64",
            "b=2,l=300,h=16,p=128,g=2,n=64",
            "b=1,l=200000,h=16,p=64,g=2,n=64",
        ]
        .map(|shape| shape.parse().unwrap())
        .into();
        let step = StepProblem::new(5, 16, 64, 2, 128);
        let legal = |config: &KernelConfig| match config {
            KernelConfig::StateUpdate(c) => check_step_config(c, &step, &device).is_ok(),
            config => problems
                .iter()
                .any(|p| check_kernel(config, p, &device).is_ok()),
        };
        for kernel in Kernel::ALL {
            let (cases, _) = covering_cases(kernel, &device);
            let texts: Vec<String> = cases
                .iter()
                .map(|c| c.render(&device).source.config_header)
                .collect();
            let usable: Vec<_> = KernelConfig::space(kernel)
                .into_iter()
                .filter(legal)
                .map(|c| c.constants())
                .collect();
            assert!(!usable.is_empty(), "{kernel}");
            for row in KernelConfig::rows(kernel) {
                let Some(constant) = row.cuda else { continue };
                for value in row
                    .domain
                    .iter()
                    .filter(|v| usable.iter().any(|c| c.contains(&(constant, **v))))
                {
                    let line = format!("constexpr int {constant} = {value};");
                    assert!(
                        texts.iter().any(|t| t.contains(&line)),
                        "{kernel}: no compilation has {line}"
                    );
                }
            }
            for dtype in 0..Dtype::ALL.len() - usize::from(kernel.needs_wgmma()) {
                assert!(
                    texts
                        .iter()
                        .any(|t| t.contains(&format!("constexpr int X_DTYPE = {dtype};")))
                );
            }
        }
    }

    #[test]
    fn every_rule_that_cuda_states_too_has_a_config_that_breaks_it_first() {
        for rule in RULES.iter().filter(|r| r.in_cuda) {
            assert!(case_against_rule(rule.id).is_some(), "{}", rule.id);
        }
    }
}
