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
if [ -n "$peers" ]; then
  peers=$(cd "$peers" && pwd)
  [ -f "$peers/peers.py" ] || { echo "pack.sh: no $peers/peers.py" >&2; exit 2; }
fi
cd "$(dirname "$0")/.."
rm -rf "$dir"
mkdir -p "$dir/bin" "$dir/tests" "$dir/cases" "$dir/shapes"

cargo build --release -p mamba2-cli
cp "${CARGO_TARGET_DIR:-target}/release/mamba2" "$dir/bin/"
# The GPU tests are the integration tests whose names start with gpu; two packages have one of the same name. One build for all,
# so that what they share is built once; cargo tells in JSON where it put which.
cargo test --release --no-run -p mamba2-cuda -p mamba2 -p mamba2-tuner --test 'gpu*' --message-format=json >"$dir/build.json"
tests='s|.*"package_id":"[^"]*/crates/\([^"#]*\)#.*"kind":\["test"\],.*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*|\1 \2 \3|p'
sed -n "$tests" "$dir/build.json" | while read -r package name path; do
  cp "$path" "$dir/tests/$package-$name"
done
rm "$dir/build.json"
cp benches/gpu.sh benches/compare.py "$dir/"
cp tuning-db/shapes/*.toml "$dir/shapes/"
if [ -n "$cases" ]; then cp "$cases"/*.safetensors "$dir/cases/"; fi
if [ -n "$peers" ]; then cp -r "$peers" "$dir/peers"; fi
strip --strip-debug "$dir"/bin/* "$dir"/tests/*
du -sh "$dir"
