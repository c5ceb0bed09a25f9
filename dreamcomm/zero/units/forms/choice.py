"""Which form a unit gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dreamcomm._torch.groups import ours
from dreamcomm.zero.units.forms.files import Files
from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.forms.gathered import Gathered
from dreamcomm.zero.units.forms.hosts import Hosts, even_hosts
from dreamcomm.zero.units.forms.shared import Shared
from dreamcomm.zero.units.parameters.ranks import shards_of
from dreamcomm.zero.units.tree.checks import check_folder

if TYPE_CHECKING:
    from dreamcomm.zero.units.unit import Unit

__all__ = ["form_of"]


def form_of(
    mesh: DeviceMesh, below: Sequence[Unit], gather: bool | None, folder: str | None
) -> Form:
    """Where parameters lie: that of units below, or a new one.

    Raises:
        ValueError: units below have another; ``gather`` is False, and no other is possible.
        NotImplementedError: parameters cannot lie in files of the folder.
    """
    group = shards_of(mesh)
    why = "gather=True was given" if gather else _why_gathered(group)
    gathers = bool(why)
    if gathers and gather is False:
        raise ValueError(f"fully_shard: got gather=False, but {why}: leave it out")
    hosts = _hosts_of(group)
    check_folder(
        folder,
        [unit.tree.form.folder for unit in below],
        why or ("the ranks are on several hosts" if len(hosts) > 1 else ""),
    )
    for unit in below:
        if unit.tree.form.gathers != gathers:
            raise ValueError(
                f"fully_shard: expected one form for all units of a root, got gather={gathers}, "
                f"and {unit.tree.form.described()} for {type(unit.module).__name__} below it"
            )
        return unit.tree.form
    if gathers:
        return Gathered(group, why)
    if len(hosts) > 1:
        return Hosts(group, hosts)
    return Shared(group) if folder is None else Files(group, folder)


def _hosts_of(group: dist.ProcessGroup) -> list[list[int]]:
    backend = ours(group, torch.device("cpu"))
    return [] if backend is None else backend.hosts


def _why_gathered(group: dist.ProcessGroup) -> str:
    """Why parameters cannot lie once on each host; empty: they can."""
    backend = ours(group, torch.device("cpu"))
    if backend is None:
        return "the group does not use the backend dreamcomm"
    if even_hosts(backend.hosts) or backend.shares_heaps:
        return ""
    if len(backend.hosts) > 1:
        return "the hosts have one rank each, or different numbers of ranks"
    return "the ranks do not share memory"
