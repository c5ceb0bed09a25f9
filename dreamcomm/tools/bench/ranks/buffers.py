"""The tensors of one case in one rank: a row for every call of a burst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamcomm.tools.bench.operations import OPERATIONS

if TYPE_CHECKING:
    from dreamcomm.tools.bench.cases import Case

# Rows, columns and dtype to a contiguous tensor.
Maker = Callable[[int, int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Buffers:
    """``input`` is [burst, n] and ``output`` [burst, m]; in place they share memory."""

    rank: int
    input: Tensor
    output: Tensor

    def rewrite(self) -> None:
        """Rewrites every element: rank + 1 into the inputs, 0 into memory that is output only.

        Peers' cached copies are invalid after this, and the data is in this core's cache, as after
        a computation. The inputs are written last, as in a computation.
        """
        if self.output is not self.input:
            self.output.zero_()
        self.input.fill_(self.rank + 1)

    def as_float32(self) -> tuple[Tensor, Tensor]:
        """The same memory as float32, which the memory probe moves."""
        return self.input.view(torch.float32), self.output.view(torch.float32)


def make_buffers(case: Case, rank: int, make: Maker, in_slice: bool) -> Buffers:
    """Makes the rows of one variant; ``in_slice``: input or output is a slice of the other."""
    operation = OPERATIONS[case.op]
    dtype = getattr(torch, case.dtype)
    n = operation.input_length(case.total, case.world)
    m = operation.output_length(case.total, case.world)
    if in_slice:
        large = make(case.burst, max(n, m), dtype)
        small = large.view(case.burst, case.world, min(n, m))[:, rank]
        return Buffers(rank, small, large) if n < m else Buffers(rank, large, small)
    first = make(case.burst, n, dtype)
    usually_in_place = OPERATIONS[case.op].in_place == (True,)
    return Buffers(rank, first, first if usually_in_place else make(case.burst, m, dtype))
