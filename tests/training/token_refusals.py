"""Counts that one rank leaves out or gives twice, in all ways of training, and the step after."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dreamcomm
from ddp.models import make
from dreamcomm.buckets.protocol import is_sharded
from dreamcomm.zero import ZeroOptimizer
from training.token_means import RATE, WAYS, Way, micro_batch, summed_loss, whole

CASE = "uneven"
FAULTS = ["missing", "twice", "missing under no_sync()", "uncleared"]


def over_gloo(name: str) -> Way:
    """A way whose group is Gloo's, in a world of dreamcomm's."""
    module, group = make("mlp", torch.float64), dist.new_group(backend="gloo")
    if name == "ddp":
        model = dreamcomm.DistributedDataParallel(module, process_group=group, reduce="tokens")
        return Way(model, torch.optim.SGD(model.parameters(), lr=RATE), model)
    optimizer = ZeroOptimizer(
        module.parameters(), torch.optim.SGD, group, stage=int(name[-1]), reduce="tokens", lr=RATE
    )
    return Way(module, optimizer, optimizer)


def made(name: str, gloo: bool = False, module: nn.Module | None = None) -> Way:
    return over_gloo(name) if gloo else WAYS[name](module or make("mlp", torch.float64))


def run_pass(
    way: Way, step: int, micro: int, counts: int = 1, *, reduces: bool, last: bool = True
) -> None:
    """A forward and backward pass; ``counts``: how often it is counted before."""
    x, y, weights = micro_batch(CASE, dist.get_rank(), step, micro)
    with nullcontext() if reduces else way.counts.no_sync():
        loss = summed_loss(way.module, x, y, weights, torch.float64)
        for _ in range(counts):
            way.counts.count(len(weights))
        loss.backward()
    if reduces and last:
        way.counts.reduce_gradients()  # ZeRO's stage 1 does so here, or in its step


def own_gradients(passes: list[tuple[int, int]]) -> list[Tensor]:
    """This rank's sums of some passes' gradients, in a module of its own."""
    module = make("mlp", torch.float64)
    for step, micro in passes:
        batch = micro_batch(CASE, dist.get_rank(), step, micro)
        summed_loss(module, *batch, torch.float64).backward()
    return [one.grad for one in module.parameters() if one.grad is not None]


def trained_right(way: Way, weights: list[Tensor], steps: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Weights after more steps of two passes, and those of one process, which trains `weights`."""
    module = make("mlp", torch.float64)
    with torch.no_grad():
        for one, weight in zip(module.parameters(), weights, strict=True):
            one.copy_(weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in steps:
        way.optimizer.zero_grad()
        run_pass(way, step, 0, reduces=False)
        run_pass(way, step, 1, reduces=True, last=False)
        way.optimizer.step()
        expected_gradients(module, [(step, 0), (step, 1)])
        optimizer.step()
    found = [whole(one) for one in way.module.parameters()]
    return list(zip(found, [one.detach() for one in module.parameters()], strict=True))


def expected_gradients(module: nn.Module, passes: list[tuple[int, int]]) -> None:
    """Sets one process's gradients of all ranks' passes."""
    ranks = range(dist.get_world_size())
    parts = [micro_batch(CASE, rank, *one) for rank in ranks for one in passes]
    x, y, weights = (torch.cat(some) for some in zip(*parts, strict=True))
    module.zero_grad()
    summed_loss(module, x, y, weights, torch.float64).backward()
    total = sum(len(one) for _, _, one in parts)
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(total)


def shown(way: Way) -> list[Tensor | None]:
    """This rank's gradients; None: there is none, or it is in shards that are no tensor."""
    found = [one.grad for group in way.optimizer.param_groups for one in group["params"]]
    return [None if one is None or is_sharded(one) else local(one).clone() for one in found]


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def at_fault(name: str, fault: str, gloo: bool = False) -> str:
    """The error of a step that one rank counts wrongly; then a right step."""
    way, guilty = made(name, gloo), dist.get_world_size() - 1
    is_guilty = dist.get_rank() == guilty
    passes = [(0, 0), (0, 1)]
    if fault == "uncleared":
        run_pass(way, 0, 0, reduces=True)
        if not is_guilty:
            way.optimizer.zero_grad()
        passes = [(0, 1)]
    before, weights = shown(way), [whole(one) for one in way.module.parameters()]
    text = ""
    try:
        if fault != "uncleared":
            run_pass(way, 0, 0, int(not (is_guilty and "under" in fault)), reduces=False)
        counts = {"missing": 0, "twice": 2}.get(fault, 1) if is_guilty else 1
        run_pass(way, 0, 1, counts, reduces=True)
    except RuntimeError as error:
        text = str(error)
    check_nothing_moved(way, name, before, passes)
    for found, expected in trained_right(way, weights, [2, 3]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return text


def check_nothing_moved(
    way: Way, name: str, before: list[Tensor | None], passes: list[tuple[int, int]]
) -> None:
    """Gradients are this rank's own sums on top of what was there."""
    is_apart = name.startswith(("sharded", "gathered", "hybrid"))
    for now, was, own in zip(shown(way), before, own_gradients(passes), strict=True):
        if is_apart or name.endswith("zero2"):
            assert now is None or was is None or torch.equal(now, was)
            continue
        assert now is not None
        torch.testing.assert_close(now, own if was is None else was + own, rtol=1e-13, atol=1e-13)
