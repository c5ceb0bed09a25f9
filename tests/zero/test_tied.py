"""Parameters with one memory stay so, and are stepped one after the other as by torch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.NAdam, {"lr": 0.01}),
]


class Tied(nn.Module):
    """An embedding and a head that have one memory, with a layer between them."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(6, 5, bias=False)
        self.between = nn.Linear(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        if turned:  # rows that do not lie together become contiguous
            self.embedding.weight.data = torch.randn(6, 5).t()
        self.head.weight.data = self.embedding.weight.data

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.between(self.embedding(x))))
        return out


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(4, 6)).square().sum().backward()  # the same on all ranks
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def differing() -> list[str]:
    """The ways in which weights are not torch's."""
    found = []
    messages = dist.new_group(backend="gloo")  # ranks that share no memory
    for kind, options in KINDS:
        for turned in (False, True):
            alone = Tied(turned)
            expected = train(alone, kind(alone.parameters(), foreach=False, **options))
            for how in ("1", "2", "wrapped 1", "not reducing", "messages 1", "messages 2"):
                inner = Tied(turned)
                module: Any = inner
                if how.startswith("wrapped"):
                    module = dreamcomm.DistributedDataParallel(module)
                if how == "not reducing":
                    more: dict[str, Any] = {"reduce": False}
                else:
                    more = {"stage": int(how[-1])}
                if how.startswith("messages"):
                    more["process_group"] = messages
                optimizer = ZeroOptimizer(module.parameters(), kind, **more, **options)
                got = train(module, optimizer)
                first, second = inner.embedding.weight, inner.head.weight
                if first.data_ptr() != second.data_ptr():
                    found.append(f"{kind.__name__} {how} {turned}: untied")
                # An average of equal numbers over three ranks has other last bits.
                exact = dist.get_world_size() == 2
                if not torch.allclose(got, expected, rtol=0 if exact else 1e-4, atol=1e-6):
                    found.append(f"{kind.__name__} {how} {turned}: {(got - expected).abs().max()}")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_weights_tied_by_data_are_those_of_torch(pool: Pool, world: int) -> None:
    assert pool.run(differing, world=world) == [[]] * world


def refused() -> list[str]:
    said = []
    tied = Tied().bfloat16()
    tied.head.weight.data = tied.embedding.weight.data
    part = nn.Parameter(torch.zeros(4, 5))
    flat = nn.Parameter(part.data[1])
    for parameters, options in (
        (tied.named_parameters(), {"master_dtype": torch.float32}),
        ([("part", part), ("flat", flat)], {}),
    ):
        with pytest.raises(ValueError, match="ZeroOptimizer") as error:
            ZeroOptimizer(parameters, torch.optim.SGD, lr=0.1, **options)
        said.append(str(error.value))
    return said


def test_memory_that_cannot_be_followed_is_refused(pool: Pool) -> None:
    for masters, part in pool.run(refused):
        assert "'embedding.weight' and 'head.weight' share memory" in masters
        assert "use one parameter in both places" in masters
        assert "'part' and 'flat' overlap in memory" in part


def tied_on_one_rank() -> str:
    module = Tied()
    if dist.get_rank() == 1:
        module.head.weight.data = module.head.weight.data.clone()
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="list of parameters that share memory") as error:
        optimizer.step()
    return str(error.value)


def test_a_tie_that_one_rank_has_not_is_named(pool: Pool) -> None:
    for text in pool.run(tied_on_one_rank):
        assert "is [[0, 3]] on rank 0, and [] on rank 1" in text


class Copied(nn.Module):
    """Its buffer is a view of its parameter."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        kept = self.weight.detach().t()
        self.register_buffer("turned", kept if views else kept.clone())


def moved(views: bool) -> list[str]:
    module = Copied(views)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    return [str(one.message) for one in found if "memory that other tensors" in str(one.message)]


def test_views_of_a_parameter_that_moves_are_named(pool: Pool) -> None:
    for texts in pool.run(moved, True):
        assert len(texts) == 1
        assert "(parameter 0)" in texts[0]
    assert pool.run(moved, False) == [[], []]
