//! What only a GPU can show of this crate. Prints `SKIPPED: no CUDA device` without one, and fails if MAMBA2_REQUIRE_GPU=1.

use std::ffi::c_void;

use cudarc::driver::{CudaContext, sys};
use mamba2_cuda::{
    Comparer, Compares, Copier, CubinCache, CudaError, Device, DeviceTensor, Jit, Timer,
    TimerPolicy,
};
use mamba2_spec::{Dtype, TensorMeta};

fn device() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var_os("MAMBA2_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("a GPU is required: {error}")
        }
        Err(_) => {
            eprintln!("SKIPPED: no CUDA device");
            None
        }
    }
}

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver is loaded and initialised; the pointer is to a live handle.
    assert_eq!(
        unsafe { sys::cuCtxGetCurrent(&mut context) },
        sys::CUresult::CUDA_SUCCESS
    );
    context
}

fn work(device: &Device) {
    let stream = device.stream().expect("stream");
    let buffer = device.upload(&[1f32, 2.0, 3.0]).expect("upload");
    buffer.fill(&stream, 0).expect("fill");
    stream.synchronize().expect("synchronize");
    let mut back = [9f32; 3];
    buffer.read(0, &mut back).expect("read");
    assert_eq!(back, [0.0; 3]);
}

#[test]
fn i6_a_thread_that_never_touched_cuda_works_and_keeps_no_context() {
    let Some(device) = device() else { return };
    std::thread::spawn(move || {
        work(&device);
        assert!(current().is_null());
    })
    .join()
    .expect("thread");
}

#[test]
fn i6_the_callers_context_is_current_again_after_every_call() {
    let Some(device) = device() else { return };
    let count = Device::count().expect("count");
    // The caller works with the last device; we with the first (the same one on a machine with one).
    let theirs = CudaContext::new(count - 1).expect("cudarc");
    theirs.bind_to_thread().expect("bind");
    let before = current();
    assert_eq!(before, theirs.cu_ctx());
    work(&device);
    assert_eq!(current(), before);
    device.alloc(1 << 60).expect_err("too much");
    assert_eq!(current(), before, "also after an error");
}

#[test]
fn i6_two_devices_take_turns_on_one_thread() {
    let Some(first) = device() else { return };
    if Device::count().expect("count") < 2 {
        eprintln!("SKIPPED: one CUDA device only");
        return;
    }
    let second = Device::open(1).expect("device 1");
    assert_ne!(first.info().uuid, second.info().uuid);
    for _ in 0..3 {
        work(&first);
        work(&second);
    }
}

#[test]
fn a_cudarc_slice_and_stream_can_be_borrowed() {
    let Some(device) = device() else { return };
    let theirs = CudaContext::new(0).expect("cudarc");
    let stream = theirs.new_stream().expect("stream");
    let slice = stream.alloc_zeros::<f32>(12).expect("slice");
    let meta = TensorMeta::contiguous(Some(Dtype::F32), &[3, 4]);
    // SAFETY: the slice is of device 0, holds f32 and outlives the tensor.
    let tensor = unsafe { DeviceTensor::from_cudarc(&slice, &stream, meta) }.expect("fits");
    assert_ne!(tensor.address(), 0);
    let long = TensorMeta::contiguous(Some(Dtype::F32), &[13]);
    // SAFETY: as above.
    let error = unsafe { DeviceTensor::from_cudarc(&slice, &stream, long) }.expect_err("too long");
    assert_eq!(
        error,
        CudaError::View {
            available: 48,
            needed: 52
        }
    );

    // SAFETY: the stream is of device 0's primary context and outlives the borrowed one; the memory is the slice's.
    let (ours, memory) = unsafe {
        (
            device.borrow_stream(stream.cu_stream().cast::<c_void>()),
            device.borrow_memory(tensor.address(), 48),
        )
    };
    memory.fill(&ours, 0x3f).expect("fill");
    drop((ours, memory));
    let back = stream.clone_dtoh(&slice).expect("copy");
    assert_eq!(back, [f32::from_bits(0x3f3f_3f3f); 12]);
}

