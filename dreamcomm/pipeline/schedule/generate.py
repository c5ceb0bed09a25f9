"""Schedules with full backwards, GPipe and 1F1B, and the choice of a schedule by its name.

Two ranks, four micro-batches; B takes two units::

    GPipe   rank 0 | F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 --
            rank 1 | .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .

    1F1B    rank 0 | F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --
            rank 1 | .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .

Both have the same length, and 1F1B keeps fewer activations.
"""

from __future__ import annotations

from dreamcomm.pipeline.schedule.actions import Action, Kind
from dreamcomm.pipeline.schedule.interleaved import interleaved_1f1b
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.pipeline.schedule.sizes import check_sizes, looped
from dreamcomm.pipeline.schedule.zero_bubble import zero_bubble_h1

__all__ = ["NAMES", "gpipe", "make_schedule", "one_f_one_b"]

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "ZB-H1")


def gpipe(ranks: int, microbatches: int, stages: int | None = None) -> Schedule:
    """All forwards, then all backwards. Source: GPipe (Huang et al. 2019).

    With several stages a rank it is breadth-first (Lamy-Poirier 2023; torch's LoopedBFS): a rank
    runs all micro-batches of a stage before those of its next one.

    Args:
        ranks: number of ranks.
        microbatches: number of micro-batches.
        stages: number of stages, a multiple of ``ranks``; None for one a rank. Stage s is on rank
            ``s % ranks``.

    Raises:
        ValueError: a number is below 1, or ``stages`` is not a multiple of ``ranks``.
    """
    stages = ranks if stages is None else stages
    check_sizes("gpipe", ranks, microbatches, stages)
    rows = []
    for rank in range(ranks):
        local = range(rank, stages, ranks)
        forwards = [Action(s, Kind.F, m) for s in local for m in range(microbatches)]
        backwards = [Action(s, Kind.B, m) for s in reversed(local) for m in range(microbatches)]
        rows.append((*forwards, *backwards))
    name = "GPipe" if stages == ranks else "LoopedBFS"
    return looped(name, rows, microbatches, stages)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """A warm-up, then one forward and one backward in turn, one stage a rank.

    Source: PipeDream-flush (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
    Training"). Stage s keeps the activations of at most ``min(microbatches, ranks - s)``
    micro-batches.

    Args:
        ranks: number of ranks, and of stages.
        microbatches: number of micro-batches.

    Raises:
        ValueError: a number is below 1.
    """
    check_sizes("one_f_one_b", ranks, microbatches, ranks)
    rows = []
    for rank in range(ranks):
        warmup = min(microbatches, ranks - 1 - rank)
        row = [Action(rank, Kind.F, m) for m in range(warmup)]
        for m in range(microbatches):
            if warmup + m < microbatches:
                row.append(Action(rank, Kind.F, warmup + m))
            row.append(Action(rank, Kind.B, m))
        rows.append(tuple(row))
    return looped("1F1B", rows, microbatches, ranks)


def make_schedule(name: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The schedule of a name.

    Args:
        name: "GPipe", "1F1B", "Interleaved1F1B" or "ZB-H1", as torch's ``get_schedule_class``
            spells them, in any case. "LoopedBFS" is another name of GPipe, "ZBH1" and
            "ZeroBubbleH1" of ZB-H1.
        ranks: number of ranks.
        stages: number of stages, a multiple of ``ranks``. 1F1B and ZB-H1 have one a rank.
        microbatches: number of micro-batches.

    Raises:
        ValueError: the name is unknown, or the schedule cannot have these sizes.
    """
    chosen = name.lower()
    if chosen in ("gpipe", "loopedbfs"):
        return gpipe(ranks, microbatches, stages)
    if chosen == "interleaved1f1b":
        return interleaved_1f1b(ranks, microbatches, stages)
    if chosen == "1f1b":
        _check_one_stage_a_rank(name, ranks, stages)
        return one_f_one_b(ranks, microbatches)
    if chosen in ("zb-h1", "zbh1", "zerobubbleh1"):
        _check_one_stage_a_rank(name, ranks, stages)
        return zero_bubble_h1(ranks, microbatches)
    raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(NAMES)}")


def _check_one_stage_a_rank(name: str, ranks: int, stages: int) -> None:
    if stages != ranks:
        raise ValueError(
            f"{name} has one stage a rank, got {stages} stages on {ranks} ranks: "
            f"use Interleaved1F1B for several stages a rank"
        )
