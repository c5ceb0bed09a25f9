"""ZB-H1: backwards for weights fill the bubble of 1F1B.

Two ranks, three micro-batches::

    rank 0 | F0 F1 .  I0 W0 F2 I1 W1 I2 W2
    rank 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 W2

The gradient of a stage's input is what the stage before it waits for. No other rank waits for the
gradient of its weights, so that runs where the rank would be idle.
"""

from __future__ import annotations

from dreamcomm.pipeline.schedule.actions import Action, Kind
from dreamcomm.pipeline.schedule.schedule import Schedule
from dreamcomm.pipeline.schedule.sizes import check_sizes, looped

__all__ = ["zero_bubble_h1"]


def zero_bubble_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with split backwards, one stage a rank, and with 1F1B's bound on activations.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1, the schedule ZB-H1.
    Stage s is s backwards for weights behind its backwards for inputs. If forward and both halves
    of the backward take one unit, M micro-batches on K ranks take
    ``max(3 * M + K - 1, 2 * M + 2 * K - 1)`` units.

    Args:
        ranks: number of ranks, and of stages.
        microbatches: number of micro-batches.

    Raises:
        ValueError: a number is below 1.
    """
    check_sizes("zero_bubble_h1", ranks, microbatches, ranks)
    rows = [_row(rank, ranks - 1 - rank, microbatches) for rank in range(ranks)]
    return looped("ZB-H1", rows, microbatches, ranks)


def _row(stage: int, later: int, microbatches: int) -> tuple[Action, ...]:
    """A stage's steps, with ``later`` stages behind it."""
    warmup = min(microbatches, later)
    row = [Action(stage, Kind.F, m) for m in range(warmup)]
    for m in range(microbatches):
        if warmup + m < microbatches:
            row.append(Action(stage, Kind.F, warmup + m))
        row.append(Action(stage, Kind.I, m))
        if m >= stage:
            row.append(Action(stage, Kind.W, m - stage))
    row += [Action(stage, Kind.W, m) for m in range(max(0, microbatches - stage), microbatches)]
    return tuple(row)
