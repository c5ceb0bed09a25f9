"""reduce="tokens" at its edges: numbers, zero gradients, joins, scaling, new parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import FEATURES, make
from dreamcomm.zero import GradScaler
from helpers.pool import Pool
from training.token_means import RATE, Way, micro_batch, summed_loss, whole
from training.token_refusals import CASE, expected_gradients, local, made, run_pass, trained_right

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

NAMES = ["ddp", "replicate", "zero1", "zero2", "sharded", "gathered", "hybrid"]
ways = pytest.mark.parametrize("name", NAMES)


def world_of(name: str) -> int:
    return 4 if name == "hybrid" else 2


def weights_of(way: Way) -> list[Tensor]:
    return [whole(one) for one in way.module.parameters()]


def check_goes_on(way: Way, weights: list[Tensor]) -> None:
    for found, expected in trained_right(way, weights, [2, 3]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def norm_of(passes: list[tuple[int, int]]) -> tuple[float, int]:
    """One process's norm of all ranks' passes, and the number of their rows."""
    module = make("mlp", torch.float64)
    expected_gradients(module, passes)
    world = range(dist.get_world_size())
    rows = sum(len(micro_batch(CASE, rank, *one)[2]) for rank in world for one in passes)
    return float(nn.utils.clip_grad_norm_(module.parameters(), 1e9)), rows


# Numbers.

BAD: list[tuple[Any, type[Exception]]] = [
    (-1, ValueError),
    (-0.5, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (2**62, ValueError),
    (torch.tensor(-2.0), ValueError),
    (True, TypeError),
    (torch.ones(2), TypeError),
    (torch.tensor(1j), TypeError),
    ("3", TypeError),
    (None, TypeError),
]


def bad_numbers(name: str) -> list[str]:
    way = made(name)
    texts, weights = [], weights_of(way)
    for value, kind in BAD:
        with pytest.raises(kind) as caught:
            way.counts.count(value)
        texts.append(str(caught.value))
    check_goes_on(way, weights)
    return texts


@ways
def test_bad_numbers_are_refused_where_they_are_given(pool: Pool, name: str) -> None:
    for rank, texts in enumerate(pool.run(bad_numbers, name, world=world_of(name))):
        for text in texts:
            assert f"count() on rank {rank}: expected a count of" in text


def other_reductions() -> str:
    model = dreamcomm.DistributedDataParallel(make("mlp", torch.float64), reduce="sum")
    with pytest.raises(RuntimeError) as caught:
        model.count(3)
    return str(caught.value)


def test_other_reductions_count_nothing(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(other_reductions)):
        assert f"count() on rank {rank}: it is for reduce=\"tokens\", got reduce='sum'" in text


def hooked(name: str) -> str:
    way = made(name)
    with pytest.raises(ValueError, match="hook") as caught:
        way.module.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    check_goes_on(way, weights_of(way))
    return str(caught.value)


@pytest.mark.parametrize("name", ["ddp", "replicate", "ddp-zero2"])
def test_hooks_are_refused(pool: Pool, name: str) -> None:
    for text in pool.run(hooked, name):
        assert "communication hook" in text


# Cleared and zero gradients.


def clear(way: Way, how: str) -> None:
    if how == "foreach":
        parameters = [one for group in way.optimizer.param_groups for one in group["params"]]
        torch._foreach_zero_([local(one.grad) for one in parameters])
    else:
        way.optimizer.zero_grad(set_to_none=how == "none")


def cleared(name: str, how: str) -> bool:
    """Counts of cleared passes are dropped, and not those of passes whose gradients are zeros."""
    way, extra = made(name), 10
    for _ in range(2):
        way.optimizer.zero_grad()
        run_pass(way, 0, 0, reduces=False)
        run_pass(way, 0, 1, reduces=False)
        clear(way, how)
        with way.counts.no_sync():
            way.counts.count(extra)
            (way.module(torch.ones(2, FEATURES, dtype=torch.float64)).sum() * 0).backward()
        run_pass(way, 2, 1, reduces=True)
    norm, rows = norm_of([(2, 1)])
    expected = norm * rows / (rows + extra * dist.get_world_size())
    return float(way.counts.clip_grad_norm_(1e9)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", ["none", "zeros", "foreach"])
@ways
def test_counts_go_with_their_gradients(pool: Pool, name: str, how: str) -> None:
    assert all(pool.run(cleared, name, how, world=world_of(name)))


# Ranks without data.


def joined() -> tuple[list[Tensor], list[Tensor]]:
    """Weights where rank r has r + 1 batches, and those of one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    way, module = made("ddp"), make("mlp", torch.float64)
    with way.module.join():
        for step in range(rank + 1):
            way.optimizer.zero_grad()
            run_pass(way, step, 0, reduces=False)
            run_pass(way, step, 1, reduces=True, last=False)
            way.optimizer.step()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(world):
        parts = [micro_batch(CASE, r, step, m) for r in range(step, world) for m in range(2)]
        x, y, weights = (torch.cat(some) for some in zip(*parts, strict=True))
        optimizer.zero_grad()
        (summed_loss(module, x, y, weights, torch.float64) / len(weights)).backward()
        optimizer.step()
    return weights_of(way), [one.detach() for one in module.parameters()]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_has_ended_counts_nothing(pool: Pool, world: int) -> None:
    for found, expected in pool.run(joined, world=world):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Loss scaling.


