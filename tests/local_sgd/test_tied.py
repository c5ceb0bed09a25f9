"""Tensors in one memory, as weights that are tied by .data, are averaged once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.local_sgd import DiLoCo, Gossip, LocalSGD
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9)
MADE: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "LocalSGD": lambda module, inner: LocalSGD(module, inner, every=2),
    "DiLoCo": lambda module, inner: DiLoCo(module, inner, OUTER, every=2, fragments=2, alpha=0.5),
    "DiLoCo over the model's": lambda module, inner: DiLoCo(
        module, inner, torch.optim.SGD(module.named_parameters(), 0.7, 0.9), every=2, alpha=0.5
    ),
    "Gossip": lambda module, inner: Gossip(module, inner, topology="full"),
    "Gossip, late": lambda module, inner: Gossip(module, inner, bound=2, seed=1),
}


class Twice(nn.Module):
    """Uses a weight in two places, and has buffers; the memory is tied or copied."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.middle = nn.Linear(4, 4)
        if tie == "parameter":
            self.last.weight = self.first.weight
        elif tie != "apart":
            self.last.weight.data = self.first.weight.data
        self.register_buffer("mean", torch.full((2,), float(dist.get_rank())))
        if tie == "buffers":
            self.register_buffer("same", self.mean.detach())
            self.register_buffer("weight", self.middle.weight.detach())
        if tie == "transposed":
            self.last.weight.data = self.first.weight.data.t()
        if tie == "row":
            self.register_buffer("row", self.middle.weight.detach()[1])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)).tanh())
        return out


def trained(way: str, tie: str) -> list[Tensor]:
    """Steps of SGD without momentum: two gradients are subtracted as one sum would be."""
    module = Twice(tie)
    optimizer = MADE[way](module, torch.optim.SGD(module.parameters(), lr=0.05))
    module.get_buffer("mean").fill_(float(dist.get_rank()))  # which is rank 0's at first
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        module(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    return [
        one.detach().clone()
        for one in (module.first.weight, module.last.weight, module.middle.weight, module.mean)
    ]


def both(way: str, tie: str) -> list[float]:
    """How far the tensors are from those of one parameter in two places."""
    pairs = zip(trained(way, tie), trained(way, "parameter"), strict=True)
    return [float((one - other).abs().max()) for one, other in pairs]


@pytest.mark.parametrize("tie", ["data", "buffers"])
@pytest.mark.parametrize("way", MADE)
def test_one_memory_is_averaged_once(pool: Pool, way: str, tie: str) -> None:
    for distances in pool.run(both, way, tie):
        assert max(distances) < 1e-5


def refused(way: str, tie: str, on: str) -> str:
    """What making says, or the second step where tensors are tied after the first."""
    rank = dist.get_rank()
    late = on == "late"
    tied_here = not late and (on == "all" or rank == 1)
    module = Twice(tie if tied_here else "apart")
    inner = torch.optim.SGD(module.parameters(), lr=0.05)
    try:
        optimizer = MADE[way](module, inner)
        for step in range(2):
            if late and step == 1:
                module.last.weight.data = module.first.weight.data
            optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["LocalSGD", "DiLoCo", "Gossip"])
@pytest.mark.parametrize(
    ("tie", "on", "words"),
    [
        ("transposed", "all", ": 'first.weight' and 'last.weight' overlap in memory"),
        ("row", "all", ": 'middle.weight' and 'row' overlap in memory"),
        ("data", "one", ": the memory of 'last.weight' is that of 'first.weight' on rank 1, and"),
        ("data", "late", ".step: expected tensors to share memory as when"),
    ],
    ids=["transposed", "a row", "one rank's", "late"],
)
def test_other_ties_are_refused_on_all_ranks(
    pool: Pool, way: str, tie: str, on: str, words: str
) -> None:
    for text in pool.run(refused, way, tie, on):
        assert text.startswith(way)
        assert words in text
