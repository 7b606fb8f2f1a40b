//! The parameters of the kernels: the structs of `kernel-templates/common/args.cuh` and of the tools' templates, field by field. A test
//! compares names and offsets with those files.

use mamba2_spec::launch::{Divisor, LaunchPlan};
use mamba2_spec::{HasMeta, Problem, StepProblem};

use crate::tensor::DeviceTensor;
use crate::{CudaError, Device};

macro_rules! argument_struct {
    ($(#[doc = $doc:literal])+ $name:ident { $($field:ident: $ty:ty,)+ }) => {
        $(#[doc = $doc])+
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        #[allow(non_snake_case)] // A, B, C and D are the names of the header
        pub(crate) struct $name { $(pub $field: $ty,)+ }

        #[cfg(test)]
        impl $name {
            const FIELDS: &'static [(&'static str, usize)] =
                &[$((stringify!($field), std::mem::offset_of!($name, $field))),+];
        }
    };
}

argument_struct! {
    /// Element strides of `[batch, seqlen, heads or groups, innermost]`; the innermost axis is contiguous.
    Strides {
        batch: i64,
        token: i64,
        head: i64,
    }
}

argument_struct! {
    /// Parameter of the kernels of a forward pass.
    ForwardArgs {
        dt: u64,
        A: u64,
        dt_bias: u64,
        cu_seqlens: u64,
        dt_strides: Strides,
        segment: i32,
        seqlen: i32,
        nheads: i32,
        heads_per_group: i32,
        sequences: i32,
        chunk_slots: i32,
        scanned: i32,
        chunks_per_row: Divisor,
        ngroups: Divisor,
        blocks_per_group: Divisor,
        dt_min: f32,
        dt_max: f32,
        work_items: i64,
        x: u64,
        B: u64,
        C: u64,
        D: u64,
        z: u64,
        initial_states: u64,
        out: u64,
        final_states: u64,
        dt_out: u64,
        da_cumsum: u64,
        state_weight: u64,
        states: u64,
        flags: u64,
        call: u64,
        x_strides: Strides,
        b_strides: Strides,
        c_strides: Strides,
        z_strides: Strides,
        out_strides: Strides,
        initial_strides: [i64; 3],
        final_strides: [i64; 3],
        d_head_stride: i64,
    }
}

argument_struct! {
    /// Strides of a row's batch and head axes.
    RowStrides {
        batch: i64,
        head: i64,
    }
}

argument_struct! {
    /// Parameter of `state_update`.
    StepArgs {
        state: u64,
        state_strides: [i64; 3],
        state_batch_indices: u64,
        slots: i32,
        aligned: i32,
        dt: u64,
        A: u64,
        dt_bias: u64,
        dt_row_stride: i64,
        x: u64,
        B: u64,
        C: u64,
        D: u64,
        z: u64,
        out: u64,
        x_strides: RowStrides,
        b_strides: RowStrides,
        c_strides: RowStrides,
        z_strides: RowStrides,
        out_strides: RowStrides,
        d_head_stride: i64,
        heads_per_group: Divisor,
        batch: i32,
        tokens: i32,
        dt_token_stride: i64,
        x_token_stride: i64,
        b_token_stride: i64,
        c_token_stride: i64,
        z_token_stride: i64,
        out_token_stride: i64,
        dt_min: f32,
        dt_max: f32,
    }
}

argument_struct! {
    /// Parameter of `tool_copy`.
    CopyArgs {
        from: u64,
        to: u64,
        vectors: i64,
    }
}

argument_struct! {
    /// Parameter of `tool_compare`.
    CompareArgs {
        first: u64,
        second: u64,
        image: u64,
        standard: u64,
        skipped: u64,
        found: u64,
        units: i64,
        lead: i64,
        shape: [i64; 4],
        strides: [i64; 4],
    }
}

const _: () = assert!(size_of::<ForwardArgs>() == 18 * 8 + 18 * 8 + 6 * 8 + 2 * 8 + 18 * 4);
const _: () = assert!(size_of::<StepArgs>() == 240 + 6 * 8 + 2 * 4);
// What a step of one token reads.
const _: () = assert!(std::mem::offset_of!(StepArgs, dt_token_stride) == 240);

