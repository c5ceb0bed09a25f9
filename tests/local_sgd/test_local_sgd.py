"""LocalSGD: means of parameters, against workers in one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from dreamcomm.averaging.mean import BUFFER_BYTES
from dreamcomm.local_sgd import LocalSGD
from dreamcomm.ranks.pieces import runs
from helpers.pool import Pool
from local_sgd import simulated
from local_sgd.simulated import weights

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")

WIDTH = 240  # divisible by 2 and 4; small messages go another way


def trained(steps: int, every: int, start: int) -> list[Tensor]:
    module = simulated.model(seed=dist.get_rank())  # rank 0's is everyone's
    optimizer = LocalSGD(module, simulated.sgd(module), every=every, start=start)
    for step in range(1, steps + 1):
        simulated.descend(module, optimizer, step, dist.get_rank())
    return weights(module)


@pytest.mark.parametrize(
    ("world", "every", "start"),
    [(2, 1, 0), (2, 4, 0), (3, 4, 0), (4, 4, 3), pytest.param(3, 1, 0, marks=pytest.mark.long)],
)
def test_equals_workers_in_one_process(pool: Pool, world: int, every: int, start: int) -> None:
    found = pool.run(trained, 19 + start % 2, every, start, world=world)
    expected = simulated.local_sgd(world, 19 + start % 2, every, start)
    if (19 + start % 2 - start) % every == 0:
        for one in found[1:]:
            assert all(map(torch.equal, one, found[0]))
    for ours, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def against_ddp(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    apart, together = simulated.model(), simulated.model()
    ours = LocalSGD(apart, torch.optim.SGD(apart.parameters(), lr=0.1), every=1)
    wrapped = dreamcomm.DistributedDataParallel(together)
    theirs = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        simulated.descend(apart, ours, step, rank)
        simulated.descend(wrapped, theirs, step, rank)
    return weights(apart), weights(together)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_step_is_ddp(pool: Pool, world: int) -> None:
    for ours, theirs in pool.run(against_ddp, 20, world=world):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def traffic(every: int, steps: int) -> tuple[int, int]:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = LocalSGD(module, simulated.sgd(module), every=every)
    dist.all_reduce(torch.zeros(1))
    before = dreamcomm.stats()["all_reduce"]["sent"]
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
    sent = dreamcomm.stats()["all_reduce"]["sent"] - before
    return sent, sum(one.nbytes for one in module.parameters())


@pytest.mark.parametrize("world", [2, 4])
def test_sends_in_every_nth_step_alone(pool: Pool, world: int) -> None:
    for sent, nbytes in pool.run(traffic, 5, 20, world=world):
        assert sent == 4 * 2 * (world - 1) * nbytes // world


def resumed() -> tuple[bool, bool]:
    """Saved in the middle of a round, and gone on with in another object."""
    rank = dist.get_rank()
    module = simulated.model()
    optimizer = LocalSGD(module, simulated.sgd(module), every=4)
    for step in range(6):
        simulated.descend(module, optimizer, step, rank)
    own, state = deepcopy((module.state_dict(), optimizer.state_dict()))  # as a file would be
    other = simulated.model(seed=9)
    again = LocalSGD(other, simulated.sgd(other), every=4)
    other.load_state_dict(own)
    again.load_state_dict(state)
    for step in range(6, 15):
        simulated.descend(module, optimizer, step, rank)
        simulated.descend(other, again, step, rank)
    return all(map(torch.equal, weights(module), weights(other))), again.steps == 15


def test_resumes_inside_a_round(pool: Pool) -> None:
    assert pool.run(resumed) == [(True, True)] * 2


def statistics(buffers: str) -> tuple[list[float], int]:
    module = simulated.Normed()
    optimizer = LocalSGD(module, simulated.sgd(module), every=2, buffers=buffers)
    for step in range(4):
        simulated.descend(module, optimizer, step, dist.get_rank())
    tracked = module.norm.num_batches_tracked
    assert tracked is not None
    return module.norm.running_mean.tolist(), int(tracked)  # type: ignore[union-attr]


def test_statistics_are_averaged_if_asked(pool: Pool) -> None:
    (first, tracked), (second, _) = pool.run(statistics, "average")
    assert first == second
    assert tracked == 4
    (first, _), (second, _) = pool.run(statistics, "local")
    assert first != second


def scheduled(kind: Any) -> tuple[float, float, int]:
    """A scheduler over the wrapper, a scaler that skips on rank 1 alone, and added parameters."""
    rank = dist.get_rank()
    module = simulated.model()
    inner = torch.optim.SGD(module[0].parameters(), lr=0.4)  # type: ignore[index]
    optimizer = LocalSGD(module, inner, every=3)
    optimizer.add_param_group({"params": list(module[2:].parameters()), "lr": 0.2})  # type: ignore[index]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = kind("cpu", init_scale=4.0, growth_interval=100)
    for step in range(6):
        optimizer.zero_grad()
        x, y = simulated.batch(step, rank)
        loss = nn.functional.mse_loss(module(x), y)
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    rates = [group["lr"] for group in inner.param_groups]
    total = sum(float(one.detach().double().sum()) for one in module.parameters())
    assert rates[0] == 2 * rates[1]
    return rates[0], total, optimizer.steps


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, dreamcomm.GradScaler])
def test_schedulers_and_scalers(pool: Pool, kind: Any) -> None:
    first, second = pool.run(scheduled, kind)
    assert first == second  # parameters too: the ranks stayed in the same round
    assert first[0] == pytest.approx(0.4 / 8)
    assert first[2] == 6


def scaled(scale: float) -> list[Tensor]:
    module = simulated.model()
    optimizer = LocalSGD(module, simulated.sgd(module), every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(4):
        optimizer.zero_grad()
        x, y = simulated.batch(step, dist.get_rank())
        scaler.scale(nn.functional.mse_loss(module(x), y)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weights(module)


def test_a_scale_leaves_no_trace(pool: Pool) -> None:
    without, with_scale = pool.run(scaled, 1.0), pool.run(scaled, 1024.0)
    for one, other in zip(without, with_scale, strict=True):
        assert all(map(torch.equal, one, other))  # a power of two


def with_closure() -> tuple[list[Tensor], float, float]:
    """LBFGS calls the closure several times in a step."""
    module = simulated.model()
    inner = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    optimizer = LocalSGD(module, inner, every=2)
    losses = []
    for _ in range(4):
        x, y = simulated.batch(0, dist.get_rank())

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return weights(module), losses[0], losses[-1]


def test_a_closure_reaches_the_optimizer(pool: Pool) -> None:
    (first, begin, end), (second, _, _) = pool.run(with_closure)
    assert all(map(torch.equal, first, second))
    assert end < begin


def hooked() -> list[str]:
    """Calls of hooks that were registered with the wrapper."""
    module, calls = simulated.model(), []
    optimizer = LocalSGD(module, simulated.sgd(module), every=2)
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load_state_dict"))
    simulated.descend(module, optimizer, 0, dist.get_rank())
    optimizer.load_state_dict(optimizer.state_dict())
    return calls


def test_hooks_are_called(pool: Pool) -> None:
    assert pool.run(hooked) == [["step", "state_dict", "load_state_dict"]] * 2


def test_batches_fit_a_buffer_and_lose_nothing() -> None:
    quarter = BUFFER_BYTES // 16  # elements of float32
    sizes = [quarter, quarter, 5 * quarter, 3 * quarter, quarter, 1, 0]
    given = [torch.empty(size, device="meta") for size in sizes]
    given.insert(2, torch.empty(3, dtype=torch.float64, device="meta"))
    batches = [[given[number] for number in run] for run in runs(given, BUFFER_BYTES)]
    flat = [one for batch in batches for one in batch]
    assert sorted(map(id, flat)) == sorted(map(id, given))
    for batch in batches:
        assert len({one.dtype for one in batch}) == 1
        assert len(batch) == 1 or sum(one.nbytes for one in batch) <= BUFFER_BYTES
    assert len(batches) == 5  # 2 quarters, 5, 3 and 1, the small ones, and those of float64


def averaged() -> list[float]:
    """More than a buffer full, of two dtypes."""
    rank = dist.get_rank()
    module = nn.Module()
    numel = BUFFER_BYTES // 4
    module.first = nn.Parameter(torch.ones(numel))
    module.second = nn.Parameter(torch.ones(5, dtype=torch.float64))
    module.third = nn.Parameter(torch.ones(numel // 2))
    optimizer = LocalSGD(module, torch.optim.SGD(module.parameters(), lr=1.0), every=1)
    with torch.no_grad():
        for number, one in enumerate(module.parameters()):
            one.fill_(10.0 * number + rank)
    optimizer.average_now()
    ends = [(one.min(), one.max()) for one in module.parameters()]
    assert all(least == most for least, most in ends)
    return [float(least) for least, _ in ends]


def test_more_than_a_buffer_full_is_averaged(pool: Pool) -> None:
    assert pool.run(averaged) == [[0.5, 10.5, 20.5]] * 2
