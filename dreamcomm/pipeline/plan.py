"""What a pipeline is made of, decided before any message: stages, schedule, names."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.pipeline.errors import Failure, PipelineError, text_of
from dreamcomm.pipeline.layout import Layout
from dreamcomm.pipeline.schedule import Schedule, check, make_schedule
from dreamcomm.pipeline.split import Splittable, StagePart, choose_cuts, make_parts
from dreamcomm.pipeline.tied import check_memory

__all__ = ["Asked", "Plan", "agreed_plan", "stage_parameters"]

TAGS = 1 << 24  # tags of pipelines are drawn from these; users' own are small numbers


@dataclass(frozen=True)
class Asked:
    """What the user asks for; see :class:`Pipeline`."""

    whole: Splittable
    microbatches: int
    schedule: str | Schedule
    stages: int | None
    split: str | Sequence[int]
    costs: Sequence[float] | None
    blocks: str | Sequence[str] | None
    seed: int | None
    options: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What all ranks have agreed on.

    Attributes:
        parts: of all stages.
        schedule: checked.
        seed: of random states.
        tag: the first of the channel's two.
    """

    parts: list[StagePart]
    schedule: Schedule
    seed: int
    tag: int


def agreed_plan(asked: Asked, layout: Layout) -> Plan:
    """Makes the plan, the same on all ranks. Collective.

    Cuts, the seed and the tag are rank 0's. An error of one rank is raised on all.

    Raises:
        ValueError: the stages, the schedule and the ranks do not fit together; ranks ask for
            different things; stages on different ranks have parameters that share memory.
    """
    first = _exchanged(layout, lambda: _choices(asked, layout))[0]
    cuts, seed, tag = first["cuts"], first["seed"], first["tag"]
    made: list[Plan] = []

    def describe() -> list[str]:
        parts = make_parts(asked.whole, cuts, blocks=asked.blocks)
        schedule = _schedule(asked, layout, len(parts))
        check_memory([stage_parameters(part) for part in parts], schedule.rank_of)
        made.append(Plan(parts, schedule, seed, tag))
        return _lines(asked, parts, schedule)

    _check_equal(_exchanged(layout, describe))
    return made[0]


def _choices(asked: Asked, layout: Layout) -> dict[str, Any]:
    cuts = choose_cuts(
        asked.whole, _stage_count(asked, layout), asked.split, asked.costs, blocks=asked.blocks
    )
    seed = torch.initial_seed() if asked.seed is None else asked.seed
    return {"cuts": cuts, "seed": seed, "tag": TAGS + 2 * secrets.randbelow(TAGS)}


def _stage_count(asked: Asked, layout: Layout) -> int:
    if asked.microbatches < 1:
        raise ValueError(f"expected n_microbatches of at least 1, got {asked.microbatches}")
    ranks = len(layout.peers)
    if isinstance(asked.schedule, Schedule):
        given: int | None = asked.schedule.stages
    elif not isinstance(asked.split, str):
        given = len(asked.split) + 1
    elif isinstance(asked.whole, nn.Module) and not isinstance(asked.whole, nn.ModuleList):
        given = None
    else:
        given = len(asked.whole)
    if asked.stages is not None and given is not None and asked.stages != given:
        raise ValueError(f"stages={asked.stages}, but the schedule, split or list has {given}")
    several = str(asked.schedule).lower() == "interleaved1f1b"
    count = asked.stages or given or (2 * ranks if several else ranks)
    if count % ranks and not isinstance(asked.schedule, Schedule):
        raise ValueError(
            f"{count} stages do not divide among the {ranks} ranks of the pipeline: each rank has "
            "equally many"
        )
    return count


def _schedule(asked: Asked, layout: Layout, stages: int) -> Schedule:
    ranks = len(layout.peers)
    given = asked.schedule
    if isinstance(given, str):
        made = make_schedule(given, ranks, stages, asked.microbatches)
        check(made)
        return made
    if (given.world, given.stages, given.microbatches) != (ranks, stages, asked.microbatches):
        raise ValueError(
            f"the schedule {given.name!r} is for {given.world} ranks, {given.stages} stages and "
            f"{given.microbatches} micro-batches, and the pipeline has {ranks}, {stages} and "
            f"{asked.microbatches}"
        )
    check(given)
    return given


# What ranks have to have in common.


def _exchanged(layout: Layout, make: Any) -> list[Any]:
    """What ``make`` returns, of all ranks. Raises on all where it raises on one."""
    try:
        mine: Any = make()
        error = None
    except Exception as raised:
        mine, error = None, raised
    failure = None
    if error is not None:
        failure = Failure(dist.get_rank(layout.group), type(error).__name__, text_of(error))
    everyone: list[Any] = [None] * dist.get_world_size(layout.group)
    dist.all_gather_object(everyone, (failure, mine), group=layout.group)
    if error is not None:
        raise error
    failed = next((one for one, _ in everyone if one is not None), None)
    if failed is not None:
        raise PipelineError(f"Pipeline: another rank has failed to make it: {failed}", failed)
    return [one for _, one in everyone]


def _lines(asked: Asked, parts: Sequence[StagePart], schedule: Schedule) -> list[str]:
    rows = [" ".join(map(str, schedule.actions(rank))) for rank in range(schedule.world)]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
    lines = [f"schedule of {schedule.microbatches} micro-batches ({digest})"]
    lines += [f"seed {asked.seed}", *asked.options]
    for part in parts:
        lines.append(f"stage {part.number} of units {', '.join(part.units)}")
        lines += [
            f"stage {part.number}, parameter {name!r} of shape {tuple(one.shape)}, {one.dtype}"
            f"{'' if one.requires_grad else ', frozen'}"
            for name, one in stage_parameters(part)
        ]
    return lines


def _check_equal(everyone: list[list[str]]) -> None:
    for rank, lines in enumerate(everyone):
        if lines == everyone[0]:
            continue
        for ours, theirs in zip(everyone[0], lines, strict=False):
            if ours != theirs:
                raise ValueError(
                    f"Pipeline: the ranks ask for different ones: rank 0 has {ours}, and rank "
                    f"{rank} has {theirs}"
                )
        raise ValueError(f"Pipeline: rank {rank} has more or fewer parameters than rank 0")


def stage_parameters(part: StagePart) -> list[tuple[str, nn.Parameter]]:
    """A stage's parameters, each under the first of its names in the whole module."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for unit, module in part.units.items():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (f"{unit}.{name}", parameter))
    for name, tensor in part.tensors.items():
        if isinstance(tensor, nn.Parameter):
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())
