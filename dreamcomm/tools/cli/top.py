"""``dreamcomm top``."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from types import FrameType

    from dreamcomm.tools.cli.top_view import Moment, Moved

LEAST, MOST = 0.05, 3600.0
LEAST_WIDTH = 80  # of what does not fill a window: lines that are folded there can still be read


def within_bounds(seconds: float) -> float:
    """Not by typer's own bounds, which let nan pass."""
    if not LEAST <= seconds <= MOST:
        raise typer.BadParameter(f"expected seconds from {LEAST:g} to {MOST:g}, got {seconds:g}")
    return seconds


Json = Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON.")]
Once = Annotated[bool, typer.Option(help="Print one snapshot as a table.")]
Interval = Annotated[
    float, typer.Option(callback=within_bounds, help="Seconds between looks, 0.05 to 3600.")
]


def top(as_json: Json = False, once: Once = False, interval: Interval = 0.5) -> None:
    """Shows the current state of all your ranks on this host, and the rank that each waits for.

    Reads it from outside: the jobs need no preparation and are not affected. Ends with Ctrl-C.

    If a window has too few lines, ranks that have failed or wait longest are shown first.
    """
    from dreamcomm.observe.top import snapshot
    from dreamcomm.tools.cli.top_view import whole

    if as_json:
        states, problems = snapshot()
        typer.echo(json.dumps({"ranks": [s.as_dict() for s in states], "problems": problems}))
        return
    console = Console(highlight=False)
    if once or not console.is_interactive:
        console.width = max(console.width, LEAST_WIDTH)
    if once:
        console.print(whole(next(moments(interval)), console.width))
        return
    try:
        if console.is_interactive:
            watch(console, interval)
        else:
            for moment in moments(interval):
                console.print(whole(moment, console.width), "")
    except KeyboardInterrupt:
        return


def watch(console: Console, interval: float) -> None:
    """Shows moment after moment in the terminal's other screen."""
    from dreamcomm.tools.cli.top_view import fitted

    with ended_by_signals(), Live(console=console, screen=True, auto_refresh=False) as live:
        for moment in moments(interval):
            live.update(fitted(moment, console.width, console.height), refresh=True)


def moments(interval: float) -> Iterator[Moment]:
    """The current moment, and another after each interval."""
    from dreamcomm.observe.top import snapshot
    from dreamcomm.tools.cli.top_view import Moment

    before: Moved = {}
    looked = time.monotonic()
    for number in itertools.count():
        if number:
            time.sleep(interval)
        last, looked = looked, time.monotonic()
        states, problems = snapshot()
        yield Moment(states, problems, before, looked - last)
        before = {(state.team, state.rank): state.moved() for state in states}


ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes these signals end the command by an exit, which restores the terminal."""

    def end(number: int, frame: FrameType | None) -> None:
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)  # another one would cut the tidying short
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as of nohup
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
