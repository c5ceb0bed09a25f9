"""Has whole parameters of units be in memory while they compute, and of the next one in order.

    forward    | start 0 | 0: compute, start 1 | 1: compute, start 2, free 0 | ...
    backward   | start 2 | 2: compute, start 1 | 1: compute, start 0, free 2 | ...

INVARIANT: what is used is not freed. Each unit counts its passes, and a parameter of several units
is freed with the root's alone, which all of them use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.distributed as dist

from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.forms.order import UseOrder
from dreamcomm.zero.units.forms.use import UnitUse
from dreamcomm.zero.units.parameters.record import UnitParameter

if TYPE_CHECKING:
    from dreamcomm.zero.units.unit import Unit, Use

__all__ = ["Freeing", "needs_of"]

U = TypeVar("U", bound=UnitUse)


class Freeing(Form, Generic[U]):
    """A form that frees a unit's whole parameters after its passes."""

    frees = True

    def __init__(self, group: dist.ProcessGroup, why: str = "") -> None:
        super().__init__(group, why)
        self._units: list[Unit] = []
        self._needs: dict[int, list[U]] = {}  # by the unit's id; its own first
        self._forward, self._backward = UseOrder(), UseOrder()
        self._pass = 1  # the backward pass that runs, or comes next
        self._following: int | None = None  # the number of the unit to start next

    def _make_use(self, number: int, records: Sequence[UnitParameter]) -> U:
        """The use of parameters that are freed together with the unit of that number."""
        raise NotImplementedError

    def lay_out(self, units: Sequence[Unit], records: Sequence[UnitParameter]) -> None:
        super().lay_out(units, records)
        self._free_all()
        self._units, self._needs = list(units), {}
        self._forward, self._backward = UseOrder(), UseOrder()

    @torch.inference_mode(False)  # whose tensors are of no use later
    def _uses(self) -> dict[int, list[U]]:
        if not self._needs and self._units:
            self._needs = needs_of(self._units, self._make_use)
        return self._needs

    # Passes.

    @torch.inference_mode(False)
    def _use(self, unit: Unit, order: UseOrder) -> None:
        needs = self._uses()[id(unit)]
        for one in needs:
            self._start(one)
        for one in needs:
            self._finish(one)
        self._has_begun(needs)
        self._following = order.used(needs[0].number)
        self._prefetch()

    def _prefetch(self) -> None:
        """Starts the unit that is used next, unless a backward pass still leaves one: so no more
        than two are there, and the root."""
        if self._following is None:
            return
        units = [needs[0] for needs in self._needs.values()][:-1]
        if sum(one.backward_uses > 0 for one in units) < 2:
            for one in self._needs[id(self._units[self._following])]:
                self._start(one)
            self._following = None

    def _start(self, use: U) -> None:
        """Begins to bring whole parameters into memory, unless it has."""
        raise NotImplementedError

    def _finish(self, use: U) -> None:
        """Waits until they can be read."""

    def _has_begun(self, needs: Sequence[U]) -> None:
        """They can be read, and the unit computes next."""

    def begin_forward(self) -> None:
        self._forward.begin()

    def enter(self, unit: Unit) -> None:
        for one in self._uses()[id(unit)]:
            one.users += 1
        self._use(unit, self._forward)

    def leave(self, unit: Unit) -> None:
        needs = self._needs.get(id(unit), [])
        for one in needs:
            one.users = max(0, one.users - 1)
        for one in needs[:1]:
            one.is_kept = one.is_kept or unit.keeps_whole
        for one in needs:
            one.free_if_unused()

    def begin_backward(self) -> None:
        self._backward.begin()

    def enter_backward(self, unit: Unit, use: Use) -> None:
        needs = self._uses()[id(unit)]
        if use.entered != self._pass:
            use.entered = self._pass
            for one in needs:
                one.backward_uses += 1
        self._use(unit, self._backward)

    def leave_backward(self, unit: Unit, use: Use) -> None:
        if use.entered != self._pass:
            return
        use.entered = 0
        for one in self._needs.get(id(unit), []):
            one.backward_uses = max(0, one.backward_uses - 1)
        for one in self._needs.get(id(unit), [])[:1]:
            if unit.reshard_after_backward:
                one.is_kept = False
                one.free_if_unused()
        self._prefetch()

    def end_backward(self, units: Sequence[Unit]) -> None:
        self._pass += 1
        self._following = None
        for unit in units:
            for one in self._needs.get(id(unit), [])[:1]:
                one.backward_uses = 0
                if unit.reshard_after_backward:
                    one.is_kept = False
                    one.free_if_unused()

    @torch.inference_mode(False)
    def hold(self, unit: Unit) -> None:
        for one in self._uses()[id(unit)]:
            one.is_kept = True
            self._start(one)
            self._finish(one)

    def release(self, unit: Unit) -> None:
        for one in self._needs.get(id(unit), [])[:1]:
            one.is_kept = False
            one.free_if_unused()

    def close(self) -> None:
        self._free_all()

    def reset(self) -> None:
        for needs in self._needs.values():
            needs[0].users = 0
        self._free_all()

    def _free_all(self) -> None:
        self._following = None
        for needs in self._needs.values():
            needs[0].backward_uses = 0
            needs[0].free()


def needs_of(
    units: Sequence[Unit], make: Callable[[int, Sequence[UnitParameter]], U]
) -> dict[int, list[U]]:
    """What each unit computes with: its own parameters, and the root's for what is tied.

    A parameter of several units is among the root's, the last one's.
    """
    users: dict[int, int] = {}
    for unit in units:
        for one in unit.parameters():
            users[id(one)] = users.get(id(one), 0) + 1
    tied = {id(one): one for unit in units for one in unit.parameters() if users[id(one)] > 1}
    found: dict[int, list[U]] = {}
    root = units[-1]
    for number, unit in enumerate(units):
        own = [one for one in unit.parameters() if id(one) not in tied]
        found[id(unit)] = [make(number, [*own, *tied.values()] if unit is root else own)]
    for unit in units[:-1]:
        if any(id(one) in tied for one in unit.parameters()):
            found[id(unit)].append(found[id(root)][0])
    return found
