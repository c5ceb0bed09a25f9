"""Follows what a script does to the parameters of units between two passes.

whole or DTensor, as registered before         stays
a DTensor of another place of the tree         tied: both places have it from now on
a DTensor with other memory or dtype           taken into a new region; the same DTensor
another DTensor (an assigned state)            takes the place's DTensor's place
a plain Parameter                              sharded: each rank's own rows
nothing                                        left out
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dreamcomm.ranks.agree import Failed, exchange, first_difference, gather_objects
from dreamcomm.ranks.pieces import in_memory_order, is_dense
from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.parameters.casts import Casts
from dreamcomm.zero.units.parameters.placed import Placed, Source, contiguous_strides, source_of
from dreamcomm.zero.units.parameters.ranks import everyone, replicas_of, shards_of
from dreamcomm.zero.units.parameters.record import (
    Place,
    UnitParameter,
    own_rows,
    set_local,
    sharded_parameter,
)
from dreamcomm.zero.units.parameters.region import any_on_ranks
from dreamcomm.zero.units.unit import Unit
from dreamcomm.zero.units.window import WindowError

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree_window import TreeWindow

__all__ = ["differs", "new_records", "take_in"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
Registered = list[tuple[Place, nn.Parameter]]


@dataclass(frozen=True)
class Given:
    """A registered parameter that is taken in.

    Attributes:
        parameter: a plain one, or a DTensor.
        old: what its place had before.
        casts: of the unit.
    """

    parameter: nn.Parameter
    old: UnitParameter | None
    casts: Casts


Fresh = dict[int, Given]


def differs(units: Iterable[Unit]) -> bool:
    """Whether any module has other parameters or modules than before."""
    return any(unit.differs() for unit in units)


@torch.inference_mode(False)  # whose tensors have no versions
def take_in(tree: TreeWindow) -> None:
    """Brings all units' places up to date. Collective; the window is closed.

    After an error the units differ still, so that the next pass raises it again.
    """
    try:
        _take_in(tree)
    except BaseException:
        for unit in tree.units():
            unit.forget_contents()
        raise


def _take_in(tree: TreeWindow) -> None:
    from dreamcomm import _C

    known: dict[int, UnitParameter] = {}
    for unit in tree.units():
        for _, one in unit.places:
            known[id(one.whole)] = known[id(one.sharded)] = one
    found, fresh = _look_again(tree, known)
    _check_equal(tree.group, [one.parameter for one in fresh.values()])
    made = renew(list(fresh.values()), tree.mesh, tree.form)
    known.update(zip(fresh, made, strict=True))
    for unit, registered in found:
        unit.places = [(place_, known[id(parameter)]) for place_, parameter in registered]
        unit.shows_whole = True  # plain parameters may be registered
        unit.show_sharded()
    tree.pending.clear()
    if fresh:
        _C.give_back_free_pages()
    tree.forget()
    tree.link()
    tree.mark_changed()


def _look_again(
    tree: TreeWindow, known: dict[int, UnitParameter]
) -> tuple[list[tuple[Unit, Registered]], Fresh]:
    """What units have registered, and those that are new, each with what its place had before."""
    before = {
        (id(place_.module()), place_.name): one
        for unit in tree.units()
        for place_, one in unit.places
    }
    fresh: Fresh = {}
    found: list[tuple[Unit, Registered]] = []
    for unit in tree.units():
        unit.look_again()
        unit.hook_states()
        registered = list(unit.registered())
        found.append((unit, registered))
        for place_, parameter in registered:
            now = known.get(id(parameter))
            if now is None or not now.is_current(parameter):
                old = (
                    tree.pending.of(parameter)
                    or now
                    or before.get((id(place_.module()), place_.name))
                )
                fresh.setdefault(id(parameter), Given(parameter, old, unit.casts))
    return found, fresh


def _check_equal(group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Raises on all ranks where they have not changed the same."""
    lines = [f"{tuple(one.shape)} {one.dtype} on {one.device.type}" for one in parameters]
    facts = {"the list of changed parameters": str(lines)}
    found = first_difference(exchange(group, lambda: facts, _failed))
    if found is not None:
        raise WindowError(
            f"rank {dist.get_rank(group)}: fully_shard: {found}. Change a module's parameters on "
            "all ranks alike"
        )


def _failed(failed: Failed) -> Exception:
    return WindowError(f"fully_shard: rank {failed.rank} failed: {failed.kind}: {failed.text}")


