"""The build's CUDA half, as far as a machine without a GPU shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dreamcomm import _C, _build_info

ROOT = Path(__file__).parents[2]
needs_cuda = pytest.mark.skipif(not _build_info.CUDA_VERSION, reason="built without CUDA")


def test_a_build_has_cuda_or_says_why_not() -> None:
    assert bool(_build_info.CUDA_VERSION) == bool(_build_info.CUDA_ARCHITECTURES)
    assert bool(_build_info.CUDA_VERSION) != bool(_build_info.WITHOUT_CUDA)


def test_the_runtime_is_that_of_the_build() -> None:
    major, minor = (_build_info.CUDA_VERSION or "0.0").split(".")
    assert _C.cuda_runtime_version() == 1000 * int(major) + 10 * int(minor)


def test_devices_are_counted_and_their_absence_explained() -> None:
    count, why = _C.cuda_devices()
    assert count >= 0
    assert (count == 0) == bool(why)
    if not _build_info.CUDA_VERSION:
        assert why == f"dreamcomm was built without CUDA: {_build_info.WITHOUT_CUDA}"


def decision(folder: Path, *definitions: str, **environment: str) -> str:
    """The line in which a configuration says whether and for what it compiles CUDA code.

    With an nvcc that only knows its GPUs, as trying a real one takes seconds: the configuration
    fails where it tries that one, after the decision.
    """
    make_program(folder / "nvcc", "sm_80", "sm_86", "sm_90")
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = [f"-D{one}" for one in (*definitions, f"CMAKE_CUDA_COMPILER={folder / 'nvcc'}")]
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", folder / "build", "-G", "Ninja", *given],
        env={**os.environ, "DREAMCOMM_BUILD_CUDA": "", **environment, "PATH": path},
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"^-- (Building with.* CUDA.*)", done.stdout, re.M)
    return str(lines[0]) if lines else done.stderr


def torch_with(folder: Path, cuda: str) -> str:
    """The definition of a torch that is for this version of CUDA."""
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/lib/libtorch_python.so").touch()
    (folder / "torch/version.py").write_text(
        f"__version__ = '2.13.0+some'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    )
    return f"DREAMCOMM_TORCH_DIR={folder / 'torch'}"


def make_program(path: Path, *lines: str) -> None:
    """One that prints these lines, whatever it is asked."""
    path.write_text("\n".join(["#!/bin/sh", *(f"echo {line}" for line in lines), ""]))
    path.chmod(0o755)


def test_a_torch_without_cuda_gets_none(tmp_path: Path) -> None:
    why = "Building without CUDA: torch 2.13.0+some has no CUDA"
    assert decision(tmp_path, torch_with(tmp_path, "None")) == why


def test_no_cuda_is_built_where_it_is_off(tmp_path: Path) -> None:
    line = decision(tmp_path, torch_with(tmp_path, "'13.0'"), DREAMCOMM_BUILD_CUDA="off")
    assert line == "Building without CUDA: DREAMCOMM_BUILD_CUDA is off"


def test_another_word_is_refused(tmp_path: Path) -> None:
    line = decision(tmp_path, torch_with(tmp_path, "None"), "DREAMCOMM_BUILD_CUDA=maybe")
    assert "DREAMCOMM_BUILD_CUDA must be auto, on or off; got maybe" in line


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (["9.0", "8.6", "9.0"], "90-real;86-real: this machine's GPUs"),
        (["7.5"], "80-real;90-real;100: nvcc or the kernels do not know"),
        ([], "80-real;90-real;100: nvidia-smi shows no GPU here"),
    ],
)
def test_cuda_is_built_for_the_cards_that_are_there(
    tmp_path: Path, shown: list[str], expected: str
) -> None:
    make_program(tmp_path / "nvidia-smi", *shown)
    line = decision(tmp_path, torch_with(tmp_path, "'13.0'"))
    assert line.startswith(f"Building with CUDA for {expected}")


def test_cuda_is_built_for_every_card_where_that_is_asked_for(tmp_path: Path) -> None:
    make_program(tmp_path / "nvidia-smi", "9.0")
    line = decision(tmp_path, torch_with(tmp_path, "None"), "DREAMCOMM_BUILD_CUDA=on")
    assert line == "Building with CUDA for 80-real;90-real;100: DREAMCOMM_BUILD_CUDA is on"


def test_architectures_that_are_given_are_taken(tmp_path: Path) -> None:
    make_program(tmp_path / "nvidia-smi", "9.0")
    given = "CMAKE_CUDA_ARCHITECTURES=80-real"
    line = decision(tmp_path, torch_with(tmp_path, "'13.0'"), given)
    assert line == "Building with CUDA for 80-real: CMAKE_CUDA_ARCHITECTURES"


def reports() -> dict[str, str]:
    """What ptxas said of each file of kernels, from the tree of an editable build."""
    trees = (ROOT / "build").glob("cp3*")
    found = {}
    for tree in trees:
        for file in tree.glob("CMakeFiles/dc_gpu.dir/csrc/gpu/**/*.ptxas.txt"):
            found[str(file.relative_to(tree))] = file.read_text()
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
    numbers = re.findall(r"\d+", _build_info.CUDA_ARCHITECTURES)
    architectures = {f"sm_{number}" for number in numbers}
    kernels = 0
    for name, text in found.items():
        for entry in text.split("Compiling entry function")[1:]:
            kernels += 1
            (architecture,) = re.findall(r"for '(sm_\d+)'", entry.splitlines()[0])
            assert architecture in architectures
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
    assert kernels == len(architectures) * (10 + 2 * 4 * 4 * 3 + 1)
