//! Development tasks. `cargo xtask test` is all a newcomer and CI need.
//!
//! * [`steps`]: what the commands run, in order;
//! * [`wheels`]: finds NVRTC and a C++ compiler, or fetches them;
//! * [`covering`]: small sets of rows in which every pair of values of two factors occurs;
//! * [`gate`]: compiles every kernel for every architecture and refuses spills, too much shared memory, and legality rules on
//!   which Rust and CUDA differ;
//! * [`carry_over`]: shipped records through an edit of templates that leaves their kernels as they were;
//! * [`golden`]: rendered headers as files, so that a change of a constant is seen in review.
#![forbid(unsafe_code)]

pub mod carry_over;
pub mod covering;
pub mod gate;
pub mod golden;
pub mod steps;
pub mod wheels;

/// The examples of the README, compiled and run as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct ReadmeExamples;
