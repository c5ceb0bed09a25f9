"""Ways of training whose gradients are means over tokens, beside one process on all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dreamcomm
from ddp.models import FEATURES, make
from dreamcomm.zero import ZeroOptimizer
from zero.units.sharding import shard

STEPS, MICRO, RATE = 4, 3, 0.05
Found = tuple[list[float], list[Tensor]]  # norms, and weights in the end


@dataclass(frozen=True)
class Way:
    """A way of training: ``counts`` has count(), no_sync() and clip_grad_norm_()."""

    module: nn.Module
    optimizer: Any
    counts: Any


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def ddp(module: nn.Module) -> Way:
    model = dreamcomm.DistributedDataParallel(module, reduce="tokens")
    return Way(model, _sgd(model.parameters()), model)


def replicated(module: nn.Module) -> Way:
    dreamcomm.replicate(module, reduce="tokens")
    return Way(module, _sgd(module.parameters()), module)


def zero(module: nn.Module, stage: int) -> Way:
    optimizer = ZeroOptimizer(
        module.parameters(), torch.optim.SGD, stage=stage, reduce="tokens", lr=RATE
    )
    return Way(module, optimizer, optimizer)


def under_ddp(module: nn.Module, stage: int) -> Way:
    model = dreamcomm.DistributedDataParallel(module, reduce="tokens")
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=stage, lr=RATE)
    return Way(model, optimizer, optimizer)


def sharded(module: nn.Module, **options: Any) -> Way:
    made = shard(module, reduce="tokens", **options)
    return Way(made, _sgd(made.parameters()), made)


def hybrid(module: nn.Module, **options: Any) -> Way:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return sharded(module, mesh=mesh, **options)


WAYS: dict[str, Callable[[nn.Module], Way]] = {
    "ddp": ddp,
    "replicate": replicated,
    "zero1": lambda module: zero(module, 1),
    "zero2": lambda module: zero(module, 2),
    "ddp-zero1": lambda module: under_ddp(module, 1),
    "ddp-zero2": lambda module: under_ddp(module, 2),
    "sharded": sharded,
    "gathered": lambda module: sharded(module, gather=True),
    "hybrid": hybrid,
    "hybrid-gathered": lambda module: hybrid(module, gather=True),
}


# What the ranks count.


def rows(case: str, rank: int, step: int, micro: int) -> int:
    """Rows of a rank's micro-batch."""
    if case == "idle" and rank == 1:
        return 0
    if case == "none" and step == 1:
        return 0
    return (2 * rank + 3 * micro + step) % 5


def counted(case: str, weights: Tensor) -> float | int | Tensor:
    """What a micro-batch counts: a tensor, a float or an int."""
    if case == "weights":
        return weights.sum()
    if case == "large":
        return len(weights) * (2**24 + 1)
    return len(weights)


def micro_batch(case: str, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of its rows, float64."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    count = rows(case, rank, step, micro)
    made = [torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (FEATURES, 5)]
    weights = torch.rand(8, generator=generator, dtype=torch.float64)
    if case != "weights":
        weights = torch.ones(8, dtype=torch.float64)
    return made[0][:count], made[1][:count], weights[:count]


def summed_loss(module: Any, x: Tensor, y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    loss = (module(x.to(dtype)).double() - y).square().sum(1) @ weights
    return loss.to(dtype) if dtype == torch.float64 else loss


# Training.


def clipped(counts: Any) -> float:
    return float(counts.clip_grad_norm_(1e9))


def whole(parameter: Tensor) -> Tensor:
    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach().clone()


def trained(way: Way, case: str, dtype: torch.dtype) -> Found:
    rank, norms = dist.get_rank(), []
    for step in range(STEPS):
        way.optimizer.zero_grad()
        for micro in range(MICRO):
            x, y, weights = micro_batch(case, rank, step, micro)
            with nullcontext() if micro == MICRO - 1 else way.counts.no_sync():
                loss = summed_loss(way.module, x, y, weights, dtype)
                way.counts.count(counted(case, weights))
                loss.backward()
        norms.append(clipped(way.counts))
        way.optimizer.step()
    return norms, [whole(one) for one in way.module.parameters()]


def all_counted(case: str, world: int, step: int) -> Iterator[float]:
    for rank in range(world):
        for micro in range(MICRO):
            yield float(counted(case, micro_batch(case, rank, step, micro)[2]))


def by_one_process(module: nn.Module, case: str, dtype: torch.dtype, world: int) -> Found:
    """The gradient of the sum over all tokens, divided once."""
    optimizer, norms = _sgd(module.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [
            micro_batch(case, rank, step, micro) for rank in range(world) for micro in range(MICRO)
        ]
        x, y, weights = (torch.cat(some) for some in zip(*parts, strict=True))
        summed_loss(module, x, y, weights, dtype).backward()
        total = sum(all_counted(case, world, step))
        for one in module.parameters():
            assert one.grad is not None
            one.grad.div_(total if total else float("inf"))
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 1e9)))
        optimizer.step()
    return norms, [one.detach() for one in module.parameters()]


def beside_one_process(name: str, case: str, dtype: torch.dtype) -> tuple[Found, Found]:
    world = dist.get_world_size()
    return (
        trained(WAYS[name](make("mlp", dtype)), case, dtype),
        by_one_process(make("mlp", dtype), case, dtype, world),
    )
