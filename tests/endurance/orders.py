"""The messages between the supervisor and the ranks of a soak. Picklable, no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# The faults of ranks. The supervisor makes the first three, at a random moment. A rank makes the
# others itself, at a random step.
FROM_OUTSIDE = ("kill -9", "kill -9 of several", "pause")
FROM_INSIDE = ("os._exit", "exception")
NOTHING = "nothing"
# After these the ranks continue as without a fault.
HARMLESS = (NOTHING, "pause")

# The role of a process after an episode.
RESTARTED, SMALLER, REPLACED = "restarted", "smaller", "replaced"


@dataclass(frozen=True)
class Fault:
    """``delay``: seconds after the ranks are exposed, ``pause``: how long a stopped rank stays so;
    ``turn`` and ``step``: before which step a rank's own fault comes."""

    kind: str
    victims: tuple[int, ...]
    delay: float = 0.0
    pause: float = 0.0
    turn: int = 0
    step: int = 0

    @property
    def is_fatal(self) -> bool:
        return self.kind not in HARMLESS


@dataclass(frozen=True)
class Episode:
    """The life of one default group."""

    seed: int
    number: int
    world: int
    options: dict[str, Any]  # fields of dreamcomm.Options
    sheltered: int  # plans before anything can happen, each with groups of its own
    exposed: int  # plans after that where nothing fatal happens
    fault: Fault
    then: str

    @property
    def name(self) -> str:
        return f"episode {self.number} ({self.world} ranks, {self.fault.kind})"


@dataclass(frozen=True)
class Order:
    episode: Episode
    rank: int
    store: str


@dataclass(frozen=True)
class Exposed:
    """From now on faults may come."""


@dataclass(frozen=True)
class Struck:
    """A rank's own fault comes now."""

    at: float


# How an episode ends in a rank.
FINISHED, ERROR, RAISED, WRONG, UNEXPECTED = "finished", "error", "raised", "wrong", "unexpected"


@dataclass
class Told:
    """What a rank says of an episode. Times are of the clock that all processes share."""

    end: str = FINISHED
    text: str = ""  # of the error
    step: str = ""  # in which it came
    begun: float = 0.0  # that step
    at: float = 0.0  # the error, or the end
    members: tuple[int, ...] = ()  # of the group of that step, as ranks of the world
    calls: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0  # compared
    leaks: list[str] = field(default_factory=list)
    private_bytes: int = 0  # that malloc has given out
