"""Says why parameters cannot be read or loaded, or were not to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dreamcomm.ranks.agree import gather_objects
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.window import WindowError

__all__ = ["check_rows", "refuse_changes", "refuse_to_read", "refuse_writes", "unreadable"]


def unreadable(records: Sequence[UnitParameter], name: str) -> str:
    """Says which parameter has no values, or values that would be ignored; empty: none."""
    from dreamcomm import _C

    storages = _C.storages_of([one.sharded for one in records])
    for one, storage in zip(records, storages, strict=True):
        if one.is_meta:
            return (
                f"parameter {one.name!r} of {name} is on the meta device: call "
                "module.to_empty(device='cpu'), then load a checkpoint, or initialise it with "
                "dreamcomm.zero.initialize(module)"
            )
        if storage != one.storage:
            return (
                f"parameter {one.name!r} of {name} was given other data by .data = ..., which a "
                "sharded parameter ignores: copy values into it under torch.no_grad(), as by "
                "parameter.copy_(...), or use module.rewrite(). It has its values from before"
            )
    return ""


def refuse_to_read(
    group: dist.ProcessGroup, records: Sequence[UnitParameter], problem: str
) -> NoReturn:
    """Raises the first rank's problem. The next pass goes on with the values from before.

    Args:
        group: all of its ranks call it.
        records: all parameters.
        problem: of this rank, or empty.
    """
    for one in records:
        one.note_storage()
    found = gather_objects(group, problem)
    rank, text = next((rank, text) for rank, text in enumerate(found) if text)
    raise WindowError(f"fully_shard: rank {rank}: {text}")


def refuse_writes(group: dist.ProcessGroup, module: str, names: Sequence[str]) -> NoReturn:
    """Raises for what ranks have written while others could read it.

    Args:
        group: all of its ranks call it.
        module: its root's name.
        names: the parameters that this rank has written to.
    """
    written = gather_objects(group, list(names[:3]))
    found = "; ".join(
        f"rank {rank} has written to {', '.join(map(repr, some))}"
        for rank, some in enumerate(written)
        if some
    )
    raise WindowError(
        f"rank {dist.get_rank(group)}: fully_shard: parameters of {module} were changed while all "
        f"ranks read them: {found}. Between a forward pass and the end of its backward pass the "
        "ranks use one copy. Change parameters after backward(), or after a forward pass under "
        "torch.no_grad() or module.reshard(), or within module.rewrite()"
    )


def refuse_changes(group: dist.ProcessGroup, module: str) -> NoReturn:
    """Raises for modules that have other parameters than the graph that a pass goes through."""
    raise WindowError(
        f"rank {dist.get_rank(group)}: fully_shard: modules of {module} got other parameters "
        "between a forward pass and its backward pass. Replace parameters, or tie them, before a "
        "forward pass or after backward()"
    )


def check_rows(state: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Raises where a state has another rank's rows, as where one rank has saved it for all.

    Args:
        state: to load; nothing of it is loaded yet.
        mesh: of the module.
    """
    here = mesh.get_coordinate()
    for key, value in state.items():
        if not isinstance(value, DTensor) or not any(one.is_shard() for one in value.placements):
            continue
        theirs = value.device_mesh
        maker = theirs.get_coordinate()
        if theirs.shape != mesh.shape or maker == here or maker is None:
            continue  # torch compares the meshes
        rank, of = mesh.get_rank(), int(theirs.mesh[tuple(maker)])
        raise ValueError(
            f"rank {rank}: fully_shard: expected this rank's rows of {key!r} in the state, got "
            f"those of rank {of}; nothing has changed. A state_dict() has the rows of the rank "
            "that made it. Save with dreamcomm.zero.save or torch.distributed.checkpoint on all "
            "ranks, or a whole state of get_model_state_dict(full_state_dict=True)"
        )
