"""Gradients are reduced in memory of their own: what others still read, or keep, does not change.

Autograd makes a parameter's gradient of a tensor that arrives there, or of a view of one. That
tensor may flow on, or be kept by a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from buckets.viewed import FEATURES, Kept, Viewed, cases, row, trained_alone
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

STEPS = 2  # the first pass learns the order of gradients, and reduces at its end
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def wrapped(how: str, model: Viewed) -> tuple[nn.Module, torch.optim.Optimizer]:
    if how.startswith("zero"):
        return model, ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=int(how[-1]), lr=0.1)
    wrap = {"ddp": dreamcomm.DistributedDataParallel, "replicate": dreamcomm.replicate}[how]
    # Each large gradient has a bucket of its own, which is reduced while the pass goes on.
    return wrap(model, bucket_cap_mb=0.01), torch.optim.SGD(model.parameters(), lr=0.1)


def differences(names: Sequence[str], found: list[list[Tensor]], view: str, size: str) -> list[str]:
    expected = trained_alone(view, size, dist.get_world_size(), STEPS)
    return [
        f"{view}, {size}: {name} after step {step}"
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name, one, other in zip(names, ours, theirs, strict=True)
        if not torch.allclose(one, other, **CLOSE)
    ]


def train(how: str, keeps: bool) -> list[str]:
    """What differs from one process, over all views."""
    wrong = []
    for view, size in cases():
        model, kept = Viewed(view, size), Kept()
        model.keep = kept if keeps else None
        module, optimizer = wrapped(how, model)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            module(row(step, dist.get_rank())).square().sum().backward()
            optimizer.step()
            found.append([one.detach().clone() for one in model.parameters()])
        names = [name for name, _ in model.named_parameters()]
        wrong += differences(names, found, view, size)
        if keeps and not kept.are_equal():
            wrong.append(f"{view}, {size}: what the hooks have kept")
    return wrong


@pytest.mark.parametrize("keeps", [False, True], ids=["plain", "hooks"])
@pytest.mark.parametrize("how", ["ddp", "replicate", "zero 1", "zero 2"])
def test_equals_one_process(pool: Pool, how: str, keeps: bool) -> None:
    assert pool.run(train, how, keeps) == [[], []]


def squared(output: Tensor, _: Tensor) -> Tensor:
    return output.square().sum()


def pipelined(schedule: str) -> list[str]:
    """Micro-batches take the place of ranks: they have one row each."""
    wrong = []
    for view, size in cases():
        model = Viewed(view, size)
        first = nn.Linear(FEATURES, FEATURES, bias=False)  # gets a gradient, and is not stepped
        nn.init.eye_(first.weight)
        pipe = Pipeline([first, model], 2, loss_fn=squared, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.cat([row(step, number) for number in range(2)])
            pipe.step(x, target=x)
            optimizer.step()
            found.append([one.detach().clone() for one in model.parameters()])
        names = [name for name, _ in model.named_parameters()]
        wrong += differences(names, found, view, size) if dist.get_rank() == 1 else []
    return wrong


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_pipelines_stages_equal_one_process(pool: Pool, schedule: str) -> None:
    assert pool.run(pipelined, schedule) == [[], []]


# What gradients of earlier passes keep.


def saved_by_hand(set_to_none: bool) -> bool:
    """A script keeps each task's gradients, clears them, and compares with copies at the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 70_000), nn.Linear(70_000, 1))
    model = dreamcomm.DistributedDataParallel(net)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        model(torch.randn(2, 4)).sum().backward()
        for one in net.parameters():
            assert one.grad is not None
            kept += [(one.grad, one.grad.clone()), (one.grad.view(-1), one.grad.clone().view(-1))]
    return all(torch.equal(one, copy) for one, copy in kept)


def test_gradients_that_a_script_keeps_do_not_change(pool: Pool) -> None:
    assert pool.run(saved_by_hand, True) == [True, True]


def given_by_hand(reduce: str) -> list[float]:
    """Two gradients that are one tensor, reduced without a backward pass."""
    net = nn.ParameterList(nn.Parameter(torch.zeros(300, 300)) for _ in range(2))
    model = dreamcomm.DistributedDataParallel(Called(net), reduce=reduce)
    net[0].grad = net[1].grad = dreamcomm.zeros(300, 300).fill_(1.0 + dist.get_rank())
    model.reduce_gradients()
    return [one.grad.mean().item() for one in net]


class Called(nn.Module):
    def __init__(self, net: nn.ParameterList) -> None:
        super().__init__()
        self.net = net


@pytest.mark.parametrize(("reduce", "expected"), [("mean", 1.5), ("sum", 3.0)])
def test_one_tensor_given_as_two_gradients_is_reduced_for_each(
    pool: Pool, reduce: str, expected: float
) -> None:
    assert pool.run(given_by_hand, reduce) == [[expected] * 2] * 2


def copied(model: Callable[[], nn.Module], x: Tensor) -> list[int]:
    """Bytes of large gradients that each pass copies before it reduces them."""
    net = model()
    ddp = dreamcomm.DistributedDataParallel(net)
    small = sum(one.nbytes for one in net.parameters() if one.nbytes < 128 << 10)
    found = []
    for _ in range(3):
        net.zero_grad()
        ddp(x).sum().backward()
        found.append(int(ddp.reducer.report()["copied"]) - small)
    return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 300), nn.LayerNorm(300))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.Conv2d(128, 64, 3))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(mlp, (2, 300)), (mlp, (1, 300)), (convolution, (2, 64, 6, 6)), (attention, (2, 3, 128))],
)
def test_gradients_of_usual_layers_are_not_copied(
    pool: Pool, model: Any, shape: tuple[int, ...]
) -> None:
    for rank in pool.run(copied, model, torch.randn(shape)):
        assert rank[1:] == [0, 0]
