"""Where parameters are: on which server, in which flat tensor, in which message. Pure functions.

A server has whole parameters, so any optimizer works on it. Its parameters of one dtype make one
flat tensor, in their order and each row-major, which travels in pieces of bounded size. So a worker
needs no second copy of all its gradients to send them, or of the weights to receive them: only of a
piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dreamcomm.ranks.pieces import Part, cut

__all__ = [
    "PIECE_BYTES",
    "Flats",
    "Layout",
    "ServerPiece",
    "TensorSpec",
    "assign",
    "difference",
    "memories",
]

PIECE_BYTES = 2 << 20

Flats = dict[torch.dtype, Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """What server and worker have to agree on for a parameter.

    Attributes:
        name: "" where it has none.
        shape: its shape.
        dtype: its dtype.
        tied_to: the number of the first parameter in the same memory, as weights that are tied by
            ``.data``; None for that one, and where no other is in it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: int | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"
        if self.tied_to is not None:
            kind += f" in the memory of parameter {self.tied_to}"
        return f"{self.name} of {kind}" if self.name else kind


@dataclass(frozen=True)
class ServerPiece:
    """What one message holds: elements of the flat tensor of a dtype."""

    dtype: torch.dtype
    begin: int
    end: int
    parts: tuple[Part, ...]


class Layout:
    """The flat tensors of some parameters, and their pieces.

    Args:
        specs: the parameters.
        piece_bytes: the most that a piece has.
    """

    def __init__(self, specs: Sequence[TensorSpec], piece_bytes: int = PIECE_BYTES) -> None:
        self.specs = tuple(specs)
        self.offsets: list[int] = []  # of each parameter in the flat tensor of its dtype
        self.sizes: dict[torch.dtype, int] = {}
        for spec in self.specs:
            begin = self.sizes.get(spec.dtype, 0)
            self.offsets.append(begin)
            self.sizes[spec.dtype] = begin + spec.numel
        pieces = [piece for dtype in self.sizes for piece in self._pieces_of(dtype, piece_bytes)]
        # Parameters without any element are a message, too.
        self.pieces = pieces or [ServerPiece(dtype, 0, 0, ()) for dtype in [*self.sizes][:1]]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(spec.nbytes for spec in self.specs)

    def _pieces_of(self, dtype: torch.dtype, piece_bytes: int) -> Iterator[ServerPiece]:
        sizes = [(n, spec.numel) for n, spec in enumerate(self.specs) if spec.dtype == dtype]
        begin = 0
        for parts in cut(sizes, max(piece_bytes // dtype.itemsize, 1)):
            end = begin + sum(part.numel for part in parts)
            yield ServerPiece(dtype, begin, end, parts)
            begin = end

    def views(self, flats: Flats) -> list[Tensor]:
        """Each parameter's elements in flat tensors, in its shape."""
        return [
            flats[spec.dtype][offset : offset + spec.numel].view(spec.shape)
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        ]


def assign(specs: Sequence[TensorSpec], servers: int) -> list[list[int]]:
    """The numbers of the parameters that each server has.

    The largest goes first, to the server with the fewest bytes so far; equal ones go in their
    order, to the server with the lowest index. Parameters in one memory stay together, as each
    server steps only what it has.
    """
    load = [0] * servers
    members: list[list[int]] = [[] for _ in range(servers)]
    together: dict[int, list[int]] = {}
    for number, spec in enumerate(specs):
        together.setdefault(number if spec.tied_to is None else spec.tied_to, []).append(number)
    sizes = {first: sum(specs[one].nbytes for one in tied) for first, tied in together.items()}
    for first in sorted(together, key=lambda first: -sizes[first]):
        least = load.index(min(load))
        load[least] += sizes[first]
        members[least] += together[first]
    return [sorted(one) for one in members]


def memories(specs: Sequence[TensorSpec]) -> int:
    """The number of parameters, where those in one memory count as one."""
    return sum(spec.tied_to is None for spec in specs)


def difference(server: Sequence[TensorSpec], worker: Sequence[TensorSpec]) -> str:
    """How a worker's parameters differ from the server's, in words; "" if they do not.

    Names are compared only where both have some.
    """
    for number, (ours, theirs) in enumerate(zip(server, worker, strict=False)):
        names_differ = ours.name and theirs.name and ours.name != theirs.name
        kinds_differ = replace(ours, name="") != replace(theirs, name="")
        if names_differ or kinds_differ:
            return f"parameter {number} is {ours} on the server, and {theirs} on the worker"
    if len(server) != len(worker):
        return f"the server has {len(server)} parameters, and the worker {len(worker)}"
    return ""
