//! Everything up to the driver, with a driver made for tests (tests/fake_cuda.c): what is called, in which order, and what is
//! not. Each scene runs in a process of its own that finds the fake as libcuda.so.1.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::{child, passed};
use mamba2_cuda::{
    Compiled, Cubin, CubinCache, CudaError, Device, DeviceTensor, Jit, KernelIdentity, KernelKey,
    LoadedForward, LoadedStep, NvrtcVersion, Origin, ShippedCubins, Stream, Timer, TimerPolicy,
    availability,
};
use mamba2_spec::{
    Arch, ForwardInputs, ForwardOutputs, Problem, StepInputs, StepOutputs, StepProblem, TensorMeta,
    rules,
};

/// Counts this thread's allocations.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Builds the fake with the given definitions into `directory`.
fn build_fake(directory: &Path, definitions: &[&str]) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_cuda.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(directory.join("libcuda.so.1"))
        .args(definitions.iter().map(|d| format!("-D{d}")))
        .arg(source)
        .status()
        .expect("cc, which Rust needs too");
    assert!(status.success());
    // The name cudarc tries first, so that a driver of this machine cannot come before the fake.
    std::fs::copy(directory.join("libcuda.so.1"), directory.join("libcuda.so")).expect("copy");
}

/// Runs the ignored test `scene` with a fake driver.
fn play(scene: &str, definitions: &[&str]) -> String {
    let directory = tempfile::tempdir().expect("directory");
    build_fake(directory.path(), definitions);
    let variables = [
        ("LD_LIBRARY_PATH", Some(directory.path().to_path_buf())),
        // One thread: the fake's log is not for several.
        ("RAYON_NUM_THREADS", Some(PathBuf::from("1"))),
        // No NVRTC: every kernel is made up.
        ("MAMBA2_NVRTC_PATH", Some(PathBuf::from("/nonexistent"))),
    ];
    passed(&child(scene, &variables).output().expect("child"))
}

/// Handles on the loaded fake.
struct Fake(libloading::Library);

impl Fake {
    fn open() -> Fake {
        // SAFETY: the fake has no initialisers.
        Fake(unsafe { libloading::Library::new("libcuda.so") }.expect("the fake driver"))
    }

    /// Calls since the last look, and forgets them.
    fn calls(&self) -> Vec<String> {
        // SAFETY: the signatures are those of fake_cuda.c.
        unsafe {
            let log = self
                .0
                .get::<unsafe extern "C" fn() -> *const c_char>(b"fake_log")
                .expect("fake_log");
            let text = CStr::from_ptr(log()).to_str().expect("text").to_string();
            self.0
                .get::<unsafe extern "C" fn()>(b"fake_reset")
                .expect("fake_reset")();
            text.split_whitespace().map(String::from).collect()
        }
    }

    /// First word of the parameters that a graph was given last.
    fn last_set(&self) -> u64 {
        // SAFETY: the signature is that of fake_cuda.c.
        unsafe {
            self.0
                .get::<unsafe extern "C" fn() -> u64>(b"fake_last_set")
                .expect("fake_last_set")()
        }
    }

    /// Contexts on this thread's stack.
    fn depth(&self) -> c_int {
        // SAFETY: the signature is that of fake_cuda.c.
        unsafe {
            self.0
                .get::<unsafe extern "C" fn() -> c_int>(b"fake_depth")
                .expect("fake_depth")()
        }
    }
}

