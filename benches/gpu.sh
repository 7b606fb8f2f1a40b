#!/usr/bin/env bash
# Ring 2, the benchmarks and the sanitizers on a GPU machine, from a folder made by benches/pack.sh. No Rust needed there.
#
#   gpu.sh OUT_DIR [STAGE...]     stages: info cases ring2 sanitize tune bench peers table   (default: all of them, in this order)
#
# peers needs PEERS_SCRIPT (a script that times other implementations and appends JSON lines with --out) and PEERS_PATH.
# The last lines are a short table; everything else is under OUT_DIR.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: gpu.sh OUT_DIR [STAGE...]}
shift
stages=${*:-info cases ring2 sanitize tune bench peers table}
mkdir -p "$out"
export MAMBA2_REQUIRE_GPU=1 RUST_BACKTRACE=0 MAMBA2_CACHE_DIR=${MAMBA2_CACHE_DIR:-/tmp/mamba2-cache}
mamba2=$here/bin/mamba2
summary=$out/summary.txt
: >>"$summary"
note() { echo "$*" | tee -a "$summary"; }

# Runs a test executable and notes how it ended.
run_test() {
  local name=$1
  shift
  local log=$out/$name.log
  local start=$SECONDS
  "$@" >"$log" 2>&1
  local rc=$?
  note "$name: exit $rc, $((SECONDS - start)) s, $(grep -E '^test result' "$log" | tail -1)"
  [ $rc -eq 0 ] || grep -E "panicked|faults|failed|FAILED|error" "$log" | head -10
}

for stage in $stages; do
  case $stage in
  info)
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit --format=csv | tee "$out/gpu.csv"
    date -u +%FT%TZ | tee "$out/date.txt"
    "$mamba2" doctor >"$out/doctor.txt" 2>&1
    ;;
  cases)
    for f in "$here"/cases/*.safetensors; do
      "$mamba2" run "$f" --check --backend cuda -o "$out/out.safetensors" >"$out/case.txt" 2>&1
      rc=$?
      note "case $(basename "$f" .safetensors): exit $rc $(tr '\n' ' ' <"$out/case.txt" | cut -c1-180)"
    done
    rm -f "$out/out.safetensors"
    ;;
  ring2)
    for t in "$here"/tests/*; do run_test "ring2-$(basename "$t")" "$t" --nocapture --test-threads=1; done
    ;;
  sanitize)
    for tool in memcheck racecheck; do
      for t in "$here"/tests/gpu_every_config* "$here"/tests/gpu_options*; do
        MAMBA2_RING2_SUBSET=${SANITIZE_SUBSET:-2} run_test "$tool-$(basename "$t")" timeout "${SANITIZE_SECONDS:-150}" \
          compute-sanitizer --tool $tool --error-exitcode 9 "$t" --nocapture --test-threads=1 ${SANITIZE_FILTER:-}
      done
    done
    ;;
  tune)
    for shape in ${TUNE_SHAPES:-b=4,l=16384,h=8,p=64,g=1,n=128}; do
      start=$SECONDS
      "$mamba2" tune --shape "$shape" >"$out/tune-$shape.log" 2>&1
      rc=$?
      note "tune $shape: exit $rc in $((SECONDS - start)) s"
      "$mamba2" explain --shape "$shape" >"$out/explain-$shape.txt" 2>&1
      grep -iE "tier|config" "$out/explain-$shape.txt" | head -4
    done
    ;;
  bench)
    "$mamba2" bench --sweep seed --json "$out/ours-seed.json" >"$out/bench-seed.txt" 2>&1
    note "bench seed: exit $?"
    "$mamba2" bench --sweep models --json "$out/ours-models.json" >"$out/bench-models.txt" 2>&1
    note "bench models: exit $?"
    cat "$out/bench-seed.txt" "$out/bench-models.txt"
    ;;
  peers)
    [ -n "${PEERS_SCRIPT:-}" ] && python3 "$PEERS_SCRIPT" --impl "${PEERS_IMPL:-mamba_ssm}" --path "$PEERS_PATH" \
      --shapes "$PEERS_SHAPES" --out "$out/peers.jsonl" >"$out/peers.log" 2>&1
    ;;
  table)
    python3 "$here/compare.py" --ours "$out"/ours-*.json --peers "$out/peers.jsonl" --out "$out" || true
    ;;
  *) note "unknown stage $stage" ;;
  esac
done
echo "== summary"
cat "$summary"
