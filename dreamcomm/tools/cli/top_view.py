"""What ``dreamcomm top`` shows of one moment: all of it, or what fits a window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dreamcomm.observe.top import RankState

STYLES = {"active": "", "left": "dim", "failed": "bold red", "ended": "bold red"}
LONG = 1.0  # seconds in a call that are worth a colour
COLUMNS = (
    *("group", "rank", "process", "does", "call", "bytes", "for", "waits for", "GB/s"),
    *("calls", "moved"),
)
COUNTERS = ("moved", "calls")  # since the group was made
WORDS = ("group", "does", "waits for")  # the others are numbers
# Where the window is narrow: what is cut, at these widths, and what is left out, in this order.
CUT = {"group": 12, "does": 26}
DISPENSABLE = (*COUNTERS, "bytes", "GB/s", "call", "process")
GAP = 2  # between columns
NOTHING = "No rank of dreamcomm of this user runs on this host."

Moved = dict[tuple[str, int], int]


@dataclass(frozen=True)
class Moment:
    """What was seen.

    Attributes:
        states: of all ranks, in their order.
        problems: what could not be read.
        before: the bytes that each rank had moved at the look before.
        elapsed: seconds since that look: the interval, and what looking and drawing took.
    """

    states: list[RankState]
    problems: list[str]
    before: Moved
    elapsed: float


def whole(moment: Moment, width: int) -> Group:
    """Every rank and every word, on as many lines as that takes; counters where there is room."""
    notes = [Text(problem, style="yellow") for problem in moment.problems]
    if not moment.states:
        return Group(Text(NOTHING), *notes)
    cells = [cells_of(state, moment) for state in moment.states]
    return Group(table_of(cells, columns_in(width, cells, COUNTERS)), *notes)


def fitted(moment: Moment, width: int, height: int) -> Group:
    """A line for each rank, as many as the window has room for: first where there is trouble."""
    notes = notes_in(moment.problems, max(height // 4, 1))
    if not moment.states:
        return Group(in_a_line(Text(NOTHING)), *notes)
    shown = choose(moment.states, max(height - 1 - len(notes), 2))
    hidden = hidden_words(moment.states, shown)
    cells = [cells_of(state, moment) for state in shown]
    table = table_of(cells, columns_in(width, cells), cut=True)
    return Group(table, *hidden, *notes)


def choose(states: list[RankState], room: int) -> list[RankState]:
    """All, if there are as many lines; else the most troubled, and a line is left to say so."""
    if len(states) <= room:
        return states
    trouble = troubles(states)
    teams = [list(of_team) for _, of_team in itertools.groupby(states, lambda one: one.team)]
    teams.sort(key=lambda team: max(trouble[one.team, one.rank] for one in team), reverse=True)
    shown: list[RankState] = []
    for team in teams:
        worst = sorted(team, key=lambda one: trouble[one.team, one.rank], reverse=True)
        shown += sorted(worst[: room - 1 - len(shown)], key=lambda one: one.rank)
    return shown


def troubles(states: list[RankState]) -> dict[tuple[str, int], tuple[bool, float]]:
    """How much each rank is in need of a look: failed, and how long it waits or is waited for."""
    found = {
        (one.team, one.rank): (one.state in ("failed", "ended"), waiting_seconds(one))
        for one in states
    }
    for one in states:
        guilty = one.team, one.waits_for()
        if guilty in found:
            failed, seconds = found[guilty]
            found[guilty] = failed, max(seconds, waiting_seconds(one))
    return found


def waiting_seconds(state: RankState) -> float:
    """In a call or for a message; 0 up to what is usual, so that the order keeps still."""
    if state.state != "active":
        return 0.0
    if state.inside or state.in_monitored_barrier:
        seconds = state.seconds
    else:
        seconds = 0.0 if state.message is None else state.message.seconds
    return seconds if seconds > LONG else 0.0


def hidden_words(states: list[RankState], shown: list[RankState]) -> Iterator[Text]:
    """A line on the ranks that are not shown, if there are such."""
    seen = {(one.team, one.rank) for one in shown}
    hidden = [one for one in states if (one.team, one.rank) not in seen]
    if hidden:
        ranks, groups = len(hidden), len({one.team for one in hidden})
        yield in_a_line(
            Text(
                f"and {ranks} more rank{'s' * (ranks > 1)} in {groups} group{'s' * (groups > 1)}: "
                "dreamcomm top --once shows all",
                style="bold",
            )
        )


def notes_in(problems: list[str], room: int) -> list[Text]:
    """The problems, a line for each; the last line counts those for which there is none."""
    if len(problems) > room:
        hidden = len(problems) - room + 1
        more = f"and {hidden} processes more that cannot be read: dreamcomm top --once shows all"
        problems = [*problems[: room - 1], more]
    return [in_a_line(Text(problem, style="yellow")) for problem in problems]


def in_a_line(text: Text) -> Text:
    """What is too long for it ends in an ellipsis."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def columns_in(
    width: int, cells: list[dict[str, Text]], dispensable: tuple[str, ...] = DISPENSABLE
) -> tuple[str, ...]:
    """Those for which there is room; the same from look to look."""
    columns: tuple[str, ...] = COLUMNS
    for column in dispensable:
        widths = [widest(name, cells) for name in columns]
        if sum(widths) + GAP * (len(widths) - 1) <= width:
            break
        columns = tuple(name for name in columns if name != column)
    return columns


def widest(column: str, cells: list[dict[str, Text]]) -> int:
    """Of the column; of one that is cut, what it is left with."""
    if column == "does":  # other words at each look
        return CUT[column]
    found = max(len(column), *(row[column].cell_len for row in cells))
    return min(found, CUT.get(column, found))


def table_of(cells: list[dict[str, Text]], columns: tuple[str, ...], cut: bool = False) -> Table:
    """A row for each rank. Words that do not fit are folded, or cut."""
    table = Table(box=None, pad_edge=False)
    for heading in columns:
        table.add_column(
            heading,
            justify="left" if heading in WORDS else "right",
            overflow="fold",
            no_wrap=heading not in CUT,
        )
    for row in cells:
        table.add_row(*(in_a_line(row[name]) if cut else row[name] for name in columns))
    return table


def cells_of(state: RankState, moment: Moment) -> dict[str, Text]:
    """A rank's row, by column."""
    in_barrier = state.in_monitored_barrier and not state.inside
    message = None if state.inside or in_barrier else state.message
    nbytes = state.nbytes if message is None else message.nbytes
    seconds = state.seconds if message is None else message.seconds
    waits = f"rank {state.waits_for()}" if state.waits_for() >= 0 else ""
    waiting = state.inside or in_barrier or message is not None
    stuck = "yellow" if waiting and seconds > LONG else ""
    last = moment.before.get((state.team, state.rank))
    rate = "" if last is None else f"{(state.moved() - last) / moment.elapsed / 1e9:.2f}"
    return {
        "group": Text(state.group),
        "rank": Text(f"{state.rank} of {state.size}"),
        "process": Text(str(state.pid)),
        "does": Text(state.doing(), style=STYLES[state.state] or stuck),
        "call": Text(str(state.sequence)),
        "bytes": Text("" if in_barrier else f"{nbytes:,}"),
        "for": Text(f"{seconds:.1f} s" if state.sequence or in_barrier or message else ""),
        "waits for": Text(waits, style=stuck),
        "GB/s": Text(rate),
        "calls": Text(f"{state.calls():,}"),
        "moved": Text(in_bytes(state.moved())),
    }


def in_bytes(number: int) -> str:
    """Three digits and a unit: "1.23 GB"."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if value < 999.5 else f"{value:.0f} TB"
