"""The measured cases: :class:`Case`, and how flags and files become a list of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from dreamcomm.tools.bench.operations import OPERATIONS

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
PLACEMENTS = ("private", "heap")
LAYERS = ("dist", "core")
BURST_BYTES = 1 << 20
MOST_CALLS = 64
MOST_RANKS = 16  # sums of small integers stay exact in bfloat16
CEILING_ITEM = 4  # the memory probe moves float32


@dataclass(frozen=True)
class Case:
    """One collective at one size; its variants are timed in turns.

    Attributes:
        bytes: of the largest tensor of the call in each rank; 0 for a barrier.
        placement: where dreamcomm's tensors lie: "private" or "heap".
        layers: of dreamcomm: "dist" (torch.distributed), "core" (the bare C++ core).
    """

    op: str
    dtype: str
    bytes: int
    world: int
    placement: str
    in_place: bool
    layers: tuple[str, ...]

    @property
    def total(self) -> int:
        """The size in elements."""
        return self.bytes // ITEM_BYTES[self.dtype]

    @property
    def burst(self) -> int:
        """Calls on distinct buffers per sample: more where one alone is too short to time."""
        if self.bytes == 0:
            return MOST_CALLS
        return min(max(BURST_BYTES // self.bytes, 1), MOST_CALLS)

    @property
    def in_slice(self) -> bool:
        """Whether input or output is this rank's slice of the other."""
        return self.in_place and len(OPERATIONS[self.op].in_place) > 1

    @property
    def has_ceiling(self) -> bool:
        """A barrier moves no memory."""
        return self.op != "barrier"

    def tensor_bytes(self) -> int:
        """Bytes of one rank's buffers of one variant."""
        operation = OPERATIONS[self.op]
        length = operation.input_length(self.total, self.world)
        if not self.in_place:
            length += operation.output_length(self.total, self.world)
        elif self.in_slice:
            length = self.total
        return self.burst * length * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Grid:
    """Every combination of these. ``in_place`` applies to operations that can; None: as usual."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    worlds: tuple[int, ...] = (2,)
    placements: tuple[str, ...] = PLACEMENTS
    layers: tuple[str, ...] = LAYERS
    in_place: bool | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid name."""
        check_words("operation", self.ops, tuple(OPERATIONS))
        check_words("dtype", self.dtypes, tuple(ITEM_BYTES))
        check_words("placement", self.placements, PLACEMENTS)
        check_words("layer", self.layers, LAYERS)
        for world in self.worlds:
            if not 1 <= world <= MOST_RANKS:
                raise ValueError(f"a world has 1 to {MOST_RANKS} ranks, got {world}")


def check_words(kind: str, words: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    """Raises ValueError that names what is allowed."""
    for word in words:
        if word not in allowed:
            raise ValueError(f"unknown {kind} {word!r}: choose from {', '.join(allowed)}")


def expand(grids: list[Grid]) -> list[Case]:
    """All cases of the grids, each once, those of one world size together.

    Raises:
        ValueError: nothing is left to measure.
    """
    found: dict[Case, None] = {}
    for grid in grids:
        for world, op, dtype, placement, size in product(
            grid.worlds, grid.ops, grid.dtypes, grid.placements, grid.sizes
        ):
            case = make_case(op, dtype, size, world, placement, grid.in_place, grid.layers)
            if case.layers:
                found[case] = None
    if not found:
        raise ValueError(
            "nothing to measure: a barrier, and all_gather and reduce_scatter in place, run "
            "through the layer dist only"
        )
    return sorted(found, key=lambda case: case.world)


def make_case(
    op: str,
    dtype: str,
    size: int,
    world: int,
    placement: str,
    in_place: bool | None,
    layers: tuple[str, ...],
) -> Case:
    """The case that is closest to the requested one; without layers if there is none."""
    possible = OPERATIONS[op].in_place
    placed = in_place if in_place is not None and in_place in possible else possible[0]
    if op == "barrier":
        return Case(op, "uint8", 0, world, "private", placed, keep_dist(layers))
    layers = tuple(layer for layer in LAYERS if layer in layers)
    case = Case(op, dtype, fit(size, dtype, world), world, placement, placed, layers)
    return replace(case, layers=keep_dist(layers)) if case.in_slice else case


def keep_dist(layers: tuple[str, ...]) -> tuple[str, ...]:
    """For cases that the bare core's timer does not support."""
    return tuple(layer for layer in layers if layer == "dist")


def fit(size: int, dtype: str, world: int) -> int:
    """Rounds down to whole and equal parts, to one element each at the least."""
    step = world * max(ITEM_BYTES[dtype], CEILING_ITEM)
    return max(size // step, 1) * step
