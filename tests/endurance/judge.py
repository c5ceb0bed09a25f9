"""Finds what was wrong in an episode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from endurance.orders import ERROR, FINISHED, RAISED, Episode, Told

NOTICED = 1.0  # seconds within which a death has to be reported
# Between hosts a rank learns it from another, after that one has asked the store.
NOTICED_BETWEEN = 2.0


@dataclass
class Heard:
    """What the supervisor has of an episode, by rank."""

    told: dict[int, Told] = field(default_factory=dict)
    exits: dict[int, int | None] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    struck: float = 0.0
    hung: str = ""  # the stacks of those that told nothing

    def notice(self, told: Told) -> float:
        """Seconds in the call that could not finish, since there was something to notice."""
        return told.at - max(self.struck, told.begun)


def judge(episode: Episode, heard: Heard, slack: float = 0.0) -> list[str]:
    """In words; nothing if all is as it has to be. `slack`: seconds that a busy machine may add."""
    if heard.hung:
        return [f"hung: {heard.hung}"]
    found = []
    for rank in range(episode.world):
        is_victim = episode.fault.is_fatal and rank in episode.fault.victims
        texts = (
            of_victim(episode, heard, rank)
            if is_victim
            else of_survivor(episode, heard, rank, slack)
        )
        found += [f"rank {rank}: {text}" for text in texts]
    return found


def of_victim(episode: Episode, heard: Heard, rank: int) -> Iterator[str]:
    if episode.fault.kind == "exception":
        told = heard.told.get(rank)
        if told is None or told.end != RAISED:
            yield f"was to raise, but {told or heard.outputs[rank]}"
        return
    expected = 3 if episode.fault.kind == "os._exit" else -9
    if heard.exits.get(rank) != expected:
        yield f"was to end with {expected}, but {heard.told.get(rank)}, {heard.exits.get(rank)}"


def of_survivor(episode: Episode, heard: Heard, rank: int, slack: float) -> Iterator[str]:
    told = heard.told.get(rank)
    if told is None:
        yield f"ended with {heard.exits[rank]}:\n{heard.outputs[rank]}"
        return
    if not episode.fault.is_fatal:
        if told.end != FINISHED:
            yield f"{told.end} in {told.step}: {told.text}"
        return
    if told.end != ERROR:
        yield f"{told.end} in {told.step}: {told.text}"
        return
    if not names_the_right_rank(episode, told):
        yield f"names none of {episode.fault.victims} of {told.members}: {told.text}\n{told.step}"
    promised = NOTICED_BETWEEN if "hosts" in episode.options else NOTICED
    if heard.notice(told) > promised + slack:
        yield f"was told after {heard.notice(told):.2f} s: {told.text}\n{told.step}"


def names_the_right_rank(episode: Episode, told: Told) -> bool:
    """Whether the error names a rank whose process ended. If none was in the group, or if the
    victim left the group cleanly, it may name another rank that has really left."""
    lost = {told.members.index(v) for v in episode.fault.victims if v in told.members}
    words = (GONE, CUT_OFF) if "hosts" in episode.options else (GONE,)
    named = {int(number) for one in words for number in one.findall(told.text)}
    if lost and episode.fault.kind != "exception":
        return bool(named & lost)
    return bool(named or LEFT.search(told.text))


GONE = re.compile(r"the process of rank (\d+) has ended")
CUT_OFF = re.compile(r"the connection to rank (\d+) has failed")  # all that is known of it
LEFT = re.compile(r"rank \d+ has left the group")
