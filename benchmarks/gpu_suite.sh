#!/usr/bin/env bash
# Verifies and times dreamcomm's GPU half on a machine with one GPU, within 8 minutes.
#
#   benchmarks/gpu_suite.sh OUT
#
# From a bare checkout, without a network: needs Python 3.11 or newer with torch (a CUDA
# build) and pytest, nvcc, cmake 3.26 and ninja. Writes table.md (every figure beside its
# goal) and results.json to the folder OUT, and beside them what each part left: facts.json
# (what the machine is like), NAME.log of each part, NAME.jsonl of those that time, and
# registers.txt (of the kernels). Goes on after a part that fails; ends with 1 then.
#
# PYTHON: the interpreter. DREAMCOMM_GPU_BUILD: the build's folder, else build/gpu.
# DREAMCOMM_GPU_ARCHITECTURES: else that of the machine's GPU.
# DREAMCOMM_GPU_SECONDS: for all parts, else 480.
set -uo pipefail
if [[ $# -ne 1 ]]; then
  sed -n '2,15p' "$0"
  exit 2
fi
fail() {
  echo "gpu_suite.sh: $*" >&2
  exit 2
}

PYTHON=$(command -v "${PYTHON:-python3}") || fail "there is no Python: set PYTHON"
[[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
out=$(realpath -m "$1")
cd "$(dirname "$0")/.." || exit 2
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "needs Python 3.11 or newer"
"$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
  fail "$PYTHON has no torch: set PYTHON to one that has"
PATH=$(dirname "$PYTHON"):$PATH # its environment's cmake and ninja first
command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || fail "there is no nvcc on PATH or in /usr/local/cuda/bin"
for tool in cmake ninja; do
  command -v $tool >/dev/null || fail "there is no $tool on PATH or beside $PYTHON"
done

mkdir -p "$out" || fail "cannot write to $out"
build=$(realpath -m "${DREAMCOMM_GPU_BUILD:-build/gpu}")
site=$build-module/site
programs=$build/tests/cpp
architectures=${DREAMCOMM_GPU_ARCHITECTURES:-native}
label="one GPU: all ranks share its memory; nothing here is the bandwidth of a link"
# The deadline of all parts; the table needs no time to speak of.
deadline=$((SECONDS + ${DREAMCOMM_GPU_SECONDS:-480} - 15))
failed=0

# Nothing from the folder that a program is started in, above all not the package's source
# without what was compiled; also in the ranks.
export PYTHONSAFEPATH=1 PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1
# Kernels of several streams wait for each other: each stream needs a queue of its own.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export PYTHON out build site programs architectures

# What became of a part, for people and for the table.
note() {
  local name=$1 outcome=$2 seconds=$3 why=${4//[\"\\]/}
  why=${why//[^[:print:]]/ }
  echo "$name: $outcome${why:+: $why}, $seconds s"
  printf '{"label": "%s", "part": "%s", "outcome": "%s", "seconds": %d, "why": "%s"}\n' \
    "$label" "$name" "$outcome" "$seconds" "$why" >>"$out/parts.jsonl"
}

# part NAME SECONDS FILE: runs the function NAME with a deadline, output to NAME.log; not if
# FILE, which the build should have left, is missing. A function that returns 77 was not able
# to run, as its last line says.
part() {
  local name=$1 limit=$2 needs=$3 begin=$SECONDS left=$((deadline - SECONDS)) status=0 why
  if [[ ! -e $needs ]]; then
    note "$name" "not run" 0 "the build did not leave ${needs##*/}"
    failed=1
    return
  elif ((left < 5)); then
    note "$name" "not run" 0 "no time left"
    failed=1
    return
  fi
  ((limit <= left)) || limit=$left
  timeout -k 10 "$limit" bash -c "$name" >"$out/$name.log" 2>&1 </dev/null || status=$?
  why=$(grep -v '^[[:space:]]*$' "$out/$name.log" | tail -n 1 | cut -c 1-200)
  case $status in
    0) note "$name" ok $((SECONDS - begin)) "" ;;
    77) note "$name" "not run" $((SECONDS - begin)) "$why" ;;
    124 | 137) note "$name" failed $((SECONDS - begin)) "not done within $limit s" && failed=1 ;;
    *) note "$name" failed $((SECONDS - begin)) "status $status: $why" && failed=1 ;;
  esac
}

# A program of benchmarks/gpu, which finds those beside it.
benchmark() {
  PYTHONPATH=$PYTHONPATH:$PWD/benchmarks/gpu "$PYTHON" "benchmarks/gpu/$1.py" "${@:2}"
}

facts() { benchmark facts "$out/facts.json"; }

# The programs, and the module without pip, which a machine without a network may not serve:
# a package beside the build, of links to the sources and to what was compiled.
compile_programs() {
  cmake -S . -B "$build" -G Ninja -DDREAMCOMM_BUILD_TESTS=ON -DDREAMCOMM_BUILD_GPU_TESTS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="$architectures" &&
    cmake --build "$build" --target dreamcomm_gpu_tests dreamcomm_gpu_processes \
      dreamcomm_gpu_rows &&
    cat "$build"/CMakeFiles/dc_gpu.dir/csrc/gpu/*/*.ptxas.txt >"$out/registers.txt"
}
compile_module() {
  local version info
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  info=$site/dreamcomm-$version.dist-info
  cmake -S . -B "$build-module" -G Ninja -DPython_EXECUTABLE="$PYTHON" \
    -DDREAMCOMM_BUILD_CUDA=on -DCMAKE_CUDA_ARCHITECTURES="$architectures" &&
    cmake --build "$build-module" &&
    mkdir -p "$site/dreamcomm" "$info" &&
    ln -sfn "$PWD"/dreamcomm/* "$build-module"/_C*.so "$build-module/_build_info.py" \
      "$site/dreamcomm/" &&
    printf 'Metadata-Version: 2.1\nName: dreamcomm\nVersion: %s\n' "$version" >"$info/METADATA" &&
    printf '[torch.backends]\ndreamcomm = dreamcomm.backend:autoload\n' >"$info/entry_points.txt" &&
    touch "$site/built"
}
build() {
  rm -f "$programs"/dreamcomm_gpu_* "$build/dreamcomm_gpu_rows" "$site/built"
  compile_programs &
  local programs_too=$!
  compile_module >"$out/module.log" 2>&1 || { tail -n 20 "$out/module.log" && false; }
  local status=$?
  wait $programs_too && return $status
}

# For the function of a part: ends the log with what can be said in a line.
run_doctest() {
  "$@" && return
  local status=$?
  grep -o 'test cases:.*' "$out/${FUNCNAME[1]}.log" | tail -n 1
  return $status
}
processes() { run_doctest "$programs/dreamcomm_gpu_processes"; }
kernels() { run_doctest "$programs/dreamcomm_gpu_tests"; }
# For the function of a part: tests that are skipped have verified nothing.
run_pytest() {
  "$PYTHON" -m pytest -q --tb=short -p no:cacheprovider "$@" || return
  ! grep -q '[0-9] skipped' "$out/${FUNCNAME[1]}.log" || {
    echo "tests were skipped, as where torch sees no GPU: ${FUNCNAME[1]}.log says which"
    return 77
  }
}
ops() { run_pytest tests/buckets/test_ops_cuda.py; }
backend() { run_pytest tests/gpu/test_cuda.py -k "not hosts and not nccl"; }
hosts() { run_pytest tests/gpu/test_cuda.py -k "hosts or nccl"; }

rows() { "$build/dreamcomm_gpu_rows" rows 256 >"$out/rows.jsonl"; }
small() { "$build/dreamcomm_gpu_rows" small >"$out/small.jsonl"; }
bucket() { benchmark bucket "$out/bucket.jsonl"; }
collectives() { benchmark collectives "$out/collectives.jsonl" 40; }
versus_nccl() {
  local devices
  devices=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  if ((devices < 2)); then
    echo "this machine has $devices GPUs, and NCCL takes one for each rank"
    return 77
  fi
  "$PYTHON" -c 'import typer, rich, matplotlib' || {
    echo "dreamcomm bench needs typer, rich and matplotlib"
    return 77
  }
  "$PYTHON" -c 'from dreamcomm.tools.cli import app; app()' bench --versus nccl --quick \
    --world "$devices" --json "$out/versus_nccl.json"
}

# Kernels that are launched on several streams and wait for each other may never meet under the
# sanitizer, so memcheck has them in one launch. Only the bucket's kernels share memory, which
# is all that racecheck looks at.
sanitizer() {
  PATH=$PATH:$(dirname "$(command -v nvcc)")
  command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer is not installed"
    return 77
  }
  compute-sanitizer --tool "$1" --error-exitcode 1 "${@:2}"
}
small_bucket='-tc=GPU bucket: any bits*'
memcheck() {
  sanitizer memcheck "$build/dreamcomm_gpu_rows" verify &&
    sanitizer memcheck "$programs/dreamcomm_gpu_tests" "$small_bucket"
}
racecheck() { sanitizer racecheck "$programs/dreamcomm_gpu_tests" "$small_bucket"; }
export small_bucket
export -f benchmark facts build compile_programs compile_module run_doctest processes kernels run_pytest ops backend \
  hosts rows small bucket collectives versus_nccl sanitizer memcheck racecheck

# What an earlier run has left would be taken for this one's.
rm -f "$out"/{facts,results,versus_nccl}.json "$out"/*.jsonl "$out"/*.log \
  "$out"/{table.md,registers.txt}
part facts 60 "$PYTHON"
part build 240 "$PYTHON"
# First all that is quick, then times, then what may take long.
part processes 40 "$programs/dreamcomm_gpu_processes"
part ops 40 "$site/built"
part backend 120 "$site/built"
part rows 60 "$build/dreamcomm_gpu_rows"
part small 20 "$build/dreamcomm_gpu_rows"
part bucket 60 "$site/built"
part collectives 90 "$site/built"
part versus_nccl 120 "$site/built"
part kernels 90 "$programs/dreamcomm_gpu_tests"
part hosts 90 "$site/built"
part memcheck 60 "$programs/dreamcomm_gpu_tests"
part racecheck 60 "$programs/dreamcomm_gpu_tests"
benchmark table "$out" || failed=1
exit $failed
