"""``dreamcomm top``."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dreamcomm.top import RankState

Json = Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON.")]
Once = Annotated[bool, typer.Option(help="Print one snapshot as a table.")]
Interval = Annotated[float, typer.Option(min=0.05, help="Seconds between looks.")]

STYLES = {"active": "", "left": "dim", "failed": "bold red"}
LONG = 1.0  # seconds in a call that are worth a colour
COLUMNS = ("group", "rank", "process", "does", "call", "bytes", "for", "waits for", "GB/s")
WORDS = ("group", "does", "waits for")  # the others are numbers

Moved = dict[tuple[str, int], int]


def top(as_json: Json = False, once: Once = False, interval: Interval = 0.5) -> None:
    """Shows what every rank of yours on this host does now, and whom it waits for.

    Looks from outside: it needs nothing of the jobs, and they do not notice it. Ends with Ctrl-C.
    """
    from dreamcomm.top import snapshot

    if as_json:
        states, problems = snapshot()
        typer.echo(json.dumps({"ranks": [s.as_dict() for s in states], "problems": problems}))
        return
    console = Console(highlight=False)
    if once:
        states, problems = snapshot()
        console.print(screen(states, problems, {}, interval))
        return
    before: Moved = {}
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                states, problems = snapshot()
                live.update(screen(states, problems, before, interval), refresh=True)
                before = {(state.team, state.rank): state.moved() for state in states}
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def screen(states: list[RankState], problems: list[str], before: Moved, interval: float) -> Group:
    """All that is shown of one moment."""
    notes = [Text(problem, style="yellow") for problem in problems]
    if not states:
        return Group(Text("No rank of dreamcomm of this user runs on this host."), *notes)
    return Group(table_of(states, before, interval), *notes)


def table_of(states: list[RankState], before: Moved, interval: float) -> Table:
    """A line for each rank; ``before`` has the bytes that it had moved ``interval`` earlier."""
    table = Table(box=None, pad_edge=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in WORDS else "right", overflow="fold")
    for state in states:
        message = None if state.inside else state.message
        nbytes = state.nbytes if message is None else message.nbytes
        seconds = state.seconds if message is None else message.seconds
        waits = f"rank {state.waits_for()}" if state.waits_for() >= 0 else ""
        stuck = (state.inside or message is not None) and seconds > LONG
        last = before.get((state.team, state.rank))
        rate = "" if last is None else f"{(state.moved() - last) / interval / 1e9:.2f}"
        table.add_row(
            state.group,
            f"{state.rank} of {state.size}",
            str(state.pid),
            Text(state.doing(), style=STYLES[state.state] or ("yellow" if stuck else "")),
            str(state.sequence),
            f"{nbytes:,}",
            f"{seconds:.1f} s" if state.sequence or message else "",
            Text(waits, style="yellow" if stuck else ""),
            rate,
        )
    return table
