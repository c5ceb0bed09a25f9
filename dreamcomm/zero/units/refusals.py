"""Says on all ranks why parameters cannot be read, or were not to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist

from dreamcomm.ranks.agree import gather_objects
from dreamcomm.zero.units.record import UnitParameter
from dreamcomm.zero.units.window import WindowError

__all__ = ["refuse_to_read", "refuse_writes", "unreadable"]


def unreadable(records: Sequence[UnitParameter], name: str) -> str:
    """Says which parameter has no values, or values that would be ignored; empty: none."""
    for one in records:
        if one.is_meta:
            return (
                f"parameter {one.name!r} of {name} is on the meta device: call "
                "module.to_empty(device='cpu'), then load a checkpoint, or initialise it with "
                "dreamcomm.zero.initialize(module)"
            )
        if one.has_other_data():
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
        one.ignore_data()
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
