"""What a strategy is given, and what it gives to the training loop."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import dreamcomm

LR = 0.2


@dataclass
class Job:
    """What a strategy is given.

    Attributes:
        name: of this run, different from those before it in the same processes.
        steps: of each rank.
        note: to call after each step, with their number; the loop does so where there is one.
        options: of the command line.
    """

    name: str
    steps: int
    note: Callable[[float], None]
    options: argparse.Namespace


def sent_from_now_on() -> Callable[[], int]:
    """Counts the bytes that this rank sends in the default group's calls, once for each reader."""

    def sent() -> int:
        return sum(counts["sent"] for counts in dreamcomm.stats().values())

    before = sent()
    return lambda: sent() - before


@dataclass
class Training:
    """What the loop runs.

    Attributes:
        model: to call.
        optimizer: has zero_grad() and step(). None: this rank was a server, and the run is over.
        sent: the bytes that this rank has sent in this run.
        is_done: whether the run is over after so many steps; None: after the job's.
        close: to call at the end.
        servers: the number of ranks that run no loop, from 0 on.
    """

    model: nn.Module
    optimizer: Any
    sent: Callable[[], int] = field(default_factory=sent_from_now_on)
    is_done: Callable[[int], bool] | None = None
    close: Callable[[], None] = lambda: None
    servers: int = 0
