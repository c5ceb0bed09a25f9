#!/usr/bin/env bash
# Compiles the module against other versions of torch, as strictly as the tests do, and runs nothing.
#
#   cmake/check_torch_versions.sh 2.11.0 2.14.1
#
# Takes each version's wheel from the index that pip knows (for Python as it is here; those of CUDA
# are large), and of it only what a build needs: headers and libraries. Of the floors only c10d sees
# torch, so nothing is compiled by nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
PATH=$PWD/.venv/bin:$PATH
[[ $# -gt 0 ]] || { sed -n '2,8p' "$0"; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

for version in "$@"; do
  folder=$scratch/$version
  "$python" -m pip download --quiet --no-deps --dest "$folder" "torch==$version"
  "$python" -m zipfile -l "$folder"/torch-*.whl | awk '{print $1}' |
    grep -E '^torch/(include/|version\.py|lib/lib(c10|torch_cpu|torch_python|torch|shm)[.])' \
      >"$folder/wanted"
  "$python" - "$folder" <<'PY'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(folder.glob("torch-*.whl"))) as wheel:
    wheel.extractall(folder, members=(folder / "wanted").read_text().split())
PY
  rm "$folder"/torch-*.whl
  cmake -S . -B "$folder/build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" \
    -DDREAMCOMM_TORCH_DIR="$folder/torch" -DDREAMCOMM_WERROR=ON -DDREAMCOMM_TEST_DEVICE=ON \
    -DCMAKE_CUDA_COMPILER=NOTFOUND >/dev/null
  cmake --build "$folder/build"
  echo "torch $(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$folder/torch/version.py"): compiled"
done
