"""Gradients in int8: what is rounded, what stays, and that nothing is lost over the steps."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from dreamcomm import hooks
from dreamcomm.ddp import int8
from helpers.pool import Pool
from training.models import Mlp, batch, loss_of, sgd, shard

pytestmark = pytest.mark.beyond_gloo("the hooks are of dreamcomm")

SIZES = (5000, 3, 7001)  # a cut block, less than a block for a rank, several blocks


class Vectors(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in SIZES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((v * g).sum() for v, g in zip(self.vectors, gradients, strict=True))  # type: ignore[return-value]


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    scales = (1.0, 1e-3, 30.0)
    return [
        (torch.randn(size, generator=generator) * scale).to(dtype)
        for size, scale in zip(SIZES, scales, strict=True)
    ]


def wrapped(module: nn.Module, state: hooks.State, torchs: bool = False) -> Any:
    kind = nn.parallel.DistributedDataParallel if torchs else dreamcomm.DistributedDataParallel
    model: Any = kind(module, process_group=state.group, bucket_cap_mb=0.03)
    model.register_comm_hook(state, hooks.int8_feedback)
    return model


def passed(model: Any, gradients: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(gradients).backward()
    return [one.grad.clone() for one in model.module.vectors]


def once(dtype: torch.dtype, torchs: bool, on_gloo: bool) -> tuple[list[Tensor], list[float]]:
    group = dist.new_group(backend="gloo") if on_gloo else None
    state = hooks.State(group, norm=True)
    model = wrapped(Vectors(dtype), state, torchs)
    got = passed(model, gradients_of(dist.get_rank(), 0, dtype))
    exact = sum(float(one.double().square().sum()) for one in got) ** 0.5
    return got, [float(state.norm()), exact, float(state.finite())]


@pytest.mark.parametrize(
    ("world", "dtype", "torchs", "on_gloo"),
    [
        (1, torch.float32, False, False),
        (2, torch.float32, False, False),
        (3, torch.float64, False, False),
        (4, torch.float32, True, False),
        (2, torch.bfloat16, True, False),
        (2, torch.float32, False, True),
    ],
)
def test_an_average(
    pool: Pool, world: int, dtype: torch.dtype, torchs: bool, on_gloo: bool
) -> None:
    found = pool.run(once, dtype, torchs, on_gloo, world=world)
    every = [gradients_of(rank, 0, dtype) for rank in range(world)]
    for got, (norm, exact, finite) in found:
        assert finite
        assert norm == pytest.approx(exact, rel=1e-5)
        for number, mean in enumerate(got):
            assert torch.equal(mean, found[0][0][number]), "bits differ between ranks"
            inputs = torch.stack([one[number].double() for one in every])
            # Half a step of the values sent, and half a step of their average. A block may reach
            # over the edge of a parameter, to larger ones in its bucket.
            step = max(float(g.abs().max()) for one in every for g in one) / 127
            slack = float(inputs.abs().max()) * torch.finfo(dtype).eps
            assert float((mean.double() - inputs.mean(0)).abs().max()) <= step * 1.001 + slack


def summed(steps: int) -> list[Tensor]:
    """The sum of the averages of the same gradients, with this rank's residuals."""
    state = hooks.State()
    model = wrapped(Vectors(), state)
    total = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step in range(steps):  # the buckets are rebuilt after the first
        for one, got in zip(total, passed(model, gradients_of(dist.get_rank(), step)), strict=True):
            one += got.double()
    rest = [state.residual(one) for one in model.module.vectors]
    assert all(one is not None and bool(one.any()) for one in rest)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rest)
    world = len(every)
    return [
        world * one + torch.stack([of[number].double() for of in every]).sum(0)
        for number, one in enumerate(total)
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_nothing_is_lost_over_the_steps(pool: Pool, world: int) -> None:
    for found in pool.run(summed, 6, world=world):
        for number, total in enumerate(found):
            every = [gradients_of(rank, step)[number] for rank in range(world) for step in range(6)]
            exact = torch.stack(every).double().sum(0)
            largest = float(exact.abs().max())
            torch.testing.assert_close(total, exact, rtol=0, atol=1e-5 * max(largest, 30.0))


def trained(name: str, keeps: bool = True) -> list[float]:
    """Losses of all rows after each step."""
    module = Mlp()
    state = hooks.State()
    model: Any = dreamcomm.DistributedDataParallel(module, bucket_cap_mb=0.01)
    if name:
        model.register_comm_hook(state, hooks.int8_feedback)
    optimizer = sgd(module.parameters())
    losses = []
    for step in range(60):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        rank, world = dist.get_rank(), dist.get_world_size()
        loss_of(model(shard(x, rank, world)), shard(y, rank, world)).backward()
        if not keeps:
            for parameter in module.parameters():
                state._residuals._parts[parameter].zero_()
        optimizer.step()
        losses.append(float(loss_of(module(x), y).detach()))
    return losses


def apart(losses: list[float], exact: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(losses, exact, strict=True)) / sum(exact)


def test_trains_as_float32(pool: Pool) -> None:
    exact, ours = pool.run(trained, "")[0], pool.run(trained, "int8")
    without = pool.run(trained, "int8", keeps=False)[0]
    assert ours[0] == ours[1] == pool.run(trained, "int8")[0]  # and run to run
    assert apart(ours[0], exact) < 5e-3
    assert apart(without, exact) > 1.5 * apart(ours[0], exact)


def broken(where: int) -> list[tuple[bool, bool, float]]:
    """A pass with an infinity on rank 1, and the next one."""
    state = hooks.State(norm=True)
    model = wrapped(Vectors(), state)
    found = []
    for step in range(3):
        gradients = gradients_of(dist.get_rank(), step)
        if step == 1 and dist.get_rank() == 1:
            gradients[2][where] = float("inf")
        got = passed(model, gradients)
        rest = [state.residual(one) for one in model.module.vectors]
        clean = all(one is not None and bool(one.isfinite().all()) for one in rest)
        found.append((state.finite(), clean, float(got[2][where])))
    return found


def test_an_infinity_reaches_all_ranks_and_goes(pool: Pool) -> None:
    first, second = pool.run(broken, 6000)
    assert [one[:2] for one in first] == [(True, True), (False, True), (True, True)]
    assert [one[:2] for one in second] == [one[:2] for one in first]
    assert first[1][2] != first[1][2]  # NaN
    assert first[2] == second[2]


def resumed() -> bool:
    state = hooks.State()
    model = wrapped(Vectors(), state)
    rank = dist.get_rank()
    for step in range(2):
        passed(model, gradients_of(rank, step))
    again = hooks.State()
    again.load_state_dict(deepcopy(state.state_dict()))
    other = wrapped(Vectors(), again)
    expected = [passed(model, gradients_of(rank, step)) for step in range(2, 5)]
    got = [passed(other, gradients_of(rank, step)) for step in range(2, 5)]
    return all(
        torch.equal(a, b)
        for x, y in zip(got, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_resumes_with_its_residuals(pool: Pool) -> None:
    assert pool.run(resumed) == [True, True]


def sent() -> int:
    state = hooks.State()
    module = nn.Linear(1024, 1024, bias=False)
    model: Any = dreamcomm.DistributedDataParallel(module, bucket_cap_mb=25)
    model.register_comm_hook(state, hooks.int8_feedback)
    model(torch.randn(2, 1024)).sum().backward()
    before = sum(one["sent"] for one in dreamcomm.stats().values())
    model(torch.randn(2, 1024)).sum().backward()
    return sum(one["sent"] for one in dreamcomm.stats().values()) - before


@pytest.mark.parametrize("world", [2, 4])
def test_a_quarter_of_the_bytes(pool: Pool, world: int) -> None:
    numel = 1024 * 1024
    wire = numel + 4 * numel // int8.BLOCK  # and scales
    for bytes_ in pool.run(sent, world=world):
        told = world - 1  # a byte for each peer: which gradients there are
        assert bytes_ == 2 * (world - 1) * wire // world + told


def misused() -> str:
    model: Any = dreamcomm.DistributedDataParallel(Vectors())
    model.register_comm_hook(None, hooks.int8_feedback)
    try:
        model(gradients_of(0, 0)).backward()
    except TypeError as error:
        return str(error)
    return ""


def test_another_state_is_refused(pool: Pool) -> None:
    for text in pool.run(misused):
        assert "expected a dreamcomm.hooks.State" in text


def test_a_lost_second_error_is_seen(pool: Pool) -> None:
    """Without the owner's error in its residual, the sum over the steps is another."""
    found = pool.run(forgetful, 6)
    exact = sum(gradients_of(rank, step)[2].double() for rank in range(2) for step in range(6))
    assert float((found[0][2] - exact).abs().max()) > 1e-2  # type: ignore[union-attr]


def forgetful(steps: int) -> list[Tensor]:
    mean_of = int8._Piece.mean_of

    def rounded(piece: Any, rows: Tensor) -> Tensor:
        return (mean_of(piece, rows) * 4).round() / 4

    with mock.patch.object(int8._Piece, "mean_of", rounded):
        return summed(steps)
