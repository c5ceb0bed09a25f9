"""What a tree of units consists of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dreamcomm.buckets.averages import AVERAGE, Averages
from dreamcomm.buckets.shard_steps import refuse_accumulation
from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.parameters.ranks import everyone, replicas_of, shards_of
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.replication import Finishing, UnitSums
from dreamcomm.zero.units.unit import Unit

if TYPE_CHECKING:
    from dreamcomm._C import Region

__all__ = ["TreeParts"]


class TreeParts:
    """The units, parameters and regions of a tree, on one rank.

    Attributes:
        group: all ranks.
        shards: those that have one copy of the parameters together.
        replicas: those that have the same rows; None: there is one copy.

    Args:
        mesh: of one dimension, or replicas and shards.
        form: where parameters lie.
        root: the unit that holds all others. It and the units are held by their modules alone.
        units: all of them, the root last.
    """

    def __init__(self, mesh: DeviceMesh, form: Form, root: Unit, units: Iterable[Unit]) -> None:
        self.mesh, self.group = mesh, everyone(mesh)
        self.shards, self.replicas = shards_of(mesh), replicas_of(mesh)
        self.form = form
        self.name = type(root.module).__name__
        self._root = weakref.ref(root)
        self._units = [weakref.ref(unit) for unit in units]
        self._records: list[UnitParameter] = []

    @property
    def root(self) -> Unit | None:
        return self._root()

    def units(self) -> list[Unit]:
        return [unit for one in self._units if (unit := one()) is not None]

    def records(self) -> list[UnitParameter]:
        """All parameters, each once, in the order of the root module."""
        if not self._records:
            self._records = self._named_records()
        return self._records

    def _named_records(self) -> list[UnitParameter]:
        found: dict[int, UnitParameter] = {}
        for unit in self.units():
            for place, one in unit.places:
                if id(one) not in found:
                    one.name = one.name or place.name
                    one.divide_factor = unit.divide_factor
                    one.is_counted = self.averages.counted
                    found[id(one)] = one
        module = None if self.root is None else self.root.module
        by_form = {id(form): one for one in found.values() for form in (one.whole, one.sharded)}
        ordered: dict[int, UnitParameter] = {}
        for name, parameter in _named(module):
            record = by_form.get(id(parameter))
            if record is not None and id(record) not in ordered:
                record.name = name
                ordered[id(record)] = record
        return list({**ordered, **found}.values())

    def regions(self) -> list[Region]:
        """Where the parameters lie, each once."""
        found = {id(one.region): one.region for one in self.records() if one.region is not None}
        return list(found.values())

    @property
    def averages(self) -> Averages:
        """What gradients become: as the root says."""
        return AVERAGE if self.root is None else self.root.averages or AVERAGE

    def refuse_accumulation(self, what: str) -> None:
        """Raises RuntimeError where shards of a step are all that accumulates."""
        refuse_accumulation(self.averages, self.group, what)

    def check_shards(self, what: str) -> None:
        """Raises RuntimeError where ``what`` comes before all shards of a step are done."""
        if self.averages.shards and self.form.engine is not None:
            self.form.engine.check_shards(what)

    def finishing(self) -> Finishing | None:
        """What is done with rows of sums; None: nothing."""
        units = self.units()
        if self.replicas is None and all(unit.all_reduce_hook is None for unit in units):
            return None
        seen: set[int] = set()
        sums = []
        for unit in units:
            own = [one for one in unit.parameters() if id(one) not in seen]
            seen.update(map(id, own))
            sums.append(UnitSums(own, unit.all_reduces, unit.all_reduce_hook))
        return Finishing(sums, self.replicas, self._divisor if self.averages.counted else None)

    def _divisor(self) -> float:
        """What sums over all ranks are divided by: what these have counted."""
        assert self.form.engine is not None
        return self.form.engine.buckets.divisor()

    def finishes(self) -> bool:
        """Whether passes that reduce also sum over the replicas.

        Raises:
            NotImplementedError: units have several settings, and counts are of all of them.
        """
        settings = {unit.all_reduces for unit in self.units()}
        if self.replicas is not None and len(settings) == 2:
            raise NotImplementedError(
                f"fully_shard: rank {dist.get_rank(self.group)}: expected one setting of "
                f'set_requires_all_reduce() for all units of {self.name} with reduce="tokens", '
                "got both: call it on the root"
            )
        return self.replicas is None or settings != {False}

    def reduces(self) -> bool:
        """Whether backward passes reduce gradients.

        Raises:
            NotImplementedError: units have several settings.
        """
        settings = {unit.reduces for unit in self.units()}
        if len(settings) == 2:
            raise NotImplementedError(
                f"fully_shard: rank {dist.get_rank(self.group)}: expected one setting of "
                f"set_requires_gradient_sync() for all units of {self.name}, got both: "
                "call it on the root"
            )
        return settings != {False}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to this rank's own gradients, and leave the window open."""
        self.refuse_accumulation("no_sync()")
        before = [(unit, unit.reduces) for unit in self.units()]
        for unit, _ in before:
            unit.reduces = False
        try:
            yield
        finally:
            for unit, reduces in before:
                unit.reduces = reduces

    def look_again(self) -> None:
        """Has parameters listed anew, where units have others. No rank reads them."""
        self._records = []
        self._name_units()
        self.form.lay_out(self.units(), self.records())

    def _name_units(self) -> None:
        module = None if self.root is None else self.root.module
        names = {} if module is None else {id(one): name for name, one in module.named_modules()}
        for unit in self.units():
            unit.name = names.get(id(unit.module), "") or type(unit.module).__name__


def _named(module: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    """As they are registered, whatever the module's own method does."""
    return iter(()) if module is None else nn.Module.named_parameters(module)
