"""Turns the command's flags into grids of cases. Pure, except for reading a file of cases."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from dreamcomm.tools.bench.casefile import read_cases
from dreamcomm.tools.bench.cases import LAYERS, PLACEMENTS, Grid
from dreamcomm.tools.bench.operations import OPERATIONS
from dreamcomm.tools.bench.sizes import parse_size, steps

MIN, MAX, FACTOR = "1KiB", "256MiB", 4
WORLD = 2
# Every kind of path once, in seconds.
QUICK_OPS = ("all_reduce", "reduce_scatter", "all_gather")
QUICK_SIZES = "4KiB,256KiB,8MiB"


@dataclass(frozen=True)
class Flags:
    """The flags' values; None and empty mean the default."""

    ops: tuple[str, ...] = ()
    least: str | None = None
    most: str | None = None
    factor: int | None = None
    sizes: str | None = None
    dtypes: tuple[str, ...] = ()
    worlds: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    in_place: bool | None = None


def grids_of(flags: Flags, cases: Path | None, quick: bool, world: int | None) -> list[Grid]:
    """The grids that the flags, or the file ``cases`` instead of them, ask for.

    Args:
        world: the number of ranks if they run already.

    Raises:
        ValueError: a flag or the file makes no sense.
        OSError: the file cannot be read.
    """
    if cases is None:
        return [
            Grid(
                flags.ops or (QUICK_OPS if quick else tuple(OPERATIONS)),
                sizes_of(flags, quick),
                flags.dtypes or ("float32",),
                flags.worlds or (world or WORLD,),
                flags.placements or PLACEMENTS,
                flags.layers or LAYERS,
                flags.in_place,
            )
        ]
    given = [field.name for field in fields(flags) if getattr(flags, field.name) != field.default]
    if given or quick:
        raise ValueError("a file of cases says all: give --cases or flags of cases, not both")
    return read_cases(cases)


def sizes_of(flags: Flags, quick: bool) -> tuple[int, ...]:
    """A list of sizes, or the steps between two."""
    ranged = any(value is not None for value in (flags.least, flags.most, flags.factor))
    if flags.sizes is not None and ranged:
        raise ValueError("give --sizes, or --min, --max and --factor, not both")
    if flags.sizes is not None or (quick and not ranged):
        sizes = QUICK_SIZES if flags.sizes is None else flags.sizes
        return tuple(parse_size(text) for text in sizes.split(","))
    least = parse_size(MIN if flags.least is None else flags.least)
    most = parse_size(MAX if flags.most is None else flags.most)
    return steps(least, most, FACTOR if flags.factor is None else flags.factor)
