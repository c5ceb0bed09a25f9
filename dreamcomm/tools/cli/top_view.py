"""The view of one moment in ``dreamcomm top``: all of it, or what fits into a window."""

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
# In a narrow window these columns are cut, at these widths, and the next are left out, in order.
CUT = {"group": 12, "does": 26}
DISPENSABLE = (*COUNTERS, "bytes", "GB/s", "call", "process")
GAP = 2  # between columns
NOTHING = "No rank of dreamcomm of this user runs on this host."

Moved = dict[tuple[str, int], int]


@dataclass(frozen=True)
class Moment:
    """The observed state of all ranks.

    Attributes:
        states: of all ranks, in their order.
        problems: what could not be read.
        before: the bytes that each rank had moved at the previous observation.
        elapsed: seconds since then: the interval, and the time of observing and drawing.
    """

    states: list[RankState]
    problems: list[str]
    before: Moved
    elapsed: float


def whole(moment: Moment, width: int) -> Group:
    """All ranks and texts, on as many lines as needed; counters if there is room."""
    notes = [Text(problem, style="yellow") for problem in moment.problems]
    if not moment.states:
        return Group(Text(NOTHING), *notes)
    cells = [cells_of(state, moment) for state in moment.states]
    return Group(table_of(cells, columns_in(width, cells, COUNTERS)), *notes)


def fitted(moment: Moment, width: int, height: int) -> Group:
    """A line for each rank, as many as fit into the window, those with trouble first."""
    notes = notes_in(moment.problems, max(height // 4, 1))
    if not moment.states:
        return Group(in_a_line(Text(NOTHING)), *notes)
    shown = choose(moment.states, max(height - 1 - len(notes), 2))
    hidden = hidden_words(moment.states, shown)
    cells = [cells_of(state, moment) for state in shown]
    table = table_of(cells, columns_in(width, cells), cut=True)
    return Group(table, *hidden, *notes)


def choose(states: list[RankState], room: int) -> list[RankState]:
    """All ranks if they fit; otherwise those with most trouble, and one line is left for a note."""
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
    """The trouble of each rank: whether it failed, and how long it waits or is waited for."""
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
    """Seconds of waiting in a call or for a message; 0 for usual waits, for a stable order."""
    if state.state != "active":
        return 0.0
    if state.inside or state.in_monitored_barrier:
        seconds = state.seconds
    else:
        seconds = 0.0 if state.message is None else state.message.seconds
    return seconds if seconds > LONG else 0.0


def hidden_words(states: list[RankState], shown: list[RankState]) -> Iterator[Text]:
    """A line on the ranks that are not shown, if there are any."""
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
    """The problems, a line for each; the last line counts those without a line."""
    if len(problems) > room:
        hidden = len(problems) - room + 1
        more = f"and {hidden} processes more that cannot be read: dreamcomm top --once shows all"
        problems = [*problems[: room - 1], more]
    return [in_a_line(Text(problem, style="yellow")) for problem in problems]


def in_a_line(text: Text) -> Text:
    """The text in one line; an ellipsis replaces what does not fit."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def columns_in(
    width: int, cells: list[dict[str, Text]], dispensable: tuple[str, ...] = DISPENSABLE
) -> tuple[str, ...]:
    """The columns for which there is room; stable from one observation to the next."""
    columns: tuple[str, ...] = COLUMNS
    for column in dispensable:
        widths = [widest(name, cells) for name in columns]
        if sum(widths) + GAP * (len(widths) - 1) <= width:
            break
        columns = tuple(name for name in columns if name != column)
    return columns


def widest(column: str, cells: list[dict[str, Text]]) -> int:
    """The width of the column, after cutting."""
    if column == "does":  # its text changes at each observation
        return CUT[column]
    found = max(len(column), *(row[column].cell_len for row in cells))
    return min(found, CUT.get(column, found))


def table_of(cells: list[dict[str, Text]], columns: tuple[str, ...], cut: bool = False) -> Table:
    """A row for each rank. Text that does not fit is folded, or cut."""
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