/// Gives any kernel this code.
struct MadeUp(&'static [u8]);

impl ShippedCubins for MadeUp {
    fn find(&self, identity: &KernelIdentity) -> Option<Cubin> {
        let key = KernelKey {
            identity: identity.clone(),
            nvrtc: NvrtcVersion {
                major: 13,
                minor: 0,
            },
        };
        let compiled = Compiled {
            cubin: self.0.to_vec(),
            log: String::new(),
            resources: None,
            target: Arch(90),
        };
        Some(Cubin { key, compiled })
    }
}

fn jit(code: &'static [u8]) -> Jit {
    Jit::new(CubinCache::disabled()).with_shipped(Arc::new(MadeUp(code)))
}

fn problem() -> Problem {
    // Long enough for segments, and so for a workspace.
    "b=2,l=3000,h=4,p=64,g=2,n=128,dtype=bf16,z=1"
        .parse()
        .expect("shape")
}

fn load(device: &Device, problem: &Problem) -> LoadedForward {
    let config = rules::default_strategy(problem, device.facts()).expect("default");
    LoadedForward::load(device, &jit(b"code"), problem, &config).expect("load")
}

fn tensor(device: &Device, meta: TensorMeta) -> DeviceTensor {
    let buffer = device
        .alloc(mamba2_cuda::span_bytes(&meta).expect("size"))
        .expect("alloc");
    DeviceTensor::new(&buffer, 0, meta).expect("view")
}

fn tensors(
    device: &Device,
    p: &Problem,
) -> (ForwardInputs<DeviceTensor>, ForwardOutputs<DeviceTensor>) {
    let f32 = Some(mamba2_spec::Dtype::F32);
    let make = |dtype, shape: &[usize]| tensor(device, TensorMeta::contiguous(dtype, shape));
    let tokens = [p.batch, p.seqlen, p.nheads, p.headdim];
    let group = [p.batch, p.seqlen, p.ngroups, p.dstate];
    let states = [p.sequences(), p.nheads, p.headdim, p.dstate];
    let inputs = ForwardInputs {
        x: make(Some(p.dtype), &tokens),
        dt: make(Some(p.dt_dtype), &tokens[..3]),
        a: make(f32, &[p.nheads]),
        b: make(Some(p.dtype), &group),
        c: make(Some(p.dtype), &group),
        d: Some(make(f32, &[p.nheads])),
        z: p.z.then(|| make(Some(p.dtype), &tokens)),
        dt_bias: None,
        initial_states: p.initial_states.map(|d| make(Some(d), &states)),
        cu_seqlens: None,
    };
    let outputs = ForwardOutputs {
        out: make(Some(p.dtype), &tokens),
        final_states: p.final_states.map(|d| make(Some(d), &states)),
    };
    (inputs, outputs)
}

#[test]
fn i6_a_call_launches_and_does_nothing_else_and_leaves_the_current_context_what_it_was() {
    print_host_cost(&play("scene_enqueue", &[]));
}

fn print_host_cost(text: &str) {
    println!(
        "{}",
        text.lines()
            .find(|l| l.contains("host cost"))
            .expect("the scene prints it")
    );
}

#[test]
#[ignore = "a scene"]
fn scene_enqueue() {
    let fake = Fake::open();
    let device = Device::open(1).expect("device 1");
    assert_eq!(
        (device.info().facts.name.as_str(), device.facts().arch),
        ("Fake 1", Arch(90))
    );
    assert_eq!(
        device.info().uuid,
        "GPU-01010101-0101-0101-0101-010101010101"
    );
    let problem = problem();
    let loaded = load(&device, &problem);
    assert!(loaded.reports().all(|r| r.origin == Origin::Shipped));
    let (inputs, outputs) = tensors(&device, &problem);
    let workspace = device
        .alloc(loaded.plan().workspace.total_bytes)
        .expect("workspace");
    let stream = device.stream().expect("stream");
    let launches = loaded.plan().launches.len();
    let launched = loaded.plan().launches.iter().filter(|l| l.grid > 0).count();
    let calls = vec!["cuLaunchKernelEx"; launched];
    let replay = replay_of(launched);
    // The first call of a function makes cudarc look up its address, which allocates once.
    for _ in 0..2 {
        loaded
            .enqueue(&stream, &inputs, &outputs, &workspace)
            .expect("enqueue");
    }
    fake.calls();

    let before = ALLOCATIONS.get();
    loaded
        .enqueue(&stream, &inputs, &outputs, &workspace)
        .expect("enqueue");
    assert_eq!(
        ALLOCATIONS.get(),
        before,
        "a call must not allocate on the host"
    );
    assert_eq!(fake.calls(), around(&replay));
    assert_eq!(fake.depth(), 0);

    // Where the context is current already, there is nothing to push; a thread may see to that.
    let current = device.make_current().expect("current");
    fake.calls();
    loaded
        .enqueue(&stream, &inputs, &outputs, &workspace)
        .expect("enqueue");
    let mut only_the_call = vec!["cuCtxGetCurrent"];
    only_the_call.extend(&replay);
    assert_eq!(fake.calls(), only_the_call);
    assert_eq!(fake.depth(), 1);
    drop(current);
    assert_eq!(fake.calls(), ["cuCtxPopCurrent_v2"]);
    assert_eq!(fake.depth(), 0);

    loaded
        .enqueue_kernel(launches - 1, &stream, &inputs, &outputs, &workspace)
        .expect("one kernel");
    assert_eq!(
        fake.calls(),
        [
            "cuCtxGetCurrent",
            "cuCtxPushCurrent_v2",
            "cuLaunchKernelEx",
            "cuCtxPopCurrent_v2"
        ]
    );
    assert!(
        loaded
            .enqueue_kernel(launches, &stream, &inputs, &outputs, &workspace)
            .is_err()
    );

    // The caller's own stream and memory.
    // SAFETY: the fake looks at neither.
    let (borrowed, memory) = unsafe {
        (
            device.borrow_stream(0x4242 as *mut _),
            device.borrow_memory(workspace.address(), workspace.bytes()),
        )
    };
    loaded
        .enqueue(&borrowed, &inputs, &outputs, &memory)
        .expect("enqueue");
    drop((borrowed, memory));
    assert_eq!(
        fake.calls(),
        around(&calls),
        "the first on its stream; borrowed streams and memory are not destroyed"
    );

    let _current = device.make_current().expect("current");
    host_cost("forward", || {
        loaded
            .enqueue(&stream, &inputs, &outputs, &workspace)
            .expect("enqueue");
    });
}

/// These calls, on a thread whose current context is another.
fn around(calls: &[&'static str]) -> Vec<&'static str> {
    let mut all = vec!["cuCtxGetCurrent", "cuCtxPushCurrent_v2"];
    all.extend(calls);
    all.push("cuCtxPopCurrent_v2");
    all
}

/// What the driver is asked for a call that is launched as a graph of that many kernels.
fn replay_of(launches: usize) -> Vec<&'static str> {
    let mut calls = vec!["cuStreamIsCapturing"];
    calls.extend(vec!["cuGraphExecKernelNodeSetParams_v2"; launches]);
    calls.push("cuGraphLaunch");
    calls
}

#[test]
fn calls_in_a_row_on_one_stream_are_one_graph_each_with_parameters_of_its_own() {
    play("scene_replay", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_replay() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    let problem = problem();
    let loaded = load(&device, &problem);
    assert!(loaded.is_replayed());
    let launched = loaded.plan().launches.iter().filter(|l| l.grid > 0).count();
    assert!(launched > 1, "one launch would show less");
    let workspace = device
        .alloc(loaded.plan().workspace.total_bytes)
        .expect("workspace");
    let tensors = [tensors(&device, &problem), tensors(&device, &problem)];
    let streams = [(); 2].map(|()| device.stream().expect("stream"));
    let _current = device.make_current().expect("current");
    let call = |stream: usize, of: usize| {
        let (inputs, outputs) = &tensors[of];
        loaded.enqueue(&streams[stream], inputs, outputs, &workspace)
    };
    let driver = |stream, of| {
        fake.calls();
        call(stream, of).expect("enqueue");
        let mut calls = fake.calls();
        calls.retain(|c| c != "cuTensorMapEncodeTiled" && c != "cuCtxGetCurrent");
        calls
    };
    let launches = vec!["cuLaunchKernelEx"; launched];
    assert_eq!(driver(0, 0), launches, "the first on its stream");
    for of in [0, 1, 0] {
        assert_eq!(driver(0, of), replay_of(launched));
        assert_eq!(fake.last_set(), tensors[of].0.dt.address());
    }
    // Two streams that take turns do not wait for each other.
    for stream in [1, 0, 1, 0] {
        assert_eq!(driver(stream, 0), launches);
    }
    assert_eq!(driver(0, 0), replay_of(launched));
    // What the caller captures is kernels.
    fake.calls();
    streams[0]
        .capture(|_| call(0, 1))
        .map(drop)
        .expect("capture");
    let calls = fake.calls();
    let count = |name: &str| calls.iter().filter(|c| *c == name).count();
    assert_eq!(
        (count("cuLaunchKernelEx"), count("cuGraphLaunch")),
        (launched, 0),
        "{calls:?}"
    );
    assert_eq!(driver(0, 1), replay_of(launched));
}

#[test]
fn a_driver_that_refuses_parameters_gets_launches_and_is_not_asked_again() {
    play("scene_refused_replay", &["REFUSE_SET"]);
}

#[test]
#[ignore = "a scene"]
fn scene_refused_replay() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    let problem = problem();
    let loaded = load(&device, &problem);
    let launched = loaded.plan().launches.iter().filter(|l| l.grid > 0).count();
    let workspace = device
        .alloc(loaded.plan().workspace.total_bytes)
        .expect("workspace");
    let (inputs, outputs) = tensors(&device, &problem);
    let stream = device.stream().expect("stream");
    for asked in [0, 1, 0, 0] {
        fake.calls();
        loaded
            .enqueue(&stream, &inputs, &outputs, &workspace)
            .expect("enqueue");
        let calls = fake.calls();
        let count = |name: &str| calls.iter().filter(|c| *c == name).count();
        assert_eq!(count("cuLaunchKernelEx"), launched, "{calls:?}");
        assert_eq!(count("cuGraphExecKernelNodeSetParams_v2"), asked);
        assert_eq!(count("cuGraphLaunch"), 0);
    }
    assert!(!loaded.is_replayed());
}

#[test]
fn tensor_maps_are_encoded_once_for_the_same_tensors() {
    play("scene_tensor_maps", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_tensor_maps() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    let problem = problem();
    let loaded = load(&device, &problem);
    let workspace = device
        .alloc(loaded.plan().workspace.total_bytes)
        .expect("workspace");
    let stream = device.stream().expect("stream");
    let calls: Vec<_> = (0..5).map(|_| tensors(&device, &problem)).collect();
    let encoded = |(inputs, outputs): &(ForwardInputs<_>, ForwardOutputs<_>)| {
        fake.calls();
        loaded
            .enqueue(&stream, inputs, outputs, &workspace)
            .expect("enqueue");
        let calls = fake.calls();
        calls
            .iter()
            .filter(|c| *c == "cuTensorMapEncodeTiled")
            .count()
    };
    // x, B, C, z and out, of each of a few calls that take turns.
    for call in &calls[..4] {
        assert_eq!(encoded(call), 5);
    }
    for call in &calls[..4] {
        assert_eq!(encoded(call), 0);
    }
    // One more pushes the oldest out.
    assert_eq!(encoded(&calls[4]), 5);
    assert_eq!(encoded(&calls[1]), 0);
    assert_eq!(encoded(&calls[0]), 5);
    // The same address with another stride is another place.
    let (mut inputs, outputs) = calls[4].clone();
    let buffer = device.alloc(1 << 22).expect("alloc");
    let shape = [
        problem.batch,
        problem.seqlen,
        problem.ngroups,
        problem.dstate,
    ];
    let plain = TensorMeta::contiguous(Some(problem.dtype), &shape);
    let strides = [300 * 512, 512, 128, 1];
    let wide = TensorMeta::strided(Some(problem.dtype), &shape, &strides);
    for (meta, want) in [(plain, 5), (wide, 5), (plain, 0)] {
        inputs.b = DeviceTensor::new(&buffer, 0, meta).expect("view");
        assert_eq!(encoded(&(inputs.clone(), outputs.clone())), want);
    }
}

/// Host cost of a call, with a driver that costs nothing.
fn host_cost(name: &str, mut call: impl FnMut()) {
    let n = 20_000;
    let start = std::time::Instant::now();
    for _ in 0..n {
        call();
    }
    let us = start.elapsed().as_secs_f64() * 1e6 / f64::from(n);
    println!("host cost of {name} without the driver's own: {us:.3} us");
    // The bound is for optimised code.
    assert!(
        us < if cfg!(debug_assertions) { 50.0 } else { 5.0 },
        "{us} us"
    );
}

#[test]
fn a_call_that_does_not_fit_enqueues_nothing() {
    play("scene_refusals", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_refusals() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device 0");
    let other = Device::open(1).expect("device 1");
    let problem = problem();
    let loaded = load(&device, &problem);
    let (inputs, outputs) = tensors(&device, &problem);
    let (foreign, _) = tensors(&other, &problem);
    let bytes = loaded.plan().workspace.total_bytes;
    let workspace = device.alloc(bytes).expect("workspace");
    let small = device.alloc(bytes - 1).expect("workspace");
    let elsewhere = other.alloc(bytes).expect("workspace");
    let (stream, other_stream) = (
        device.stream().expect("stream"),
        other.stream().expect("stream"),
    );
    // SAFETY: the fake looks at no memory.
    let (null, crooked, shifted) = unsafe {
        let meta = *mamba2_spec::HasMeta::meta(&inputs.dt);
        (
            DeviceTensor::from_raw(0, meta),
            DeviceTensor::from_raw(0x10001, meta),
            device.borrow_memory(workspace.address() + 16, bytes),
        )
    };
    let run = |stream: &Stream, inputs: &ForwardInputs<DeviceTensor>, workspace| {
        fake.calls();
        let error = loaded
            .enqueue(stream, inputs, &outputs, workspace)
            .expect_err("does not fit");
        assert_eq!(fake.calls(), Vec::<String>::new(), "{error}");
        error
    };
    let with_dt = |dt: DeviceTensor| ForwardInputs {
        dt,
        ..inputs.clone()
    };

    assert!(matches!(
        run(&stream, &inputs, &small),
        CudaError::Workspace { .. }
    ));
    assert!(matches!(
        run(&stream, &inputs, &shifted),
        CudaError::Workspace { .. }
    ));
    assert!(matches!(
        run(&stream, &inputs, &elsewhere),
        CudaError::WrongDevice {
            what: "workspace",
            ..
        }
    ));
    assert!(matches!(
        run(&other_stream, &inputs, &workspace),
        CudaError::WrongDevice { what: "stream", .. }
    ));
    assert!(matches!(
        run(&stream, &foreign, &workspace),
        CudaError::WrongDevice {
            what: "x",
            expected: 0,
            got: 1
        }
    ));
    assert!(matches!(
        run(&stream, &with_dt(null), &workspace),
        CudaError::Address { tensor: "dt", .. }
    ));
    assert!(matches!(
        run(&stream, &with_dt(crooked), &workspace),
        CudaError::Address { tensor: "dt", .. }
    ));
    let missing = ForwardInputs {
        z: None,
        ..inputs.clone()
    };
    let error = run(&stream, &missing, &workspace);
    assert!(
        error
            .to_string()
            .starts_with("z: the problem says it is present"),
        "{error}"
    );
    assert_eq!(fake.depth(), 0);

    // A view past the end of its buffer cannot be made.
    let buffer = device.alloc(100).expect("alloc");
    let meta = TensorMeta::contiguous(Some(mamba2_spec::Dtype::F32), &[26]);
    assert_eq!(
        DeviceTensor::new(&buffer, 0, meta).expect_err("104 bytes"),
        CudaError::View {
            available: 100,
            needed: 104
        }
    );
    let mut bytes = [0u8; 101];
    assert!(buffer.read(0, &mut bytes).is_err());
    assert!(buffer.write(1, &bytes[..100]).is_err());
}

#[test]
fn an_empty_problem_launches_only_what_has_work() {
    play("scene_empty", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_empty() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    for shape in ["b=0,l=300,h=4,p=64,g=2,n=128", "b=2,l=0,h=4,p=64,g=2,n=128"] {
        let problem: Problem = shape.parse().expect("shape");
        let loaded = load(&device, &problem);
        let (inputs, outputs) = tensors(&device, &problem);
        let workspace = device
            .alloc(loaded.plan().workspace.total_bytes)
            .expect("workspace");
        let stream = device.stream().expect("stream");
        fake.calls();
        loaded
            .enqueue(&stream, &inputs, &outputs, &workspace)
            .expect("enqueue");
        let launched = fake
            .calls()
            .iter()
            .filter(|c| c.starts_with("cuLaunchKernelEx"))
            .count();
        assert_eq!(
            launched,
            loaded.plan().launches.iter().filter(|l| l.grid > 0).count(),
            "{shape}"
        );
    }
}

#[test]
fn the_step_is_enqueued_like_the_forward_pass() {
    print_host_cost(&play("scene_step", &[]));
}

#[test]
#[ignore = "a scene"]
fn scene_step() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    let p = StepProblem {
        indices: true,
        slots: 9,
        ..StepProblem::new(5, 4, 64, 2, 128)
    };
    let config = rules::default_step(&p, device.facts()).expect("default");
    let loaded = LoadedStep::load(&device, &jit(b"code"), &p, &config).expect("load");
    let f32 = Some(mamba2_spec::Dtype::F32);
    let make = |dtype, shape: &[usize]| tensor(&device, TensorMeta::contiguous(dtype, shape));
    let inputs = StepInputs {
        x: make(Some(p.dtype), &[5, 1, 4, 64]),
        dt: make(Some(p.dt_dtype), &[5, 1, 4]),
        a: make(f32, &[4]),
        b: make(Some(p.dtype), &[5, 1, 2, 128]),
        c: make(Some(p.dtype), &[5, 1, 2, 128]),
        d: Some(make(f32, &[4])),
        z: None,
        dt_bias: None,
        state_batch_indices: Some(make(None, &[5])),
    };
    let outputs = StepOutputs {
        state: make(f32, &[9, 4, 64, 128]),
        out: make(Some(p.dtype), &[5, 1, 4, 64]),
    };
    let stream = device.stream().expect("stream");
    fake.calls();
    loaded.enqueue(&stream, &inputs, &outputs).expect("enqueue");
    assert_eq!(fake.calls(), around(&["cuLaunchKernelEx"]));
    loaded.enqueue(&stream, &inputs, &outputs).expect("enqueue");
    fake.calls();
    let before = ALLOCATIONS.get();
    loaded.enqueue(&stream, &inputs, &outputs).expect("enqueue");
    assert_eq!(ALLOCATIONS.get(), before);
    assert_eq!(fake.calls(), around(&replay_of(1)));
    assert_eq!(fake.last_set(), outputs.state.address());
    let _current = device.make_current().expect("current");
    host_cost("step", || {
        loaded.enqueue(&stream, &inputs, &outputs).expect("enqueue");
    });
    let outputs = StepOutputs {
        state: make(f32, &[8, 4, 64, 128]),
        ..outputs
    };
    fake.calls();
    let error = loaded
        .enqueue(&stream, &inputs, &outputs)
        .expect_err("a slot too few");
    assert!(
        error
            .to_string()
            .starts_with("state: expected [slots, nheads, headdim, dstate] = [9, 4, 64, 128]"),
        "{error}"
    );
    assert_eq!(fake.calls(), Vec::<String>::new());
}

#[test]
fn capture_ends_on_every_path_and_the_timer_flushes_outside_of_what_it_times() {
    play("scene_capture", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_capture() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    let stream = device.stream().expect("stream");
    fake.calls();
    let error = stream
        .capture(|s| s.synchronize())
        .map(drop)
        .expect_err("cannot be captured");
    assert!(
        matches!(&error, CudaError::Driver { code: 900, .. }),
        "{error}"
    );
    let calls = fake.calls();
    assert!(
        calls.contains(&"cuStreamEndCapture".to_string())
            && !calls.contains(&"cuGraphInstantiateWithFlags".to_string())
    );

    let timer = Timer::new(&device).expect("timer");
    let policy = TimerPolicy {
        warmup: 1,
        samples: 2,
        calls_per_replay: 5,
        cold: true,
    };
    let mut told = Vec::new();
    let samples = timer
        .time(policy, &mut |_, n| {
            told.push(n);
            Ok(())
        })
        .expect("time");
    assert_eq!(told, [0, 1, 2, 3, 4]);
    assert_eq!(
        samples.us,
        [50.0, 50.0],
        "the fake says 250 us a replay of 5 calls"
    );
    let calls: Vec<String> = fake
        .calls()
        .into_iter()
        .filter(|c| !c.starts_with("cuCtx"))
        .collect();
    let replay = [
        "cuMemsetD8Async",
        "cuEventRecord",
        "cuGraphLaunch",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuEventElapsedTime",
    ];
    assert!(
        calls.windows(replay.len()).filter(|w| *w == replay).count() >= 3,
        "{calls:?}"
    );
    timer
        .time(
            TimerPolicy {
                cold: false,
                ..policy
            },
            &mut |_, _| Ok(()),
        )
        .expect("time");
    let calls: Vec<String> = fake
        .calls()
        .into_iter()
        .filter(|c| !c.starts_with("cuCtx"))
        .collect();
    let warm = [
        "cuMemsetD8Async",
        "cuGraphLaunch",
        "cuEventRecord",
        "cuGraphLaunch",
        "cuEventRecord",
    ];
    assert!(
        calls.windows(warm.len()).filter(|w| *w == warm).count() >= 2,
        "{calls:?}"
    );
    let none = TimerPolicy {
        samples: 0,
        ..policy
    };
    assert!(matches!(
        timer.time(none, &mut |_, _| Ok(())),
        Err(CudaError::Timer { .. })
    ));
    assert!(
        !timer
            .stream()
            .device()
            .event()
            .expect("event")
            .is_done()
            .expect("not an error")
    );
    assert_eq!(fake.depth(), 0);
}

#[test]
fn everything_taken_is_given_back() {
    play("scene_drop", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_drop() {
    let fake = Fake::open();
    let device = Device::open(0).expect("device");
    let problem = problem();
    {
        let (first, second) = (load(&device, &problem), load(&device, &problem));
        let modules = fake
            .calls()
            .iter()
            .filter(|c| *c == "cuModuleLoadData")
            .count();
        assert_eq!(
            modules,
            first.plan().launches.len(),
            "modules are kept in memory and shared"
        );
        assert!(second.reports().all(|r| r.origin == Origin::Loaded));
        for (a, b) in first.reports().zip(second.reports()) {
            assert_eq!((a.resources, a.cubin_bytes), (b.resources, b.cubin_bytes));
        }
        drop((second, first));
        let buffer = device.upload(&[1f32, 2.0]).expect("upload");
        let view = DeviceTensor::new(
            &buffer,
            0,
            TensorMeta::contiguous(Some(mamba2_spec::Dtype::F32), &[2]),
        )
        .expect("view");
        drop(buffer);
        assert!(
            !fake.calls().contains(&"cuMemFree_v2".to_string()),
            "a tensor keeps its memory alive"
        );
        drop(view);
    }
    let calls = fake.calls();
    assert!(calls.contains(&"cuMemFree_v2".to_string()), "{calls:?}");
    let huge = device.alloc(1 << 40).expect_err("too much");
    assert!(huge.is_out_of_memory() && !huge.is_fatal(), "{huge}");
    fake.calls();
    drop(device);
    assert_eq!(fake.calls(), ["cuDevicePrimaryCtxRelease_v2"]);
}

#[test]
fn i3_a_refused_kernel_names_the_versions_of_both_sides() {
    play("scene_refused_module", &[]);
}

#[test]
#[ignore = "a scene"]
fn scene_refused_module() {
    let device = Device::open(0).expect("device");
    let problem = problem();
    let config = rules::default_strategy(&problem, device.facts()).expect("default");
    let error =
        LoadedForward::load(&device, &jit(b"refuse"), &problem, &config).expect_err("refused");
    assert!(matches!(&error, CudaError::ModuleRefused { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("CUDA 12.4") && text.contains("NVRTC 13.0") && text.contains("sm_90a"),
        "{text}"
    );
}

#[test]
fn i2_an_incomplete_driver_is_an_error_that_names_the_missing_function() {
    play("scene_old_driver", &["OMIT_GRAPHS"]);
}

#[test]
#[ignore = "a scene"]
fn scene_old_driver() {
    let error = Device::open(0).expect_err("too old");
    assert!(
        matches!(
            &error,
            CudaError::DriverTooOld {
                symbol: "cuGraphInstantiateWithFlags",
                ..
            }
        ),
        "{error}"
    );
    assert!(availability().driver.is_err());
}

#[test]
fn i2_a_stub_driver_says_so() {
    play("scene_stub", &["INIT_STATUS=34"]);
}

#[test]
#[ignore = "a scene"]
fn scene_stub() {
    let error = Device::open(0).expect_err("a stub");
    assert!(
        error.to_string().contains("CUDA_ERROR_STUB_LIBRARY")
            && error.to_string().contains("loader's path"),
        "{error}"
    );
}

#[test]
fn i2_no_visible_device_is_a_typed_error() {
    play("scene_no_device", &["DEVICES=0"]);
    play("scene_no_device", &["INIT_STATUS=100"]);
}

#[test]
#[ignore = "a scene"]
fn scene_no_device() {
    match Device::open(0).expect_err("no device") {
        CudaError::NoDevice {
            ordinal: 0,
            count: 0,
        }
        | CudaError::Driver { code: 100, .. } => {}
        other => panic!("{other}"),
    }
}

#[test]
fn c5_a_gpu_before_ampere_is_refused_with_both_compute_capabilities() {
    play("scene_turing", &["MAJOR=7", "MINOR=5"]);
}

#[test]
#[ignore = "a scene"]
fn scene_turing() {
    let error = Device::open(0).expect_err("too old");
    assert!(
        error.to_string().contains("8.0 or newer") && error.to_string().contains("7.5"),
        "{error}"
    );
    // Still listed, for people.
    assert_eq!(Device::list().expect("list").len(), 2);
}
