#!/usr/bin/env bash
# Checks and measures on a GPU machine that has no Rust, from a folder made by benches/pack.sh.
#
#   gpu.sh OUT_DIR [PART[:REGEX]...]        parts in this order if none is named: a b c d e f
#
#   a  the reference cases, `mamba2 run --check`
#   b  ring 2: GPU tests of the libraries, of the options, and of every config (complete for bf16 at seven small shapes)
#   c  compute-sanitizer, memcheck and racecheck, over ring 2's small set
#   d  decode steps beside mamba_ssm's, cost of options, host cost, first call of a process
#   e  tuning of the shapes that are compared, then their times beside mamba_ssm's
#   f  tuning of the kept shape lists, as far as time allows
#   g  the seed and models sweeps beside mamba_ssm (only if named)
#   h  the reference cases again, each with every config: items h/every-CASE (only if named; up to a minute each, mostly compilation)
#
# REGEX picks items of a part by name: `b:bf16`. Time limits in seconds by environment variables: A_SECONDS .. H_SECONDS for a
# part, TOTAL_SECONDS for everything, E_BENCH_SECONDS kept back for the times at the end of e, C_ITEM_SECONDS for one test under
# the sanitizer, D_TUNE_SECONDS and E_TUNE_SECONDS for the tuning of one shape. B_SUBSET and C_SUBSET: configs of each kernel where not all are run. GPU_BACKEND=cpu tries the script itself.
# PEERS_DIR (default: peers/ beside this file) holds peers.py and mamba_ssm/. records/*.json beside this file are imported first.
#
# An item that fails or is cut off does not stop the next; the exit code is 1 then. OUT_DIR gets at most eight files:
#   summary.txt run.log ring2.log sanitize.log tune.log ours.jsonl peers.jsonl records.json
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: gpu.sh OUT_DIR [PART[:REGEX]...]}
shift
[ $# -gt 0 ] || set -- a b c d e f
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

export MAMBA2_REQUIRE_GPU=1 RUST_BACKTRACE=0 PYTHONUNBUFFERED=1
export MAMBA2_CACHE_DIR=${MAMBA2_CACHE_DIR:-/tmp/mamba2-cache}
backend=${GPU_BACKEND:-cuda}
mamba2=$here/bin/mamba2
peers=${PEERS_DIR:-$here/peers}
total_deadline=$((SECONDS + ${TOTAL_SECONDS:-570}))
# What one item may add to a log.
log_bytes=2000000

declare -A seconds=(
  [a]=${A_SECONDS:-120} [b]=${B_SECONDS:-560} [c]=${C_SECONDS:-300} [d]=${D_SECONDS:-240}
  [e]=${E_SECONDS:-560} [f]=${F_SECONDS:-560} [g]=${G_SECONDS:-400}
  [h]=${H_SECONDS:-560}
)
failed=0
filter=
deadline=0
item_seconds=0

row() { # NAME STATUS SECONDS DETAIL
  printf '%-50s %-9s %4s s  %s\n' "${1:0:50}" "$2" "$3" "$4" | tee -a "$out/summary.txt"
}

fault() { # NAME DETAIL
  row "$1" FAILED 0 "$2"
  failed=1
}

# True if the item is wanted. Says so if there is no time left for it.
wanted() { # NAME
  [[ $1 =~ $filter ]] || return 1
  [ $((deadline - SECONDS)) -gt 0 ] && return 0
  row "$1" "NOT RUN" 0 "out of time"
  failed=1
  return 1
}

# Runs a command with what is left of the part's time. $scratch/item keeps its output, $rc how it ended.
rc=0
item() { # NAME LOG COMMAND...
  local name=$1 log=$out/$2 left started=$SECONDS status=ok detail
  shift 2
  rc=125
  wanted "$name" || return 0
  left=$((deadline - SECONDS))
  if [ "$item_seconds" -gt 0 ] && [ "$item_seconds" -lt "$left" ]; then left=$item_seconds; fi
  timeout -k 10 "$left" "$@" >"$scratch/item" 2>&1
  rc=$?
  { echo "=== $name: $*"; head -c "$log_bytes" "$scratch/item"; echo; } >>"$log"
  detail=$(grep -oE '^test result: .*failed|^========= (ERROR|RACECHECK) SUMMARY.*' "$scratch/item" | tail -2 | tr '\n' ' ')
  [[ $name == a/* ]] && detail=$(grep -oE '^[a-z_]+ .*relative error [^ ]+' "$scratch/item" | tr -s ' ' | tr '\n' ' ')
  if [[ $name == h/* ]]; then
    detail="$(awk '/ configs .* failed /{for (i = 2; i < NF; ++i) {if ($i == "configs") c += $(i - 1); if ($i == "failed") f += $(i - 1)}}
      END {print c + 0, "configs,", f + 0, "failed"}' "$scratch/item") "
  fi
  case $rc in
  0)
    # The exit code alone would not tell a run that tested nothing.
    if grep -qE 'SKIPPED: no CUDA device|^running 0 tests' "$scratch/item"; then status="EMPTY" failed=1; fi
    ;;
  124 | 137) status="CUT OFF" failed=1 detail="after $left s $detail" ;;
  *)
    status="FAILED" failed=1
    detail="exit $rc $detail$(grep -m1 -E '^mamba2:|panicked at|[Nn]o such file|not found|Error|error' "$scratch/item" | cut -c1-160)"
    ;;
  esac
  row "$name" "$status" $((SECONDS - started)) "$detail"
}

# Runs `mamba2 bench` and keeps its JSON as one line.
bench() { # NAME ARGUMENTS...
  local name=$1
  shift
  rm -f "$scratch/bench.json"
  item "$name" run.log "$mamba2" bench --backend "$backend" --json "$scratch/bench.json" "$@"
  if [ -s "$scratch/bench.json" ]; then
    { printf '{"item":"%s","result":' "$name"; tr -d '\n' <"$scratch/bench.json"; echo '}'; } >>"$out/ours.jsonl"
    cat "$scratch/item"
  fi
}

# Runs another implementation on shapes "B,T,G,H,N,P,Q;...".
peer() { # NAME IMPL SHAPES
  local before after
  wanted "$1" || return 0
  if [ ! -f "$peers/peers.py" ]; then
    fault "$1" "no $peers/peers.py"
    return 0
  fi
  before=$(grep -c '"error"' "$out/peers.jsonl" 2>/dev/null)
  item "$1" run.log python3 "$peers/peers.py" --impl "$2" --path "$peers" --shapes "$3" --out "$out/peers.jsonl"
  after=$(grep -c '"error"' "$out/peers.jsonl" 2>/dev/null)
  if [ "${after:-0}" -gt "${before:-0}" ]; then
    fault "$1" "$(grep '"error"' "$out/peers.jsonl" | tail -1 | cut -c1-160)"
  fi
}

tune() { # NAME ARGUMENTS...
  local name=$1
  shift
  item "$name" tune.log "$mamba2" tune "$@"
  # A tuning that was cut off keeps what it measured; whatever is known is taken along.
  if [ "$rc" -ne 125 ]; then
    "$mamba2" db export -o "$scratch/records.json" >>"$out/tune.log" 2>&1 && cp "$scratch/records.json" "$out/records.json"
  fi
}

explain() { # SHAPE
  echo "=== explain $1" >>"$out/tune.log"
  "$mamba2" explain --shape "$1" >>"$out/tune.log" 2>&1
}

# Path of the one test executable of this name.
test_of() { # NAME
  local found
  found=$(compgen -G "$here/tests/$1*" | head -1)
  echo "${found:-$here/tests/$1}"
}

# Runs each test of an executable that matches a pattern as an item of its own, so that a cut-off keeps what was done.
each_test() { # PREFIX LOG REGEX COMMAND... EXECUTABLE
  local prefix=$1 log=$2 regex=$3 name names
  shift 3
  names=$("${@: -1}" --list 2>/dev/null | sed -n 's/: test$//p' | grep -E "$regex")
  if [ -z "$names" ]; then
    fault "$prefix" "no test matches $regex in ${*: -1}"
    return 0
  fi
  for name in $names; do
    item "$prefix${name#every_config_is_right_in_}" "$log" "$@" --exact "$name" --nocapture
  done
}

small='one_token_past|one_token_short|full_chunks|at_one_token|more_work|tail_of_63|two_slices'

each_case() { # PREFIX ARGUMENTS...
  local prefix=$1 file found=0
  shift
  for file in "$here"/cases/*.safetensors; do
    [ -f "$file" ] || continue
    found=1
    item "$prefix$(basename "$file" .safetensors)" run.log "$mamba2" run "$file" --check --backend "$backend" "$@"
  done
  [ "$found" -eq 1 ] || fault "${prefix%%/*}" "no cases/*.safetensors"
}

part_a() { each_case a/; }

part_h() { each_case h/every- --every-config; }

part_b() {
  local every
  every=$(test_of mamba2-tuner-gpu_every_config)
  item b/lib-cuda ring2.log "$(test_of mamba2-cuda-gpu)" --nocapture --test-threads=1
  item b/lib-mamba2 ring2.log "$(test_of mamba2-gpu)" --nocapture --test-threads=1
  # Side by side, because most of their time is compilation.
  item b/options ring2.log "$(test_of mamba2-tuner-gpu_options)" --nocapture --test-threads=8
  each_test b/complete- ring2.log "bf16.*($small)" "$every"
  item b/complete-decode ring2.log "$every" --nocapture every_decode_config
  export MAMBA2_RING2_SUBSET=${B_SUBSET:-6}
  item b/subset-bf16-segments ring2.log "$every" --nocapture --test-threads=4 bf16_with_segments
  item b/subset-f16 ring2.log "$every" --nocapture --test-threads=4 right_in_f16
  item b/subset-f32 ring2.log "$every" --nocapture --test-threads=4 right_in_f32
  unset MAMBA2_RING2_SUBSET
}

part_c() {
  local tool every options options_regex
  every=$(test_of mamba2-tuner-gpu_every_config)
  options=$(test_of mamba2-tuner-gpu_options)
  export MAMBA2_RING2_SUBSET=${C_SUBSET:-2}
  item_seconds=${C_ITEM_SECONDS:-90}
  for tool in memcheck racecheck; do
    # Hopper's barriers compiled so that the tool can follow them.
    if [ "$tool" = racecheck ]; then export MAMBA2_RACECHECK=1; fi
    each_test "c/$tool-" sanitize.log "bf16.*($small|segments_up_to_(1024|2048))|f(16|32)_one_token_past|decode" \
      compute-sanitizer --tool "$tool" --error-exitcode 9 "$every"
    options_regex='^(n8_|decode_|empty_)'
    # Reads past the end are memcheck's; under racecheck its hundred problems would take minutes.
    [ "$tool" = racecheck ] || options_regex='^(c7_|n8_|decode_|empty_)'
    each_test "c/$tool-" sanitize.log "$options_regex" \
      compute-sanitizer --tool "$tool" --error-exitcode 9 "$options"
  done
  item_seconds=0
  unset MAMBA2_RING2_SUBSET MAMBA2_RACECHECK
}

part_d() {
  local shape options='bias=1,softplus=1'
  item_seconds=${D_TUNE_SECONDS:-40}
  for shape in "b=1,h=80,p=64,g=1,n=128,$options" "b=64,h=80,p=64,g=1,n=128,$options" "b=256,h=128,p=64,g=8,n=128,$options"; do
    tune "d/tune-${shape%%,p*}" --shape "step:$shape"
  done
  item_seconds=0
  bench d/decode --sweep decode
  peer d/decode-mamba_ssm mamba_ssm-step "1,1,1,80,128,64,1;64,1,1,80,128,64,1;256,1,8,128,128,64,1"
  bench d/options --sweep options
  bench d/options-default --sweep options --mode default-only
  bench d/host-cost --host-cost --shape "${headline}" --shape b=4,l=1024,h=8,p=64,g=1,n=128 \
    --shape b=1,l=4096,h=80,p=64,g=1,n=128 --sweep decode
  bench d/first-call --first-call --shape "${headline}" --shape b=1,l=4096,h=80,p=64,g=1,n=128 \
    --step b=64,h=80,p=64,g=1,n=128
}

headline=b=4,l=16384,h=8,p=64,g=1,n=128
compared=(
  "$headline"
  "b=4,l=16384,h=8,p=64,g=1,n=64"
  "b=4,l=16384,h=8,p=64,g=1,n=256"
  "b=4,l=16384,h=8,p=64,g=1,n=512"
  "b=4,l=1024,h=8,p=64,g=1,n=128"
  "b=1,l=4096,h=80,p=64,g=1,n=128"
  "b=8,l=2048,h=80,p=64,g=1,n=128"
  "b=1,l=8192,h=128,p=64,g=8,n=128"
  "b=1,l=8192,h=128,p=80,g=8,n=128"
  "b=1,l=32768,h=128,p=64,g=1,n=128"
)
# The same for peers.py, with chunk 256 as well where mamba_ssm is known to be faster with it.
compared_peers="4,16384,1,8,128,64,128;4,1024,1,8,128,64,128;1,4096,1,80,128,64,128;8,2048,1,80,128,64,128"
compared_peers+=";1,8192,8,128,128,64,128;1,32768,1,128,128,64,128;1,8192,8,128,128,80,128"
compared_peers+=";4,16384,1,8,64,64,128;4,16384,1,8,256,64,128;4,16384,1,8,512,64,128"
compared_peers+=";1,4096,1,80,128,64,256;8,2048,1,80,128,64,256;1,32768,1,128,128,64,256"

part_e() {
  local shape whole=$deadline arguments=()
  # Only if the times are wanted is anything kept back for them.
  if [[ e/bench =~ $filter ]]; then deadline=$((whole - ${E_BENCH_SECONDS:-200})); fi
  item_seconds=${E_TUNE_SECONDS:-100}
  for shape in "${compared[@]}"; do
    tune "e/tune-$shape" --shape "$shape"
    arguments+=(--shape "$shape")
  done
  item_seconds=0
  deadline=$whole
  bench e/bench "${arguments[@]}"
  peer e/mamba_ssm mamba_ssm "${E_PEER_SHAPES:-$compared_peers}"
  for shape in "${compared[0]}" "${compared[4]}" "${compared[9]}"; do explain "$shape"; done
}

part_f() {
  tune f/sweep --shapes "$here/shapes/sweep.toml" --resume
  tune f/models --shapes "$here/shapes/models.toml" --resume
}

part_g() {
  local l n shapes=""
  bench g/seed --sweep seed
  bench g/models --sweep models
  for n in 128 64 256 512; do
    for l in 1024 4096 16384 65536 262144; do shapes+="4,$l,1,8,$n,64,128;"; done
  done
  peer g/seed-mamba_ssm mamba_ssm "${shapes%;}"
  peer g/models-mamba_ssm mamba_ssm \
    "1,2048,1,24,128,64,256;1,4096,1,80,128,64,256;8,2048,1,80,128,64,256;1,131072,1,80,128,64,128;1,2048,8,128,128,64,128;1,8192,8,128,128,64,128;1,8192,8,128,128,80,128;16,1024,8,128,128,64,128;1,32768,1,128,128,64,256"
}

{
  date -u +%FT%TZ
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu --format=csv
  uname -a
  "$mamba2" doctor
} >>"$out/run.log" 2>&1
for records in "$here"/records/*.json; do
  if [ -f "$records" ]; then "$mamba2" db import "$records" >>"$out/tune.log" 2>&1; fi
done

for part in "$@"; do
  letter=${part%%:*}
  filter=
  [ "$part" = "$letter" ] || filter=${part#*:}
  if [ -z "${seconds[$letter]:-}" ]; then
    fault "$part" "no such part"
    continue
  fi
  deadline=$((SECONDS + seconds[$letter]))
  [ $deadline -le $total_deadline ] || deadline=$total_deadline
  case $letter in
  a) part_a ;;
  b) part_b ;;
  c) part_c ;;
  d) part_d ;;
  e) part_e ;;
  f) part_f ;;
  g) part_g ;;
  h) part_h ;;
  esac
done
nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,clocks_event_reasons.active --format=csv >>"$out/run.log" 2>&1

if [ -s "$out/ours.jsonl" ]; then
  python3 "$here/compare.py" --ours "$out/ours.jsonl" --peers "$out/peers.jsonl" | tee -a "$out/summary.txt"
fi
echo "== $(grep -cE ' ok +[0-9]+ s ' "$out/summary.txt") ok; the others:"
grep -E ' (FAILED|CUT OFF|NOT RUN|EMPTY) +[0-9]+ s ' "$out/summary.txt" | head -40
exit $failed
