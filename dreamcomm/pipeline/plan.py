"""What a pipeline is made of, decided before any message: stages, schedule, names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from dreamcomm.pipeline.errors import Failure, PipelineError
from dreamcomm.pipeline.layout import Layout
from dreamcomm.pipeline.schedule import Schedule, check, make_schedule
from dreamcomm.pipeline.split import Splittable, StagePart, choose_cuts, make_parts
from dreamcomm.pipeline.sync_layers import check_sync_layers
from dreamcomm.pipeline.tied import check_memory
from dreamcomm.ranks import tags
from dreamcomm.ranks.agree import Failed, exchange, first_difference
from dreamcomm.ranks.parameters import described

__all__ = ["Asked", "PipelinePlan", "agreed_plan", "stage_parameters"]

T = TypeVar("T")


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
    options: dict[str, str]


@dataclass(frozen=True)
class PipelinePlan:
    """What all ranks have agreed on.

    Attributes:
        parts: of all stages.
        schedule: checked.
        seed: of random states.
        tag: the first of the channel's unit.
    """

    parts: list[StagePart]
    schedule: Schedule
    seed: int
    tag: int


def agreed_plan(asked: Asked, layout: Layout) -> PipelinePlan:
    """Makes the plan, the same on all ranks. Collective.

    Cuts, the seed and the tag are rank 0's. An error of one rank is raised on all.

    Raises:
        ValueError: the stages, the schedule and the ranks do not fit together; ranks ask for
            different things; stages on different ranks have parameters that share memory.
    """
    first = _exchanged(layout, lambda: _choices(asked, layout))[0]
    cuts, seed, tag = first["cuts"], first["seed"], first["tag"]
    made: list[PipelinePlan] = []

    def describe() -> dict[str, str]:
        parts = make_parts(asked.whole, cuts, blocks=asked.blocks)
        schedule = _schedule(asked, layout, len(parts))
        check_memory([stage_parameters(part) for part in parts], schedule.rank_of)
        own = [part for part in parts if schedule.rank_of[part.number] == layout.place]
        check_sync_layers([unit for part in own for unit in part.units.items()], layout)
        made.append(PipelinePlan(parts, schedule, seed, tag))
        return _facts(asked, parts, schedule)

    found = first_difference(_exchanged(layout, describe))
    if found is not None:
        raise ValueError(f"Pipeline: the ranks ask for different ones: {found}")
    return made[0]


def _choices(asked: Asked, layout: Layout) -> dict[str, Any]:
    cuts = choose_cuts(
        asked.whole, _stage_count(asked, layout), asked.split, asked.costs, blocks=asked.blocks
    )
    seed = torch.initial_seed() if asked.seed is None else asked.seed
    return {"cuts": cuts, "seed": seed, "tag": tags.PIPELINE.drawn()}


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


def _exchanged(layout: Layout, make: Callable[[], T]) -> list[T]:
    """What ``make`` returns, of all ranks. Raises on all where it raises on one."""
    return exchange(layout.group, make, _failed)


def _failed(one: Failed) -> PipelineError:
    failure = Failure(one.rank, one.kind, one.text)
    return PipelineError(f"Pipeline: another rank has failed to make it: {failure}", failure)


def _facts(asked: Asked, parts: Sequence[StagePart], schedule: Schedule) -> dict[str, str]:
    """What ranks have to have in common."""
    rows = [" ".join(map(str, schedule.actions(rank))) for rank in range(schedule.world)]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
    facts = {"schedule": f"of {schedule.microbatches} micro-batches ({digest})"}
    facts |= {"seed": str(asked.seed), **asked.options}
    for part in parts:
        facts[f"stage {part.number}"] = f"of units {', '.join(part.units)}"
        for number, (name, one) in enumerate(stage_parameters(part)):
            frozen = "" if one.requires_grad else ", frozen"
            facts[f"parameter {number} of stage {part.number}"] = (
                f"{name!r} {described(one)}{frozen}"
            )
    return facts


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
