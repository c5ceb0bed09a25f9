"""What ZeroOptimizer refuses before anything has changed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dreamcomm._torch.overlap import same_memory
from dreamcomm.buckets.averages import Averages, averages_of
from dreamcomm.buckets.engine import BucketEngine
from dreamcomm.zero.engine import WHAT
from dreamcomm.zero.per_element import check_per_element
from dreamcomm.zero.rules import has_kernel
from dreamcomm.zero.shards import ParameterShard

__all__ = [
    "check_arguments",
    "check_groups",
    "check_held",
    "check_invariant",
    "check_memory",
    "check_parameters",
    "check_sharded",
    "refuse_own_gradients",
]


def check_arguments(
    optimizer_class: object,
    stage: object,
    overlap_with_ddp: bool,
    master_dtype: torch.dtype | None,
    reduce: bool | str | float,
    per_element: bool,
) -> Averages | None:
    """Raises for options that do not exist, or contradict each other.

    Returns:
        What gradients become; None: they are reduced elsewhere.
    """
    if overlap_with_ddp:
        raise NotImplementedError(
            f"{WHAT}: overlap_with_ddp is not supported; the step is one pass over shared memory, "
            "with nothing left to overlap: leave it out"
        )
    if stage not in (1, 2, 3):
        hint = "; stage 0 is the optimizer itself" if stage == 0 else ""
        raise ValueError(f"{WHAT}: expected stage 1, 2 or 3, got {stage!r}{hint}")
    averages = None if reduce is False else averages_of("mean" if reduce is True else reduce, WHAT)
    if averages is None and stage == 2:
        raise ValueError(
            f"{WHAT}: stage 2 keeps shards of the gradients that it reduces itself; with "
            "reduce=False use stage=1"
        )
    if master_dtype is not None and not (
        isinstance(master_dtype, torch.dtype) and master_dtype in (torch.float32, torch.float64)
    ):
        raise ValueError(
            f"{WHAT}: expected master_dtype to be torch.float32, torch.float64 or None, got "
            f"{master_dtype!r}"
        )
    check_per_element(optimizer_class, per_element, WHAT)
    return averages


def check_held(engine: BucketEngine, averages: Averages | None, reduce: object) -> None:
    """Raises where the DistributedDataParallel that holds the parameters reduces otherwise."""
    if reduce is True or averages is None or averages == engine.averages:
        return
    raise ValueError(
        f"{WHAT}: expected reduce as of the DistributedDataParallel that has the parameters, with "
        f"{engine.averages}, got reduce={reduce!r}: leave it out here"
    )


def check_invariant(inner: torch.optim.Optimizer, in_heaps: bool) -> None:
    """Raises where invariant_shards= would have torch's fused kernels step slices.

    Args:
        inner: steps the rows.
        in_heaps: this library's kernels do, if they know the optimizer.
    """
    if in_heaps and has_kernel(inner):
        return
    if any(group.get("fused") for group in inner.param_groups):
        raise ValueError(
            f"{WHAT}: torch's fused {type(inner).__name__} has other bits where a rank has other "
            "rows, so invariant_shards= takes its foreach or single-tensor form: leave fused=True "
            "out"
        )


def check_sharded(master_dtype: torch.dtype | None, reduce: object) -> None:
    """Raises for options that parameters of fully_shard do not have."""
    if master_dtype is not None:
        raise NotImplementedError(
            f"{WHAT}: master_dtype is not supported for parameters of fully_shard: keep "
            "parameters in float32, and use torch.autocast"
        )
    if reduce is not True:
        raise ValueError(
            f"{WHAT}: fully_shard reduces the gradients of its parameters itself, as its own "
            f"reduce= says: leave reduce={reduce!r} out here"
        )


def check_parameters(
    named: Sequence[tuple[str, torch.nn.Parameter]], master_dtype: torch.dtype | None
) -> list[list[int]]:
    """Raises for parameters that cannot be sharded together.

    Returns:
        The numbers of all of them, those with one memory together.
    """
    seen: dict[int, str] = {}
    for name, parameter in named:
        if id(parameter) in seen:
            raise ValueError(f"{WHAT}: {name!r} is given twice, also as {seen[id(parameter)]!r}")
        seen[id(parameter)] = name
        if not parameter.is_floating_point():
            raise ValueError(
                f"{WHAT}: expected parameters of floating-point types, got {name!r} of "
                f"{parameter.dtype}"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{WHAT}: {name!r} is a DTensor, whose optimizer state is sharded with it: give "
                "these parameters to the optimizer's own class"
            )
    devices = {parameter.device: name for name, parameter in reversed(named)}
    if len(devices) > 1:
        placed = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"{WHAT}: expected all parameters on one device, got {placed}")
    if not any(parameter.requires_grad for _, parameter in named):
        raise ValueError(f"{WHAT}: none of {len(named)} parameters requires a gradient")
    ties = same_memory(named, WHAT)
    for first, *others in ties:
        if others and master_dtype not in (None, named[first][1].dtype):
            raise ValueError(
                f"{WHAT}: {named[first][0]!r} and {named[others[0]][0]!r} share memory, and with "
                "master_dtype each would have a copy of its own: use one parameter in both places"
            )
    return ties


def check_groups(groups: object, given: Sequence[Sequence[torch.nn.Parameter]]) -> None:
    """Raises where groups have other parameters than the optimizer was given.

    Raises:
        RuntimeError: they were changed by hand.
    """
    now = groups if isinstance(groups, (list, tuple)) else [{"params": groups}]
    for number, (group, kept) in enumerate(zip_longest(now, given)):
        found = None if group is None else group.get("params")
        if not isinstance(found, (list, tuple)) or kept is None or not _are_same(found, kept):
            raise RuntimeError(
                f"rank {dist.get_rank()}: {WHAT}: param_groups[{number}] was changed by hand: "
                f"expected {_count(kept)}, got {_count(found)}{_others(found, kept)}. To add "
                "parameters call add_param_group(); to hold some back, set their grad to None and "
                "call requires_grad_(False); to train others or in another order, make a new "
                "optimizer"
            )


def refuse_own_gradients(group: dist.ProcessGroup) -> NoReturn:
    """Raises for a GradScaler that has looked at gradients of this rank alone."""
    raise RuntimeError(
        f"rank {dist.get_rank(group)}: torch.amp.GradScaler has looked for infinities in this "
        "rank's own gradients, as they are not averaged yet, so ranks could skip different "
        "steps: use dreamcomm.zero.GradScaler, which has the same arguments"
    )


def _are_same(found: Sequence[object], kept: Sequence[object]) -> bool:
    return len(found) == len(kept) and all(map(operator.is_, found, kept))


def _others(found: object, kept: object) -> str:
    return ", others or in another order" if _count(found) == _count(kept) else ""


def _count(parameters: object) -> str:
    if parameters is None:
        return "no such group"
    if not isinstance(parameters, (list, tuple)):
        return f"a {type(parameters).__name__}"
    return f"a list of {len(parameters)} parameters"


def check_memory(shards: Iterable[ParameterShard]) -> None:
    """Raises where a parameter has got other memory than its rows were taken of."""
    for one in shards:
        if one.has_moved():
            raise RuntimeError(
                f"{WHAT}: parameter {one.name!r} has got other memory since the optimizer was "
                "made, as by .data = ..., .to() or load_state_dict(assign=True); make the "
                "optimizer afterwards, or copy values in place"
            )
