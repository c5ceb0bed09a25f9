"""A worker takes the memory of parameters and gradients, and no more than 3 % beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dreamcomm.server import ParameterServer, Worker
from helpers.pool import Fresh
from server.serving import PATIENCE, held_store

# 169 M parameters: what a worker takes beside them is some 35 MB, whatever their number.
WIDTH, LAYERS, STEPS = 6500, 4, 3


def resident(field: str) -> int:
    """Bytes of this process, with those that it shares: VmRSS now, VmHWM at the highest."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(rank: int, address: str, kind: str, channels_last: bool) -> tuple[int, int]:
    """Bytes of the parameters, and the highest growth over what the process had before."""
    if rank == 0:
        if kind == "worker":
            ParameterServer(
                model().parameters(), torch.optim.AdamW, workers=1, store=address, timeout=PATIENCE
            ).serve()
        return 0, 0
    # What torch keeps after its first steps is there before.
    warm = nn.Linear(64, 64)
    small = torch.optim.AdamW(warm.parameters())
    warm(torch.ones(2, 64)).sum().backward()
    small.step()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    module = model()
    if channels_last:
        for layer in module:
            layer.weight.data = layer.weight.data.t().contiguous().t()
    optimizer: Any = None
    if kind == "worker":
        optimizer = Worker(module.parameters(), store=address, timeout=PATIENCE)
    elif kind == "adamw":
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for _ in range(STEPS):
        module.zero_grad()
        module(torch.ones(2, WIDTH)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    if kind == "worker":
        optimizer.close()
    return sum(one.nbytes for one in module.parameters()), resident("VmHWM") - before


def measured(fresh: Fresh, kind: str, channels_last: bool = False) -> float:
    """In sizes of the parameters."""
    with held_store() as address:
        _, (nbytes, growth) = fresh.run(
            train, address, kind, channels_last, group=False, timeout=200
        )
    return growth / nbytes


@pytest.mark.long
def test_a_worker_takes_parameters_and_gradients(fresh: Fresh) -> None:
    without = measured(fresh, "none")
    assert 2.0 <= without < 2.1
    worker = measured(fresh, "worker")
    print(f"without {without:.3f}, worker {worker:.3f}")
    assert worker < 1.03 * without
    assert measured(fresh, "adamw") > 3.9
