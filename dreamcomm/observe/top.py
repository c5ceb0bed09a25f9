"""The current state of the ranks on this host, read from outside of their jobs.

Every rank writes its state into the memory that its peers map. A tool of the same user finds that
memory among the open files of processes, maps its first bytes and reads them. The ranks are not
affected.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["PendingMessage", "RankState", "snapshot"]


@dataclass(frozen=True)
class PendingMessage:
    """A send or receive that is under way.

    Attributes:
        operation: "send" or "recv".
        peer: the other side; -1: any rank.
        nbytes: its bytes.
        seconds: time since the call.
    """

    operation: str
    peer: int
    nbytes: int
    seconds: float

    def words(self) -> str:
        """ "recv from rank 1" and the like."""
        way = "to" if self.operation == "send" else "from"
        return f"{self.operation} {way} {'any rank' if self.peer < 0 else f'rank {self.peer}'}"


@dataclass(frozen=True)
class RankState:
    """One rank of one group, at one moment.

    Attributes:
        pid: the rank's process; if it has ended, the number that it had in its PID namespace.
        rank, size: its rank, and the number of ranks in the group.
        team: equal for the ranks of one group, and for no others.
        group: the group's name.
        state: "active", "left" (shut down), "failed" or "ended". "ended" means without leaving the
            group; a forked child still holds its memory, so its peers may not have noticed.
        reason: the reason of a failure, or the child that holds the memory.
        sequence: the number of its last collective in the group; 0: none yet.
        operation, nbytes: of that call; nbytes are those of its largest tensor; "" and 0: none yet.
        before: the operation of the call before that one; "": none.
        inside: whether it is still in that call.
        seconds: time since it entered that call.
        waiting_for: the rank that it waits for, or -1; only after a first, short wait.
        counts: for each operation (calls, bytes sent, bytes received). In a group on several hosts
            bytes within the host are counted for the calls' parts, under the parts' names.
        messages: the number of unfinished sends and receives.
        message: the oldest of them, or None.
        in_monitored_barrier: whether it is in a monitored_barrier, which is not numbered as a
            collective; then ``seconds`` is the time since it entered that.
        stopped: whether its process is stopped, by SIGSTOP or a debugger.
    """

    pid: int
    rank: int
    size: int
    team: str
    group: str
    state: str
    reason: str
    sequence: int
    operation: str
    nbytes: int
    inside: bool
    seconds: float
    waiting_for: int
    counts: dict[str, tuple[int, int, int]]
    messages: int
    message: PendingMessage | None
    in_monitored_barrier: bool = False
    stopped: bool = False
    before: str = ""

    def doing(self) -> str:
        """As text: "in all_reduce, after barrier", "outside, after all_reduce (stopped)", ..."""
        return f"{self._doing()} (stopped)" if self.stopped else self._doing()

    def _doing(self) -> str:
        if self.state == "failed":
            return f"failed: {self.reason}"
        if self.state == "ended":
            return f"has ended ({self.reason})"
        if self.state == "left":
            return "has left the group"
        if self.inside:
            return f"in {self.operation}{f', after {self.before}' if self.before else ''}"
        if self.in_monitored_barrier:
            return "in monitored_barrier"
        if self.message is not None:
            others = f" and {self.messages - 1} more" if self.messages > 1 else ""
            return f"{self.message.words()}{others}"
        return f"outside, after {self.operation}" if self.sequence else "has called nothing yet"

    def waits_for(self) -> int:
        """The rank that its call, or else its oldest message, waits for; -1: none, or any."""
        if self.inside or self.in_monitored_barrier:
            return self.waiting_for
        return -1 if self.message is None else self.message.peer

    def moved(self) -> int:
        """Bytes sent and received so far."""
        return sum(sent + received for _, sent, received in self.counts.values())

    def calls(self) -> int:
        """The number of collectives that have succeeded and of messages that have begun."""
        return sum(calls for calls, _, _ in self.counts.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def snapshot() -> tuple[list[RankState], list[str]]:
    """All ranks of this user on this host, by group and rank, and the problems in reading them.

    The default group is first, and group 2 is before group 10. Ranks of other users are not found,
    nor are those in PID namespaces that are not below this one.
    """
    from dreamcomm._torch.build_check import check_build

    check_build()
    from dreamcomm import _C

    found: dict[tuple[str, int], RankState] = {}
    problems = []
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for pid, path in windows(_C.WINDOW_LABEL):
        seen = _C.observe_rank(str(path))
        if seen is None:
            continue
        if seen["version"] != _C.PROTOCOL_VERSION:
            problems.append(
                f"process {pid} runs another version of dreamcomm (protocol {seen['version']}, "
                f"this one is {_C.PROTOCOL_VERSION})"
            )
            continue
        key = seen["team"], seen["rank"]
        own = pid_in_its_namespace(pid)
        if own == seen["pid"]:
            found[key] = _state_of(pid, seen, now)
        elif own is not None and seen["state"] == "active":
            # A forked child holds its parent's window open, too: the parent counts, if it exists.
            found.setdefault(key, _ended(seen["pid"], pid, _state_of(pid, seen, now)))
    states = sorted(found.values(), key=place)
    return states, list(dict.fromkeys(problems))  # a process has a window for each group


def place(state: RankState) -> tuple[Any, ...]:
    """The key of its place in a list; numbers in groups' names are ordered by value."""
    words = re.split(r"(\d+)", state.group)  # every second one is a number
    name = [(int(word), "") if word.isdecimal() else (-1, word) for word in words]
    return state.group != "default", name, state.team, state.rank


def _state_of(pid: int, seen: dict[str, Any], now: int) -> RankState:
    others = ("pid", "version", "entered_ns", "barrier_ns", "message")
    fields = {name: seen[name] for name in seen if name not in others}
    if seen["sequence"] == 0:
        fields["operation"] = ""
    in_barrier = seen["in_monitored_barrier"] and not seen["inside"]
    since = seen["barrier_ns"] if in_barrier else seen["entered_ns"]
    seconds = (now - since) / 1e9 if in_barrier or seen["sequence"] > 0 else 0.0
    message = None
    if seen["message"] is not None:
        operation, peer, nbytes, since = seen["message"]
        message = PendingMessage(operation, peer, nbytes, max((now - since) / 1e9, 0.0))
    return RankState(
        pid=pid, seconds=max(seconds, 0.0), message=message, stopped=is_stopped(pid), **fields
    )


def _ended(pid: int, child: int, last: RankState) -> RankState:
    """The state of a rank whose process has ended: it is in no call, and waits for no rank."""
    return replace(
        last,
        pid=pid,
        state="ended",
        reason=f"its child {child} holds its memory",
        inside=False,
        waiting_for=-1,
        messages=0,
        message=None,
        in_monitored_barrier=False,
        stopped=False,
    )


def pid_in_its_namespace(pid: int) -> int | None:
    """The process's number in its own namespace, as in its window; None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    numbers = re.search(r"^NSpid:(.*)$", text, re.MULTILINE)  # the last is the innermost
    return int(numbers[1].split()[-1]) if numbers else pid


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds the process, as far as /proc tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # gone
        return False
    return text.rpartition(") ")[2][:1] in ("T", "t")


def windows(label: str) -> Iterator[tuple[int, Path]]:
    """The places where ranks' memory is open: the process, and the path of the descriptor."""
    wanted = f"/memfd:{label} (deleted)"
    for pid in sorted(_pids()):
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # another user's, or gone
            continue
        for path in descriptors:
            try:
                if os.readlink(path) == wanted:
                    yield pid, path
            except OSError:  # closed by now
                continue


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}
