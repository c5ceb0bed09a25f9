"""Cases from a TOML file, such as ``benchmarks/cases.toml``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from dreamcomm.tools.bench.cases import Grid
from dreamcomm.tools.bench.sizes import parse_size

# The keys of a table [[cases]] and the fields they fill.
LISTS = {
    "op": "ops",
    "size": "sizes",
    "dtype": "dtypes",
    "world": "worlds",
    "placement": "placements",
    "layer": "layers",
}


def read_cases(path: Path) -> list[Grid]:
    """Reads the tables ``[[cases]]``; each stands for every combination of its lists.

    Raises:
        ValueError: the file's content is invalid; the text says what is wrong and where.
        OSError: it cannot be read.
    """
    try:
        content = tomllib.loads(path.read_text())
        if list(content) != ["cases"] or not isinstance(content["cases"], list):
            raise ValueError("expected tables [[cases]] and nothing else")
        if not content["cases"]:
            raise ValueError("there is no table [[cases]]")
        return [read_grid(table, number) for number, table in enumerate(content["cases"], 1)]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_grid(table: Any, number: int) -> Grid:
    """One table of the file, the ``number``-th."""
    try:
        if not isinstance(table, dict):
            raise ValueError(f"expected a table, got {table!r}")
        unknown = set(table) - {*LISTS, "in_place"}
        if unknown:
            raise ValueError(
                f"unknown key {min(unknown)!r}: choose from {', '.join(LISTS)}, in_place"
            )
        fields = {field: read_list(table[key], key) for key, field in LISTS.items() if key in table}
        for needed in ("op", "size"):
            if needed not in table:
                raise ValueError(f"the key {needed!r} is missing")
        in_place = table.get("in_place")
        if not isinstance(in_place, (bool, type(None))):
            raise ValueError(f"in_place must be true or false, got {in_place!r}")
        return Grid(**fields, in_place=in_place)
    except ValueError as error:
        raise ValueError(f"[[cases]] number {number}: {error}") from error


def read_list(value: object, key: str) -> tuple[Any, ...]:
    """A list, or one value that stands for a list of one."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{key} is an empty list")
    kind: type = int if key == "world" else str
    for one in values:
        if not isinstance(one, kind) or isinstance(one, bool):
            raise ValueError(f"{key} holds {one!r}, expected {kind.__name__}")
    return tuple(map(parse_size, values)) if key == "size" else tuple(values)
