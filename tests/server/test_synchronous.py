"""A synchronous server trains as an all_reduce of each gradient does: in bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.models import batch, make
from helpers.pool import Pool
from server.serving import (
    common_store,
    differing,
    made_gradient,
    serve_rank,
    values,
    worker,
)

pytestmark = pytest.mark.beyond_gloo("compares with what only dreamcomm's all_reduce gives")

# Nothing overflows in 100 steps with these, nor does a square in float16 vanish.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.005, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-4}),
}


def special(case: str) -> list[dict[str, Any]]:
    """Groups of parameters."""
    torch.manual_seed(3)
    if case in ("bfloat16", "float64"):
        dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}[case]
        return groups(torch.randn(300, 70, dtype=dtype), torch.randn(9, dtype=dtype))
    if case == "mixed":
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
        return groups(*(torch.randn(40, 3).to(dtype) for dtype in kinds))
    if case == "channels last":
        images = (torch.randn(16, 8, 3, 3), torch.randn(128, 128, 3, 3), torch.randn(4, 3, 5, 5))
        last = [one.to(memory_format=torch.channels_last) for one in images]
        return groups(*last, torch.randn(16), torch.randn(30, 40).t())
    if case == "sizes":
        # Pieces are 2 MiB: one parameter has four, and one piece has 150 parameters.
        many = [torch.randn(1 + number % 7) for number in range(150)]
        return groups(torch.randn(1400, 1400), *many, torch.randn(()), torch.randn(524_288))
    if case == "empty":
        return groups(torch.randn(0, 5), torch.randn(4), torch.randn(0, dtype=torch.float64))
    two = groups(torch.randn(50, 3), torch.randn(60)) + groups(torch.randn(70), torch.randn(2, 2))
    two[1] |= {"lr": 0.3, "weight_decay": 0.5}
    two[0]["params"][1].requires_grad_(case != "frozen")
    return two


def groups(*tensors: Tensor) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(one) for one in tensors]}]


def flat(given: list[dict[str, Any]]) -> list[Tensor]:
    return [one for group in given for one in group["params"]]


class Training:
    """Parameters, and their gradients of a step on some rank."""

    def __init__(self, case: str) -> None:
        self.module = make(case) if case in ("mlp", "gpt", "cnn", "odd") else None
        self.case = case
        self.groups = [{"params": list(self.module.parameters())}] if self.module else special(case)
        self.tensors = flat(self.groups)

    def backward(self, rank: int, world: int, step: int) -> None:
        for one in self.tensors:
            one.grad = None
        if self.module is not None:
            x, y = (data.chunk(world)[rank] for data in batch(step))
            nn.functional.mse_loss(self.module(x), y).backward()
            return
        for number, one in enumerate(self.tensors):
            lacks = self.case == "lacking" and number == 1 and (rank + step) % 2
            never = self.case == "never" and number == 1 and step >= 2
            if one.requires_grad and not lacks and not never:
                one.grad = made_gradient(one, number, rank, step)


def by_server(case: str, steps: int, servers: int, store: Any, gradients: bool) -> Any:
    rank, world = dist.get_rank() - servers, dist.get_world_size() - servers
    training = Training(case)
    with torch.no_grad():
        for one in training.tensors:
            if one.requires_grad:
                one.zero_()  # the servers' values replace them
    optimizer = worker(
        training.groups, servers, store=store, rank=rank, gradients=gradients, name=case
    )
    norms = []
    for step in range(steps):
        training.backward(rank, world, step)
        optimizer.step()
        norms.append(values([one.grad for one in training.tensors if one.grad is not None]))
    assert optimizer.version == steps
    optimizer.close()
    return norms, values(training.tensors)


def by_all_reduce(
    case: str, steps: int, kind: str, servers: int, members: dist.ProcessGroup
) -> Any:
    rank, world = dist.get_rank() - servers, dist.get_world_size() - servers
    training = Training(case)
    cls, options = OPTIMIZERS[kind]
    optimizer = cls(training.groups, **options)  # type: ignore[arg-type]
    norms = []
    for step in range(steps):
        training.backward(rank, world, step)
        for one in training.tensors:
            has = torch.tensor(float(one.grad is not None))
            dist.all_reduce(has, group=members)
            if has > 0:
                gradient = torch.zeros_like(one) if one.grad is None else one.grad
                reduced = gradient.detach().contiguous()
                dist.all_reduce(reduced, dist.ReduceOp.AVG, group=members)
                one.grad = gradient.copy_(reduced)
        norms.append(values([one.grad for one in training.tensors if one.grad is not None]))
        optimizer.step()
    return norms, values(training.tensors)


def both(case: str, steps: int, kind: str, servers: int, gradients: bool) -> Any:
    store = common_store()
    members = dist.new_group(list(range(servers, dist.get_world_size())))
    if dist.get_rank() < servers:
        cls, options = OPTIMIZERS[kind]
        serve_rank(
            Training(case).groups,
            cls,
            workers=dist.get_world_size() - servers,
            index=dist.get_rank(),
            servers=servers,
            store=store,
            name=case,
            **options,
        )
        dist.barrier()
        return None
    norms, weights = by_server(case, steps, servers, store, gradients)
    expected_norms, expected = by_all_reduce(case, steps, kind, servers, members)
    dist.barrier()
    moved = differing(expected, values(Training(case).tensors))
    assert all(one.isfinite().all() for one in weights)
    different = [differing(*two) for two in zip(norms, expected_norms, strict=True)]
    return differing(weights, expected), different if gradients else [], moved


def check(pool: Pool, case: str, steps: int, kind: str, workers: int, servers: int) -> list[int]:
    """Returns the numbers of the parameters that have moved."""
    ranks = pool.run(
        both, case, steps, kind, servers, True, world=workers + servers, timeout=60 + steps
    )
    for weights, gradients, _ in ranks[servers:]:
        assert weights == []
        assert gradients == [[]] * steps
    moved: list[int] = ranks[-1][2]
    return moved


@pytest.mark.parametrize(("workers", "servers", "kind"), [(2, 1, "adamw"), (3, 2, "sgd")])
def test_the_bits_are_those_of_all_reduce(
    pool: Pool, workers: int, servers: int, kind: str
) -> None:
    check(pool, "mlp", 20, kind, workers, servers)


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("case", ["mlp", "gpt", "cnn", "odd"])
def test_the_bits_are_those_of_all_reduce_after_100_steps(
    pool: Pool, case: str, kind: str, workers: int, servers: int
) -> None:
    check(pool, case, 100, kind, workers, servers)


@pytest.mark.parametrize(
    "case",
    ["bfloat16", "float64", "mixed", "channels last", "sizes", "empty", "groups", "frozen"],
)
def test_parameters_of_all_kinds(pool: Pool, case: str) -> None:
    check(pool, case, 4, "sgd", 2, 1)


@pytest.mark.parametrize("case", ["lacking", "never"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_some_workers_or_all_lack(pool: Pool, case: str, kind: str) -> None:
    """From some it counts as zero. From all, the parameter stays, with momentum and decay, too."""
    check(pool, case, 6, kind, 3, 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "case",
    ["bfloat16", "float64", "mixed", "channels last", "sizes", "empty", "groups", "frozen"],
)
def test_parameters_of_all_kinds_on_two_servers(pool: Pool, case: str, kind: str) -> None:
    moved = check(pool, case, 20, kind, 3, 2)
    assert moved == {
        "empty": [1],
        "frozen": [0, 2, 3],
        "sizes": list(range(153)),
        "groups": [0, 1, 2, 3],
    }.get(case, moved)


def scheduled(workers: int) -> Any:
    """A learning rate that changes after each update, on the server and beside all_reduce."""
    store = common_store()
    members = dist.new_group(list(range(1, workers + 1)))
    training = Training("groups")
    make_schedule = torch.optim.lr_scheduler.OneCycleLR
    if dist.get_rank() == 0:
        server_schedule: list[Any] = []

        def on_update(server: Any) -> None:
            if not server_schedule:
                server_schedule.append(make_schedule(server.optimizer, 0.3, total_steps=12))
            server_schedule[0].step()

        cls = torch.optim.SGD
        serve_rank(
            training.groups, cls, workers=workers, store=store, on_update=on_update, lr=0.2,
            momentum=0.5,
        )  # fmt: skip
        return None
    rank = dist.get_rank() - 1
    optimizer = worker(training.groups, store=store, rank=rank)
    alone = Training("groups")
    stepper = torch.optim.SGD(alone.groups, lr=0.2, momentum=0.5)  # type: ignore[arg-type]
    schedule = None
    for step in range(10):
        training.backward(rank, workers, step)
        optimizer.step()
        alone.backward(rank, workers, step)
        for one in alone.tensors:
            assert one.grad is not None
            dist.all_reduce(one.grad, dist.ReduceOp.AVG, group=members)
        stepper.step()
        schedule = schedule or make_schedule(stepper, 0.3, total_steps=12)
        schedule.step()
    optimizer.close()
    return differing(training.tensors, alone.tensors)


def test_a_schedule_of_the_learning_rate_in_on_update(pool: Pool) -> None:
    _, *found = pool.run(scheduled, 2, world=3)
    assert found == [[], []]
