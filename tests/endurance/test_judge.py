"""A soak tells what is wrong: shown by episodes that went wrong, made up here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from endurance.judge import Heard, judge
from endurance.leftovers import left_by
from endurance.orders import (
    ERROR,
    FINISHED,
    NOTHING,
    RESTARTED,
    UNEXPECTED,
    WRONG,
    Episode,
    Fault,
    Told,
)
from endurance.rank import differences
from endurance.report import GROWTH, Figures
from helpers.census import census, shared_memory_files

HEAP = "/memfd:dreamcomm-heap (deleted)"
EPISODE = Episode(1, 0, 3, {}, 0, 1, Fault("kill -9", (1,)), RESTARTED)
DEATH = (
    "all_reduce on rank 0 of 3 in group 'default' cannot finish: the process of rank 1 has ended"
)


def told_of_a_death() -> Told:
    return Told(end=ERROR, text=DEATH, begun=99.0, at=100.1, members=(0, 1, 2))


def good() -> Heard:
    told = {0: told_of_a_death(), 2: told_of_a_death()}
    return Heard(told, exits={1: -9}, outputs={1: ""}, struck=100.0)


def name_another(heard: Heard) -> None:
    heard.told[2].text = DEATH.replace("rank 1 has", "rank 0 has")


def name_one_that_left(heard: Heard) -> None:
    heard.told[2].text = "all_reduce cannot finish: rank 1 has left the group"


def be_late(heard: Heard) -> None:
    heard.told[2].at = 101.1


def go_on(heard: Heard) -> None:
    heard.told[2].end = FINISHED


def be_wrong(heard: Heard) -> None:
    heard.told[2].end = WRONG


def raise_something(heard: Heard) -> None:
    heard.told[2].end = UNEXPECTED


def crash(heard: Heard) -> None:
    del heard.told[2]
    heard.exits[2], heard.outputs[2] = -11, "Fatal Python error: Segmentation fault"


def live_on(heard: Heard) -> None:
    del heard.exits[1]


def hang(heard: Heard) -> None:
    heard.hung = "the stacks of rank 2"


def test_a_good_episode() -> None:
    assert judge(EPISODE, good()) == []


WAYS = (name_another, name_one_that_left, be_late, go_on, be_wrong, raise_something, crash)


@pytest.mark.parametrize("go_wrong", [*WAYS, live_on, hang])
def test_a_bad_episode(go_wrong: Callable[[Heard], None]) -> None:
    heard = good()
    go_wrong(heard)
    found = judge(EPISODE, heard)
    assert len(found) == 1
    figures = Figures()
    figures.add(EPISODE, heard, found)
    assert not figures.is_clean
    assert "seed 1" in figures.problems[0]


def test_ranks_are_those_of_the_group() -> None:
    """In a group of the world's ranks 1 and 2 the victim is rank 0."""
    heard = good()
    heard.told[2].members = (1, 2)
    assert len(judge(EPISODE, heard)) == 1
    heard.told[2].text = DEATH.replace("rank 1 has", "rank 0 has")
    assert judge(EPISODE, heard) == []


def test_between_hosts_a_connection_is_all_that_is_seen_of_a_rank() -> None:
    heard = good()
    heard.told[2].text = "the connection to rank 1 has failed: Connection reset by peer"
    assert len(judge(EPISODE, heard)) == 1
    spanning = replace(EPISODE, options={"hosts": "a,b,c"})
    assert judge(spanning, heard) == []
    heard.told[2].at += 1.5
    assert judge(spanning, heard) == []
    heard.told[2].text = "the connection to rank 0 has failed: Connection reset by peer"
    assert len(judge(spanning, heard)) == 1


@pytest.mark.parametrize("kind", [NOTHING, "pause"])
def test_nothing_may_come_of_what_is_harmless(kind: str) -> None:
    episode = replace(EPISODE, fault=Fault(kind, (1,)))
    finished = {rank: Told() for rank in range(3)}
    assert judge(episode, Heard(finished)) == []
    finished[0].end = ERROR
    assert len(judge(episode, Heard(finished))) == 1


def test_what_a_process_may_keep() -> None:
    before = census()
    heap = replace(before, descriptors=before.descriptors + 1, shared_mappings=(HEAP,))
    assert differences(before, before) == []
    assert len(differences(before, heap)) == 2
    assert len(differences(before, replace(before, threads=99))) == 1


def test_leftovers_are_found() -> None:
    files = shared_memory_files()
    assert left_by([], os.getpid(), files) == []
    assert left_by([os.getpid()], os.getpid(), files) == [f"process {os.getpid()} is still there"]
    window = os.memfd_create("dreamcomm-window")
    try:
        assert len(left_by([], os.getpid(), files)) == 1
    finally:
        os.close(window)


def test_memory_that_grows_is_a_leak() -> None:
    figures = Figures()
    figures.note_life([10, 20, 20 + GROWTH])
    assert figures.is_clean
    figures.note_life([10, 20, 21 + GROWTH])
    assert not figures.is_clean
