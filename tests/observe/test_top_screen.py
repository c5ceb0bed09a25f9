"""dreamcomm top in a terminal: what fits its window, and how it leaves it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from dreamcomm.observe.top import PendingMessage, RankState, place
from dreamcomm.tools.cli.commands import commands
from dreamcomm.tools.cli.top import moments
from dreamcomm.tools.cli.top_view import Moment, cells_of, fitted, in_bytes, whole

TOP = [sys.executable, "-c", "from dreamcomm.tools.cli import app; app()", "top"]
OTHER_SCREEN, OWN_SCREEN, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


def state(group: str, rank: int, size: int = 4) -> RankState:
    """The state of a rank that computes, after a call."""
    return RankState(
        pid=4_000_000 + rank,
        rank=rank,
        size=size,
        team=f"team of {group}",
        group=group,
        state="active",
        reason="",
        sequence=1000,
        operation="reduce_scatter",
        nbytes=1 << 30,
        inside=False,
        seconds=500.0,
        waiting_for=-1,
        counts={},
        messages=0,
        message=None,
    )


def group_of(name: str, size: int = 4) -> list[RankState]:
    return [state(name, rank, size) for rank in range(size)]


def ordered(*groups: list[RankState]) -> list[RankState]:
    return sorted((one for group in groups for one in group), key=place)


def stuck(one: RankState, seconds: float, waits_for: int) -> RankState:
    return replace(one, inside=True, seconds=seconds, waiting_for=waits_for)


def lines(states: list[RankState], rows: int, width: int = 80, problems: int = 0) -> list[str]:
    """What a window shows."""
    told = [f"process {number} runs another version " * 4 for number in range(problems)]
    console = Console(width=width, height=rows, file=io.StringIO())
    with console.capture() as shown:
        console.print(fitted(Moment(states, told, {}, 0.5), width, rows))
    return [line.rstrip() for line in shown.get().splitlines()]


def groups_in(shown: list[str]) -> list[str]:
    return list(dict.fromkeys(line.split()[0] for line in shown[1:]))


def test_groups_stand_by_their_numbers_and_the_default_one_first() -> None:
    names = ["10", "9", "default", "mesh_2", "1", "mesh_10"]
    states = ordered(*(group_of(name, 1) for name in names))
    assert [one.group for one in states] == ["default", "1", "9", "10", "mesh_2", "mesh_10"]


def test_what_fits_is_all_there_with_a_line_for_each_rank() -> None:
    shown = lines(ordered(group_of("default"), group_of("1")), rows=9)
    assert len(shown) == 9
    assert shown[1].startswith("default  0 of 4")
    assert all("outside, after reduce_scat" in line for line in shown[1:])
    assert groups_in(shown) == ["default", "1"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_rank_has_one_line_whatever_the_width(width: int) -> None:
    failed = replace(state("default", 0), state="failed", reason="rank 1 has died " * 20)
    shown = lines([failed, stuck(state("default", 1), 100.0, 0)], rows=24, width=width)
    assert len(shown) == 3
    assert max(map(len, shown)) <= width
    assert "…" in shown[1]
    assert "in r" in shown[2]
    assert shown[2].split("100.0 s")[1].split()[:2] == ["rank", "0"]
    assert ("process" in shown[0]) == (width >= 80)
    assert ("bytes" in shown[0]) == (width >= 100)
    assert ("moved" in shown[0]) == (width >= 160)


def test_calls_and_bytes_are_counted_where_there_is_room() -> None:
    counts = {"all_reduce": (1200, 1 << 30, 1 << 30), "send": (34, 4000, 0)}
    first, *others = group_of("default")
    ranks = [replace(first, counts=counts), *others]
    heading, line, *_ = lines(ranks, rows=24, width=160)
    assert heading.endswith("calls    moved")
    assert line.endswith("1,234  2.15 GB")
    assert "moved" not in lines(ranks, rows=24, width=90)[0]
    console = Console(width=160)
    with console.capture() as shown:
        console.print(whole(Moment(ranks, [], {}, 0.5), 160))
    assert "1,234  2.15 GB" in shown.get()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (1_234_567, "1.23 MB"), (10**16, "10000 TB")],
)
def test_bytes_have_three_digits(number: int, text: str) -> None:
    assert in_bytes(number) == text


def test_a_call_is_shown_with_the_one_before() -> None:
    one = replace(stuck(state("default", 0), 3.0, 1), before="broadcast")
    assert one.doing() == "in reduce_scatter, after broadcast"
    assert replace(one, before="").doing() == "in reduce_scatter"
    assert replace(one, inside=False).doing() == "outside, after reduce_scatter"


def test_where_all_do_not_fit_the_troubled_come_first_and_the_others_are_counted() -> None:
    groups = [group_of(str(number)) for number in range(1, 13)]
    groups[6][1] = stuck(groups[6][1], 3.0, 2)  # of group 7
    groups[10][3] = replace(groups[10][3], state="failed", reason="why")  # of group 11
    default = [stuck(one, 90.0, 3) for one in group_of("default")]
    shown = lines(ordered(default, *groups), rows=24)
    assert len(shown) == 24
    assert groups_in(shown) == ["11", "default", "7", "1", "2", "3", "and"]
    assert shown[-1] == "and 30 more ranks in 8 groups: dreamcomm top --once shows all"


def test_of_a_large_group_those_who_wait_and_who_is_waited_for_are_shown() -> None:
    ranks = group_of("default", 64)
    ranks[40] = stuck(ranks[40], 5.0, 63)
    message = PendingMessage("recv", 20, 8, 7.0)
    ranks[50] = replace(ranks[50], messages=1, message=message)
    shown = lines(ranks, rows=8)
    assert [line.split()[1] for line in shown[1:-1]] == ["0", "1", "20", "40", "50", "63"]
    assert shown[-1] == "and 58 more ranks in 1 group: dreamcomm top --once shows all"


def test_short_waits_do_not_change_the_order() -> None:
    ranks = group_of("default", 20)
    ranks[15] = stuck(ranks[15], 0.9, 16)
    shown = lines(ranks, rows=6)
    assert [line.split()[1] for line in shown[1:-1]] == ["0", "1", "2", "3"]


def test_many_problems_leave_room_for_ranks() -> None:
    shown = lines(group_of("default"), rows=12, problems=30)
    assert [line.split()[0] for line in shown[1:5]] == ["default"] * 4
    assert [line[:9] for line in shown[5:7]] == ["process 0", "process 1"]
    more = "and 28 processes more that cannot be read: dreamcomm top --once shows all"
    assert shown[7:] == [more]


def test_once_cuts_nothing() -> None:
    states = ordered(*(group_of(str(number)) for number in range(30)))
    states[7] = replace(states[7], state="failed", reason="rank 1 has died " * 20)
    console = Console(width=80, height=10)
    with console.capture() as shown:
        console.print(whole(Moment(states, ["a problem"], {}, 0.5), 80))
    text = shown.get()
    assert text.count(" of 4 ") == 120
    assert text.count("died") == 20
    assert "…" not in text
    assert text.rstrip().endswith("a problem")


def test_rates_are_of_the_time_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is longer than the interval, as looking and drawing take time, too."""
    now, gigabytes = 100.0, 0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    def look() -> tuple[list[RankState], list[str]]:
        nonlocal gigabytes
        pass_time(0.05)
        gigabytes += 6
        return [replace(state("default", 0), counts={"send": (1, gigabytes * 10**9, 0)})], []

    monkeypatch.setattr("dreamcomm.observe.top.snapshot", look)
    monkeypatch.setattr(
        "dreamcomm.tools.cli.top.time", SimpleNamespace(sleep=pass_time, monotonic=lambda: now)
    )
    seen = moments(0.1)
    first = next(seen)
    pass_time(0.05)  # of drawing
    second = next(seen)
    assert cells_of(first.states[0], first)["GB/s"].plain == ""
    assert cells_of(second.states[0], second)["GB/s"].plain == "30.00"


