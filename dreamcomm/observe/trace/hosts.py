"""Traces of groups on several hosts, which may have no folder in common.

Rank 0 merges the parts that it sees. The first rank of each other host checks whether rank 0's part
appears beside its own, or its own part is removed: then all share the folder. Otherwise it merges
the parts of its host's ranks into a file with the host's name.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dreamcomm.observe.trace.files import is_of_trace, merge_traces

if TYPE_CHECKING:
    from dreamcomm._C import Recorder

__all__ = ["OtherHosts"]


@dataclass(frozen=True)
class Host:
    """A host without rank 0.

    Attributes:
        words: "host beta (ranks 2, 3)".
        first: its lowest rank.
        parts: the paths of its ranks' parts.
        file: the file of all its ranks, if its folder is not rank 0's.
    """

    words: str
    first: int
    parts: list[Path]
    file: Path


class OtherHosts:
    """The hosts of a group except rank 0's; ``parts`` are those of all ranks."""

    def __init__(self, recorder: Recorder, parts: list[Path], path: Path) -> None:
        self._path = path
        self._first_part = parts[0]
        self._hosts = []
        for name, ranks in recorder.hosts:
            if 0 in ranks:
                continue
            words = f"host {name} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
            same = [other for other, _ in recorder.hosts].count(name) > 1
            self._hosts.append(
                Host(
                    words,
                    ranks[0],
                    [parts[rank] for rank in ranks],
                    file_of_host(path, f"{name}.{ranks[0]}" if same else name),
                )
            )

    def is_led_by(self, rank: int) -> bool:
        return any(host.first == rank for host in self._hosts)

    def merge_own(self, rank: int, patience: float) -> str:
        """Merges the parts of this rank's host, unless rank 0 does; returns a warning or ""."""
        (host,) = (host for host in self._hosts if host.first == rank)
        (own, *others) = host.parts
        end = time.monotonic() + patience
        while own.exists() and not self._first_part.exists():
            if time.monotonic() >= end:
                break
            time.sleep(0.02)
        if not own.exists() or self._first_part.exists():
            return ""
        merge_traces([own, *(part for part in others if part.exists())], host.file)
        return (
            f"rank 0 has left nothing beside {self._path} within {patience:g} s: it writes "
            f"elsewhere, or has ended. The trace of {host.words} is {host.file}; "
            "dreamcomm.merge_traces([that, rank 0's], path) joins them"
        )

    def sort_out(self, missing: list[Path], name: str) -> tuple[list[Path], list[Path], str]:
        """The parts missing except of whole hosts, the files of such hosts, and a warning or ""."""
        here, elsewhere = [], []
        for host in self._hosts:
            if not set(host.parts) <= set(missing):
                continue
            missing = [part for part in missing if part not in host.parts]
            if host.file.exists() and is_of_trace(host.file, name):  # its rank has not waited
                here.append(host.file)
            else:
                elsewhere.append(host)
        if not elsewhere:
            return missing, here, ""
        text = (
            f"the trace {self._path} lacks {', '.join(host.words for host in elsewhere)}, as no "
            "part of these has appeared beside it: where hosts have folders of their own, "
            f"theirs are in {', '.join(host.file.name for host in elsewhere)} there, and "
            f"dreamcomm.merge_traces(copies, {str(self._path)!r}) adds them to it"
        )
        return missing, here, text


def file_of_host(path: Path, name: str) -> Path:
    """run.json of host alpha is run.alpha.json."""
    return path.with_name(f"{path.stem}.{re.sub(r'[^0-9A-Za-z.-]', '_', name)}{path.suffix}")
