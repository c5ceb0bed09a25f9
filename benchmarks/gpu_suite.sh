#!/usr/bin/env bash
# Verifies and times dreamcomm's GPU half on a machine with one GPU.
#
#   benchmarks/gpu_suite.sh OUT
#
# From a bare checkout, without a network: needs Python with torch (a CUDA build), nvcc,
# cmake 3.26 and ninja. Writes to the folder OUT: facts.json (what the machine is like),
# build.log, registers.txt, tests.log (the GPU's kernels under the tests of the host
# target), processes.log (ranks that share the GPU over CUDA IPC, one stuck, one killed),
# ops.log (the Python operations on CUDA tensors), backend.log (torch's collectives in
# processes, streams, graphs, DDP, FSDP2, NCCL), sanitizer.log, rows.jsonl (rows of
# all_reduce, each rank virtual, beside the device's copy rate), bucket.jsonl (pack and
# unpack beside torch's ways), collectives.jsonl (processes, beside torch's symmetric
# memory) and summary.txt. Goes on after a part that fails; ends with 1 then.
set -uo pipefail
cd "$(dirname "$0")/.."
if [[ $# -ne 1 ]]; then
  sed -n '2,13p' "$0"
  exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
build=${DREAMCOMM_GPU_BUILD:-build/gpu}
python=${PYTHON:-python3}
PATH=$(dirname "$(command -v "$python")"):$PATH # its environment's cmake and ninja first
failed=()

# part NAME SECONDS COMMAND...: runs it with a deadline, notes how it ended.
part() {
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  if timeout "$seconds" "$@"; then
    echo "$name: ok, $((SECONDS - begin)) s" | tee -a "$out/summary.txt"
  else
    echo "$name: FAILED with $?, $((SECONDS - begin)) s" | tee -a "$out/summary.txt"
    failed+=("$name")
  fi
}

compile() {
  cmake -S . -B "$build" -G Ninja -DDREAMCOMM_BUILD_TESTS=ON -DDREAMCOMM_BUILD_GPU_TESTS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${DREAMCOMM_GPU_ARCHITECTURES:-native}" &&
    cmake --build "$build" --target dreamcomm_gpu_tests dreamcomm_gpu_processes \
      dreamcomm_gpu_rows &&
    cat "$build"/CMakeFiles/dc_gpu.dir/csrc/gpu/*.ptxas.txt >"$out/registers.txt"
}

# The module without pip, which a machine without a network may not serve: a package beside
# the build, of links to the sources and what was compiled.
module() {
  cmake -S . -B "$build-module" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" \
    -DCMAKE_CUDA_ARCHITECTURES="${DREAMCOMM_GPU_ARCHITECTURES:-native}" &&
    cmake --build "$build-module" &&
    mkdir -p "$build-module/site/dreamcomm" &&
    ln -sfn "$PWD"/dreamcomm/* "$PWD/$build-module"/_C*.so "$PWD/$build-module/_build_info.py" \
      "$build-module/site/dreamcomm/"
}

ops() {
  "$python" -m pytest -q -p no:cacheprovider tests/bucketing/test_ops_cuda.py
}

backend() {
  "$python" -m pytest -q -p no:cacheprovider tests/devices/test_cuda.py
}

sanitize() {
  command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer is not installed: not run"
    return 0
  }
  local tests=(-tc="GPU kernels take tensors that begin anywhere")
  compute-sanitizer --tool memcheck --error-exitcode 1 \
    "$build/tests/cpp/dreamcomm_gpu_tests" "${tests[@]}" &&
    compute-sanitizer --tool racecheck --error-exitcode 1 \
      "$build/tests/cpp/dreamcomm_gpu_tests" "${tests[@]}"
}

: >"$out/summary.txt"
git rev-parse HEAD >>"$out/summary.txt" 2>/dev/null
export -f compile module ops backend sanitize
export out build python
part facts 240 "$python" benchmarks/gpu/facts.py "$out/facts.json"
part build 240 bash -c compile &>"$out/build.log"
part module 240 bash -c module &>>"$out/build.log"
export PYTHONPATH=$PWD/$build-module/site
part processes 60 "$build/tests/cpp/dreamcomm_gpu_processes" &>"$out/processes.log"
part ops 60 bash -c ops &>"$out/ops.log"
part backend 180 bash -c backend &>"$out/backend.log"
part tests 120 "$build/tests/cpp/dreamcomm_gpu_tests" &>"$out/tests.log"
part sanitizer 120 bash -c sanitize &>"$out/sanitizer.log"
part rows 120 "$build/dreamcomm_gpu_rows" 256 >"$out/rows.jsonl"
part bucket 60 "$python" benchmarks/gpu/bucket.py "$out/bucket.jsonl" >/dev/null
part collectives 90 "$python" benchmarks/gpu/collectives.py "$out/collectives.jsonl" \
  >"$out/collectives.log" 2>&1
tail -n 3 "$out/tests.log" "$out/processes.log" "$out/ops.log" "$out/backend.log" \
  "$out/collectives.log"
cat "$out/rows.jsonl" "$out/bucket.jsonl" "$out/summary.txt"
((${#failed[@]} == 0))