/// Kernels count tokens in 32 bits, to the end of the last chunk or of the last block's share.
const PAST_THE_END: usize = 512;

impl ForwardArgs {
    /// The fields that do not change from call to call.
    pub fn of(problem: &Problem, plan: &LaunchPlan) -> Result<ForwardArgs, CudaError> {
        Ok(ForwardArgs {
            segment: narrow("tokens of a segment", plan.segment)?,
            seqlen: seqlen(problem)?,
            nheads: narrow("nheads", problem.nheads)?,
            heads_per_group: narrow("heads of a group", problem.heads_per_group())?,
            sequences: narrow("sequences", problem.sequences())?,
            chunk_slots: narrow("chunks of all sequences", plan.slots)?,
            chunks_per_row: divisor("chunks of a row", plan.slots_per_row)?,
            ngroups: divisor("groups", problem.ngroups)?,
            scanned: plan.scanned().into(),
            dt_min: problem.dt_limit.min,
            dt_max: problem.dt_limit.max,
            work_items: most_work_items(plan)?,
            ..ForwardArgs::default()
        })
    }
}

fn seqlen(problem: &Problem) -> Result<i32, CudaError> {
    let got = problem.seqlen;
    match narrow("seqlen", got.saturating_add(PAST_THE_END)) {
        Ok(_) => narrow("seqlen", got),
        Err(_) => Err(CudaError::TooLarge {
            name: "seqlen",
            got,
        }),
    }
}

fn divisor(name: &'static str, value: usize) -> Result<Divisor, CudaError> {
    narrow(name, value).map(|v| Divisor::new(v as u32))
}

/// Work items of the largest kernel; kernels count them in 32 bits, because 64-bit divisions would be a fair part of a short one.
fn most_work_items(plan: &LaunchPlan) -> Result<i64, CudaError> {
    let most = plan.launches.iter().map(|l| l.work_items).max();
    narrow("work items", most.unwrap_or_default() as usize).map(i64::from)
}

impl StepArgs {
    /// The fields that do not change from call to call.
    pub fn of(problem: &StepProblem) -> Result<StepArgs, CudaError> {
        Ok(StepArgs {
            batch: narrow("batch", problem.batch)?,
            tokens: narrow("tokens", problem.tokens)?,
            slots: narrow("slots", problem.slots)?,
            heads_per_group: divisor("heads of a group", problem.heads_per_group())?,
            dt_min: problem.dt_limit.min,
            dt_max: problem.dt_limit.max,
            ..StepArgs::default()
        })
    }
}

fn narrow(name: &'static str, got: usize) -> Result<i32, CudaError> {
    i32::try_from(got).map_err(|_| CudaError::TooLarge { name, got })
}

/// Reads addresses and strides of one call's tensors, all on one device.
pub(crate) struct Reader<'a> {
    pub device: &'a Device,
}

impl Reader<'_> {
    pub fn address(&self, name: &'static str, tensor: &DeviceTensor) -> Result<u64, CudaError> {
        tensor.check(name, self.device)
    }

    /// Address, 0 if absent.
    pub fn optional(
        &self,
        name: &'static str,
        tensor: Option<&DeviceTensor>,
    ) -> Result<u64, CudaError> {
        tensor.map_or(Ok(0), |t| self.address(name, t))
    }
}

/// The outer strides of a token tensor, zero if absent.
pub(crate) fn token_strides(tensor: Option<&DeviceTensor>) -> Strides {
    let [batch, token, head] = outer_strides(tensor);
    Strides { batch, token, head }
}

/// The strides of a token tensor's rows, and that of its tokens; zero if absent.
pub(crate) fn row_strides(tensor: Option<&DeviceTensor>) -> (RowStrides, i64) {
    let [batch, token, head] = outer_strides(tensor);
    (RowStrides { batch, head }, token)
}

/// The first three strides, zero if absent.
pub(crate) fn outer_strides(tensor: Option<&DeviceTensor>) -> [i64; 3] {
    match tensor.map(|t| t.meta().strides()) {
        Some([a, b, c, ..]) => [*a as i64, *b as i64, *c as i64],
        _ => [0; 3],
    }
}