#[test]
fn the_timer_tells_long_work_from_short_and_its_spread_is_small() {
    let Some(device) = device() else { return };
    let timer = Timer::new(&device).expect("timer");
    let (short, long) = (
        device.alloc(64 << 20).expect("alloc"),
        device.alloc(1 << 30).expect("alloc"),
    );
    let policy = TimerPolicy {
        samples: 11,
        ..TimerPolicy::default()
    };
    let all = timer
        .compare(
            policy,
            &mut [&mut |s, _| short.fill(s, 1), &mut |s, _| long.fill(s, 1)],
        )
        .expect("compare");
    let ratio = all[1].median_us() / all[0].median_us();
    println!(
        "64 MiB {:.1} us, 1 GiB {:.1} us, spread {:.3}",
        all[0].median_us(),
        all[1].median_us(),
        all[1].spread()
    );
    assert!(ratio > 6.0, "16 times the bytes took {ratio} times as long");
    assert!(all[1].spread() < 0.2, "{:?}", all[1].us);
    assert!(all[1].min_us() <= all[1].median_us());
}

#[test]
fn nothing_that_cannot_be_captured_leaves_the_stream_unusable() {
    let Some(device) = device() else { return };
    let stream = device.stream().expect("stream");
    let error = stream
        .capture(|s| s.synchronize())
        .map(drop)
        .expect_err("synchronising cannot be captured");
    assert!(!error.is_fatal(), "{error}");
    let buffer = device.alloc(100).expect("alloc");
    let graph = stream.capture(|s| buffer.fill(s, 7)).expect("capture");
    graph.launch(&stream).expect("launch");
    stream.synchronize().expect("synchronize");
    let mut back = [0u8; 100];
    buffer.read(0, &mut back).expect("read");
    assert_eq!(back, [7; 100]);
}

fn jit() -> Jit {
    Jit::new(CubinCache::new(
        std::env::temp_dir().join("mamba2-tool-cubins"),
    ))
}

#[test]
fn a_copy_by_a_kernel_copies_every_byte() {
    let Some(device) = device() else { return };
    let stream = device.stream().expect("stream");
    let copier = Copier::load(&device, &jit()).expect("copier");
    // More vectors than the grid has threads, and no multiple of what a block takes.
    let bytes: Vec<u8> = (0..40_000_016usize).map(|i| (i % 251) as u8).collect();
    let from = device.upload(&bytes).expect("upload");
    let to = device.alloc(bytes.len()).expect("alloc");
    copier.copy(&stream, &to, &from).expect("copy");
    stream.synchronize().expect("synchronize");
    let mut back = vec![0u8; bytes.len()];
    to.read(0, &mut back).expect("read");
    assert!(back == bytes);
    let odd = device.alloc(bytes.len() - 1).expect("alloc");
    assert!(matches!(
        copier.copy(&stream, &odd, &from),
        Err(CudaError::View { .. })
    ));
}

#[test]
fn a_comparison_finds_what_was_planted_and_gives_the_same_bits_each_time() {
    let Some(device) = device() else { return };
    let stream = device.stream().expect("stream");
    let comparer = Comparer::load(&device, &jit(), Dtype::F32).expect("comparer");
    // [2, 3, 70, 1000] of 1024 with a guard of 64 on both sides.
    let (shape, strides, lead) = ([2, 3, 70, 1000], [3 * 70 * 1024, 70 * 1024, 1024, 1], 64);
    let units = 2 * 64 + 6 * 70 * 1024;
    let image = vec![-1f32; units];
    let mut run = image.clone();
    for row in 0..6 * 70 {
        for n in 0..1000 {
            run[lead + row * 1024 + n] = (row + n) as f32;
        }
    }
    let upload = |values: &[f32]| device.upload(values).expect("upload");
    let (image, standard) = (upload(&image), upload(&run));
    let compare = |first: &[f32], second: &[f32]| {
        let (first, second) = (upload(first), upload(second));
        let compares = Compares {
            first: &first,
            second: &second,
            image: &image,
            standard: Some(&standard),
            skipped: None,
            lead,
            shape,
            strides,
        };
        let once = comparer.compare(&stream, &compares).expect("compare");
        assert_eq!(once, comparer.compare(&stream, &compares).expect("compare"));
        once
    };
    let right = compare(&run, &run);
    let squares: f64 = (0..6 * 70)
        .flat_map(|row| (0..1000).map(move |n| f64::from(row + n).powi(2)))
        .sum();
    assert_eq!(right.error, 0.0);
    assert!((right.norm / squares - 1.0).abs() < 1e-12);
    assert_eq!((right.outside, right.differing), (None, 0));
    let mut wrong = run.clone();
    wrong[lead + 5 * 1024 + 999] += 2.0;
    wrong[lead + 5 * 1024 + 1000] = 0.0;
    let found = compare(&run, &wrong);
    assert_eq!(found.error, 4.0);
    assert_eq!(
        (found.outside, found.differing),
        (Some(lead + 5 * 1024 + 1000), 1)
    );
}
