"""Bytes that ranks move, by their counters, and where gradients are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from dreamcomm.zero import ZeroOptimizer, memory_report
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("counts what only dreamcomm counts")

WIDTH = 240  # divisible by 2, 3 and 4
TOLD = 1 + 128  # bytes for each peer: whether all is averaged, and a digest of the options


def moved(stage: int, clips: bool) -> tuple[dict[str, tuple[int, int]], int]:
    """Bytes sent and received in a step after the first, by operation, and those of parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage=stage)
    assert optimizer._in_heaps
    for _ in range(2):
        optimizer.zero_grad()
        before = dreamcomm.stats()
        module(torch.ones(2, WIDTH)).square().sum().backward()
        if clips:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        after = dreamcomm.stats()
    names = ("all_reduce", "reduce_scatter", "all_gather")
    nothing = {"sent": 0, "received": 0}
    found = {}
    for name in names:
        old, new = before.get(name, nothing), after.get(name, nothing)
        found[name] = new["sent"] - old["sent"], new["received"] - old["received"]
    return found, sum(p.nbytes for p in module.parameters())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_stage_1_moves_what_an_all_reduce_does(pool: Pool, world: int) -> None:
    for found, nbytes in pool.run(moved, 1, False, world=world):
        both_ways = 2 * nbytes * (world - 1) // world
        told = TOLD * (world - 1)
        assert found["all_reduce"] == (both_ways + told, both_ways + told)
        assert found["reduce_scatter"] == found["all_gather"] == (0, 0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_stage_2_moves_as_much_in_two_parts(pool: Pool, world: int) -> None:
    for found, nbytes in pool.run(moved, 2, False, world=world):
        one_way = nbytes * (world - 1) // world
        assert found["reduce_scatter"] == (one_way, one_way)
        assert found["all_gather"] == (one_way, one_way)
        assert found["all_reduce"] == (TOLD * (world - 1), TOLD * (world - 1))


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_adds_the_sums_of_blocks_alone(pool: Pool, stage: int) -> None:
    for found, nbytes in pool.run(moved, stage, True):
        assert found["reduce_scatter"] == (nbytes // 2, nbytes // 2)
        assert nbytes // 2 < found["all_gather"][1] < 0.7 * nbytes


def held(stage: int) -> tuple[int, int, int, int]:
    """Planned and measured bytes, whole gradients that there are, and shards."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = ZeroOptimizer(module.named_parameters(), torch.optim.AdamW, stage=stage)
    most = 0

    def look(_: torch.Tensor) -> None:
        nonlocal most
        local = [p.grad for p in module.parameters() if p.grad is not None]
        most = max(most, sum(type(one) is torch.Tensor for one in local))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
    report = memory_report(optimizer)
    assert "planned" in str(report)
    assert optimizer.report() == report
    return report.planned.total, report.total, most, report.gradients


def test_the_plan_is_what_tensors_take(pool: Pool) -> None:
    for stage in (1, 2):
        for planned, measured, _, _ in pool.run(held, stage):
            assert measured == planned


def test_stage_2_frees_gradients_in_backward(pool: Pool) -> None:
    """The model is one bucket of 4 MiB, unless it is closed earlier: here it is all of it."""
    parameters = sum(p.nbytes for _ in range(4) for p in nn.Linear(WIDTH, WIDTH).parameters())
    for _, _, most, gradients in pool.run(held, 2):
        assert gradients == parameters // 2
        assert most <= 8
    for _, _, most, gradients in pool.run(held, 1):
        assert gradients == parameters
        assert most == 8


def after_backward() -> list[str]:
    module = nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(4)))  # each is a bucket
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    most = 0

    def look(_: torch.Tensor) -> None:
        nonlocal most
        whole = [p.grad for p in module.parameters() if p.grad is not None and p.dim() > 1]
        most = max(most, sum(type(one) is torch.Tensor for one in whole))

    for layer in module:
        layer.weight.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(2, 1100)).sum().backward()
        optimizer.step()
    dist.barrier()
    return [str(most), *(type(p.grad).__name__ for p in module.parameters())]


def test_two_large_gradients_are_there_at_most(pool: Pool) -> None:
    for most, *kinds in pool.run(after_backward):
        assert int(most) <= 2
        assert set(kinds) == {"ShardedGradient"}


def passes_made(options: dict[str, float], stage: int) -> int:
    """How often the compiled pass of the optimizer is made in three steps."""
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, stage=stage, lr=0.1, **options)
    made = optimizer._engine.optimizer_pass
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(None)
        return made(*args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(optimizer._engine, "optimizer_pass", counted)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, WIDTH)).square().sum().backward()
            optimizer.step()
    return len(calls)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_compiled_pass_is_made_once(pool: Pool, options: dict[str, float], stage: int) -> None:
    """Its first step gives memory back to the kernel, which costs each later pass page faults."""
    assert pool.run(passes_made, options, stage) == [1, 1]
