//! The engine on a GPU. Prints `SKIPPED: no CUDA device` without one, and fails if MAMBA2_REQUIRE_GPU=1.

mod common;

use common::{
    OnDevice, Place, StepOnDevice, assert_right, bits, offsets, poisoned, run_host, run_step_host,
    shapes, view_mut,
};
use mamba2::{
    Backend, Device, Dtype, Engine, ForwardInputs, ForwardOutputs, HasMeta, HostData, HostTensor,
    Mode, Plan, StepProblem, StrategyConfig, Stream, TensorMeta,
};
use mamba2_reference::{
    Bounds, ErrorReport, Generated, Pattern, Values, generate, generate_packed, generate_step, step,
};
use mamba2_spec::parameters::Sm90ChainForward;
use mamba2_spec::rules::check_strategy;
use mamba2_spec::{Arch, Sm90ChainConfig};

fn engine() -> Option<Engine> {
    let required = std::env::var_os("MAMBA2_REQUIRE_GPU").is_some_and(|v| v == "1");
    match Engine::builder().cuda(0) {
        Ok(builder) => Some(builder.build().expect("engine")),
        Err(error) if required => panic!("a GPU is required: {error}"),
        Err(_) => {
            eprintln!("SKIPPED: no CUDA device");
            None
        }
    }
}

fn plan(engine: &Engine, shape: &str) -> Plan {
    engine
        .plan(&shape.parse().expect("shape"))
        .unwrap_or_else(|e| panic!("{shape}: {e}"))
}

fn device(engine: &Engine) -> &Device {
    engine.device().expect("a CUDA engine has a device")
}

const SMALL: [&str; 16] = [
    "b=2,l=1,h=4,p=64,g=1,n=128",
    "b=2,l=63,h=4,p=64,g=2,n=128",
    "b=1,l=257,h=6,p=32,g=3,n=64,dtype=f16",
    "b=1,l=200,h=8,p=80,g=8,n=16,z=1",
    "b=1,l=130,h=3,p=128,g=1,n=256,d=hp,dtype=f16",
    "b=2,l=129,h=4,p=64,g=2,n=128,dtype=f32",
    "b=2,l=129,h=4,p=64,g=2,n=128,dtype=f32,tf32=1",
    "b=1,l=100,h=5,p=33,g=5,n=20,align=1",
    "b=1,l=100,h=2,p=7,g=1,n=3,dtype=f32,align=1",
    "b=1,l=300,h=4,p=64,g=2,n=128,softplus=1,bias=1,limit=0.001:0.1,dt_dtype=f32",
    "b=1,l=300,h=4,p=64,g=2,n=128,init=none,final=none,d=none",
    "b=1,l=300,h=4,p=64,g=2,n=128,init=bf16,final=f16",
    "b=1,l=700,h=4,p=64,g=2,n=128,packed=5",
    "b=1,l=700,h=4,p=64,g=2,n=128,packed=5,z=1,init=none,dtype=f16",
    "b=1,l=300,h=4,p=64,g=2,n=128,q=64",
    "b=1,l=300,h=4,p=256,g=2,n=512",
];

#[test]
fn small_problems_of_every_option_agree_with_the_oracle_and_with_themselves() {
    let Some(engine) = engine() else { return };
    assert_eq!(engine.backend(), Backend::Cuda);
    for shape in SMALL {
        for pattern in [Pattern::Plain, Pattern::StrongDecay] {
            let plan = plan(&engine, shape);
            let made = generate(plan.problem(), 5, pattern);
            let first = run_host(&plan, &made);
            assert_right(plan.problem(), &made, &first);
            assert_eq!(
                bits(&first),
                bits(&run_host(&plan, &made)),
                "{shape}: two runs differ"
            );
        }
    }
}