def renew(given: Sequence[Given], mesh: DeviceMesh, form: Form) -> list[UnitParameter]:
    """Forms of registered parameters, in new memory. Collective.

    Args:
        given: as they are registered now.
        mesh: shards them.
        form: places them.
    """
    group = shards_of(mesh)
    wanted = [one for one in given if one.parameter.device.type != "meta"]
    with torch.no_grad():
        placed = iter(form.place([_source(one, group) for one in wanted]))
        made = []
        for one in given:
            if one.parameter.device.type == "meta":
                made.append(_on_meta(one, mesh))
            elif isinstance(one.parameter, DTensor):
                made.append(_adopted(one, next(placed)))
            else:
                made.append(_sharded(one, next(placed), mesh))
        _make_equal(made, replicas_of(mesh))
        for record in made:
            if record.sum_dtype != record.whole.dtype:
                record.whole.grad_dtype = record.sum_dtype
    return made


def _make_equal(records: Sequence[UnitParameter], replicas: dist.ProcessGroup | None) -> None:
    """Gives all replicas the first one's rows, which would differ for ever. Collective."""
    for one in records if replicas is not None else ():
        if not one.is_meta and one.local.numel() > 0:
            dist.broadcast(in_memory_order(one.local), group=replicas, group_src=0)


def new_records(
    parameters: Sequence[nn.Parameter], casts: Casts, mesh: DeviceMesh, form: Form
) -> tuple[list[UnitParameter], bool]:
    """Forms of plain parameters, and whether all ranks had the same values. Collective."""
    from dreamcomm import _C

    group = everyone(mesh)
    copies = [one.detach() for one in parameters if one.device.type != "meta"]
    equal = copies_are_equal(copies, group)
    del copies
    made = renew([Given(one, None, casts) for one in parameters], mesh, form)
    any_on_ranks(group, False)  # all rows are written
    _C.give_back_free_pages()  # malloc might keep as many bytes as the module has
    return made, equal


def copies_are_equal(copies: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all ranks have the same values, by sums of their bits. Collective."""
    sums = []
    for one in copies:
        flat = in_memory_order(one) if is_dense(one) else one.contiguous().view(-1)
        sums.append(int(flat.view(BITS[one.dtype.itemsize]).sum(dtype=torch.int64)))
    return all(found == sums for found in gather_objects(group, sums))


def _source(given: Given, group: dist.ProcessGroup) -> Source:
    one, old = given.parameter, given.old
    if not isinstance(one, DTensor):
        return source_of(one, given.casts, group)
    shape = tuple(one.shape)
    same = old is not None and tuple(old.whole.shape) == shape and not old.is_meta
    strides = tuple(old.whole.stride()) if same and old is not None else contiguous_strides(shape)
    return Source(shape, strides, one._local_tensor, given.casts)


def _record(
    given: Given, placed: Placed, whole: nn.Parameter, sharded: nn.Parameter
) -> UnitParameter:
    return UnitParameter("", whole, sharded, placed.rows, placed.sent, given.casts, placed.region)


def _sharded(given: Given, placed: Placed, mesh: DeviceMesh) -> UnitParameter:
    """The plain parameter stays the whole one, with its hooks."""
    from dreamcomm import _C

    one = given.parameter
    one.data = placed.whole
    sharded = sharded_parameter(placed.rows, one, mesh)
    for form in (placed.rows, sharded):
        _C.share_version(form, one)
    return _record(given, placed, one, sharded)


def _adopted(given: Given, placed: Placed) -> UnitParameter:
    """A DTensor stays registered, on other memory."""
    from dreamcomm import _C

    one, old = given.parameter, given.old
    if old is not None and not old.is_meta:
        whole = old.whole
        whole.grad = None
        whole.data = placed.whole
        whole.requires_grad_(one.requires_grad)
    else:
        whole = nn.Parameter(placed.whole, requires_grad=one.requires_grad)
        if old is not None:
            whole.__dict__.update(old.whole.__dict__)
    set_local(one, placed.rows)
    for form in (placed.rows, one):
        _C.share_version(form, whole)
    if old is not None and one is not old.sharded:
        one.__dict__.update(old.sharded.__dict__)
    return _record(given, placed, whole, one)


def _on_meta(given: Given, mesh: DeviceMesh) -> UnitParameter:
    one, group = given.parameter, shards_of(mesh)
    if isinstance(one, DTensor):
        whole = nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"))
        whole.requires_grad_(one.requires_grad)
        rows = one._local_tensor
        return UnitParameter("", whole, one, rows, rows, given.casts)
    rows = own_rows(one.detach(), dist.get_world_size(group), dist.get_rank(group))
    rows = torch.empty_like(rows)
    return UnitParameter("", one, sharded_parameter(rows, one, mesh), rows, rows, given.casts)
