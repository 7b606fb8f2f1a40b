//! Every binary is this file; its name says which target it feeds.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // Accepted or refused: both are fine.
    let _ = mamba2_fuzz::run(env!("CARGO_BIN_NAME"), bytes);
});
