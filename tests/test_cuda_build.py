"""The build's CUDA half, as far as a machine without a GPU shows it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dreamcomm import _C, _build_info

needs_cuda = pytest.mark.skipif(not _build_info.CUDA_VERSION, reason="built without nvcc")


def test_nvcc_on_the_path_is_used() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    assert _build_info.CUDA_VERSION


def test_the_runtime_is_that_of_the_build() -> None:
    major, minor = (_build_info.CUDA_VERSION or "0.0").split(".")
    assert _C.cuda_runtime_version() == 1000 * int(major) + 10 * int(minor)


def test_devices_are_counted_and_their_absence_explained() -> None:
    count, why = _C.cuda_devices()
    assert count >= 0
    assert (count == 0) == bool(why)
    if not _build_info.CUDA_VERSION:
        assert "built without CUDA" in why


def reports() -> dict[str, str]:
    """What ptxas said of each file of kernels, from the tree of an editable build."""
    trees = (Path(__file__).parents[1] / "build").glob("cp*")
    found = {}
    for tree in trees:
        for file in tree.glob("CMakeFiles/dc_gpu.dir/csrc/gpu/**/*.ptxas.txt"):
            found[file.name] = file.read_text()
    return found


def most_spilled(function: str, architecture: str) -> int:
    """Bytes of registers that a function may put into memory: none where it loops over much data
    (a bucket's kernel has the loop in itself, and calls a division that keeps some)."""
    if "bucket_kernel" in function:
        return 32
    if "reduce_kernel" not in function:
        return 0
    return 512 if "7Float16" in function and architecture == "sm_100" else 48


@needs_cuda
def test_kernels_are_compiled_for_every_architecture_and_their_loops_spill_nothing() -> None:
    found = reports()
    if not found:
        pytest.skip("not an editable build: its tree is gone")
    assert len(found) >= 4
    kernels = 0
    for name, text in found.items():
        for entry in text.split("Compiling entry function")[1:]:
            kernels += 1
            (architecture,) = re.findall(r"for '(sm_\d+)'", entry.splitlines()[0])
            assert architecture in {"sm_80", "sm_90", "sm_100"}
            properties = re.findall(
                r"Function properties for (\S+)\n.*, (\d+) bytes spill stores", entry
            )
            assert properties
            for function, spilled in properties:
                assert int(spilled) <= most_spilled(function, architecture), (
                    name,
                    architecture,
                    function,
                )
    # Nine types and the kernel that moves bytes; pack and unpack between four types, with
    # tables of two sizes or elsewhere, and the end of an inspection.
    assert kernels == 3 * (10 + 2 * 4 * 4 * 3 + 1)
