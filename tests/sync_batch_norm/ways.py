"""A CNN with SyncBatchNorm in all ways of training, beside one process with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.pipeline.compute.batch_norm import DeferredBatchNorm
from dreamcomm.zero import ZeroOptimizer, fully_shard

STEPS, RATE = 20, 0.05
MICRO = 4  # micro-batches of a pipeline


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.second = nn.Sequential(nn.Conv2d(6, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12))
        self.head = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        repeats = self.checkpoints
        x = checkpoint(self.second, x, use_reentrant=False) if repeats else self.second(x)
        out: Tensor = self.head(F.relu(x).mean((2, 3)))
        return out


def make(*, checkpoints: bool = False) -> Cnn:
    torch.manual_seed(7)
    module = Cnn()
    module.checkpoints = checkpoints
    return module


def synchronised(module: nn.Module, group: dist.ProcessGroup | None = None) -> Any:
    return dreamcomm.convert_sync_batchnorm(module, group)


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, 1, 6, 5, generator=generator) * 2 + 1
    return x, torch.randint(5, (rows,), generator=generator)


def mine(data: Tensor, rows: list[int]) -> Tensor:
    rank = dist.get_rank()
    return data[sum(rows[:rank]) : sum(rows[: rank + 1])]


# Of each step the loss over all rows and the gradients' norm; in the end the buffers.
Found = tuple[list[float], list[float], list[Tensor]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


# Each returns the module, its optimizer and what clips.


def ddp(module: nn.Module) -> tuple[Any, Any, Any]:
    model = dreamcomm.DistributedDataParallel(module, reduce="sum")
    return model, sgd(model.parameters()), model


def torchs_ddp(module: nn.Module) -> tuple[Any, Any, Any]:
    model = nn.parallel.DistributedDataParallel(module)
    return model, sgd(model.parameters()), None


def replicated(module: nn.Module) -> tuple[Any, Any, Any]:
    dreamcomm.replicate(module, reduce="sum")
    return module, sgd(module.parameters()), module


def zero(module: nn.Module, stage: int) -> tuple[Any, Any, Any]:
    optimizer = ZeroOptimizer(
        module.parameters(), torch.optim.SGD, stage=stage, reduce="sum", lr=RATE, momentum=0.9
    )
    return module, optimizer, optimizer


def under_ddp(module: nn.Module, stage: int) -> tuple[Any, Any, Any]:
    model = dreamcomm.DistributedDataParallel(module, reduce="sum")
    optimizer = ZeroOptimizer(
        model.parameters(), torch.optim.SGD, stage=stage, lr=RATE, momentum=0.9
    )
    return model, optimizer, optimizer


def sharded(module: Any, **options: Any) -> tuple[Any, Any, Any]:
    for part in (module.first, module.second):
        fully_shard(part, **options).set_gradient_divide_factor(1.0)
    made: Any = fully_shard(module, **options)
    made.set_gradient_divide_factor(1.0)
    return made, sgd(made.parameters()), made


def hybrid(module: nn.Module) -> tuple[Any, Any, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return sharded(module, mesh=mesh)


WAYS: dict[str, Callable[[nn.Module], tuple[Any, Any, Any]]] = {
    "ddp": ddp,
    "replicate": replicated,
    "zero1": lambda module: zero(module, 1),
    "zero2": lambda module: zero(module, 2),
    "ddp-zero2": lambda module: under_ddp(module, 2),
    "sharded": sharded,
    "gathered": lambda module: sharded(module, gather=True),
    "hybrid": hybrid,
}


def one_process(rows: int, *, micro: int = 1, checkpoints: bool = False) -> Found:
    """All rows in one module; with micro-batches as a pipeline's, one after the other."""
    module, summed, norms = make(checkpoints=checkpoints), list[float](), list[float]()
    optimizer, deferred = sgd(module.parameters()), DeferredBatchNorm([module])
    for step in range(STEPS):
        x, y = batch(step, rows)
        optimizer.zero_grad()
        losses = []
        with deferred.step() if micro > 1 else nullcontext():
            for index, (a, b) in enumerate(pipeline_parts(x, y, micro)):
                with deferred.at(index):
                    loss = F.cross_entropy(module(a), b) / micro
                    loss.backward()
                losses.append(float(loss))
        deferred.commit()
        summed.append(sum(losses))
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 1e9)))
        optimizer.step()
    return summed, norms, [one.clone() for one in module.buffers()]


def pipeline_parts(x: Tensor, y: Tensor, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of two pipelines side by side, of which each has half of the rows."""
    if micro == 1:
        yield x, y
        return
    halves = [zip(a.chunk(micro), b.chunk(micro), strict=True) for a, b in halved(x, y)]
    for pairs in zip(*halves, strict=True):
        yield torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def halved(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(2), y.chunk(2), strict=True))


def on_ranks(way: str, rows: list[int], *, checkpoints: bool = False) -> tuple[Found, Found]:
    """What ranks with these rows have found, and one process."""
    module, optimizer, clips = WAYS[way](synchronised(make(checkpoints=checkpoints)))
    losses, norms = list[float](), list[float]()
    for step in range(STEPS):
        x, y = batch(step, sum(rows))
        optimizer.zero_grad()
        loss = F.cross_entropy(module(mine(x, rows)), mine(y, rows), reduction="sum") / sum(rows)
        loss.backward()
        norms.append(float(clips.clip_grad_norm_(1e9)))
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    found = losses, norms, [one.clone() for one in module.buffers()]
    return found, one_process(sum(rows), checkpoints=checkpoints)


def in_pipelines(schedule: str, how: str, rows: int) -> tuple[Found, Found]:
    """Two pipelines on two ranks each; the one process has the buffers of this rank's stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    module = synchronised(make(), group)
    stages = [module.first, nn.ReLU(), module.second, Pooled(module.head)]
    of_places = [[0, 1], [2]]  # the layers of each rank
    if schedule != "interleaved1f1b":
        stages = [stages[0], nn.Sequential(*stages[1:])]
        of_places = [[0], [1, 2]]
    pipe = Pipeline(
        stages,
        MICRO,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        mesh=mesh,
        loss="all",
        checkpoint=how == "checkpoint",
        seed=1,
    )
    keep: Any = None
    if how == "zero2":
        optimizer: Any = ZeroOptimizer(
            pipe.parameters(), torch.optim.SGD, group, stage=2, lr=RATE, momentum=0.9
        )
    else:
        keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=group)
        optimizer = sgd(pipe.parameters())
    summed, norms = list[float](), list[float]()
    for step in range(STEPS):
        x, y = halved(*batch(step, rows))[share]
        optimizer.zero_grad()
        losses: list[Tensor] = []
        pipe.step(x, target=y, losses=losses)
        whole = torch.stack(losses).mean()
        dist.all_reduce(whole)
        summed.append(float(whole) / dist.get_world_size())
        norms.append(float(pipe.clip_grad_norm_(1e9)))
        optimizer.step()
    del keep
    found = summed, norms, [one.clone() for one in pipe.module.buffers()]
    *numbers, buffers = one_process(rows, micro=MICRO)
    layers = [buffers[3 * i : 3 * i + 3] for i in range(3)]
    own = of_places[mesh.get_local_rank("pipe")]
    return found, (*numbers, [one for i in own for one in layers[i]])


class Pooled(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(x).mean((2, 3)))
        return out
