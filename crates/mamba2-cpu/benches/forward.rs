//! Times of the forward pass and the decode step: dtypes, chunk sizes, shapes.

mod common;

use common::{Forward, Step};
use divan::Bencher;
use mamba2_spec::{ChunkSize, Problem, StepProblem};

fn main() {
    divan::main();
}

fn problem(text: &str) -> Problem {
    text.parse().expect("shape should parse")
}

#[divan::bench(args = ["f32", "bf16", "f16"], sample_count = 10)]
fn forward_by_dtype(bencher: Bencher, dtype: &str) {
    let mut call = Forward::new(problem(&format!(
        "b=1,l=4096,h=24,p=64,g=1,n=128,dtype={dtype}"
    )));
    bencher.bench_local(|| call.run());
}

#[divan::bench(args = [16, 32, 64, 128, 256], sample_count = 10)]
fn forward_by_chunk_size(bencher: Bencher, chunk_size: u32) {
    let mut problem = problem("b=1,l=4096,h=24,p=64,g=1,n=128,dtype=f32");
    problem.chunk_size = ChunkSize::Fixed(chunk_size);
    let mut call = Forward::new(problem);
    bencher.bench_local(|| call.run());
}

#[divan::bench(args = ["b=1,l=4096,h=24,p=64,g=8,n=64", "b=16,l=256,h=8,p=80,g=8,n=128", "b=2,l=1024,h=8,p=256,g=1,n=16"], sample_count = 10)]
fn forward_by_shape(bencher: Bencher, shape: &str) {
    let mut call = Forward::new(problem(shape));
    bencher.bench_local(|| call.run());
}

#[divan::bench(args = ["b=1,h=80,p=64,g=1,n=128", "b=16,h=80,p=64,g=1,n=128"], sample_count = 20)]
fn decode(bencher: Bencher, shape: &str) {
    let problem: StepProblem = shape.parse().expect("shape should parse");
    let mut call = Step::new(problem);
    bencher.bench_local(|| call.run());
}
