"""What fully_shard refuses before anything has changed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.utils import _get_root_modules
from torch.nn.parameter import UninitializedParameter

from dreamcomm.buckets.found import engine_of
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.unit import Unit, unit_of

__all__ = [
    "check_arguments",
    "check_folder",
    "check_mesh",
    "check_modules",
    "check_parameters",
    "check_root",
    "check_tied",
    "given_modules",
    "path_of",
]

if TYPE_CHECKING:
    from dreamcomm._C import RegionFolder

WHAT = "fully_shard"


def given_modules(given: object) -> list[nn.Module]:
    """The module or modules that were given, without those inside of others."""
    is_one = isinstance(given, nn.Module) or not isinstance(given, Iterable)
    found: list[Any] = [given] if is_one else list(cast("Iterable[Any]", given))
    for one in found:
        if not isinstance(one, nn.Module):
            raise ValueError(
                f"{WHAT}: expected a torch.nn.Module or a list of some, got {type(one).__name__}"
            )
    if not found:
        raise ValueError(f"{WHAT}: expected a torch.nn.Module or a list of some, got an empty list")
    return list(_get_root_modules(found))


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Raises for modules that cannot be a unit."""
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _has_no_forward(module):
            raise ValueError(
                f"{WHAT}: {type(module).__name__} has no forward(), so its parameters would never "
                "be read: shard each module in it"
            )
        if unit_of(module) is not None:
            raise ValueError(
                f"{WHAT}: this {type(module).__name__} is sharded already: call it once for each "
                "module"
            )


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward in (nn.ModuleList.forward, nn.ModuleDict.forward)


def check_arguments(
    reshard_after_forward: object,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    parameters: Sequence[nn.Parameter],
    dp_mesh_dims: object,
) -> None:
    """Raises for arguments that are not supported."""
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"{WHAT}: expected True, False or None as reshard_after_forward, got "
            f"{reshard_after_forward!r}: parameters lie on the host once, so there is no smaller "
            "group to gather them in"
        )
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            f"{WHAT}: dp_mesh_dims is not supported: give the mesh of data parallelism as mesh"
        )
    for one in parameters if shard_placement_fn is not None else ():
        wanted = shard_placement_fn(one)  # type: ignore[misc]
        if wanted is not None and wanted != Shard(0):
            raise NotImplementedError(
                f"{WHAT}: expected None or Shard(0) of shard_placement_fn, got {wanted}: rows of "
                "another dimension lie apart in memory, where torch's fused optimizers write to "
                "their neighbours"
            )


def check_mesh(mesh: DeviceMesh, below: Iterable[Unit]) -> None:
    """Raises where a unit below is sharded over other ranks."""
    ranks = mesh.mesh.tolist()
    for unit in below:
        others = unit.tree.mesh.mesh.tolist()
        if others != ranks:
            raise ValueError(
                f"{WHAT}: expected one mesh for all units of a root, got ranks {ranks}, and ranks "
                f"{others} for {type(unit.module).__name__} below it: give both the same mesh"
            )


def path_of(folder: str | os.PathLike[str] | None) -> str | None:
    """The whole path of a folder."""
    return None if folder is None else os.path.abspath(folder)


def check_folder(path: str | None, below: Iterable[RegionFolder | None], why: str) -> None:
    """Raises where parameters cannot lie in files of the folder.

    Args:
        path: None: they are not to.
        below: the folders of units below.
        why: they do not lie once on the host; empty: they do.
    """
    if path is not None and why:
        raise NotImplementedError(
            f"{WHAT}: expected no offload_folder, as {why}: it is for parameters that lie once on "
            "the host, in memory that this library's ranks share. Leave it out"
        )
    for one in below:
        theirs = None if one is None else one.path
        if theirs != path:
            raise ValueError(
                f"{WHAT}: expected one offload_folder for all units of a root, got {path!r}, and "
                f"{theirs!r} for a unit below it"
            )


def check_parameters(unit: Unit, modules: Sequence[nn.Module], known: set[int]) -> None:
    """Raises for parameters that cannot be sharded.

    Args:
        unit: a new one, without a tree.
        modules: of the unit.
        known: ids of DTensors of units below, which may be tied.
    """
    for place, one in unit.registered():
        where = f"parameter {place.name!r} of a {type(place.module()).__name__}"
        if id(one) in known:
            continue
        if isinstance(one, UninitializedParameter):
            raise ValueError(f"{WHAT}: {where} has no shape yet: run a forward pass first")
        if isinstance(one, DTensor):
            raise ValueError(
                f"{WHAT}: {where} is a DTensor already: shard modules from the inside out, a "
                "child before its root; tensor parallel parameters are not supported yet"
            )
        if engine_of(one) is not None:
            gc.collect()  # its wrapper may be garbage, as an optimizer with a scheduler
        if engine_of(one) is not None:
            raise ValueError(
                f"{WHAT}: the gradients of {where} are reduced already, by a ZeroOptimizer or a "
                "DistributedDataParallel: delete it first, and make the optimizer after fully_shard"
            )
        if not one.is_floating_point():
            raise ValueError(f"{WHAT}: {where} is {one.dtype}, expected a floating-point type")
        if one.layout is not torch.strided:
            raise ValueError(f"{WHAT}: {where} is {one.layout}, expected a dense one")
    for module in modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.max_norm is not None:
                raise ValueError(
                    f"{WHAT}: {type(module).__name__}(max_norm=...) writes to its weight in each "
                    "forward pass, while all ranks read it: leave max_norm out"
                )
            if module.sparse:
                raise ValueError(
                    f"{WHAT}: {type(module).__name__}(sparse=True) makes sparse gradients, which "
                    "cannot be sharded: leave sparse=True out"
                )


def check_tied(unit: Unit, known: Mapping[int, UnitParameter]) -> None:
    """Raises where a unit has parameters of units below in another type than its own.

    Args:
        unit: a new one.
        known: by the ids of DTensors of units below.
    """
    for place, one in unit.registered():
        record = known.get(id(one))
        if record is None or record.whole.dtype == unit.casts.whole_dtype(record.local.dtype):
            continue
        raise ValueError(
            f"{WHAT}: parameter {place.name!r} of a {type(place.module()).__name__} is tied to one "
            f"of a unit that computes in {record.whole.dtype}, and this unit's policy has "
            f"param_dtype={unit.casts.policy.param_dtype}: give both the same mp_policy"
        )


def check_root(root: Unit | None) -> None:
    """Raises where the outermost unit is a list of modules, of which none holds the others."""
    names = [] if root is None else [type(one()).__name__ for one in root.roots]
    if len(names) > 1:
        raise RuntimeError(
            f"{WHAT}: expected one module as the root, got the list [{', '.join(names)}]: give the "
            f"module that holds them to {WHAT}, after the list"
        )
