#!/usr/bin/env python3
"""Checks that a room of a floor in csrc/ includes only the rooms below it.

    python tests/lint/rooms.py

A floor is a folder of csrc/, a room a folder of a floor; "." stands for the files in no room. The
floors' own order is CMake's (CMakeLists.txt). Exit code 1 if an include goes up or sideways.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "csrc"
ENDINGS = {".h", ".cc", ".cu", ".cuh"}

# The rooms of a floor from the top down. A room includes itself and the levels below its own, not
# its neighbours on the same level. Rooms that an order leaves out may include, and be included by,
# all. A floor has several orders where its rooms have no single one.
ORDERS: dict[str, list[list[set[str]]]] = {
    "c10d": [
        [
            {"python"},
            {"backward"},
            {"buckets"},
            {"backend"},
            {"device", "rendezvous", "work"},
            {"base"},
            {"process", "autograd", "messages", "region"},
        ],
    ],
    "internode": [
        [{"."}, {"barrier", "p2p", "tuning"}, {"collectives"}, {"cost", "liveness"}],
    ],
    "comm": [
        [{"barrier", "p2p", "tuning"}, {"record"}],
    ],
    "transport": [
        [{"bootstrap"}, {"shm"}, {"introspect"}, {"os"}],
    ],
    "gpu": [
        [{"cuda"}, {"host"}, {"collectives"}],
        [{"bucket"}, {"collectives"}],
    ],
}

INCLUDE = re.compile(r'\s*#\s*include "([^"]+)"')


def room_of(path: str) -> str:
    """The room of a file, by its path from the floor."""
    room, slash, _ = path.partition("/")
    return room if slash else "."


def wrong_includes(floor: str, order: list[set[str]]) -> Iterator[str]:
    """A line for each include of the floor that goes against the order."""
    level = {room: number for number, rooms in enumerate(order) for room in rooms}
    for path in sorted((ROOT / floor).rglob("*")):
        if path.suffix not in ENDINGS:
            continue
        room = room_of(path.relative_to(ROOT / floor).as_posix())
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = INCLUDE.match(line)
            if include is None or not include[1].startswith(f"{floor}/"):
                continue
            other = room_of(include[1].removeprefix(f"{floor}/"))
            if room == other or room not in level or other not in level:
                continue
            if level[other] <= level[room]:
                place = path.relative_to(ROOT.parent).as_posix()
                yield f"{place}:{number}: {floor}'s room {room} includes {other}: {include[1]}"


def main() -> int:
    """Prints the includes that go against an order."""
    for floor, orders in ORDERS.items():
        for order in orders:
            missing = sorted(
                room
                for rooms in order
                for room in rooms
                if room != "." and not (ROOT / floor / room).is_dir()
            )
            if missing:
                sys.exit(f"csrc/{floor} has no room {', '.join(missing)}: mend the table here")
    found = [
        line
        for floor, orders in ORDERS.items()
        for order in orders
        for line in wrong_includes(floor, order)
    ]
    for line in found:
        print(line)
    print(f"{len(found)} includes go up")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
