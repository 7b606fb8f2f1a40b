//! The engine without a GPU.

mod common;

use common::{assert_right, bits, run_host, run_step_host, view, view_mut};
use mamba2::{
    Backend, Engine, Error, ForwardInputs, ForwardOutputs, HostTensor, Mode, Problem, SpecError,
    StepProblem,
};
use mamba2_reference::{Bounds, ErrorReport, Pattern, Values, generate, generate_step, step};

fn engine() -> Engine {
    Engine::builder()
        .cpu()
        .cache_dir(None)
        .build()
        .expect("the CPU backend always works")
}

#[test]
fn i2_a4_the_cpu_backend_computes_and_never_loads_cuda() {
    let engine = engine();
    assert_eq!(engine.backend(), Backend::Cpu);
    assert!(
        engine.device_facts().is_none() && engine.jit().is_none() && engine.passed_over().is_none()
    );
    let problem: Problem = "b=2,l=70,h=6,p=20,g=3,n=24,dtype=bf16,z=1,softplus=1,bias=1,q=32"
        .parse()
        .expect("shape");
    let plan = engine.plan(&problem).expect("plan");
    assert_eq!(
        (
            plan.workspace_bytes(),
            plan.choice().config,
            plan.choice().tier
        ),
        (0, None, None)
    );
    assert!(plan.reports().is_empty() && plan.loaded().is_none());
    let made = generate(&problem, 1, Pattern::StrongDecay);
    assert_right(&problem, &made, &run_host(&plan, &made));
    let step_problem = StepProblem {
        indices: true,
        slots: 9,
        ..StepProblem::new(5, 4, 16, 2, 24)
    };
    let made = generate_step(&step_problem, 1, Pattern::Plain);
    let (out, state) = run_step_host(&engine.step_plan(&step_problem).expect("plan"), &made);
    let want = step(&step_problem, &made.reference());
    let bounds = Bounds::of_step(&step_problem);
    assert!(ErrorReport::compare(&state.to_f64(), &want.state).within(bounds.states));
    let row = step_problem.nheads * step_problem.headdim;
    for (i, slot) in made
        .state_batch_indices
        .as_ref()
        .expect("indices")
        .iter()
        .enumerate()
    {
        let range = i * row..(i + 1) * row;
        if *slot < 0 {
            assert!(
                out.to_f64()[range].iter().all(|v| v.is_nan()),
                "a skipped row was touched"
            );
        } else {
            assert!(
                ErrorReport::compare(&out.to_f64()[range.clone()], &want.out[range])
                    .within(2.0 * bounds.out)
            );
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    assert!(!maps.contains("libcuda") && !maps.contains("libnvrtc"));
}

#[test]
fn a_wrong_tensor_is_named_and_no_output_is_written() {
    let problem: Problem = "b=1,l=9,h=2,p=4,g=1,n=8,dtype=f32".parse().expect("shape");
    let plan = engine().plan(&problem).expect("plan");
    let made = generate(&problem, 1, Pattern::Plain);
    let mut out = Values::poison(problem.dtype, 72);
    let mut states = Values::poison(problem.dtype, 64);
    let offsets = None;
    let good = common::host_inputs(&problem, &made, &offsets);
    let short = Values::zeros(problem.dtype, 64);
    let short: HostTensor<'_> = view(&short, &[1, 8, 1, 8]);
    let inputs = ForwardInputs { b: short, ..good };
    let mut outputs = ForwardOutputs {
        out: view_mut(&mut out, &[1, 9, 2, 4]),
        final_states: Some(view_mut(&mut states, &[1, 2, 4, 8])),
    };
    let error = plan
        .forward_host(&inputs, &mut outputs)
        .expect_err("B is too short");
    assert_eq!(
        error.to_string(),
        "B: expected [batch, seqlen, ngroups, dstate] = [1, 9, 1, 8], got [1, 8, 1, 8]"
    );
    assert!(
        out.to_f64()
            .iter()
            .chain(&states.to_f64())
            .all(|v| v.is_nan())
    );
}

/// Whoever planned a problem has everything its calls need; there is no variant that a first call could still have to build.
#[test]
fn p2_a_call_with_options_that_its_plan_does_not_have_is_refused_and_builds_nothing() {
    let planned: Problem = "b=1,l=9,h=2,p=4,g=1,n=8,dtype=f32,d=none,init=none,final=none"
        .parse()
        .expect("shape");
    let plan = engine().plan(&planned).expect("plan");
    for (more, named) in [
        ("init=f32", "initial_states"),
        ("z=1", "z"),
        ("bias=1", "dt_bias"),
        ("d=h", "D"),
        ("d=hp", "D"),
        ("packed=2", "cu_seqlens"),
    ] {
        let base = "b=1,l=9,h=2,p=4,g=1,n=8,dtype=f32,final=none";
        let rest = ["d=none", "init=none"]
            .iter()
            .filter(|option| option.split('=').next() != more.split('=').next())
            .fold(base.to_string(), |all, option| format!("{all},{option}"));
        let called: Problem = format!("{rest},{more}").parse().expect("shape");
        let made = generate(&called, 1, Pattern::Plain);
        let offsets = common::offsets(&made);
        let mut out = Values::poison(planned.dtype, 72);
        let mut outputs = ForwardOutputs {
            out: view_mut(&mut out, &[1, 9, 2, 4]),
            final_states: None,
        };
        let error = plan
            .forward_host(&common::host_inputs(&called, &made, &offsets), &mut outputs)
            .expect_err(more);
        assert!(
            error.to_string().starts_with(&format!("{named}: ")),
            "{more}: {error}"
        );
        assert!(out.to_f64().iter().all(|v| v.is_nan()), "{more}");
    }
}

#[test]
fn an_illegal_problem_is_refused_when_it_is_planned() {
    let mut problem: Problem = "b=1,l=9,h=15,p=4,g=5,n=8".parse().expect("shape");
    problem.ngroups = 4;
    let error = engine().plan(&problem).expect_err("15 heads in 4 groups");
    assert!(
        matches!(error, Error::Spec(SpecError::Size { name: "nheads", .. })),
        "{error}"
    );
}

#[test]
fn mode_tune_without_a_tuner_is_refused() {
    let error = Engine::builder()
        .cpu()
        .mode(Mode::Tune)
        .build()
        .expect_err("nobody to tune");
    assert!(matches!(error, Error::NoTuner));
}

#[test]
fn i2_auto_takes_the_cpu_and_says_why_or_takes_a_gpu() {
    let engine = Engine::builder()
        .auto()
        .cache_dir(None)
        .build()
        .expect("auto always works");
    match engine.backend() {
        Backend::Cpu => assert!(engine.passed_over().is_some()),
        Backend::Cuda => assert!(engine.passed_over().is_none() && engine.device_facts().is_some()),
    }
}

#[test]
fn i2_asking_for_a_gpu_that_is_not_there_is_a_typed_error() {
    match Engine::builder().cuda(4096) {
        Err(error) => assert!(error.is_no_device(), "{error}"),
        Ok(_) => panic!("4097 GPUs"),
    }
}

#[test]
fn the_same_call_gives_the_same_bits() {
    let problem: Problem = "b=2,l=130,h=4,p=16,g=2,n=16,dtype=f16"
        .parse()
        .expect("shape");
    let plan = engine().plan(&problem).expect("plan");
    let made = generate(&problem, 3, Pattern::Plain);
    assert_eq!(bits(&run_host(&plan, &made)), bits(&run_host(&plan, &made)));
}
