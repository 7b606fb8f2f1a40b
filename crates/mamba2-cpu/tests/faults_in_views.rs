//! Faults of other systems, as their users reported them: views, tails, refusals. Named after the ids of the reports.
#![allow(clippy::unwrap_used)]

mod common;

use common::{
    d_shape, data, data_mut, f32_problem, gather, inputs, run, state_shape, token_shape, try_run,
    try_step,
};
use mamba2_cpu::{CpuError, HostData, HostDataMut, HostTensor, HostTensorMut, forward};
use mamba2_reference::{Generated, Pattern, Values, generate, generate_step};
use mamba2_spec::{
    ChunkSize, DKind, Dtype, ForwardInputs, ForwardOutputs, HasMeta, Problem, StepProblem,
    TensorMeta,
};

/// All per-token tensors as slices of one buffer `[batch, seqlen, d_proj]`, as a fused projection leaves them.
struct Fused {
    buffer: Values,
    width: usize,
}

impl Fused {
    /// Order: z, x, B, C, dt; gaps and the end are NaN.
    fn new(p: &Problem, parts: &[(&Values, usize)]) -> Fused {
        let width = parts.iter().map(|(_, width)| width + 3).sum::<usize>();
        let tokens = p.batch * p.seqlen;
        let mut all = vec![f64::NAN; tokens * width];
        let mut at = 0;
        for (values, part) in parts {
            for (t, row) in values.to_f64().chunks_exact(*part).enumerate() {
                all[t * width + at..][..*part].copy_from_slice(row);
            }
            at += part + 3;
        }
        Fused {
            buffer: Values::rounded(p.dtype, &all),
            width,
        }
    }

    /// Exactly the elements from `offset` on that the view spans, so that one element too far is out of bounds.
    fn view(&self, offset: usize, shape: &[usize]) -> HostTensor<'_> {
        let mut strides = vec![shape[1] * self.width, self.width];
        if shape.len() == 4 {
            strides.push(shape[3]);
        }
        strides.push(1);
        let meta = TensorMeta::strided(self.buffer.dtype(), shape, &strides);
        let end = offset + meta.span_elems().unwrap();
        let data = match &self.buffer {
            Values::Bf16(v) => HostData::Bf16(&v[offset..end]),
            Values::F16(v) => HostData::F16(&v[offset..end]),
            Values::F32(v) => HostData::F32(&v[offset..end]),
            Values::I32(v) => HostData::I32(&v[offset..end]),
        };
        HostTensor::new(meta, data).unwrap()
    }
}

#[test]
fn n16_slices_of_a_fused_projection_give_the_same_bits_as_copies() {
    for dtype in Dtype::ALL {
        let problem = {
            let mut p: Problem = "b=2,l=75,h=6,p=5,g=3,n=7,z=1".parse().unwrap();
            p.chunk_size = ChunkSize::Fixed(32);
            p.with_dtype(dtype)
        };
        let p = &problem;
        let g = generate(p, 1, Pattern::Plain);
        let want = run(p, &g);
        let (wide, group) = (p.nheads * p.headdim, p.ngroups * p.dstate);
        let fused = Fused::new(
            p,
            &[
                (g.z.as_ref().unwrap(), wide),
                (&g.x, wide),
                (&g.b, group),
                (&g.c, group),
                (&g.dt, p.nheads),
            ],
        );
        let group_shape = [p.batch, p.seqlen, p.ngroups, p.dstate];
        let mut views = inputs(p, &g);
        let mut at = 0;
        let mut next = |width: usize| {
            at += width + 3;
            at - width - 3
        };
        views.z = Some(fused.view(next(wide), &token_shape(p)));
        views.x = fused.view(next(wide), &token_shape(p));
        views.b = fused.view(next(group), &group_shape);
        views.c = fused.view(next(group), &group_shape);
        views.dt = fused.view(next(p.nheads), &token_shape(p)[..3]);
        let (out, states) = run_into_gaps(p, &views);
        assert_eq!(
            (out.to_le_bytes(), states.to_le_bytes()),
            (
                want.out.to_le_bytes(),
                want.final_states.unwrap().to_le_bytes()
            )
        );
    }
}