#[test]
fn n6_n11_n13_patterns_that_hide_nothing_agree_with_the_oracle() {
    let Some(engine) = engine() else { return };
    let plain = plan(&engine, "b=2,l=300,h=8,p=64,g=4,n=64,dtype=f32");
    for pattern in [
        Pattern::GroupConstant,
        Pattern::Impulse,
        Pattern::StateOnly,
        Pattern::HalfZero,
        Pattern::WeakDecay,
    ] {
        let made = generate(plain.problem(), 1, pattern);
        assert_right(plain.problem(), &made, &run_host(&plain, &made));
    }
    let raw = plan(
        &engine,
        "b=2,l=300,h=8,p=64,g=4,n=64,dtype=f32,softplus=1,bias=1,limit=0.001:0.1",
    );
    let made = generate(raw.problem(), 1, Pattern::RawDt);
    assert_right(raw.problem(), &made, &run_host(&raw, &made));
}

#[test]
fn an_empty_sequence_ends_in_its_initial_state() {
    let Some(engine) = engine() else { return };
    for shape in ["b=2,l=0,h=4,p=64,g=2,n=128", "b=0,l=10,h=4,p=64,g=2,n=128"] {
        let plan = plan(&engine, shape);
        let made = generate(plan.problem(), 1, Pattern::Plain);
        let results = run_host(&plan, &made);
        assert_eq!(results.final_states, made.initial_states, "{shape}");
    }
    let packed = plan(&engine, "b=1,l=200,h=4,p=64,g=2,n=128,packed=4");
    let made = generate_packed(packed.problem(), 1, Pattern::Plain, &[0, 0, 70, 70, 150]);
    assert_right(packed.problem(), &made, &run_host(&packed, &made));
}

#[test]
fn a_padded_tail_of_nan_is_neither_read_nor_written() {
    let Some(engine) = engine() else { return };
    let plan = plan(&engine, "b=1,l=700,h=4,p=64,g=2,n=128,packed=5,z=1");
    let p = plan.problem();
    let mut made = generate(p, 9, Pattern::Plain);
    made.poison_tail(p);
    let results = run_host(&plan, &made);
    assert_right(p, &made, &results);
    let used = common::used_tokens(p, &made) * p.nheads * p.headdim;
    let tail = &results.out.to_f64()[used..];
    assert!(
        !tail.is_empty() && tail.iter().all(|v| v.is_nan()),
        "the tail was written"
    );
}

/// Runs on device tensors laid as `place` says.
fn run_device(engine: &Engine, plan: &Plan, made: &Generated, place: Place) -> common::Results {
    let on = OnDevice::new(device(engine), plan, made, place);
    let stream = device(engine).stream().expect("stream");
    plan.forward(&stream, &on.inputs, &on.outputs, &on.workspace)
        .expect("enqueue");
    stream.synchronize().expect("synchronize");
    on.results()
}

#[test]
fn n16_tensors_aligned_to_their_elements_only_take_another_path_with_right_results() {
    let Some(engine) = engine() else { return };
    for shape in [
        "b=2,l=130,h=4,p=64,g=2,n=128",
        "b=1,l=130,h=4,p=64,g=2,n=128,packed=3",
        "b=2,l=70,h=4,p=64,g=2,n=64,dtype=f32",
    ] {
        let plan = plan(&engine, shape);
        let made = generate(plan.problem(), 2, Pattern::Plain);
        assert_right(
            plan.problem(),
            &made,
            &run_device(&engine, &plan, &made, Place::OffBy1),
        );
    }
}

#[test]
fn c7_nothing_is_read_past_the_end_of_tensors_that_end_with_their_memory() {
    let Some(engine) = engine() else { return };
    for l in [1, 65, 129, 1026, 4099] {
        for options in [
            "",
            ",z=1,softplus=1,bias=1",
            ",init=none,final=none,d=none",
            ",dtype=f32",
        ] {
            let plan = plan(&engine, &format!("b=1,l={l},h=2,p=64,g=1,n=64{options}"));
            let made = generate(plan.problem(), 3, Pattern::Plain);
            let at_end = run_device(&engine, &plan, &made, Place::PageEnd);
            assert_right(plan.problem(), &made, &at_end);
            assert_eq!(
                bits(&at_end),
                bits(&run_device(&engine, &plan, &made, Place::Exact))
            );
        }
    }
}

#[test]
fn a_call_can_be_captured_in_a_graph_and_replayed() {
    let Some(engine) = engine() else { return };
    capture_and_replay(&engine, "b=2,l=300,h=4,p=64,g=2,n=128,z=1");
}

