"""A timeline of all ranks in one file, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each rank is a process of the picture. Each of its groups has a lane for the calls, one for each
kind of step in them (wait for peers, copy in, reduce, copy out), and a track for messages.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from dreamcomm._torch.groups import backend_of
from dreamcomm.observe.records import Record, world_rank
from dreamcomm.observe.trace.events import part_of
from dreamcomm.observe.trace.files import check_regular, merge_traces, write_json
from dreamcomm.observe.trace.hosts import OtherHosts

if TYPE_CHECKING:
    from dreamcomm._C import DreamBackend, Recorder

__all__ = ["Trace", "trace"]

LOG = logging.getLogger("dreamcomm")
MOST = 100_000_000  # calls or spans
ADDED = 80  # characters by which the names of ranks' parts and hosts' files exceed the trace's


def trace(
    path: str | os.PathLike[str],
    *,
    calls: int = 100_000,
    spans: int = 400_000,
    patience: float = 10.0,
) -> Trace:
    """Begins a timeline of all groups of this process, also of groups that are made later.

    ``stop()``, or the end of a ``with`` block, writes it. Every rank that should be in it has to
    call this with the same path, the same number of times. Rank 0 of the largest group waits for
    the parts of that group's ranks, merges them and writes the file. So ranks without a common
    dreamcomm group need different paths. The ranks do not communicate for the trace. If the ranks
    are on several hosts without a common folder, the first rank of each other host writes a file
    of its host's ranks, with the host's name in the file name; ``merge_traces`` joins them. ::

        with dreamcomm.trace("run.json"):
            train()

    Args:
        path: the path of the file; the ranks' parts are beside it until they are merged.
        calls: how many calls are kept for each group; they are the last ones.
        spans: how many waits, copies and reductions in calls are kept, for each group; 64 bytes
            each.
        patience: seconds that rank 0 waits for the others' parts, in total. It does not wait for
            ranks whose process has ended. The first ranks of other hosts wait as long for rank 0's
            part.

    Returns:
        The running trace.

    Raises:
        ValueError: a number is out of range, the folder does not exist, or the path is a folder or
            no regular file.
        TypeError: an argument has another type.
        RuntimeError: a trace of this process already runs.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    for name, number in (("calls", calls), ("spans", spans)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"dreamcomm.trace: expected {name} to be an int, got {number!r}")
        if not 1 <= number <= MOST:
            raise ValueError(f"dreamcomm.trace: expected {name} from 1 to {MOST}, got {number}")
    if isinstance(patience, bool) or not isinstance(patience, int | float):
        raise TypeError(f"dreamcomm.trace: expected patience to be a number, got {patience!r}")
    if not 0 <= patience < math.inf:
        raise ValueError(f"dreamcomm.trace: expected patience from 0 on, got {patience}")
    return Trace(checked(path), calls, spans, patience)


def checked(path: str | os.PathLike[str]) -> Path:
    """The absolute path of the file, since the process may change its folder before the end."""
    if not os.fsdecode(path) or "\0" in os.fsdecode(path):
        raise ValueError(f"dreamcomm.trace: expected the path of a file, got {path!r}")
    try:
        target = Path(os.path.abspath(os.fsdecode(path)))
        if not target.parent.is_dir():
            raise ValueError(f"dreamcomm.trace: there is no folder {target.parent}")
        check_regular(target, "dreamcomm.trace")
        with suppress(FileNotFoundError):
            os.stat(target.with_name(target.name + "-" * ADDED))
    except OSError as error:  # the name is too long, or this process's folder was deleted
        room = f" ({ADDED} characters are added)" if error.errno == errno.ENAMETOOLONG else ""
        raise ValueError(
            f"dreamcomm.trace: no file can be at {path!r}: {error.strerror}{room}"
        ) from None
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"dreamcomm.trace: expected a path in UTF-8, which other ranks can read, got {target!r}"
        ) from None
    return target


