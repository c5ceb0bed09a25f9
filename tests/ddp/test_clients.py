"""What torch's own code does with torch's DistributedDataParallel, it does with dreamcomm's: join,
checkpoints and torch.compile. Pipelines are in test_pipelines.py."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dreamcomm
from helpers.pool import Pool
from training.models import WIDTH, batch, loss_of, sgd, shard

WRAPPERS: dict[str, type[nn.parallel.DistributedDataParallel]] = {
    "dreamcomm": dreamcomm.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


class Net(nn.Module):
    """Some gradients are reduced where they are (those of `middle`), the others in buckets."""

    def __init__(self, width: int = 192, norm: bool = False, rare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.middle = nn.Linear(width, width)
        self.rare = nn.Linear(width, width) if rare else None
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, rarely: bool = False) -> Tensor:
        x = torch.tanh(self.middle(self.norm(torch.tanh(self.first(x)))))
        if self.rare is not None and rarely:
            x = x + self.rare(x)
        out: Tensor = self.last(x)
        return out


def own(step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step's batch."""
    x, y = (shard(part, dist.get_rank(), dist.get_world_size()) for part in batch(step))
    return x, y


def alone(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    """Trains on the rows of all ranks."""
    for step in range(first, first + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


# Join: each rank has two steps more than the rank before it.

UNEVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "none_at_first": {"fewest": 0},
    "buffers": {"norm": True},
    "no_sync": {"micro": 3},
    "static_graph": {"options": {"static_graph": True}},
    "unused": {"rare": True, "options": {"find_unused_parameters": True}},
}


def uneven_steps(
    wrapper: str,
    divide: bool,
    fewest: int = 2,
    norm: bool = False,
    rare: bool = False,
    micro: int = 1,
    sharded: bool = False,
    options: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Parameters and buffers after a join, and an even step after it.

    Under SGD without momentum: where no rank with data uses a parameter, torch's class may leave
    zeros in place of no gradient, as it counts what a rank without data used at last.
    """
    net = Net(norm=norm, rare=rare)
    model = WRAPPERS[wrapper](net, **(options or {}))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imports for a second

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    rank = dist.get_rank()

    def step_once(step: int) -> None:
        optimizer.zero_grad()
        x, y = own(step)
        parts = list(zip(x.chunk(micro), y.chunk(micro), strict=True))
        for number, (part, wanted) in enumerate(parts):
            with ExitStack() as stack:
                if number < micro - 1:
                    stack.enter_context(model.no_sync())
                used = {"rarely": (step + rank) % 3 == 1} if rare else {}
                loss_of(model(part, **used), wanted).backward()
        optimizer.step()

    joined = [model, optimizer] if sharded else [model]
    with Join(joined, divide_by_initial_world_size=divide):
        for step in range(fewest + 2 * rank):
            step_once(step)
    step_once(9)
    return [one.detach().clone() for one in model.state_dict().values()]


def joins(case: str, divide: bool) -> tuple[list[Tensor], list[Tensor]]:
    how = UNEVEN.get(case, {"sharded": True})
    ours, torchs = (uneven_steps(wrapper, divide, **how) for wrapper in WRAPPERS)
    return ours, torchs


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("divide", [True, False], ids=["by_all", "by_active"])
@pytest.mark.parametrize(
    "case",
    [*UNEVEN, pytest.param("sharded_optimizer", marks=pytest.mark.long)],
)
def test_join(pool: Pool, case: str, divide: bool, world: int) -> None:
    for ours, torchs in pool.run(joins, case, divide, world=world):
        if world == 2:  # of more, torch's class divides before it adds
            assert all(map(torch.equal, ours, torchs))
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


def end_early(wrapper: str) -> tuple[str, list[Tensor]]:
    """The error of the rank, and its gradients in a step after it."""
    model = WRAPPERS[wrapper](Net())
    said = "none"
    try:
        with Join([model], throw_on_early_termination=True):
            for step in range(1 + dist.get_rank()):
                x, y = own(step)
                loss_of(model(x), y).backward()
    except RuntimeError as error:
        said = str(error)
    model.zero_grad()
    x, y = own(2)
    loss_of(model(x), y).backward()
    return said, [p.grad for p in model.parameters() if p.grad is not None]


def both_end_early() -> list[tuple[str, list[Tensor]]]:
    return [end_early(wrapper) for wrapper in WRAPPERS]


def test_join_raises_on_all_ranks_where_one_has_no_data(pool: Pool) -> None:
    for (said, ours), (said_torch, torchs) in pool.run(both_end_early):
        assert said == said_torch
        assert "exhausted" in said
        assert all(map(torch.equal, ours, torchs))


# Checkpoints.


def saved_and_loaded(folder: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Weights of one process that goes on from a checkpoint of the ranks, and of one that trained
    all steps; and the checkpoint's names."""
    model: nn.Module = dreamcomm.DistributedDataParallel(torch.compile(Net(), backend="eager"))
    optimizer = sgd(model.parameters())
    for step in range(2):
        x, y = own(step)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    loaded = Net()
    optimizer = sgd(loaded.parameters())
    of_loaded, of_optimizer = get_state_dict(loaded, optimizer)
    dcp.load({"model": of_loaded, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(loaded, optimizer, model_state_dict=of_loaded, optim_state_dict=of_optimizer)
    alone(2, loaded, optimizer, first=2)
    straight = Net()
    alone(4, straight, sgd(straight.parameters()))
    names = [*of_model, *of_optimizer["state"]]
    return list(loaded.parameters()), list(straight.parameters()), names


def test_checkpoints_have_the_modules_own_names(pool: Pool, tmp_path: Any) -> None:
    for loaded, straight, names in pool.run(saved_and_loaded, str(tmp_path)):
        torch.testing.assert_close(loaded, straight, rtol=1e-4, atol=1e-6)
        assert names == 2 * list(Net().state_dict())


# torch.compile.


def compiled(how: str, wrapper: str, micro: int) -> tuple[list[Tensor], int]:
    """Weights after some steps, and how many graphs were compiled."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    net: Any = Net(width=520, norm=True)  # of more than one bucket of 1 MiB
    if how == "inside":
        net = torch.compile(net, backend=backend)
    model = wrapped = WRAPPERS[wrapper](net, bucket_cap_mb=1)
    if how == "outside":
        model = torch.compile(wrapped, backend=backend)
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        x, y = own(step)
        for number, part in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            with ExitStack() as stack:
                if number < micro - 1:
                    stack.enter_context(wrapped.no_sync())
                loss_of(model(part[0]), part[1]).backward()
        optimizer.step()
    return [weight.detach().clone() for weight in model.parameters()], len(graphs)


def compile_both(how: str, micro: int) -> tuple[Any, Any, Any]:
    ours, torchs = (compiled(how, wrapper, micro) for wrapper in WRAPPERS)
    return ours, torchs, compiled("not", "torch", micro)[0]


@pytest.mark.parametrize("how", ["outside", "inside"])
def test_compile(pool: Pool, how: str) -> None:
    """Dynamo splits the graph at the buckets of both classes."""
    for (weights, graphs), (torchs, of_torchs), eager in pool.run(compile_both, how, 2):
        assert all(map(torch.equal, weights, torchs))
        torch.testing.assert_close(weights, eager, rtol=1e-4, atol=1e-6)
        assert graphs == of_torchs > 1
