//! The lists of shapes that are shipped: they can be read, hold what they promise, and the held-out ones are near and untuned.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use std::path::PathBuf;

use mamba2_spec::{Arch, DeviceFacts};
use mamba2_tunedb::{NEAREST_BOUND, TuneKey};
use mamba2_tuner::{Target, shapes};

fn list(name: &str) -> Vec<Target> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tuning-db/shapes");
    let text = std::fs::read_to_string(path.join(name)).unwrap();
    shapes::parse(&text).unwrap()
}

fn key(target: &Target) -> TuneKey {
    let device = DeviceFacts::assumed(Arch(90));
    match target {
        Target::Forward(p) => TuneKey::forward(p, &device),
        Target::Step(p) => TuneKey::step(p, &device),
    }
}

#[test]
fn the_models_are_listed_with_their_tensor_parallel_splits() {
    let listed: Vec<String> = list("models.toml")
        .iter()
        .map(ToString::to_string)
        .collect();
    // nheads, headdim, ngroups, dstate of one rank.
    let models = [
        ("Mamba-2 130M", (24, 64, 1, 128)),
        ("Mamba-2 370M", (32, 64, 1, 128)),
        ("Mamba-2 780M", (48, 64, 1, 128)),
        ("Mamba-2 1.3B", (64, 64, 1, 128)),
        ("Mamba-2 2.7B", (80, 64, 1, 128)),
        ("Codestral Mamba 7B, Nemotron-H 8B", (128, 64, 8, 128)),
        ("Nemotron-H 47B and 56B", (256, 64, 8, 256)),
        ("Nemotron Nano v2, headdim 80", (128, 80, 8, 128)),
        ("Granite 4.0 H Small, Bamba 9B", (128, 64, 1, 128)),
    ];
    for (name, (h, p, g, n)) in models {
        for tp in [1, 2, 4, 8usize] {
            let sizes = format!("h={},p={p},g={},n={n}", h / tp, usize::max(g / tp, 1));
            for prefix in ["b=1,l=2048,", "step:b=1,t=1,"] {
                let wanted = format!("{prefix}{sizes}");
                assert!(
                    listed.iter().any(|s| s.starts_with(&wanted)),
                    "{name}, {tp} ranks: {wanted} is missing"
                );
            }
        }
    }
}

#[test]
fn the_sweep_of_the_headline_benchmark_is_listed() {
    let listed: Vec<String> = list("sweep.toml").iter().map(ToString::to_string).collect();
    assert_eq!(listed.len(), 20);
    for l in [1024, 4096, 16384, 65536, 262_144] {
        for n in [64, 128, 256, 512] {
            let wanted = format!("b=4,l={l},h=8,p=64,g=1,n={n}");
            assert!(listed.iter().any(|s| s.starts_with(&wanted)), "{wanted}");
        }
    }
}

#[test]
fn every_held_out_shape_is_within_the_bound_of_a_listed_one_and_is_not_listed_itself() {
    let mut listed: Vec<TuneKey> = Vec::new();
    for name in ["models.toml", "sweep.toml", "bench.toml"] {
        listed.extend(list(name).iter().map(key));
    }
    let mut farthest = 0f64;
    for target in list("held-out.toml") {
        let distances = listed.iter().filter_map(|k| key(&target).distance(k));
        let nearest = distances.fold(f64::INFINITY, f64::min);
        assert!(
            nearest > 0.0 && nearest <= NEAREST_BOUND,
            "{target}: {nearest} from the nearest listed shape"
        );
        farthest = farthest.max(nearest);
    }
    assert_eq!(farthest, NEAREST_BOUND, "the worst case is held out too");
}