class Trace:
    """A trace that runs; see :func:`trace`."""

    def __init__(self, path: Path, calls: int, spans: int, patience: float) -> None:
        from dreamcomm import _C

        self._runs = False
        self._number = _C.start_trace(str(path), calls, spans)
        self._path = path
        self._patience = patience
        self._stop_trace = _C.stop_trace  # nothing can be imported when the interpreter ends
        self._warn = LOG.warning
        self._process = os.getpid()
        self._runs = True

    def __enter__(self) -> Trace:
        if not self._runs:
            raise RuntimeError(
                f"the trace {self._path} has ended, and begins no second time: call "
                "dreamcomm.trace() for each"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except (OSError, ValueError):
            if error is None:
                raise
            # The exception that ended the block matters more than this one.
            LOG.warning("the trace %s could not be written", self._path, exc_info=True)

    def __del__(self) -> None:
        if not self._runs or os.getpid() != self._process:
            return
        self._runs = False
        self._stop_trace()
        self._warn("the trace %s is not written: nobody called its stop()", self._path)

    def stop(self) -> None:
        """Ends the trace and writes this rank's part; on rank 0 the file.

        A second call does nothing. A call in a process that was forked meanwhile does nothing.

        Raises:
            OSError: the file cannot be written.
            ValueError: the path now is no regular file.
        """
        if not self._runs or os.getpid() != self._process:
            return
        self._runs = False
        recorders = self._stop_trace()
        if not recorders:
            LOG.warning(
                "no group of dreamcomm was there while the trace ran: %s is not written", self._path
            )
            return
        whole = whole_of(recorders)
        name = f"{whole.team[:8]}.{self._number}"  # identifies this trace among those at this path
        ranks = [world_rank(whole, rank) for rank in range(whole.size)]
        parts = [part_path(self._path, name, rank) for rank in ranks]
        write_json(parts[whole.rank], part_of(recorders, name))
        backend = backend_of_recorder(whole)
        others = OtherHosts(whole, parts, self._path)
        if whole.rank == 0:
            self._merge(parts, name, backend, others)
        elif others.is_led_by(whole.rank):
            text = others.merge_own(whole.rank, self._patience)
            if text:
                LOG.warning(text)
        elif is_without_rank_0(whole, backend) and parts[whole.rank].exists():
            LOG.warning(
                "the trace %s is made by rank %d, and it has ended or its group has failed: if it "
                "is gone, this rank's part stays at %s, and dreamcomm.merge_traces(parts, path) "
                "makes the trace of the parts that are there",
                self._path,
                ranks[0],
                parts[whole.rank],
            )

    def _merge(
        self, parts: list[Path], name: str, backend: DreamBackend | None, others: OtherHosts
    ) -> None:
        begin = time.monotonic()

        def is_hopeless(rank: int) -> bool:
            late = time.monotonic() - begin > self._patience
            return late or (backend is not None and backend._has_ended(rank))

        try:
            missing = [
                part for rank, part in enumerate(parts) if not appears(part, rank, is_hopeless)
            ]
        except KeyboardInterrupt:
            LOG.warning(
                "the trace %s is not written; dreamcomm.merge_traces(parts, path) makes it of the "
                "ranks' parts beside it: %s",
                self._path,
                ", ".join(str(part) for part in parts if part.exists()),
            )
            raise
        present = [part for part in parts if part not in missing]
        missing, of_hosts, text = others.sort_out(missing, name)
        if text:
            LOG.warning(text)
        if missing:
            LOG.warning(
                "the trace %s lacks ranks that have ended, or whose parts did not appear within "
                "%g s: %s; if they do later, dreamcomm.merge_traces(parts, path) adds them to it",
                self._path,
                self._patience,
                ", ".join(map(str, missing)),
            )
        merge_traces([*present, *of_hosts], self._path)


def whole_of(recorders: list[Recorder]) -> Recorder:
    """The largest group's recorder; if there are several, the default group's.

    All ranks of that group choose the same.
    """
    try:
        default = backend_of(None)._recorder
    except ValueError:  # it belongs to another backend, or does not exist
        default = None
    team = None if default is None else default.team
    return max(recorders, key=lambda one: (one.size, one.team == team))


def backend_of_recorder(recorder: Recorder) -> DreamBackend | None:
    """The backend of the recorder's group, or None if the group no longer exists."""
    from torch.distributed.distributed_c10d import _world

    for group in _world.pg_map:
        try:
            backend = backend_of(group)
        except ValueError:
            continue
        own = backend._recorder
        if own is not None and own.team == recorder.team:
            return backend
    return None


def is_without_rank_0(recorder: Recorder, backend: DreamBackend | None) -> bool:
    """Whether rank 0 has ended or the group has failed; of an ended group, by its last call."""
    if backend is not None:
        return backend.failure is not None or backend._has_ended(0)
    found = recorder.trace_records()
    calls = [] if found is None else found[0]
    return bool(calls) and Record.of(calls[-1]).state == "failed"


def part_path(path: Path, name: str, rank: int) -> Path:
    """The path of a rank's part."""
    return path.with_name(f"{path.name}.{name}.rank{rank}")


def appears(path: Path, rank: int, is_hopeless: Callable[[int], bool]) -> bool:
    """Whether the rank's file appears before that is hopeless."""
    while not path.exists():
        if is_hopeless(rank):
            return path.exists()  # the rank may have written it and then ended
        time.sleep(0.02)
    return True