def scaled(name: str) -> tuple[float, float, list[Tensor], list[Tensor]]:
    """The norm of unscaled gradients, and weights after a step by them, beside one process's."""
    way, scaler = made(name), GradScaler("cpu", init_scale=1024.0)
    for micro in range(2):
        x, y, weights = micro_batch(CASE, dist.get_rank(), 2, micro)
        way.counts.count(len(weights))
        loss = summed_loss(way.module, x, y, weights, torch.float64)
        if micro == 0:
            with way.counts.no_sync():
                scaler.scale(loss).backward()
        else:
            scaler.scale(loss).backward()
    scaler.unscale_(way.optimizer)
    norm = float(way.counts.clip_grad_norm_(0.1))
    scaler.step(way.optimizer)
    scaler.update()
    module = make("mlp", torch.float64)
    expected_gradients(module, [(2, 0), (2, 1)])
    expected = float(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    return norm, expected, weights_of(way), [one.detach() for one in module.parameters()]


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "sharded", "gathered"])
def test_scaling_and_clipping_see_divided_gradients(pool: Pool, name: str) -> None:
    for norm, expected, found, weights in pool.run(scaled, name):
        assert norm == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=1e-8)  # the norm is float32


# Parameters that change between count() and the backward pass.


def thaw(module: nn.Module) -> None:
    next(iter(module.parameters())).requires_grad_(True)


def replace(module: nn.Module) -> None:
    layers = next(one for one in module.modules() if isinstance(one, nn.Sequential))
    layers[0].weight = nn.Parameter(layers[0].weight.detach() * 1.5)


def changed(name: str, change: Callable[[nn.Module], None]) -> tuple[float, float]:
    """Norms of a step whose second pass has other parameters, and one process's."""
    own, module = make("mlp", torch.float64), make("mlp", torch.float64)
    if change is thaw:
        for one in (own, module):
            next(iter(one.parameters())).requires_grad_(False)
    way = made(name, module=own)
    run_pass(way, 2, 0, reduces=False)
    x, y, weights = micro_batch(CASE, dist.get_rank(), 2, 1)
    way.counts.count(len(weights))
    change(way.module)
    summed_loss(way.module, x, y, weights, torch.float64).backward()
    way.counts.reduce_gradients()
    norm = float(way.counts.clip_grad_norm_(1e9))
    total = 0
    for micro in range(2):
        if micro == 1:
            change(module)
        for rank in range(dist.get_world_size()):
            batch = micro_batch(CASE, rank, 2, micro)
            total += len(batch[2])
            summed_loss(module, *batch, torch.float64).backward()
    expected = float(nn.utils.clip_grad_norm_(module.parameters(), 1e9)) / total
    return norm, expected


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, thaw) for name in NAMES]
    + [(name, replace) for name in NAMES if not name.startswith("zero")],  # its list is its own
)
def test_parameters_may_change_after_a_count(
    pool: Pool, name: str, change: Callable[[nn.Module], None]
) -> None:
    for norm, expected in pool.run(changed, name, change, world=world_of(name)):
        assert norm == pytest.approx(expected, rel=1e-6)