/// A chain's flags have to be down again for the next replay: with one that is up, a block would take what the replay before has left, which for
/// the same tensors is the same. So the workspace is poisoned between replays, but for the flags.
#[test]
fn a_chain_of_blocks_can_be_replayed() {
    let Some(engine) = engine() else { return };
    let facts = engine.device_facts().expect("a CUDA engine has facts");
    for (shape, warpgroups, stages, halves) in [
        ("b=4,l=1024,h=8,p=64,g=1,n=128", 1, 2, 1),
        ("b=4,l=1024,h=8,p=64,g=1,n=128", 2, 2, 1),
        ("b=4,l=1024,h=8,p=64,g=1,n=128", 2, 4, 2),
        ("b=4,l=1024,h=8,p=64,g=1,n=256", 1, 2, 1),
        ("b=4,l=1024,h=8,p=64,g=1,n=256", 2, 2, 1),
    ] {
        let config = chain(4, warpgroups, stages, halves);
        let problem = shape.parse().expect("shape");
        if let Err(error) = check_strategy(&config, &problem, facts) {
            assert_ne!(facts.arch, Arch(90), "{shape}: {error}");
            eprintln!("{shape}: no such chain on this device: {error}");
            continue;
        }
        let chained = Engine::builder()
            .cuda(0)
            .and_then(|b| b.mode(Mode::Pinned(config)).build())
            .expect("engine");
        capture_and_replay(&chained, shape);
    }
}

fn chain(segments: u32, warpgroups: u32, stages: u32, halves: u32) -> StrategyConfig {
    StrategyConfig::Sm90Chain(Sm90ChainConfig {
        chain_forward: Sm90ChainForward {
            segments,
            warpgroups,
            stages,
            halves,
        },
    })
}

/// Halves of a segment: with one chunk and with none in the second, a segment that is not there, ragged ends, and options.
#[test]
fn a_chain_of_halves_is_right_at_every_length() {
    let Some(engine) = engine() else { return };
    let facts = engine.device_facts().expect("a CUDA engine has facts");
    for (shape, segments, stages) in [
        ("b=2,l=1024,h=8,p=64,g=1,n=128", 4, 4),
        ("b=2,l=650,h=4,p=64,g=2,n=64,z=1", 4, 3),
        ("b=2,l=320,h=4,p=64,g=1,n=128,init=bf16,final=bf16", 4, 2),
        ("b=2,l=300,h=4,p=64,g=1,n=128,init=none", 2, 3),
        ("b=1,l=530,h=4,p=64,g=1,n=64,final=none", 3, 4),
        ("b=1,l=193,h=4,p=64,g=1,n=72", 3, 2),
        ("b=1,l=270,h=4,p=64,g=1,n=104", 4, 2),
        ("b=2,l=700,h=4,p=64,g=4,n=32", 4, 3),
        ("b=2,l=500,h=4,p=64,g=1,n=24,init=f16,final=bf16", 4, 2),
        (
            "b=2,l=1000,h=8,p=48,g=2,n=104,d=hp,bias=1,softplus=1,dtype=f16,init=f16,final=f16",
            4,
            4,
        ),
        ("b=3,l=250,h=8,p=40,g=2,n=72,d=none,final=f16", 2, 2),
    ] {
        let config = chain(segments, 2, stages, 2);
        let problem = shape.parse().expect("shape");
        if let Err(error) = check_strategy(&config, &problem, facts) {
            assert_ne!(facts.arch, Arch(90), "{shape}: {error}");
            eprintln!("{shape}: no such chain on this device: {error}");
            continue;
        }
        let pinned = Engine::builder()
            .cuda(0)
            .and_then(|b| b.mode(Mode::Pinned(config)).build())
            .expect("engine");
        let plan = plan(&pinned, shape);
        let made = generate(plan.problem(), 4, Pattern::Plain);
        assert_right(plan.problem(), &made, &run_host(&plan, &made));
    }
}