/// Stride of the first axis, zero if absent.
pub(crate) fn first_stride(tensor: Option<&DeviceTensor>) -> i64 {
    tensor
        .and_then(|t| t.meta().strides().first())
        .map_or(0, |s| *s as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(name, offset)` of every field of a struct of the templates, laid out by C's rules for these types.
    fn fields_of_template(name: &str) -> Vec<(String, usize)> {
        let arch = mamba2_spec::Arch(80);
        let tools = mamba2_kernels::Tool::ALL.map(|tool| tool.render(arch).source);
        let text = mamba2_kernels::HEADERS
            .iter()
            .map(|h| h.1)
            .chain(tools)
            .find(|text| text.contains(&format!("struct {name} {{")))
            .expect("a template should have the struct");
        let body = text
            .split(&format!("struct {name} {{"))
            .nth(1)
            .expect("struct")
            .split("};")
            .next()
            .expect("end");
        let mut at = 0usize;
        let mut fields = Vec::new();
        for line in body
            .lines()
            .filter_map(|l| l.split("//").next())
            .map(str::trim)
            .filter(|l| !l.is_empty())
        {
            let Some(declaration) = line.strip_suffix(';') else {
                assert!(line.contains('('), "one field a line: {line}");
                continue; // a function
            };
            let (ty, field) = declaration.rsplit_once(' ').expect("type and name");
            let (field, count) = match field.split_once('[') {
                Some((field, n)) => (field, n.trim_end_matches(']').parse().expect("extent")),
                None => (field, 1),
            };
            let (size, align) = match ty {
                pointer if pointer.ends_with('*') => (8, 8),
                "int64" | "unsigned long long" => (8, 8),
                "Strides" => (24, 8),
                "RowStrides" => (16, 8),
                "Divisor" => (12, 4),
                "int" | "unsigned" | "float" => (4, 4),
                other => panic!("unknown type {other}"),
            };
            at = at.next_multiple_of(align);
            fields.push((field.to_string(), at));
            at += size * count;
        }
        fields
    }

    #[test]
    fn argument_structs_have_the_fields_of_the_templates_at_the_same_offsets() {
        let divisor = [
            ("value", std::mem::offset_of!(Divisor, value)),
            ("multiplier", std::mem::offset_of!(Divisor, multiplier)),
            ("shift", std::mem::offset_of!(Divisor, shift)),
        ];
        for (name, fields) in [
            ("Strides", Strides::FIELDS),
            ("Divisor", &divisor),
            ("ForwardArgs", ForwardArgs::FIELDS),
            ("RowStrides", RowStrides::FIELDS),
            ("StepArgs", StepArgs::FIELDS),
            ("CopyArgs", CopyArgs::FIELDS),
            ("CompareArgs", CompareArgs::FIELDS),
        ] {
            let ours: Vec<(String, usize)> =
                fields.iter().map(|(n, o)| (n.to_string(), *o)).collect();
            assert_eq!(ours, fields_of_template(name), "{name}");
        }
    }

    #[test]
    fn counts_beyond_32_bits_are_refused_by_name() {
        let mut problem = Problem::new(1 << 30, 1 << 20, 1, 1, 1, 1);
        let device = mamba2_spec::DeviceFacts::assumed(mamba2_spec::Arch(80));
        let mut config = mamba2_spec::ThreeKernelConfig::default();
        config.compute_out.chunk_size = 64;
        let config = mamba2_spec::StrategyConfig::ThreeKernel(config);
        let planned = |problem: &Problem| mamba2_spec::launch::plan(&config, problem, &device);
        let error = ForwardArgs::of(&problem, &planned(&problem)).expect_err("too many chunks");
        assert!(
            matches!(
                error,
                CudaError::TooLarge {
                    name: "chunks of all sequences",
                    ..
                }
            ),
            "{error}"
        );
        problem.batch = 1;
        assert_eq!(
            ForwardArgs::of(&problem, &planned(&problem))
                .expect("fits")
                .chunks_per_row
                .value,
            1 << 14
        );
    }
}
