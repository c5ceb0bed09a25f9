"""What a worker refuses that would be ignored without a word, and what on_update may change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.server import ParameterServer, Worker
from dreamcomm.server.groups import PlainGroup
from helpers.pool import Pool
from server.serving import common_store, parameters, seconds, serve_rank, worker

STORE = dist.HashStore()


@pytest.mark.parametrize("make", ["server", "worker"])
def test_parameters_without_values_or_order_are_refused(make: str) -> None:
    def made(params: Any) -> None:
        if make == "server":
            ParameterServer(params, torch.optim.SGD, workers=1, store=STORE)
        else:
            Worker(params, store=STORE)

    with pytest.raises(TypeError, match="'weight' is on the meta device, so it has no values"):
        made(nn.Linear(2, 2, device="meta").named_parameters())
    with pytest.raises(TypeError, match="in an order that is equal on all ranks, got a set"):
        made(set(nn.Linear(2, 2).parameters()))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "item": lambda group: group.__setitem__("lr", 0.0),
    "update": lambda group: group.update(lr=0.0),
    "update by pairs": lambda group: group.update([("lr", 0.0)]),
    "|=": lambda group: group.__ior__({"lr": 0.0}),
    "setdefault": lambda group: group.setdefault("lr", 0.0),
    "del": lambda group: group.__delitem__("lr"),
    "pop": lambda group: group.pop("lr", None),
    "params": lambda group: group.update(params=[]),
    "pop of params": lambda group: group.pop("params"),
    "popitem": lambda group: group.popitem(),
    "clear": lambda group: group.clear(),
}
GROUPS: dict[str, Callable[[list[Any]], Any]] = {
    "a group more": lambda groups: groups.append({"params": [nn.Parameter(torch.ones(2))]}),
    "no group": lambda groups: groups.clear(),
    "a shape": lambda groups: setattr(groups[0]["params"][0], "data", torch.ones(3)),
    "unfrozen": lambda groups: groups[0]["params"][1].requires_grad_(),
}


def changed(change: str) -> tuple[str, str]:
    if dist.get_rank() == 0:
        serve_rank(parameters((2,)), workers=1, store=common_store())
        return "", ""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    params = [*parameters((2,)), frozen]
    with worker([{"params": params, "lr": 0.1}], store=common_store()) as optimizer:
        if change in CHANGES:
            found = seconds(lambda: CHANGES[change](optimizer.param_groups[0]), KeyError)
        elif change in GROUPS:
            optimizer.zero_grad()
            GROUPS[change](optimizer.param_groups)
            found = seconds(optimizer.step, RuntimeError)
        else:
            other = nn.Linear(2, 2)
            stepped = torch.optim.AdamW(other.parameters())
            other(torch.ones(1, 2)).sum().backward()
            stepped.step()
            found = seconds(lambda: optimizer.load_state_dict(stepped.state_dict()), ValueError)
            optimizer.load_state_dict(optimizer.state_dict())
        return found[1:]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ("update", "KeyError", "a Worker has no 'lr': the optimizer is the server's"),
        (
            "a shape",
            "RuntimeError",
            "parameter 0 has got the shape [3], and the servers have float32",
        ),
        *(
            (change, "RuntimeError", "added, removed or unfrozen later")
            for change in ("a group more", "no group", "unfrozen")
        ),
        ("state", "ValueError", "a Worker has no state; load it by ParameterServer.load"),
    ],
)
def test_what_is_the_servers_is_refused(pool: Pool, change: str, kind: str, words: str) -> None:
    _, (found, text) = pool.run(changed, change)
    assert found == kind
    assert words in text


@pytest.mark.parametrize("change", CHANGES)
def test_a_group_of_a_worker_never_changes(change: str) -> None:
    params = parameters((2,))
    group = PlainGroup(params=params, param_names=["weight"])
    with pytest.raises(KeyError, match=r"a Worker has no 'lr'|that its servers have"):
        CHANGES[change](group)
    assert dict(group) == {"params": params, "param_names": ["weight"]}
    assert copy(group) == group
    assert type(copy(group)) is dict


def closed_by_another() -> Any:
    rank, store = dist.get_rank(), common_store()
    workers = dist.new_group([1, 2])
    tensors = parameters((3,))
    if rank == 0:
        return serve_rank(tensors, workers=2, store=store)
    with worker(tensors, store=store, rank=rank) as optimizer:
        tensors[0].grad = torch.ones(3)
        dist.barrier(workers)
        if rank == 2:
            dist.barrier(workers)
            optimizer.step()
            return ""
        waits = threading.Thread(target=optimizer.step)
        waits.start()
        while not optimizer.report().pushed_bytes:
            time.sleep(0.001)
        found = seconds(optimizer.close, RuntimeError)
        dist.barrier(workers)
        waits.join()
        return found[2], optimizer.version


def test_another_thread_cannot_break_a_step(pool: Pool) -> None:
    _, (text, version), _ = pool.run(closed_by_another, world=3)
    assert "Worker.close: another thread is in a call of this object" in text
    assert version == 1


def clamped(staleness: int | None) -> Any:
    """The weights after each step and pull, where on_update bounds them."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((3,), value=1.0)

    @torch.no_grad()
    def clamp(_: ParameterServer) -> None:
        tensors[0].clamp_(-0.5, 0.5)

    if rank == 0:
        serve_rank(
            tensors, workers=1, store=store, staleness=staleness, lr=1.0, on_update=clamp
        )  # fmt: skip
        return None
    seen = []
    with worker(tensors, store=store, gradients=staleness == 0) as optimizer:
        for _ in range(2):
            tensors[0].grad = torch.full((3,), 3.0)
            optimizer.step()
            seen.append(float(tensors[0].detach()[0]))
            optimizer.pull()
            seen.append(float(tensors[0].detach()[0]))
    return seen


@pytest.mark.parametrize("staleness", [0, None])
def test_workers_get_weights_as_on_update_leaves_them(pool: Pool, staleness: int | None) -> None:
    assert pool.run(clamped, staleness)[1] == [-0.5] * 4


def scheduled(path: str, steps: int) -> Any:
    """A server with a schedule that it keeps in its checkpoint."""
    rank, store = dist.get_rank(), common_store()
    tensors = parameters((3,), value=1.0)
    if rank == 0:
        server = ParameterServer(tensors, torch.optim.SGD, workers=1, store=store, lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(server.optimizer, 3)
        if Path(path).exists():
            state = torch.load(path)
            server.load_state_dict(state)
            schedule.load_state_dict(state["schedule"])
        server.serve(
            checkpoint=path, on_update=lambda _: schedule.step(), also={"schedule": schedule}
        )
        taken = seconds(
            lambda: ParameterServer(
                tensors, torch.optim.SGD, workers=1, store=store, name="b", lr=1.0
            ).serve(also={"version": schedule}),
            ValueError,
        )
        return taken[2]
    with worker(tensors, store=store) as optimizer:
        for _ in range(steps):
            tensors[0].grad = torch.ones(3)
            optimizer.step()
    return tensors[0].tolist()


def test_a_schedule_goes_on_from_the_checkpoint(pool: Pool, tmp_path: Path) -> None:
    _, whole = pool.run(scheduled, str(tmp_path / "whole"), 10)
    pool.run(scheduled, str(tmp_path / "parts"), 5)
    text, resumed = pool.run(scheduled, str(tmp_path / "parts"), 5)
    assert resumed == whole
    assert "expected other keys of also than ['version']" in text