/// Runs with outputs that have gaps between tokens, heads and states; returns them without the gaps, which must be untouched.
fn run_into_gaps(p: &Problem, views: &ForwardInputs<HostTensor<'_>>) -> (Values, Values) {
    // out: heads outermost within a row, tokens inside, two elements of gap; states: dstate rows with one element of gap.
    let row = p.headdim + 2;
    let out_strides = [p.nheads * p.seqlen * row, row, p.seqlen * row, 1];
    let state_strides = [
        p.nheads * p.headdim * (p.dstate + 1),
        p.headdim * (p.dstate + 1),
        p.dstate + 1,
        1,
    ];
    let out_meta = TensorMeta::strided(Some(p.dtype), &token_shape(p), &out_strides);
    let state_meta = TensorMeta::strided(p.final_states, &state_shape(p), &state_strides);
    let mut out = Values::poison(p.dtype, out_meta.span_elems().unwrap());
    let mut states = Values::poison(p.final_states.unwrap(), state_meta.span_elems().unwrap());
    let mut outputs = ForwardOutputs {
        out: HostTensorMut::new(out_meta, data_mut(&mut out)).unwrap(),
        final_states: Some(HostTensorMut::new(state_meta, data_mut(&mut states)).unwrap()),
    };
    forward(p, views, &mut outputs).unwrap();
    (gather(&out, &out_meta), gather(&states, &state_meta))
}

#[test]
fn n16_unusable_strides_are_refused_by_name() {
    let problem = f32_problem("b=1,l=8,h=4,p=4,g=1,n=4");
    let g = generate(&problem, 1, Pattern::Plain);
    let refused = |change: &dyn Fn(&mut ForwardInputs<HostTensor<'_>>)| {
        let mut views = inputs(&problem, &g);
        change(&mut views);
        let mut out = Values::poison(Dtype::F32, 128);
        let mut states = Values::poison(Dtype::F32, 64);
        let mut outputs = ForwardOutputs {
            out: common::view_mut(&mut out, &token_shape(&problem)),
            final_states: Some(common::view_mut(&mut states, &state_shape(&problem))),
        };
        let error = forward(&problem, &views, &mut outputs)
            .unwrap_err()
            .to_string();
        assert!(
            out.to_f64()
                .iter()
                .chain(&states.to_f64())
                .all(|v| v.is_nan()),
            "written in spite of: {error}"
        );
        error
    };
    // A transposed initial state, and dt expanded over heads.
    let error = refused(&|v| {
        let state = v.initial_states.unwrap();
        let meta = TensorMeta::strided(Some(Dtype::F32), state.meta().shape(), &[64, 16, 1, 4]);
        v.initial_states = Some(HostTensor::new(meta, state.data()).unwrap());
    });
    assert!(
        error.contains("initial_states") && error.contains("contiguous innermost axis"),
        "{error}"
    );
    let error = refused(&|v| {
        let meta = TensorMeta::strided(Some(Dtype::F32), &[1, 8, 4], &[8, 1, 0]);
        v.dt = HostTensor::new(meta, v.dt.data()).unwrap();
    });
    assert!(
        error.contains("dt") && error.contains("contiguous innermost axis"),
        "{error}"
    );
}

#[test]
fn n16_an_axis_may_repeat_in_an_input_but_not_in_an_output() {
    // x expanded over heads with stride 0 equals a copy.
    let problem = f32_problem("b=1,l=8,h=4,p=4,g=1,n=4");
    let mut g = generate(&problem, 1, Pattern::Plain);
    let once: Vec<f64> = g.x.to_f64()[..32].to_vec();
    g.x = Values::rounded(
        Dtype::F32,
        &once
            .chunks_exact(4)
            .flat_map(|row| row.repeat(4))
            .collect::<Vec<_>>(),
    );
    let want = run(&problem, &g);
    let small = Values::rounded(Dtype::F32, &once);
    let mut views = inputs(&problem, &g);
    let meta = TensorMeta::strided(Some(Dtype::F32), &token_shape(&problem), &[32, 4, 0, 1]);
    views.x = HostTensor::new(meta, data(&small)).unwrap();
    let (out, _) = run_into_gaps(&problem, &views);
    assert_eq!(out, want.out);

    let mut out = Values::poison(Dtype::F32, 128);
    let mut states = Values::poison(Dtype::F32, 64);
    let mut outputs = ForwardOutputs {
        out: HostTensorMut::new(meta, data_mut(&mut out)).unwrap(),
        final_states: Some(common::view_mut(&mut states, &state_shape(&problem))),
    };
    let error = forward(&problem, &views, &mut outputs)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("out: ") && error.contains("overlap"),
        "{error}"
    );
}

#[test]
fn c7_nothing_past_a_tensor_is_touched_with_any_set_of_options() {
    // Every tensor is a slice of its exact size: one element too far is a panic here.
    for l in [1, 65, 1026, 4099] {
        for bits in 0..32u32 {
            let on = |bit: u32| bits >> bit & 1 == 1;
            let mut problem = f32_problem(&format!("b=1,l={l},h=2,p=3,g=1,n=2"));
            problem.chunk_size = ChunkSize::Fixed(64);
            problem.d = [DKind::None, DKind::PerHead][on(0) as usize];
            (problem.z, problem.dt_bias) = (on(1), on(2));
            problem.initial_states = on(3).then_some(Dtype::F32);
            problem.final_states = on(4).then_some(Dtype::F32);
            common::check(
                &problem,
                &generate(&problem, u64::from(bits), Pattern::Plain),
            );
        }
    }
}

