"""The comm log: where a group's communication time went, by operation and size.

Groups with ``Options(log=True)`` keep it, or all groups with ``DREAMCOMM_LOG=1``. Ranks learn when
the others entered a collective from data that they exchange in it anyway, so the log causes no
waits.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dreamcomm._torch.groups import backend_of
from dreamcomm.observe.records import MESSAGES, Line, size_of_call

if TYPE_CHECKING:
    import torch.distributed as dist

    from dreamcomm._C import Recorder

__all__ = ["CommLog", "comm_log", "report"]

LOG = logging.getLogger("dreamcomm")
MOST_LINES = 40  # of a table
HEADINGS = (
    "operation",
    "bytes",
    "calls",
    "p50",
    "p99",
    "total",
    "algbw GB/s",
    "busbw GB/s",
    "in place",
    "waited",
    "mostly for",
)


@dataclass(frozen=True)
class CommLog:
    """One rank's log of one group; ``str()`` of it is a table.

    Attributes:
        group, rank, size: the group's name, this rank and the number of ranks.
        lines: one for each operation and size, the longest total time first.
    """

    group: str
    rank: int
    size: int
    lines: list[Line]

    def __str__(self) -> str:
        title = f"Communication of rank {self.rank} of {self.size} in group '{self.group}'"
        if not self.lines:
            return f"{title}: none"
        lines = [line for line in self.lines if line.calls]
        failed = sum(line.failed for line in self.lines)
        if not lines:
            return f"{title}: no call has succeeded, {failed} failed"
        rows = [HEADINGS, *(self._row(line) for line in lines[:MOST_LINES])]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        text = [f"{title} (waited: for the last rank to enter)"]
        for row in rows:
            first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            text.append("  ".join((row[0].ljust(len(first)), *others)).rstrip())
        if len(lines) > MOST_LINES:
            text.append(f"... and {len(lines) - MOST_LINES} lines more, in its attribute lines")
        if failed:
            text.append(f"{failed} failed; they are not in the table")
        return "\n".join(text)

    def _row(self, line: Line) -> tuple[str, ...]:
        moved = line.nbytes > 0
        nbytes = size_of_call(line.operation, line.nbytes, self.size)
        timed = line.operation not in MESSAGES  # messages do not record when the peer's call began
        waited = f"{line.waited / line.total:.0%}" if timed and line.total else ""
        share = line.for_slowest / line.waited if line.waited else 0.0
        return (
            line.operation,
            f"{nbytes:,}" if line.nbytes >= 0 else "others",
            f"{line.calls:,}",
            in_time(line.p50),
            in_time(line.p99),
            in_time(line.total),
            f"{line.algbw(self.size):.2f}" if moved else "",
            f"{line.busbw(self.size):.2f}" if moved else "",
            f"{line.in_place / line.calls:.0%}" if line.in_place else "",
            waited,
            f"rank {line.slowest} ({share:.0%})" if line.waited else "",
        )


def in_time(nanoseconds: int) -> str:
    """Three digits and a unit: "1.23 ms"."""
    value = float(nanoseconds)
    for unit in ("ns", "us", "ms"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} s" if value < 999.5 else f"{value:.0f} s"


def comm_log(group: dist.ProcessGroup | None = None) -> CommLog:
    """Returns this rank's log of the group's operations since the log was begun.

    The duration of a collective is the time from this rank's entry to its return. The duration of
    a message is the time from the call until all its bytes have been sent or received. The log does
    not contain calls on tensors on GPUs, nor calls that torch's own Gloo or NCCL group carried.

    Args:
        group: a group with the backend dreamcomm; None is the default group.

    Returns:
        The log; times are in nanoseconds.

    Raises:
        ValueError: the group keeps no log, or does not use dreamcomm.
    """
    recorder = backend_of(group)._recorder
    log = None if recorder is None else log_of(recorder)
    if recorder is None:
        raise ValueError(
            "the group keeps no log: torch's own backends carry everything for it, as its ranks "
            "share no memory; dreamcomm.explain() says why"
        )
    if log is None:
        raise ValueError(
            "the group keeps no log: give it pg_options=dreamcomm.Options(log=True), "
            "or set DREAMCOMM_LOG=1"
        )
    return log


def log_of(recorder: Recorder) -> CommLog | None:
    """The recorder's log, or None if it keeps none."""
    noted = recorder.log_lines()
    if noted is None:
        return None
    lines = [line for line in map(Line.of, noted) if line.calls or line.failed]
    lines.sort(key=lambda line: -line.total)
    return CommLog(recorder.group, recorder.rank, recorder.size, lines)


def report(recorder: Recorder, failure: str) -> None:
    """Reports the log at the end of a group; called by the backend.

    Rank 0 prints the table to stderr. If the group has failed and ``DREAMCOMM_FLIGHT_RECORD``
    names a prefix, each rank writes its flight record there, and makes a missing folder.
    """
    if recorder.rank == 0 and sys.stderr is not None:
        print(log_of(recorder), file=sys.stderr)
    prefix = os.environ.get("DREAMCOMM_FLIGHT_RECORD")
    if failure and prefix:
        write_record(prefix)


def write_record(prefix: str) -> None:
    """Writes the record. Makes a missing folder, because the record cannot be requested later."""
    from dreamcomm.observe.flight_recorder import dump_flight_record

    try:
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        dump_flight_record(prefix)
    except (OSError, ValueError) as why:
        LOG.warning("the flight record of DREAMCOMM_FLIGHT_RECORD is not written: %s", why)
