"""Interleaved 1F1B: several stages a rank make a bubble shorter.

Two ranks, two stages a rank, two micro-batches; B takes two units::

    rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0 --  .   2B1 --  0B0 --  0B1 --
    rank 1 | .   1F0 1F1 3F0 3B0 --  3F1 3B1 --  1B0 --  1B1 --  .   .

Micro-batches are taken in rounds. Within a round a rank runs a whole stage before its next one, so
a round of at least as many micro-batches as ranks leaves no gap between the two: the output of the
rank's first stage has been once around the ranks when it is needed. The rounds here are of nearly
equal size and at least that long, so any number of micro-batches reaches the shortest length.
"""

from __future__ import annotations

from dreamcomm.pipeline.schedule.actions import Action, Kind
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.pipeline.schedule.sizes import check_sizes, looped

__all__ = ["interleaved_1f1b"]


def interleaved_1f1b(ranks: int, microbatches: int, stages: int) -> Schedule:
    """1F1B with stage s on rank ``s % ranks``.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2. The paper needs a multiple of ``ranks`` micro-batches; this
    schedule takes any number.

    Args:
        ranks: number of ranks.
        microbatches: number of micro-batches.
        stages: number of stages, a multiple of ``ranks``.

    Raises:
        ValueError: a number is below 1, or ``stages`` is not a multiple of ``ranks``.
    """
    check_sizes("interleaved_1f1b", ranks, microbatches, stages)
    rounds = _rounds(ranks, microbatches)
    # The last rank's first backward needs all but its last stage's forwards of the first round.
    # A rank further from the end waits two steps longer for each rank between: there and back.
    before_last = (stages // ranks - 1) * len(rounds[0])
    rows = []
    for rank in range(ranks):
        local = range(rank, stages, ranks)
        forwards = [Action(s, Kind.F, m) for part in rounds for s in local for m in part]
        backwards = [Action(s, Kind.B, m) for part in rounds for s in reversed(local) for m in part]
        rows.append(_alternate(forwards, backwards, before_last + 2 * (ranks - 1 - rank)))
    return looped("Interleaved1F1B", rows, microbatches, stages)


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Consecutive micro-batches, as many rounds as have ``ranks`` each, longer rounds first."""
    number = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, number)
    rounds = []
    begin = 0
    for index in range(number):
        end = begin + size + (index < longer)
        rounds.append(range(begin, end))
        begin = end
    return rounds


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """The warm-up's forwards, then a forward and a backward in turn, then the other backwards."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += (forward, backward)
    row += backwards[len(forwards[warmup:]) :]
    return tuple(row)