fn capture_and_replay(engine: &Engine, shape: &str) {
    let plan = plan(engine, shape);
    let made = generate(plan.problem(), 4, Pattern::Plain);
    let want = run_device(engine, &plan, &made, Place::Exact);
    let on = OnDevice::new(device(engine), &plan, &made, Place::Exact);
    let stream = device(engine).stream().expect("stream");
    // Were the call captured not the first on its stream, it could be launched as a graph, which cannot be captured.
    let earlier = OnDevice::new(device(engine), &plan, &made, Place::Exact);
    for _ in 0..2 {
        plan.forward(
            &stream,
            &earlier.inputs,
            &earlier.outputs,
            &earlier.workspace,
        )
        .expect("enqueue");
    }
    stream.synchronize().expect("synchronize");
    let mut failure = None;
    let graph = stream
        .capture(|stream| {
            failure = plan
                .forward(stream, &on.inputs, &on.outputs, &on.workspace)
                .err();
            Ok(())
        })
        .expect("capture");
    assert!(failure.is_none(), "{failure:?}");
    assert_eq!(
        bits(&on.results()),
        bits(&poisoned(plan.problem())),
        "capturing must not run anything"
    );
    let workspace = &plan.loaded().expect("kernels").plan().workspace;
    let flags = workspace.flags;
    for replay in 0..3 {
        graph.launch(&stream).expect("launch");
        stream.synchronize().expect("synchronize");
        assert_eq!(bits(&on.results()), bits(&want), "{shape}, replay {replay}");
        let mut left = vec![0u8; flags.bytes];
        on.workspace
            .read(flags.offset_bytes, &mut left)
            .expect("flags");
        assert!(left.iter().all(|b| *b == 0), "{shape}: a flag is up");
        let after = flags.offset_bytes + flags.bytes;
        for (from, to) in [(0, flags.offset_bytes), (after, workspace.total_bytes)] {
            let poisoned = on.workspace.fill_part(&stream, from, to - from, 0xff);
            poisoned.expect("poison");
        }
    }
}

#[test]
fn a_plan_of_the_cpu_backend_refuses_device_tensors() {
    let Some(engine) = engine() else { return };
    let shape = "b=1,l=10,h=2,p=16,g=1,n=16";
    let made = generate(&shape.parse().expect("shape"), 4, Pattern::Plain);
    let on = OnDevice::new(device(&engine), &plan(&engine, shape), &made, Place::Exact);
    let cpu = Engine::builder()
        .cpu()
        .build()
        .expect("the CPU backend always works");
    let stream = device(&engine).stream().expect("stream");
    let error = plan(&cpu, shape)
        .forward(&stream, &on.inputs, &on.outputs, &on.workspace)
        .expect_err("refused");
    assert!(matches!(error, mamba2::Error::NotOnDevice), "{error}");
}

/// A call with tensors of its own, and what it leaves when nothing runs beside it.
struct OneCall {
    made: Generated,
    want: Vec<u8>,
    on: OnDevice,
}

impl OneCall {
    fn new(engine: &Engine, plan: &Plan, seed: u64) -> OneCall {
        let made = generate(plan.problem(), seed, Pattern::Plain);
        OneCall {
            want: bits(&run_device(engine, plan, &made, Place::Exact)),
            on: OnDevice::new(device(engine), plan, &made, Place::Exact),
            made,
        }
    }

    fn enqueue(&self, plan: &Plan, stream: &Stream) {
        let on = &self.on;
        plan.forward(stream, &on.inputs, &on.outputs, &on.workspace)
            .expect("enqueue");
    }

    fn assert_right(&self, plan: &Plan) {
        let results = self.on.results();
        assert_right(plan.problem(), &self.made, &results);
        assert_eq!(bits(&results), self.want, "{}", plan.problem());
    }
}

fn calls(engine: &Engine, plan: &Plan, count: u64) -> Vec<OneCall> {
    let seeds = 0..count;
    seeds.map(|s| OneCall::new(engine, plan, s)).collect()
}

