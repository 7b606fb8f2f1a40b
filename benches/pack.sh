#!/usr/bin/env bash
# Collects what benches/gpu.sh needs on a GPU machine that has no Rust: release binaries, GPU test executables, inputs.
#
#   benches/pack.sh DIR [CASES_DIR [PEERS_DIR]]
#
# DIR is made anew. CASES_DIR holds *.safetensors for `mamba2 run --check`; PEERS_DIR holds peers.py and mamba_ssm/, which
# are compared with. tuning-db's records are in the binary; others to start from go into DIR/records by hand.
set -euo pipefail
dir=${1:?usage: benches/pack.sh DIR [CASES_DIR [PEERS_DIR]]}
cases=${2:-}
peers=${3:-}
mkdir -p "$(dirname "$dir")"
dir=$(cd "$(dirname "$dir")" && pwd)/$(basename "$dir")
[ -z "$cases" ] || cases=$(cd "$cases" && pwd)
[ -z "$peers" ] || peers=$(cd "$peers" && pwd)
cd "$(dirname "$0")/.."
rm -rf "$dir"
mkdir -p "$dir/bin" "$dir/tests" "$dir/cases" "$dir/shapes"

cargo build --release -p mamba2-cli
cp "${CARGO_TARGET_DIR:-target}/release/mamba2" "$dir/bin/"
# The GPU tests are the integration tests whose names start with gpu. Two packages have one of the same name.
for package in mamba2-cuda mamba2 mamba2-tuner; do
  cargo test --release --no-run -p "$package" --test 'gpu*' 2>&1 | tee "$dir/build.log" >&2
  sed -n 's/.*Executable tests\/\(.*\)\.rs (\(.*\))/\1 \2/p' "$dir/build.log" | while read -r name path; do
    cp "$path" "$dir/tests/$package-$name"
  done
done
rm "$dir/build.log"
cp benches/gpu.sh benches/compare.py "$dir/"
cp tuning-db/shapes/*.toml "$dir/shapes/"
if [ -n "$cases" ]; then cp "$cases"/*.safetensors "$dir/cases/"; fi
if [ -n "$peers" ]; then cp -r "$peers" "$dir/peers"; fi
strip --strip-debug "$dir"/bin/* "$dir"/tests/*
du -sh "$dir"
