"""Shards plain parameters that a script has put into units, before the next pass takes them in.

A script may load a state, or make an optimizer, before that pass. It then finds DTensors, which
stay the same objects::

    module.head = nn.Linear(...)        plain
    module.parameters(), state_dict()   DTensors on rows of their own   <- here, each rank by itself
    the next pass                       in a region, by take_in()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dreamcomm.zero.units.parameters.casts import Casts
from dreamcomm.zero.units.parameters.ranks import shards_of
from dreamcomm.zero.units.parameters.record import Place, UnitParameter, own_rows, sharded_parameter
from dreamcomm.zero.units.tree.link import found_in_tree, link_form, tree_of

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["Pending"]


class Pending:
    """The parameters of one tree that wait to be taken in, by the ids of both forms."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._records: dict[int, UnitParameter] = {}

    def shard(self, tree: Tree, places: Iterable[tuple[Place, nn.Parameter]]) -> None:
        """Registers DTensors instead of plain parameters that are new. Nothing is communicated."""
        for place, parameter in list(places):
            if tree_of(parameter) is not None:
                if not isinstance(parameter, DTensor) and not tree.window.is_open:
                    _swap_tied(place, parameter)
                continue
            if not isinstance(parameter, DTensor):
                record = self._records.get(id(parameter)) or self._made(parameter)
                place.swap(parameter, record.sharded)
                parameter = record.sharded
            link_form(parameter, tree)

    def _made(self, parameter: nn.Parameter) -> UnitParameter:
        group = shards_of(self._mesh)
        rows = own_rows(parameter.detach(), dist.get_world_size(group), dist.get_rank(group))
        # The rows' storage is their own: torch.save and others take whole storages.
        rows = rows.clone(memory_format=torch.contiguous_format)
        sharded = sharded_parameter(rows, parameter, self._mesh)
        record = UnitParameter("", parameter, sharded, rows, rows, Casts())
        self._records[id(parameter)] = self._records[id(record.sharded)] = record
        return record

    def of(self, parameter: nn.Parameter) -> UnitParameter | None:
        """What was made for a parameter of either form."""
        return self._records.get(id(parameter))

    def clear(self) -> None:
        """All are taken in."""
        self._records.clear()


def _swap_tied(place: Place, whole: nn.Parameter) -> None:
    """A script has tied two places while whole parameters were registered."""
    found = found_in_tree(whole)
    if found is not None:
        place.swap(whole, found[1].sharded)
