"""What docs/other_libraries.md shows: libraries train over dreamcomm as over Gloo, bit for bit.

Those that are installed are tested (`pip install '.[libraries]'`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

# The program of each, and how it is started.
STARTED = {
    "torch": ("tutorial.py", TORCHRUN),
    "dreamcomm": ("outside.py", TORCHRUN),
    "lightning": ("with_lightning.py", TORCHRUN),
    "deepspeed": ("with_deepspeed.py", TORCHRUN),
    "ray": ("with_ray.py", []),
    "torchtitan": ("with_torchtitan.py", TORCHRUN),
    "torchmetrics": ("with_torchmetrics.py", TORCHRUN),
    "accelerate": ("with_accelerate.py", TORCHRUN),
    "transformers": ("with_transformers.py", TORCHRUN),
    "ignite": ("with_ignite.py", TORCHRUN),
    "keras": ("with_keras.py", TORCHRUN),
    "torchft": ("with_torchft.py", TORCHRUN),
}


def results(program: str, start: list[str], backend: str, folder: Path) -> set[tuple[str, str]]:
    """The backends that the ranks say they used, and the hashes of what they have computed."""
    folder.mkdir()
    # torchrun ends its ranks when it is asked to end.
    command = ["timeout", "240", sys.executable, *start, str(PROGRAMS / program)]
    done = subprocess.run(
        [*command, backend, str(folder)],
        cwd=folder,  # elsewhere than the source folder, which python -m would put on the path
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("result ")]
    return {(used, bits) for _, used, bits in lines}


@pytest.mark.beyond_gloo("compares dreamcomm with gloo")
@pytest.mark.parametrize(
    "library",
    [
        "dreamcomm",
        *(pytest.param(one, marks=pytest.mark.long) for one in STARTED if one != "dreamcomm"),
    ],
)
def test_a_library_computes_the_same_bits(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip(library)
    ((used, over_gloo),) = results(*STARTED[library], "gloo", tmp_path / "gloo")
    assert used == "gloo"
    found = results(*STARTED[library], "dreamcomm", tmp_path / "dreamcomm")
    assert found == {("dreamcomm", over_gloo)}
