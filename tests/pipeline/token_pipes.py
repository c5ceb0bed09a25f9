"""Pipelines whose gradients are means over tokens, beside one process on all tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer
from pipeline.pipe_models import FEATURES, MODELS, make

OPTIMIZER_STEPS, WINDOW, MICRO, ROWS, RATE = 3, 3, 2, 5, 0.05
Found = tuple[list[float], dict[str, Tensor]]  # norms, and weights in the end


@dataclass
class Way:
    """A pipeline, its optimizer, and what has to live as long."""

    pipe: Pipeline
    optimizer: Any
    keeps: Any
    mesh: DeviceMesh | None

    @property
    def share(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank("data")

    @property
    def shares(self) -> int:
        return 1 if self.mesh is None else self.mesh["data"].size()


def alone(pipe: Pipeline, group: Any) -> tuple[Any, Any]:
    return torch.optim.SGD(pipe.parameters(), lr=RATE), None


def ddp(reduce: str) -> Callable[..., tuple[Any, Any]]:
    def wrapped(pipe: Pipeline, group: Any) -> tuple[Any, Any]:
        wrapper = dreamcomm.DistributedDataParallel(pipe.module, process_group=group, reduce=reduce)
        return alone(pipe, group)[0], wrapper

    return wrapped


def replicated(pipe: Pipeline, group: Any) -> tuple[Any, Any]:
    return alone(pipe, group)[0], dreamcomm.replicate(pipe.module, group=group, reduce="tokens")


def zero(stage: int, reduce: str | bool, over: str = "") -> Callable[..., tuple[Any, Any]]:
    def sharded(pipe: Pipeline, group: Any) -> tuple[Any, Any]:
        keeps = ddp(over)(pipe, group)[1] if over else None
        optimizer = ZeroOptimizer(
            pipe.parameters(), torch.optim.SGD, group, stage=stage, reduce=reduce, lr=RATE
        )
        return optimizer, keeps

    return sharded


WAYS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "alone": alone,
    "ddp-mean": ddp("mean"),
    "ddp-sum": ddp("sum"),
    "ddp-tokens": ddp("tokens"),
    "replicate-tokens": replicated,
    "zero1-mean": zero(1, True),
    "zero2-mean": zero(2, True),
    "zero1-tokens": zero(1, "tokens"),
    "zero2-tokens": zero(2, "tokens"),
    "ddp-zero2-tokens": zero(2, True, "tokens"),
}


def close(found: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def world_of(name: str) -> int:
    return 2 if name == "alone" else 4


# Losses are sums of rows' losses times their weights, and 0 is the weight of a row that is ignored.


def batch(case: str, share: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of a pipeline's rows."""
    generator = torch.Generator().manual_seed(100 * step + share)
    x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (FEATURES, 5))
    drawn = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    weights = drawn if case == "weights" else (drawn > 0.3).double()
    idle = (case == "idle" and share == 1) or (case == "none" and step // WINDOW == 1)
    if idle or step % WINDOW == 1:
        weights = torch.zeros_like(weights)
    if case == "uneven" and share == 0:
        weights[:3] = 0  # the first micro-batch counts nothing
    return x, y, weights


def counted(case: str, weights: Tensor) -> float | int | Tensor:
    if case == "weights":
        return weights.sum()
    count = int(weights.sum())
    return count * (2**24 + 1) if case == "large" else count


def summed(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return (output - target[0]).square().sum(1) @ target[1]


def paired(case: str) -> Callable[..., tuple[Tensor, Any]]:
    return lambda output, target: (summed(output, target), counted(case, target[1]))


def made(name: str, loss_fn: Any, model: str = "mlp", **options: Any) -> Way:
    mesh = None
    if name != "alone":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    options = options if "scale_grads" in options else {"reduce": "tokens"} | options
    pipe = Pipeline(make(model, torch.float64), MICRO, loss_fn=loss_fn, mesh=mesh, **options)
    optimizer, keeps = WAYS[name](pipe, None if mesh is None else mesh["data"].get_group())
    return Way(pipe, optimizer, keeps, mesh)


def step(way: Way, case: str, number: int, counts: bool, *, reduces: bool) -> None:
    x, y, weights = batch(case, way.share, number)
    if counts:
        way.pipe.count(counted(case, weights))
    with nullcontext() if reduces else way.pipe.no_sync():
        way.pipe.step(x, target=(y, weights))


def trained(name: str, case: str, counts: bool, options: dict[str, Any]) -> Found:
    """Some optimizer's steps, each after a window of steps; ``counts``: pipe.count() is called."""
    way = made(name, summed if counts else paired(case), **options)
    norms = []
    for number in range(OPTIMIZER_STEPS * WINDOW):
        if number % WINDOW == 0:
            way.optimizer.zero_grad(set_to_none=number % 2 == 0)
        is_last = number % WINDOW == WINDOW - 1
        step(way, case, number, counts, reduces=is_last)
        if is_last:
            norms.append(float(way.pipe.clip_grad_norm_(1e9)))
            way.optimizer.step()
    return norms, {k: v.detach().clone() for k, v in way.pipe.named_parameters()}


def window_gradients(module: nn.Module, case: str, steps: list[int], shares: int) -> float:
    """Sets one process's gradients of some steps' rows, divided once; returns their norm."""
    parts = [batch(case, share, number) for number in steps for share in range(shares)]
    x, y, weights = (torch.cat(some) for some in zip(*parts, strict=True))
    module.zero_grad()
    summed(module(x), (y, weights)).backward()
    total = sum(float(counted(case, one)) for _, _, one in parts)
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(total if total else float("inf"))
    return float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))


def by_one_process(case: str, shares: int) -> Found:
    module = make("mlp", torch.float64)
    optimizer, norms = torch.optim.SGD(module.parameters(), lr=RATE), []
    for window in range(OPTIMIZER_STEPS):
        steps = list(range(window * WINDOW, (window + 1) * WINDOW))
        norms.append(window_gradients(module, case, steps, shares))
        optimizer.step()
    return norms, {k: v.detach() for k, v in module.named_parameters()}


def tied_gradients(name: str) -> dict[str, Tensor]:
    """Of two steps of a model whose first and last stage share a weight."""
    way = made(name, next_tokens, model="gpt")
    for number in range(2):
        x, y = tokens(number, way.share)
        with nullcontext() if number else way.pipe.no_sync():
            way.pipe.step(x, target=y)
    way.pipe.clip_grad_norm_(1e9)  # reduces, at stage 1 of ZeRO
    return {k: v.grad.clone() for k, v in way.pipe.named_parameters() if v.grad is not None}


def tokens(number: int, share: int) -> tuple[Tensor, Tensor]:
    x, y = MODELS["gpt"][2](10 * number + share, 4, torch.float64)
    y = y.clone()
    y[: 2 * share + number, 1:] = -100
    return x, y


def next_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=-100
    )
    return loss, (target != -100).sum()
