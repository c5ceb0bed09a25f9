"""Fully sharded modules come and go; their rows outlive the group, and other ranks."""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dreamcomm.ranks.agree import gather_objects
from dreamcomm.zero import ZeroOptimizer, process_memory
from helpers.pool import Fresh
from helpers.processes import replies
from zero.checkpoints import build, train
from zero.units.sharding import made, sharded, weights

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def regions() -> int:
    """How many this process maps."""
    return Path("/proc/self/maps").read_text().count("dreamcomm-region")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def live_once(how: str) -> None:
    module: Any = sharded("gpt")
    optimizer: torch.optim.Optimizer
    if how == "torch":
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    else:
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW)
    train(module, optimizer, range(1))
    assert regions() > 0
    if how == "changed":
        module.position = nn.Parameter(torch.ones(10, 96))
        module.double()
        train(module, torch.optim.SGD(module.parameters()), range(1), torch.float64)
    elif how == "open":
        module(torch.ones(2, 12))


def many_lives(how: str, lives: int) -> None:
    before = regions(), 0, 0
    for life in range(lives):
        live_once(how)
        if life in (4, lives - 1):
            gc.collect()
            dist.barrier()
            now = regions(), process_memory(), descriptors()
            if life == 4:
                before = now
    assert now[0] == before[0] == 0
    # A model has 1 MB, and its state 2. malloc keeps some.
    assert now[1] - before[1] < 8e6, (now, before)
    assert now[2] - before[2] <= 2


@pytest.mark.parametrize("how", ["zero", "torch", "changed", "open"])
def test_modules_come_and_go(fresh: Fresh, how: str) -> None:
    lives = 100 if how == "zero" else 20
    fresh.run(many_lives, how, lives, timeout=120)


def check_saves(module: Any, optimizer: ZeroOptimizer, expected: list[torch.Tensor]) -> None:
    """This rank's rows and moments go into a file, and come out of it."""
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    for value, rows in zip(state["model"].values(), expected, strict=True):
        assert torch.equal(value.to_local(), rows)
    assert len(state["optimizer"]["state"]) == len(list(module.parameters()))
    for one, rows in zip(module.parameters(), expected, strict=True):
        assert torch.equal(one.to_local(), rows)


def rows(module: nn.Module) -> list[torch.Tensor]:
    return [one.to_local().clone() for one in module.parameters()]  # type: ignore[operator]


def after_the_group() -> None:
    module, optimizer = build("gpt", "adamw", "3")
    assert isinstance(optimizer, ZeroOptimizer)
    train(module, optimizer, range(2))
    expected = rows(module)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert regions() > 0
    check_saves(module, optimizer, expected)
    with pytest.raises(dist.DistBackendError, match=r"waits for all ranks of FSDPGpt.*shut down"):
        module(torch.ones(2, 12))
    check_saves(module, optimizer, expected)


def test_rows_after_the_group(fresh: Fresh) -> None:
    fresh.run(after_the_group)


def evaluated_after_the_group() -> None:
    """Ranks that read when the group ends read on, also after other ranks have ended."""
    module: Any
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(2))
    module.set_reshard_after_forward(False)
    x = torch.ones(2, 12)
    with torch.no_grad():
        expected = module(x)
    alone = made("gpt")
    with torch.no_grad():
        for one, value in zip(alone.parameters(), weights(module), strict=True):
            one.copy_(value)
    rank, pids = dist.get_rank(), gather_objects(dist.group.WORLD, os.getpid())
    ended = os.pidfd_open(pids[1])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        os._exit(0)
    assert select.select([ended], [], [], 30)[0], "rank 1 has not ended"
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(module(x), expected)
            assert torch.equal(module(x), alone(x))
    assert torch.equal(module(x), expected)


def test_evaluation_after_the_group(fresh: Fresh) -> None:
    first, _ = replies(fresh.start(evaluated_after_the_group), 60)
    assert first.error is None, first.error


def in_a_child(function: Callable[[], Any]) -> Any:
    """What it returns in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = repr(function())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writer, found.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return found


class Sums(Dataset[float]):
    """Each item is the sum of one of the rank's shards."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, number: int) -> float:
        return float(self.parameters[number].to_local().sum())  # type: ignore[operator]


def children() -> None:
    module: Any
    module, optimizer = build("gpt", "adamw", "3")
    train(module, optimizer, range(2))
    x = torch.ones(2, 12)
    sums = [float(one.sum()) for one in rows(module)]
    loader = DataLoader(
        Sums(module), num_workers=1, batch_size=None, multiprocessing_context="fork"
    )
    assert [float(one) for one in loader] == pytest.approx(sums, rel=1e-6)
    assert in_a_child(lambda: [float(one.sum()) for one in rows(module)]) == repr(sums)
    assert in_a_child(lambda: len(module.state_dict())) == "22"
    assert "forked from a rank" in in_a_child(lambda: module(x))
    module.set_reshard_after_forward(False)
    with torch.no_grad():
        expected = module(x).tolist()

    def evaluate() -> Any:
        with torch.no_grad():
            return module(x).tolist()

    assert in_a_child(evaluate) == repr(expected)
    module.reshard()
    train(module, optimizer, range(2, 4))  # no child has disturbed the ranks


def test_forked_children_read(fresh: Fresh) -> None:
    fresh.run(children)


def killed(when: str) -> list[float]:
    """How long the others wait at their next passes, until these raise."""
    module, optimizer = build("gpt", "adamw", "3")
    assert isinstance(optimizer, ZeroOptimizer)
    train(module, optimizer, range(2))
    expected = rows(module)
    dist.barrier()
    x = torch.ones(2, 12)
    if when == "open":
        loss = module(x).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    begun = time.monotonic()
    if when == "open":
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            loss.backward()
        found.append(time.monotonic() - begun)
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            module(x).sum().backward()
        found.append(time.monotonic() - begun)
    check_saves(module, optimizer, expected)
    return found


@pytest.mark.parametrize("when", ["closed", "open"])
def test_a_rank_is_killed(fresh: Fresh, when: str, slack: float) -> None:
    found = replies(fresh.start(killed, when, world=3), 60)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].error
        assert max(found[rank].value) < 5 + slack