#[test]
fn c7_the_padded_tail_is_neither_read_nor_written() {
    let problem = f32_problem("b=1,l=300,h=4,p=6,g=2,n=5,packed=7,z=1,bias=1");
    let clean = generate(&problem, 3, Pattern::Plain);
    let mut poisoned = clean.clone();
    poisoned.poison_tail(&problem);
    assert!(run(&problem, &clean).same_bits(&run(&problem, &poisoned)));
    common::check(&problem, &poisoned);
}

#[test]
fn c7_a_short_slice_is_refused_when_the_view_is_made() {
    let meta = TensorMeta::strided(Some(Dtype::F32), &[2, 3], &[5, 1]);
    assert!(HostTensor::new(meta, HostData::F32(&[0.0; 8])).is_ok());
    let error = HostTensor::new(meta, HostData::F32(&[0.0; 7])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "host tensor: shape [2, 3] with strides [5, 1] spans 8 elements, the data has 7"
    );
    let endless = TensorMeta::strided(Some(Dtype::F32), &[3, 3], &[usize::MAX / 2, 1]);
    assert!(matches!(
        HostTensor::new(endless, HostData::F32(&[0.0; 7])),
        Err(CpuError::Span { .. })
    ));
    let mut half = [half::f16::ZERO; 8];
    let error = HostTensorMut::new(meta, HostDataMut::F16(&mut half)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "host tensor: described as f32, the data is f16"
    );
}

#[test]
fn a1_packed_calls_say_which_shape_they_expect() {
    let problem = f32_problem("b=1,l=30,h=2,p=3,g=1,n=4,packed=3");
    let g = generate(&problem, 1, Pattern::Plain);
    let fails = |change: &dyn Fn(&mut Problem, &mut Generated), words: &[&str]| {
        let (mut p, mut g) = (problem.clone(), g.clone());
        change(&mut p, &mut g);
        let (result, results) = try_run(&p, &g);
        let error = result.unwrap_err().to_string();
        assert!(
            words.iter().all(|w| error.contains(w)),
            "{error} should say {words:?}"
        );
        assert!(
            results.out.to_f64().iter().all(|v| v.is_nan()),
            "written in spite of: {error}"
        );
    };
    let cu = |cu: &'static [i32]| {
        move |_: &mut Problem, g: &mut Generated| g.cu_seqlens = Some(cu.to_vec())
    };
    fails(
        &cu(&[10, 20, 30, 30]),
        &["cu_seqlens", "first offset to be 0", "10"],
    );
    fails(
        &cu(&[0, 20, 10, 30]),
        &["cu_seqlens", "non-decreasing", "10 after 20"],
    );
    fails(
        &cu(&[0, 10, 20, 31]),
        &["cu_seqlens", "at most seqlen = 30", "31"],
    );
    fails(&cu(&[0, -1, 20, 30]), &["cu_seqlens", "-1"]);
    fails(
        &cu(&[10, 20, 30]),
        &["cu_seqlens", "[sequences + 1] = [4]", "[3]"],
    );
    fails(
        &|_, g| g.cu_seqlens = None,
        &["cu_seqlens", "says it is present", "absent"],
    );
    fails(
        &|p, _| p.packed = None,
        &["cu_seqlens", "says it is absent", "present"],
    );
}

#[test]
fn a1_states_by_batch_row_are_refused_in_packed_mode() {
    let problem = f32_problem("b=1,l=30,h=2,p=3,g=1,n=4,packed=3");
    let mut g = generate(&problem, 1, Pattern::Plain);
    let by_row = g.initial_states.take().unwrap();
    let mut views = inputs(&problem, &g);
    views.initial_states = Some(
        HostTensor::new(
            TensorMeta::contiguous(Some(Dtype::F32), &[1, 2, 3, 4]),
            data(&by_row),
        )
        .unwrap(),
    );
    let mut out = Values::poison(Dtype::F32, 180);
    let mut states = Values::poison(Dtype::F32, 72);
    let mut outputs = ForwardOutputs {
        out: common::view_mut(&mut out, &token_shape(&problem)),
        final_states: Some(common::view_mut(&mut states, &state_shape(&problem))),
    };
    let error = forward(&problem, &views, &mut outputs)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "initial_states: expected [sequences, nheads, headdim, dstate] = [3, 2, 3, 4], got [1, 2, 3, 4]"
    );
}