#[test]
fn two_streams_with_their_own_workspaces_do_not_disturb_each_other() {
    let Some(engine) = engine() else { return };
    let plan = plan(&engine, "b=2,l=2000,h=8,p=64,g=2,n=128");
    let calls = calls(&engine, &plan, 2);
    let streams: Vec<_> = (0..2)
        .map(|_| device(&engine).stream().expect("stream"))
        .collect();
    for _ in 0..10 {
        for (call, stream) in calls.iter().zip(&streams) {
            call.enqueue(&plan, stream);
        }
    }
    for (call, stream) in calls.iter().zip(&streams) {
        stream.synchronize().expect("synchronize");
        call.assert_right(&plan);
    }
}

/// From the second on, calls on one stream are launched as a graph whose parameters are those of the call before until they are set.
#[test]
fn calls_in_a_row_on_one_stream_keep_their_tensors_apart() {
    let Some(engine) = engine() else { return };
    for (shape, launches) in [
        ("b=1,l=700,h=4,p=64,g=2,n=128,dtype=f32", 3),
        ("b=1,l=300,h=4,p=64,g=2,n=16,z=1,align=1", 3),
        ("b=1,l=5000,h=3,p=64,g=1,n=128", 2),
        ("b=1,l=64,h=3,p=64,g=1,n=128", 1),
    ] {
        let plan = plan(&engine, shape);
        let loaded = plan.loaded().expect("kernels");
        assert!(loaded.is_replayed(), "{shape}");
        let kernels = loaded.plan().launches.iter();
        let got = kernels.filter(|l| l.grid > 0).count();
        // More only where the device has no fast path.
        assert!(got >= launches, "{shape}: {got} launches");
        let calls = calls(&engine, &plan, 3);
        let stream = device(&engine).stream().expect("stream");
        for call in calls.iter().chain(&calls).chain(calls.iter().rev()) {
            call.enqueue(&plan, &stream);
        }
        stream.synchronize().expect("synchronize");
        for call in &calls {
            call.assert_right(&plan);
        }
        assert!(loaded.is_replayed(), "{shape}: the driver refused");
    }
}

/// The parameters of one thread's calls never reach another's.
#[test]
fn threads_share_a_plan() {
    let Some(engine) = engine() else { return };
    let plan = plan(&engine, "b=1,l=5000,h=3,p=64,g=1,n=128");
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (engine, plan) = (&engine, &plan);
            scope.spawn(move || {
                let call = OneCall::new(engine, plan, seed);
                let stream = device(engine).stream().expect("stream");
                for _ in 0..200 {
                    call.enqueue(plan, &stream);
                }
                stream.synchronize().expect("synchronize");
                call.assert_right(plan);
            });
        }
    });
}

#[test]
fn steps_in_a_row_on_one_stream_keep_their_tensors_apart() {
    let Some(engine) = engine() else { return };
    let problem = StepProblem::new(5, 8, 64, 2, 128);
    let plan = engine.step_plan(&problem).expect("plan");
    let made: Vec<_> = (0..3)
        .map(|seed| generate_step(&problem, seed, Pattern::Plain))
        .collect();
    let want: Vec<_> = made.iter().map(|m| run_step_host(&plan, m)).collect();
    let on: Vec<_> = made
        .iter()
        .map(|m| StepOnDevice::new(device(&engine), &plan, m))
        .collect();
    let stream = device(&engine).stream().expect("stream");
    for on in &on {
        plan.step(&stream, &on.inputs, &on.outputs)
            .expect("enqueue");
    }
    stream.synchronize().expect("synchronize");
    for (on, want) in on.iter().zip(&want) {
        let (out, state) = on.results();
        assert_eq!(out.to_le_bytes(), want.0.to_le_bytes());
        assert_eq!(state.to_le_bytes(), want.1.to_le_bytes());
    }
    assert!(plan.loaded().expect("kernel").is_replayed());
}

