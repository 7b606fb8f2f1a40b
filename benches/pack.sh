#!/usr/bin/env bash
# Collects what benches/gpu.sh needs on a GPU machine that has no Rust: release binaries, GPU test executables, inputs.
#
#   benches/pack.sh DIR [CASES_DIR]      DIR is made anew; CASES_DIR holds *.safetensors for `mamba2 run --check`
set -euo pipefail
dir=${1:?usage: benches/pack.sh DIR [CASES_DIR]}
cases=${2:-}
cd "$(dirname "$0")/.."
rm -rf "$dir"
mkdir -p "$dir/bin" "$dir/tests" "$dir/cases"

cargo build --release -p mamba2-cli
cp "${CARGO_TARGET_DIR:-target}/release/mamba2" "$dir/bin/"
# The GPU tests are the integration tests whose names start with gpu; cargo prints where it put them.
cargo test --release --no-run -p mamba2-cuda -p mamba2 -p mamba2-tuner --test 'gpu*' 2>&1 | tee "$dir/build.log" >&2
sed -n 's/.*Executable tests.*(\(.*\))/\1/p' "$dir/build.log" | while read -r path; do cp "$path" "$dir/tests/"; done
rm "$dir/build.log"
cp benches/gpu.sh benches/compare.py "$dir/"
cp -r tuning-db/shapes "$dir/" 2>/dev/null || true
if [ -n "$cases" ]; then cp "$cases"/*.safetensors "$dir/cases/"; fi
strip --strip-debug "$dir"/bin/* "$dir"/tests/* 2>/dev/null || true
du -sh "$dir"