#[test]
fn a1_a_tensor_the_problem_does_not_promise_is_refused() {
    let mut problem = f32_problem("b=1,l=5,h=2,p=3,g=1,n=4,z=1");
    let g = generate(&problem, 1, Pattern::Plain);
    problem.z = false;
    let error = try_run(&problem, &g).0.unwrap_err().to_string();
    assert_eq!(
        error,
        "z: the problem says it is absent, the call has it present"
    );
    problem.z = true;
    problem.d = DKind::PerHeaddim;
    let error = try_run(&problem, &Generated { d: None, ..g })
        .0
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "D: the problem says it is present, the call has it absent"
    );
    assert_eq!(d_shape(DKind::PerHeaddim, 2, 3), [2, 3]);
}

#[test]
fn a2_shapes_without_any_multiple_of_eight_run() {
    for text in [
        "b=1,l=33,h=6,p=48,g=2,n=20",
        "b=3,l=17,h=5,p=7,g=5,n=9",
        "b=1,l=2,h=1,p=1,g=1,n=1",
    ] {
        for dtype in Dtype::ALL {
            let problem = text.parse::<Problem>().unwrap().with_dtype(dtype);
            common::check(&problem, &generate(&problem, 4, Pattern::Plain));
        }
    }
}

#[test]
fn a2_sizes_beyond_the_limits_are_refused_in_the_callers_terms() {
    for (text, words) in [
        (
            "b=1,l=4,h=2,p=257,g=1,n=4",
            "headdim: expected 1..=256, got 257",
        ),
        (
            "b=1,l=4,h=2,p=4,g=1,n=513",
            "dstate: expected 1..=512, got 513",
        ),
        (
            "b=1,l=4,h=2,p=4,g=1,n=4,q=4097",
            "chunk_size: expected 1..=4096, got 4097",
        ),
        (
            "b=1,l=4,h=2,p=4,g=1,n=4,q=0",
            "chunk_size: expected 1..=4096, got 0",
        ),
        (
            "b=2,l=4,h=2,p=4,g=1,n=4,packed=2",
            "batch of a packed call: expected 1..=1, got 2",
        ),
    ] {
        assert_eq!(text.parse::<Problem>().unwrap_err().to_string(), words);
    }
}

#[test]
fn the_alignment_that_devices_want_is_no_matter_here() {
    let problem = f32_problem("b=1,l=9,h=2,p=3,g=1,n=5");
    assert_eq!(problem.alignment, mamba2_spec::Alignment::Bytes16);
    common::check(&problem, &generate(&problem, 1, Pattern::Plain));
}

#[test]
fn c2_high_slots_are_updated_and_no_other_is() {
    let mut problem = StepProblem::new(3, 2, 3, 1, 4);
    (problem.indices, problem.slots) = (true, 2049);
    let mut g = generate_step(&problem, 1, Pattern::Plain);
    g.state_batch_indices = Some(vec![2048, -1, 7]);
    let (result, state, out) = try_step(&problem, &g);
    result.unwrap();
    let (before, after, out) = (g.state.to_f64(), state.to_f64(), out.to_f64());
    for slot in 0..2049 {
        let same = before[slot * 24..(slot + 1) * 24] == after[slot * 24..(slot + 1) * 24];
        assert_eq!(same, slot != 2048 && slot != 7, "slot {slot}");
    }
    assert!(
        out[6..12].iter().all(|v| v.is_nan())
            && out[..6].iter().chain(&out[12..]).all(|v| v.is_finite())
    );
}

#[test]
fn state_indices_that_are_out_of_range_or_shared_are_refused() {
    let mut problem = StepProblem::new(3, 2, 3, 1, 4);
    (problem.indices, problem.slots) = (true, 4);
    for (indices, words) in [
        (
            [0, 4, 1],
            "state_batch_indices: expected -1 or a slot below 4, got 4 in row 1",
        ),
        (
            [0, 1, -2],
            "state_batch_indices: expected -1 or a slot below 4, got -2 in row 2",
        ),
        (
            [3, 1, 3],
            "state_batch_indices: expected a slot of its own (row 0 has this one), got 3 in row 2",
        ),
    ] {
        let mut g = generate_step(&problem, 1, Pattern::Plain);
        g.state_batch_indices = Some(indices.to_vec());
        let (result, state, out) = try_step(&problem, &g);
        assert_eq!(result.unwrap_err().to_string(), words);
        assert!(state == g.state && out.to_f64().iter().all(|v| v.is_nan()));
    }
}