/// Blocks that wait for each other need all of theirs to run: other calls must only delay them.
#[test]
fn a_chain_of_blocks_finishes_beside_other_work() {
    let Some(engine) = engine() else { return };
    // Two chains that fill an H200 each, and blocks that stay for a whole sequence.
    let plans = [
        "b=4,l=1024,h=8,p=64,g=1,n=128",
        "b=4,l=1024,h=8,p=64,g=1,n=128",
        "b=4,l=4096,h=16,p=64,g=1,n=128",
    ]
    .map(|shape| plan(&engine, shape));
    let calls = plans.each_ref().map(|p| OneCall::new(&engine, p, 7));
    let streams = plans
        .each_ref()
        .map(|_| device(&engine).stream().expect("stream"));
    for _ in 0..100 {
        for i in [2, 0, 1] {
            calls[i].enqueue(&plans[i], &streams[i]);
        }
    }
    for (i, call) in calls.iter().enumerate() {
        streams[i].synchronize().expect("synchronize");
        call.assert_right(&plans[i]);
    }
}

#[test]
fn i6_a_plan_works_from_a_thread_that_never_touched_cuda() {
    let Some(engine) = engine() else { return };
    let plan = plan(&engine, "b=1,l=100,h=4,p=64,g=2,n=128");
    let made = generate(plan.problem(), 4, Pattern::Plain);
    std::thread::scope(|scope| {
        scope
            .spawn(|| assert_right(plan.problem(), &made, &run_host(&plan, &made)))
            .join()
            .expect("thread");
    });
}

#[test]
fn a_second_engine_on_the_same_cache_compiles_nothing() {
    if engine().is_none() {
        return;
    }
    let cache = tempfile::tempdir().expect("cache");
    let engine = || {
        Engine::builder()
            .cuda(0)
            .expect("a GPU")
            .cache_dir(Some(cache.path().into()))
            .build()
            .expect("engine")
    };
    let shape = "b=1,l=100,h=4,p=64,g=2,n=64";
    let first = engine();
    let origins = |plan: &Plan| {
        plan.reports()
            .iter()
            .map(|r| format!("{:?}", r.origin))
            .collect::<Vec<_>>()
    };
    assert!(
        origins(&plan(&first, shape))
            .iter()
            .all(|o| o == "Compiled")
    );
    let second = engine();
    assert!(origins(&plan(&second, shape)).iter().all(|o| o == "Cache"));
    assert!(
        !second
            .jit()
            .expect("a CUDA engine has a compiler")
            .nvrtc_is_open()
    );
}

#[test]
fn n16_views_of_one_fused_projection_give_the_bits_of_contiguous_copies() {
    let Some(engine) = engine() else { return };
    let plan = plan(&engine, "b=2,l=130,h=4,p=64,g=2,n=128,z=1,final=none");
    let p = plan.problem();
    let made = generate(p, 6, Pattern::Plain);
    let want = run_host(&plan, &made);
    // [batch, seqlen, z | x | B | C | dt], as the input projection of a layer writes it.
    let (hp, gn, h) = (p.nheads * p.headdim, p.ngroups * p.dstate, p.nheads);
    let width = (2 * hp + 2 * gn + h).next_multiple_of(8);
    let Values::Bf16(fused) = Values::zeros(Dtype::Bf16, p.batch * p.seqlen * width) else {
        unreachable!()
    };
    let mut fused = fused;
    let parts = [
        (made.z.as_ref().expect("z"), hp),
        (&made.x, hp),
        (&made.b, gn),
        (&made.c, gn),
        (&made.dt, h),
    ];
    let mut at = 0;
    let mut starts = Vec::new();
    for (values, columns) in parts {
        let Values::Bf16(v) = values else {
            panic!("bf16")
        };
        for row in 0..p.batch * p.seqlen {
            fused[row * width + at..row * width + at + columns]
                .copy_from_slice(&v[row * columns..(row + 1) * columns]);
        }
        starts.push(at);
        at += columns;
    }
    let view = |start: usize, shape: &[usize], inner: usize| {
        let strides = [p.seqlen * width, width, inner, 1];
        let strides = if shape.len() == 3 {
            vec![p.seqlen * width, width, 1]
        } else {
            strides.to_vec()
        };
        HostTensor::new(
            TensorMeta::strided(Some(Dtype::Bf16), shape, &strides),
            HostData::Bf16(&fused[start..]),
        )
        .expect("view")
    };
    let s = shapes(p);
    let none = offsets(&made);
    let inputs = ForwardInputs {
        z: Some(view(starts[0], &s.tokens, p.headdim)),
        x: view(starts[1], &s.tokens, p.headdim),
        b: view(starts[2], &s.group, p.dstate),
        c: view(starts[3], &s.group, p.dstate),
        dt: view(starts[4], &s.tokens[..3], 1),
        ..common::host_inputs(p, &made, &none)
    };
    assert!(!inputs.x.meta().is_contiguous());
    let mut got = poisoned(p);
    plan.forward_host(
        &inputs,
        &mut ForwardOutputs {
            out: view_mut(&mut got.out, &s.tokens),
            final_states: None,
        },
    )
    .expect("forward");
    assert_eq!(bits(&got), bits(&want));
}

