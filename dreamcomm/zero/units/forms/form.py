"""What a tree asks of a form: where parameters lie, and how ranks read whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dreamcomm.zero.units.engine import UnitEngine
from dreamcomm.zero.units.parameters.placed import Placed, Source
from dreamcomm.zero.units.parameters.record import UnitParameter

if TYPE_CHECKING:
    from dreamcomm._C import RegionFolder
    from dreamcomm.zero.units.unit import Unit, Use

__all__ = ["Form"]


class Form:
    """A form in which nothing is to be done before a unit computes, nor after.

    A class says whether it ``gathers`` parameters from other ranks, whether it ``frees`` a unit's
    whole parameters after its passes, and whether it ``fills`` other hosts' copies.

    Args:
        group: its ranks have the rows.
        why: this form and no other, for ``report()``; empty: it needs no reason.

    Attributes:
        casts: how often this rank has cast its rows.
        engine: of the tree, once there is one.
        folder: parameters lie in its files; None: they lie in memory.
    """

    gathers = False
    copies = 1  # of the parameters that its ranks have together
    frees = False
    fills = False
    folder: RegionFolder | None = None

    def __init__(self, group: dist.ProcessGroup, why: str = "") -> None:
        self.group, self.why = group, why
        self.casts = 0
        self.engine: UnitEngine | None = None
        self._local: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []

    def place(self, sources: Sequence[Source]) -> list[Placed]:
        """Puts parameters of the same shapes on all ranks where they lie from now on. Collective.

        The values are each rank's rows; those of scalars are rank 0's.
        """
        raise NotImplementedError

    @property
    def largest_use(self) -> int:
        """Bytes of whole parameters beside those, that this rank has had at a time."""
        return 0

    def described(self) -> str:
        """Where parameters lie, for ``report()``."""
        raise NotImplementedError

    def reductions(self) -> dist.ProcessGroup:
        """The group in which gradients are reduced. Collective at its first call."""
        return self.group

    def lay_out(self, units: Sequence[Unit], records: Sequence[UnitParameter]) -> None:
        """Takes the units as they are now; no rank reads them."""
        cast = [one for one in records if one.sent is not one.local and not one.is_meta]
        self._local, self._sent = [one.local for one in cast], [one.sent for one in cast]

    @torch.no_grad()
    def publish(self) -> None:
        """Casts this rank's rows; no rank reads. Always: a write through ``.data`` is not told."""
        if not self._local:
            return
        for sent, local in zip(self._sent, self._local, strict=True):
            sent.copy_(local)
        self.casts += 1

    def wrote(self, tensors: Sequence[torch.Tensor]) -> None:
        """Parameters, or rows of some, were written outside of passes."""

    def fill(self) -> None:
        """After all ranks have entered an opening: brings rows to other hosts. Collective."""

    def begin_forward(self) -> None:
        """A forward pass begins that is in no other pass."""

    def enter(self, unit: Unit) -> None:
        """Before the unit's forward pass."""

    def leave(self, unit: Unit) -> None:
        """After it."""

    def begin_backward(self) -> None:
        """A backward pass begins."""

    def enter_backward(self, unit: Unit, use: Use) -> None:
        """Before autograd goes through an output of one forward pass of the unit."""

    def leave_backward(self, unit: Unit, use: Use) -> None:
        """After autograd has made the gradients of all inputs of that pass."""

    def end_backward(self, units: Sequence[Unit]) -> None:
        """A backward pass has ended."""

    def hold(self, unit: Unit) -> None:
        """Has whole parameters of the unit be there until :meth:`release`."""

    def release(self, unit: Unit) -> None:
        """Ends :meth:`hold`, and what a forward pass has left."""

    def close(self) -> None:
        """Ends all use: no rank reads from here on."""

    def poke(self) -> None:
        """An error has ended a backward pass here: other ranks are not to wait for it."""

    def reset(self) -> None:
        """Forgets passes that an error has ended."""
