"""What docs/other_libraries.md shows of dreamcomm.DistributedDataParallel: libraries train with it
as with torch's class, bit for bit.

Each program wraps the model by the library's own way and torch's class over gloo, and by the
documented lines over dreamcomm. Those that are installed are tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from libraries.test_libraries import TORCHRUN, results


@pytest.mark.long
@pytest.mark.beyond_gloo("compares dreamcomm with gloo")
@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("lightning", "ddp_lightning.py"),
        ("lightning", "ddp_fabric.py"),
        ("accelerate", "ddp_accelerate.py"),
        ("transformers", "ddp_transformers.py"),
    ],
)
def test_training_is_as_with_torchs_class(library: str, program: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    ((used, with_torchs),) = results(program, TORCHRUN, "gloo", tmp_path / "gloo")
    assert used == "gloo"
    found = results(program, TORCHRUN, "dreamcomm", tmp_path / "dreamcomm")
    assert found == {("dreamcomm", with_torchs)}