@pytest.mark.parametrize("interval", ["inf", "nan", "1e400", "0", "-1", "-inf", "1e9"])
def test_an_interval_without_a_meaning_is_told(interval: str) -> None:
    done = CliRunner().invoke(commands, ["top", "--interval", interval])
    assert done.exit_code == 2
    assert "--interval" in done.output
    words = " ".join(done.output.replace("│", "").split())  # without the frame around them
    assert "expected seconds from 0.05 to 3600, got" in words


@contextmanager
def in_a_terminal(term: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A `dreamcomm top`, and what is at the other end of its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    unset = ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    env = {name: text for name, text in os.environ.items() if name not in unset}
    top = subprocess.Popen(
        [*TOP, "--interval", "0.05"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**env, "TERM": term},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield top, ours
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def read_until(terminal: int, what: bytes, times: int = 1) -> bytes:
    """What came, up to that, or to the end."""
    text = b""
    while text.count(what) < times:
        assert select.select([terminal], [], [], 60)[0], text
        try:
            text += os.read(terminal, 65536)
        except OSError:  # nobody has it open any longer
            break
        assert len(text) < 1 << 20
    return text


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0)]
)
def test_a_signal_gives_the_terminal_back(number: signal.Signals, status: int) -> None:
    with in_a_terminal("xterm") as (top, terminal):
        assert OTHER_SCREEN in read_until(terminal, b"\x1b[H", times=3)
        top.send_signal(number)
        text = read_until(terminal, b"nothing of this kind")
        assert OWN_SCREEN in text
        assert CURSOR in text
        assert b"Traceback" not in text
        assert top.wait(60) == status


def test_a_dumb_terminal_gets_one_snapshot_after_the_other() -> None:
    with in_a_terminal("dumb") as (top, terminal):
        text = read_until(terminal, b"\r\n\r\n", times=3)
        assert b"\x1b" not in text
        assert text.startswith((b"No rank of dreamcomm", b"group"))
        top.send_signal(signal.SIGINT)
        assert top.wait(60) == 0
