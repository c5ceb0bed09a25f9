"""What ranks need for the same bits at every world size, checked before anything has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm._torch.groups import ours
from dreamcomm.invariant.checks import check_module
from dreamcomm.ranks.agree import gather_objects
from dreamcomm.ranks.parameters import TrainedParameter

__all__ = ["check_equal", "check_shards", "check_threads"]

ARGUMENT = "invariant_shards"


def check_shards(
    shards: Any,
    seed: Any,
    group: dist.ProcessGroup,
    module: nn.Module,
    parameters: Sequence[TrainedParameter],
    what: str,
) -> int:
    """Refuses what would make the bits depend on the number of ranks. Collective.

    Args:
        shards: the argument ``invariant_shards``; None: 0, and nothing is checked.
        seed: of random numbers.
        group: its ranks have the shards.
        module: is looked through.
        parameters: that may be trained.
        what: the way of training, for errors.

    Returns:
        The number of shards; 0: none.

    Raises:
        ValueError: the number, the module, the parameters or the group cannot have the same bits at
            every world size; or ranks gave other numbers. On all ranks.
    """
    if shards is None:
        return 0
    problem = _problem(shards, seed, group, parameters)
    try:
        check_module(module, what)
    except ValueError as error:
        problem = problem or str(error).removeprefix(f"{what}: ")
    for rank, text in enumerate(gather_objects(group, problem)):
        if text:
            raise ValueError(f"{what}: rank {rank}: {text}")
    check_equal(group, {ARGUMENT: shards, "seed": seed, "threads": torch.get_num_threads()}, what)
    return int(shards)


def _problem(
    shards: Any, seed: Any, group: dist.ProcessGroup, parameters: Sequence[TrainedParameter]
) -> str:
    world = dist.get_world_size(group)
    is_whole = isinstance(shards, int) and not isinstance(shards, bool)
    if not is_whole or shards < 1 or shards & (shards - 1):
        return f"expected {ARGUMENT} to be a power of two, got {shards!r}"
    if shards % world:
        return (
            f"expected a number of ranks that divides {ARGUMENT}={shards}, got {world}: take a "
            "power of two of at most that many"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        return f"expected seed to be a whole number, got {seed!r}"
    for one in parameters:
        if one.parameter.device.type != "cpu":
            return f"{ARGUMENT} is for CPUs, got parameter {one.name!r} on {one.parameter.device}"
        if one.sparse:
            return (
                f"parameter {one.name!r} has sparse gradients, which ranks add in another order: "
                f"leave sparse=True out with {ARGUMENT}"
            )
        if one.parameter.is_complex():
            return f"parameter {one.name!r} is complex, which {ARGUMENT} does not add"
    return "" if world == 1 else _group_problem(group)


def _group_problem(group: dist.ProcessGroup) -> str:
    backend = ours(group, torch.device("cpu"))
    if backend is None or not backend.hosts:
        return (
            f"{ARGUMENT} needs a group of the backend dreamcomm, which adds in a fixed order, got "
            f"one of {dist.get_backend(group)}"
        )
    if backend.options.internode_dtype == "16bit":
        return f"{ARGUMENT} adds in float32, got a group with internode_dtype='16bit': leave it out"
    hosts = backend.hosts
    size = len(hosts[0])
    in_order = [rank for host in hosts for rank in host] == list(range(dist.get_world_size(group)))
    if not in_order or any(len(host) != size for host in hosts) or size & (size - 1):
        return (
            f"{ARGUMENT} needs hosts of neighbouring ranks, all of the same power of two of ranks, "
            f"got {hosts}"
        )
    return ""


def check_equal(group: dist.ProcessGroup, facts: Mapping[str, Any], what: str) -> None:
    """Raises RuntimeError where ranks differ in any of these. Collective."""
    everyone = gather_objects(group, dict(facts))
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                raise RuntimeError(
                    f"{what}: the ranks differ in {name}: {value} on rank 0, and "
                    f"{theirs.get(name)} on rank {rank}. {_advice(name)}"
                )


def check_threads(threads: int, who: str) -> None:
    """Raises RuntimeError where this process computes with another number of threads."""
    now = torch.get_num_threads()
    if now != threads:
        raise RuntimeError(
            f"{who}: expected {threads} threads, as when the run began, got {now}: gradients "
            f"depend on them. Call torch.set_num_threads({threads}), or set OMP_NUM_THREADS, "
            "before"
        )


def _advice(name: str) -> str:
    if name == "threads":
        return "Call torch.set_num_threads() with one number on all, as gradients depend on it"
    return "Give all ranks the same, and load the same state on all"
