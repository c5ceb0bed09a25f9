"""The figures of a soak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from endurance.judge import Heard
from endurance.orders import ERROR, WRONG, Episode

# Bytes that allocated memory may differ by after two episodes: what Python keeps of them does.
GROWTH = 4 << 20


@dataclass
class Figures:
    """What a soak did and found.

    Attributes:
        calls: by kind, each rank's counted; those of ranks that were killed are not known.
        nbytes: of results, compared bit for bit.
        survived: faults after which everything was as it has to be.
        killed: processes.
        begun_anew: times that a process was in a new group after its last one had ended by a fault.
        notices: seconds in the call that failed, since the fault or since it began.
        growth: at most, of a process, in bytes that malloc gave out, after its first two episodes.
    """

    episodes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    worlds: Counter[int] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    begun_anew: int = 0
    notices: list[float] = field(default_factory=list)
    growth: int = 0
    longest_life: int = 0  # episodes of one process
    wrong: int = 0
    hung: int = 0
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, episode: Episode, heard: Heard, problems: list[str]) -> None:
        self.episodes += 1
        self.worlds[episode.world] += 1
        self.hung += bool(heard.hung)
        self.killed += len(heard.exits)
        for rank, told in heard.told.items():
            self.calls += told.calls
            self.nbytes += told.nbytes
            self.wrong += told.end == WRONG
            self.leaks += [f"{episode.name}, rank {rank}: {leak}" for leak in told.leaks]
            if told.end == ERROR and episode.fault.is_fatal:
                self.notices.append(heard.notice(told))
        self.problems += [f"{episode.name}, seed {episode.seed}: {text}" for text in problems]
        if not problems:
            self.survived[episode.fault.kind] += 1

    def note_life(self, private: list[int]) -> None:
        """``private``: a process's memory after each of its episodes. The first ones fill what
        libraries keep."""
        self.longest_life = max(self.longest_life, len(private))
        grown = private[-1] - max(private[:2]) if len(private) > 2 else 0
        self.growth = max(self.growth, grown)
        if grown > GROWTH:
            self.leaks.append(f"a process has {grown} bytes more than after its first episodes")

    @property
    def is_clean(self) -> bool:
        return not (self.problems or self.leaks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "episodes": self.episodes,
            "episodes_by_world": {str(world): n for world, n in sorted(self.worlds.items())},
            "operations": sum(self.calls.values()),
            "operations_by_kind": dict(sorted(self.calls.items())),
            "bytes_compared": self.nbytes,
            "faults_survived": dict(sorted(self.survived.items())),
            "processes_killed": self.killed,
            "begun_anew_in_the_same_process": self.begun_anew,
            "most_episodes_of_a_process": self.longest_life,
            "notices": len(self.notices),
            "median_notice_seconds": round(self.typical_notice, 4),
            "slowest_notice_seconds": round(max(self.notices, default=0.0), 4),
            "most_allocated_growth_bytes": self.growth,
            "wrong_results": self.wrong,
            "hung": self.hung,
            "leaks": self.leaks,
            "problems": self.problems,
        }

    @property
    def typical_notice(self) -> float:
        times = sorted(self.notices)
        return times[len(times) // 2] if times else 0.0

    def __str__(self) -> str:
        found = self.as_dict()
        for name in ("operations_by_kind", "leaks", "problems"):
            found.pop(name)
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in found.items()]
        return "\n".join([*lines, *self.leaks, *self.problems])
