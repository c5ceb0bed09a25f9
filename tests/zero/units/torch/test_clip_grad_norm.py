"""Norms and clipping by torch's functions on DTensors, and by the module's method."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from helpers.pool import Pool
from zero.units.torch.beside import CLOSE, Beside, shard_all, stack

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
NORMS = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
WORLDS = pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.long)])


def clipped(norm_type: float, how: str) -> tuple[float, list[tuple[float, float]], list[str]]:
    """The difference after steps with small and large norms; each norm and that of one process."""
    beside = Beside.of(stack())
    norms, found_types = [], []
    for step, largest in enumerate([1e-3, 1e3, 1e-2]):
        beside.clear()
        beside.backward(step)
        norm = clip(beside.net, largest, norm_type, how)
        found_types.append(type(norm).__name__)
        alone = nn.utils.clip_grad_norm_(beside.alone.parameters(), largest, norm_type)
        full = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append((float(full), float(alone)))
        beside.compare()
        beside.step()
    return beside.end(), norms, found_types


def clip(net: Any, largest: float, norm_type: float, how: str) -> Tensor:
    found: Tensor
    if how == "module":
        found = net.clip_grad_norm_(largest, norm_type)
    else:
        foreach = {"foreach": True, "each": False}.get(how)
        found = nn.utils.clip_grad_norm_(net.parameters(), largest, norm_type, foreach=foreach)
    return found


@NORMS
@WORLDS
@pytest.mark.parametrize("how", ["torch's", "module"])
def test_clip_grad_norm_1d(pool: Pool, norm_type: float, how: str, world: int) -> None:
    kind = "Tensor" if how == "module" else "DTensor"
    for worst, norms, kinds in pool.run(clipped, norm_type, how, world=world):
        assert worst < CLOSE
        assert kinds == [kind] * 3
        for ours, alone in norms:
            assert ours == pytest.approx(alone, rel=CLOSE)
            assert alone > 0.01


@pytest.mark.parametrize("how", ["foreach", "each"])
def test_clip_grad_norm_foreach(pool: Pool, how: str) -> None:
    for worst, norms, _ in pool.run(clipped, 2.0, how):
        assert worst < CLOSE
        for ours, alone in norms:
            assert ours == pytest.approx(alone, rel=CLOSE)


def after_accumulation(how: str) -> tuple[float, list[tuple[float, float]]]:
    """All micro-batches are held back. The module's method reduces them; torch's function scales
    each rank's part of the sum."""
    beside = Beside.of(stack())
    net: Any = beside.net
    norms = []
    for step in range(2):
        beside.clear()
        with net.no_sync():
            beside.backward(2 * step)
            beside.backward(2 * step + 1)
        ours = clip(net, 0.01, 2.0, how)
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        alone = nn.utils.clip_grad_norm_(beside.alone.parameters(), 0.01)
        norms.append((float(ours), float(alone)))
        beside.step()
    return beside.end(), norms


@pytest.mark.parametrize("how", ["torch's", "module"])
def test_clip_grad_norm_after_accumulation(pool: Pool, how: str) -> None:
    for worst, norms in pool.run(after_accumulation, how):
        assert worst < CLOSE
        for ours, alone in norms:
            assert ours == pytest.approx(alone, rel=CLOSE)


def nonfinite(how: str) -> tuple[str, list[bool]]:
    """One element of one rank's rows is infinite: all ranks raise, and no gradient changes."""
    net = shard_all(stack())
    nn.functional.mse_loss(net(torch.ones(2, 12)), torch.zeros(2, 5)).backward()
    parameters = list(net.parameters())
    rank = torch.distributed.get_rank()
    if rank == 1:
        grad: Any = parameters[0].grad
        grad.to_local().view(-1)[0] = math.inf
    before = [one.grad.to_local().clone() for one in parameters]
    try:
        if how == "module":
            net.clip_grad_norm_(1.0, error_if_nonfinite=True)
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        found = str(error)
    after = [one.grad.to_local() for one in parameters]
    return found, [torch.equal(a, b) for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("how", ["torch's", "module"])
def test_clip_grad_norm_error_if_nonfinite(pool: Pool, how: str) -> None:
    for found, unchanged in pool.run(nonfinite, how):
        assert "non-finite" in found or "nonfinite" in found or "not finite" in found
        assert unchanged == [True] * 14


def by_value() -> float:
    beside = Beside.of(stack())
    for step in range(2):
        beside.clear()
        beside.backward(step)
        for one in (beside.net, beside.alone):
            nn.utils.clip_grad_value_(one.parameters(), 1e-3)
        beside.compare()
        beside.step()
    return beside.end()


def test_clip_grad_value(pool: Pool) -> None:
    assert max(pool.run(by_value)) < CLOSE


def total_norm() -> tuple[float, float, float]:
    """torch's two steps of clipping, apart."""
    beside = Beside.of(stack())
    beside.backward(0)
    found = []
    for one in (beside.net, beside.alone):
        grads = [p.grad for p in one.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads, 2.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(one.parameters(), 0.01, norm)
        found.append(float(norm))
    beside.compare()
    return found[0], found[1], beside.worst


def test_get_total_norm(pool: Pool) -> None:
    for ours, alone, worst in pool.run(total_norm, world=3):
        assert ours == pytest.approx(alone, rel=CLOSE)
        assert worst < CLOSE


def without_gradients() -> tuple[float, float]:
    net = shard_all(stack())
    parameters = list(net.parameters())
    return float(net.clip_grad_norm_(1.0)), float(nn.utils.clip_grad_norm_(parameters, 1.0))


def test_clip_grad_norm_without_gradients(pool: Pool) -> None:
    assert pool.run(without_gradients) == [(0.0, 0.0)] * 2