/// B and C shared by all batch rows (stride 0), which a tensor map cannot express.
#[test]
fn n16_rows_repeated_by_stride_zero_give_the_result_of_copies() {
    let Some(engine) = engine() else { return };
    let plan = plan(&engine, "b=2,l=130,h=4,p=64,g=2,n=128,final=none");
    let p = plan.problem();
    let mut made = generate(p, 6, Pattern::Plain);
    let half = p.seqlen * p.ngroups * p.dstate;
    for values in [&mut made.b, &mut made.c] {
        let Values::Bf16(v) = values else {
            panic!("bf16")
        };
        v.copy_within(0..half, half);
    }
    let s = shapes(p);
    let none = offsets(&made);
    let base = common::host_inputs(p, &made, &none);
    let strides = [0, p.ngroups * p.dstate, p.dstate, 1];
    fn repeat<'a>(t: HostTensor<'a>, shape: &[usize], strides: &[usize]) -> HostTensor<'a> {
        HostTensor::new(
            TensorMeta::strided(Some(Dtype::Bf16), shape, strides),
            t.data(),
        )
        .expect("view")
    }
    let (b, c) = (
        repeat(base.b, &s.group, &strides),
        repeat(base.c, &s.group, &strides),
    );
    let inputs = ForwardInputs { b, c, ..base };
    let mut got = poisoned(p);
    plan.forward_host(
        &inputs,
        &mut ForwardOutputs {
            out: view_mut(&mut got.out, &s.tokens),
            final_states: None,
        },
    )
    .expect("forward");
    assert_right(p, &made, &got);
}

#[test]
fn decode_steps_agree_with_the_oracle_and_leave_skipped_rows_alone() {
    let Some(engine) = engine() else { return };
    let base = StepProblem {
        indices: true,
        slots: 40,
        ..StepProblem::new(20, 8, 64, 2, 128)
    };
    let problems = [
        base.clone(),
        StepProblem {
            z: true,
            dt_bias: true,
            dt_softplus: true,
            ..base.clone()
        },
        StepProblem {
            tokens: 3,
            state_dtype: Dtype::Bf16,
            ..base.clone()
        },
        StepProblem {
            dtype: Dtype::F32,
            dt_dtype: Dtype::F32,
            headdim: 33,
            dstate: 20,
            ..base.clone()
        },
        StepProblem {
            indices: false,
            slots: 20,
            dtype: Dtype::F16,
            ..base
        },
    ];
    for p in problems {
        let plan = engine.step_plan(&p).expect("plan");
        let made = generate_step(&p, 8, Pattern::Plain);
        let (out, state) = run_step_host(&plan, &made);
        let want = step(&p, &made.reference());
        let bounds = Bounds::of_step(&p);
        let report = ErrorReport::compare(&state.to_f64(), &want.state);
        assert!(report.within(bounds.states), "{p}: state {report:?}");
        let row = p.tokens * p.nheads * p.headdim;
        let (got, mut compared) = (out.to_f64(), 0);
        for i in 0..p.batch {
            let range = i * row..(i + 1) * row;
            if made.state_batch_indices.as_ref().is_some_and(|s| s[i] < 0) {
                assert!(
                    got[range].iter().all(|v| v.is_nan()),
                    "{p}: skipped row {i} was touched"
                );
            } else {
                let report = ErrorReport::compare(&got[range.clone()], &want.out[range]);
                assert!(report.within(bounds.out), "{p}: row {i} {report:?}");
                compared += 1;
            }
        }
        assert!(compared > 0);
    }
}
