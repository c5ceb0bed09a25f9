"""Steps rows that lie in files, so that few bytes of them are in memory at a time.

read    | 1 | 2 | 3 | 4 |
step        | 1 | 2 | 3 | 4 |
write           | 1 | 2 | 3 | 4 |
drop                    | 1 | 2 | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dreamcomm.ranks.pieces import in_memory_order
from dreamcomm.zero.units.parameters.own_files import OwnFiles

__all__ = ["FileRowsPass"]

TILE = 16384  # elements: as the kernels cut rows, on which the bits of torch's square roots depend
PIECE = 128 * TILE  # elements that are read, stepped and written together


@dataclass
class Piece:
    """Parts of some rows, each with its rule, gradient and state."""

    rules: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[Sequence[Tensor]] = field(default_factory=list)
    numel: int = 0

    def tensors(self) -> list[Tensor]:
        """What a step reads and writes of files."""
        return [*self.rows, *(one for states in self.states for one in states)]


class FileRowsPass:
    """Steps rows by the compiled kernels.

    INVARIANT: a row is cut at multiples of TILE alone, so the bits are those of the whole row.

    Args:
        rows, gradients, states: of each parameter; gradients are flat, or None.
        files: of the states.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[Sequence[Tensor]],
        files: OwnFiles,
    ) -> None:
        self._rows, self._gradients, self._states = rows, gradients, states
        self._files = files

    def step(self, rules: Sequence[Any], rule_of_each: Sequence[int]) -> list[bool]:
        """Steps what has a gradient; tells which."""
        from dreamcomm import _C

        waiting: Piece | None = None
        for piece in [*self._pieces(rule_of_each), None]:
            if piece is not None:
                _C.read_files(piece.tensors())
            if waiting is not None:
                _C.step_rows(rules, waiting.rules, waiting.rows, waiting.gradients, waiting.states)
                self._files.wrote(waiting.tensors())
            waiting = piece
        return [one is not None for one in self._gradients]

    def _pieces(self, rule_of_each: Sequence[int]) -> Iterator[Piece]:
        made = Piece()
        for rule, row, gradient, states in zip(
            rule_of_each, self._rows, self._gradients, self._states, strict=True
        ):
            if gradient is None:
                continue
            flat = [in_memory_order(one) for one in (row, gradient, *states)]
            for begin in range(0, row.numel(), PIECE):
                part = [one[begin : begin + PIECE] for one in flat]
                if made.numel + part[0].numel() > PIECE:
                    yield made
                    made = Piece()
                made.rules.append(rule)
                made.rows.append(part[0])
                made.gradients.append(part[1])
                made.states.append(part[2:])
                made.numel += part[0].numel()
        if made.rows:
            yield made
