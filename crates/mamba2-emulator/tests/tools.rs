//! The tools that check and measure kernels, on the CPU: what the comparison of results must find, and what it must not.

#![allow(clippy::unwrap_used)]

use mamba2_emulator::{Compiler, Emulator};
use mamba2_kernels::Tool;
use mamba2_spec::{Arch, Dtype};

const BLOCKS: u32 = 2;
/// `[2, 3, 2, 5]` with a gap after each row of five and another after each token.
const SHAPE: [i64; 4] = [2, 3, 2, 5];
const STRIDES: [i64; 4] = [40, 13, 6, 1];
const LEAD: i64 = 7;
const UNITS: usize = 7 + 40 + 40 + 9;

fn emulator() -> Emulator {
    Emulator::new(
        Compiler::find().unwrap(),
        concat!(env!("CARGO_TARGET_TMPDIR"), "/emulator"),
    )
}

fn places(skip_second_row: bool) -> Vec<usize> {
    let mut all = Vec::new();
    for i in 0..SHAPE[0] - i64::from(skip_second_row) {
        for j in 0..SHAPE[1] {
            for k in 0..SHAPE[2] {
                for n in 0..SHAPE[3] {
                    let at = LEAD + i * STRIDES[0] + j * STRIDES[1] + k * STRIDES[2] + n;
                    all.push(at as usize);
                }
            }
        }
    }
    all
}

fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => values
            .iter()
            .flat_map(|v| half::bf16::from_f32(*v).to_le_bytes())
            .collect(),
        Dtype::F16 => values
            .iter()
            .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
            .collect(),
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Error, norm, first place outside (-1: none), differing elements.
fn compare(
    dtype: Dtype,
    [first, second, image]: [&[f32]; 3],
    standard: Option<&[f32]>,
    skipped: Option<[i32; 2]>,
) -> (f64, f64, i64, i64) {
    let of = |values: &[f32]| bytes(values, dtype);
    let (first, second, image) = (of(first), of(second), of(image));
    let standard = standard.map(of);
    let skipped: Option<Vec<u8>> =
        skipped.map(|rows| rows.iter().flat_map(|v| v.to_le_bytes()).collect());
    let found = vec![0u8; (BLOCKS * Tool::THREADS) as usize * 32];
    let words: Vec<i64> = [UNITS as i64, LEAD]
        .into_iter()
        .chain(SHAPE)
        .chain(STRIDES)
        .collect();
    let buffers = [
        Some(first.as_slice()),
        Some(&second),
        Some(&image),
        standard.as_deref(),
        skipped.as_deref(),
        Some(&found),
    ];
    let source = Tool::Compare(dtype).render(Arch(90));
    let after = emulator().tool(&source, BLOCKS, &buffers, &words).unwrap();
    let (mut error, mut norm, mut outside, mut differing) = (0.0, 0.0, -1, 0);
    for thread in after[5].chunks_exact(32) {
        let word = |i: usize| <[u8; 8]>::try_from(&thread[8 * i..8 * i + 8]).unwrap();
        error += f64::from_le_bytes(word(0));
        norm += f64::from_le_bytes(word(1));
        let at = i64::from_le_bytes(word(2));
        if at >= 0 && (outside < 0 || at < outside) {
            outside = at;
        }
        differing += i64::from_le_bytes(word(3));
    }
    (error, norm, outside, differing)
}

#[test]
fn elements_may_change_and_are_summed_in_every_dtype() {
    for dtype in Dtype::ALL {
        let image = vec![f32::NAN; UNITS];
        let (mut run, mut standard) = (image.clone(), image.clone());
        for (i, at) in places(false).into_iter().enumerate() {
            (run[at], standard[at]) = (i as f32 + 1.0, i as f32);
        }
        let found = compare(dtype, [&run, &run, &image], Some(&standard), None);
        let norm: f64 = (0..60).map(|i| f64::from(i * i)).sum();
        assert_eq!(found, (60.0, norm, -1, 0), "{dtype}");
    }
}

#[test]
fn a_unit_written_outside_is_named_wherever_it_lies_and_in_whichever_run() {
    let image = vec![-3.0f32; UNITS];
    let elements = places(false);
    for at in (0..UNITS).filter(|at| !elements.contains(at)).step_by(3) {
        let mut written = image.clone();
        written[at] = 1.0;
        for runs in [[&written, &image], [&image, &written]] {
            let found = compare(Dtype::Bf16, [runs[0], runs[1], &image], None, None);
            assert_eq!(found, (0.0, 0.0, at as i64, 0));
        }
    }
}

#[test]
fn a_skipped_row_is_no_element() {
    let image = vec![0.5f32; UNITS];
    let mut run = image.clone();
    for at in places(true) {
        run[at] = 2.0;
    }
    let skipped = Some([4, -1]);
    let found = compare(Dtype::F32, [&run, &run, &image], Some(&image), skipped);
    assert_eq!(found, (30.0 * 2.25, 30.0 * 0.25, -1, 0));
    let in_second_row = places(false)[30 + 11];
    run[in_second_row] = 2.0;
    let found = compare(Dtype::F32, [&run, &run, &image], None, skipped);
    assert_eq!(found.2, in_second_row as i64);
}

#[test]
fn runs_that_differ_in_a_bit_are_told_apart_and_nan_is_infinitely_far() {
    let image = vec![f32::NAN; UNITS];
    let mut first = image.clone();
    for at in places(false) {
        first[at] = 1.0;
    }
    let mut second = first.clone();
    (second[places(false)[3]], second[places(false)[59]]) = (1.0 + f32::EPSILON, f32::NAN);
    let found = compare(Dtype::F32, [&first, &second, &image], Some(&first), None);
    assert_eq!((found.2, found.3), (-1, 2));
    assert!(found.0.is_nan());
}

#[test]
fn a_copy_copies_all_of_it_and_nothing_more() {
    for vectors in [0usize, 1, 255, 1024, 5000] {
        let from: Vec<u8> = (0..vectors * 16).map(|i| (i * 7 % 251) as u8).collect();
        let to = vec![0u8; vectors * 16 + 64];
        let source = Tool::Copy.render(Arch(90));
        let after = emulator()
            .tool(&source, 3, &[Some(&from), Some(&to)], &[vectors as i64])
            .unwrap();
        assert!(after[1][..from.len()] == from, "{vectors}");
        assert!(
            after[1][from.len()..].iter().all(|b| *b == 0),
            "{vectors}: beyond the end"
        );
    }
}
