"""fully_shard, and what belongs to it, with the signatures of torch.distributed.fsdp."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from dreamcomm.zero.units.elsewhere.module import shard_elsewhere
from dreamcomm.zero.units.face import FSDPModule
from dreamcomm.zero.units.forms.choice import form_of
from dreamcomm.zero.units.forms.gathered import Gathered
from dreamcomm.zero.units.module.adapter import give_state
from dreamcomm.zero.units.module.module import UnitModule
from dreamcomm.zero.units.module.rewrite import reset_parameters
from dreamcomm.zero.units.parameters.casts import Casts
from dreamcomm.zero.units.parameters.ranks import shards_of
from dreamcomm.zero.units.parameters.region import NoRegion
from dreamcomm.zero.units.tree.averages import averages_given, check_averages, shards_given
from dreamcomm.zero.units.tree.checks import (
    check_arguments,
    check_folder,
    check_mesh,
    check_modules,
    check_parameters,
    check_tied,
    given_modules,
    path_of,
)
from dreamcomm.zero.units.tree.follow import new_records
from dreamcomm.zero.units.tree.link import found_in_tree
from dreamcomm.zero.units.tree.tree import Tree
from dreamcomm.zero.units.unit import KEY, Unit, unit_of

__all__ = ["fully_shard", "initialize", "register_fsdp_forward_method", "share_comm_ctx"]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    gather: bool | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    reduce: str | None = None,
    invariant_shards: int | None = None,
    seed: int = 0,
) -> Any:
    """Shards a module's parameters, gradients and optimizer state over ranks. Collective.

    The arguments are those of :func:`torch.distributed.fsdp.fully_shard` (Zhao et al. 2023,
    "PyTorch FSDP"), and it is called as that is: on inner modules first, then on the root. Where
    the ranks are processes of one host, the host holds each parameter once, in memory that all of
    them map; each rank owns the rows that torch.chunk gives it, and steps them there. Forward and
    backward passes read the whole where it lies: nothing is gathered. Several hosts, of as many
    ranks, have one copy each, whose ranks bring in the other hosts' rows when they begin to read.
    On other CPUs ranks gather a unit's parameters while it computes. On GPUs torch's own function
    does the work.
    ``module.report()`` says which, and why.

    Args:
        module: a module, or a list that is one unit, below the root. The modules' classes get
            :class:`FSDPModule` in front.
        mesh: of one dimension, which shards; or of two, of which the first replicates and the
            second shards (hybrid sharding). None is one dimension of all ranks.
        reshard_after_forward: whether the DTensors are registered again after a forward pass, and
            what was gathered is freed; None: they are, except in the root.
        shard_placement_fn: may give None or Shard(0).
        mp_policy: in which types this unit computes. Parameters keep their own, in which they are
            stepped. Sums of gradients are never of 16 bits: ``reduce_dtype`` of 16 bits counts as
            float32.
        offload_policy: does nothing on CPUs. Any that is not torch's is done by torch.
        ignored_params: stay as they are.
        dp_mesh_dims: not supported.
        gather: True: ranks gather parameters, also where they could lie once on each host: less
            memory on several hosts, and more bytes between them. False: an error where they
            cannot lie there.
        offload_folder: on a disk. The parameters lie in files there, without names, and a unit's
            are in memory while it computes; a :class:`ZeroOptimizer` has its state there, too.
            torch's own optimizers keep theirs in ordinary memory. The files end with the
            processes: only a checkpoint survives. The same for all units of a root.
        reduce: "mean", or "tokens": the sum of all gradients over the sum of what the root's
            ``count()`` was given. The root's counts; None: as the units below, or "mean".
        invariant_shards: as of :class:`dreamcomm.DistributedDataParallel`; the root's counts.
        seed: of random numbers in shards.

    Returns:
        What was given.

    Raises:
        ValueError: a module that is sharded already, in whole or in part; parameters that cannot
            be sharded; ``gather=False`` where ranks share no memory; units of one root with
            several folders.
        NotImplementedError: an argument that is not supported; ``offload_folder`` where parameters
            do not lie once on one host.
        WindowError: no file can be made in ``offload_folder``: it is missing, full or memory.
    """
    roots = given_modules(module)
    check_modules(roots)
    mesh = mesh or _default_mesh()
    ignored = list(ignored_params or ())
    unit_parameters = [
        one for root in roots for one in root.parameters() if one not in set(ignored)
    ]
    check_arguments(reshard_after_forward, shard_placement_fn, unit_parameters, dp_mesh_dims)
    shards = shards_given(invariant_shards, seed, mesh, roots)
    averages = averages_given(reduce, shards, _units_below(roots))
    casts = Casts(mp_policy or MixedPrecisionPolicy())
    why = _why_elsewhere(roots, mesh, offload_policy)
    if why and _units_below(roots):
        raise ValueError(
            f"fully_shard: {type(roots[0]).__name__} has to be sharded by torch's function, as "
            f"{why}, and modules below are sharded by this library: give all of them the same mesh "
            "and policies"
        )
    if not why:
        keeps = cast("bool | None", reshard_after_forward)
        unit = Unit(roots, ignored, keeps, casts, averages, seed)
        _shard(unit, mesh, gather, path_of(offload_folder))
        return module
    check_folder(path_of(offload_folder), [], why)
    check_averages(averages, why)
    return shard_elsewhere(
        module,
        why,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=casts.policy,
        offload_policy=offload_policy or OffloadPolicy(),
        ignored_params=ignored_params,
    )


def _default_mesh() -> DeviceMesh:
    device = torch._C._get_accelerator().type
    return init_device_mesh(device, (dist.get_world_size(),))


def _why_elsewhere(
    roots: Iterable[nn.Module], mesh: DeviceMesh, offload_policy: OffloadPolicy | None
) -> str:
    """Why torch's function has to do it; empty: it has not."""
    if mesh.ndim > 2:
        return f"the mesh has {mesh.ndim} dimensions"
    if mesh.device_type != "cpu":
        return f"the mesh is of {mesh.device_type}"
    if type(offload_policy) not in (type(None), OffloadPolicy, CPUOffloadPolicy):
        return f"the policy is {type(offload_policy).__name__}"
    below = [one for root in roots for one in root.modules() if isinstance(one, torchs.FSDPModule)]
    if any(not isinstance(one, UnitModule) for one in below):
        return "modules below are sharded by torch's function"
    return ""


def _shard(made: Unit, mesh: DeviceMesh, gather: bool | None, folder: str | None) -> None:
    """Makes a tree of the unit, of those below, and of those with tied parameters."""
    roots = [module for reference in made.roots if (module := reference()) is not None]
    registered = list(made.registered())
    below = _units_below(roots)
    known = {}
    for _, one in registered:
        found = found_in_tree(one)
        if found is not None and not _is_above(found[0], roots):
            below += [unit for unit in found[0].units() if unit not in below]
            known[id(one)] = found[1]
    modules = [module for reference in made.modules if (module := reference()) is not None]
    check_parameters(made, modules, set(known))
    check_tied(made, known)
    check_mesh(mesh, below)
    form = form_of(mesh, below, gather, folder)
    for tree in {id(unit.tree): unit.tree for unit in below}.values():
        tree.close()
    fresh = list({id(one): one for _, one in registered if id(one) not in known}.values())
    try:
        records, were_equal = new_records(fresh, made.casts, mesh, form)
    except NoRegion as error:  # on all ranks
        if gather is False or below or folder is not None:
            raise
        form = Gathered(shards_of(mesh), str(error))
        records, were_equal = new_records(fresh, made.casts, mesh, form)
    known.update({id(one): record for one, record in zip(fresh, records, strict=True)})
    made.places = [(place, known[id(one)]) for place, one in registered]
    made.hook()
    for root in roots:
        root.__dict__[KEY] = made
        root.__class__ = _class_of(cast(Any, type(root)))
        give_state(root, made)
    marked: Any
    for marked in modules:  # for torch.compile
        marked._is_fsdp_managed_module = marked._fsdp_use_orig_params = True
    tree = Tree(mesh, form, made, [*below, made])
    tree.copies_were_equal = were_equal and all(unit.copies_were_equal for unit in below)
    made.copies_were_equal = were_equal
    made.shows_whole = True
    made.show_sharded()


def _units_below(roots: Iterable[nn.Module]) -> list[Unit]:
    found = (unit_of(one) for root in roots for one in root.modules())
    return list({id(unit): unit for unit in found if unit is not None}.values())


def _is_above(tree: Tree, roots: Sequence[nn.Module]) -> bool:
    """Whether the modules are in a unit of the tree: a child after its root."""
    wanted = set(map(id, roots))
    return any(id(one()) in wanted for unit in tree.units() for one in unit.modules)


@functools.cache
def _class_of(kind: Any) -> type[nn.Module]:
    """One class for each class of modules, as torch has."""
    return type(f"FSDP{kind.__name__}", (UnitModule, kind), {"__module__": kind.__module__})


def initialize(
    module: nn.Module, fn: Callable[[nn.Module], object] | None = None, *, seed: int = 0
) -> None:
    """Initialises a sharded module with the values that one process would give it. Collective.

    For a module that was made on the meta device, after ``module.to_empty(device="cpu")``. One rank
    runs the function on whole parameters; others get its values, and those of its buffers.

    Args:
        module: the root, after fully_shard.
        fn: initialises what it is given in place; None calls ``reset_parameters()`` of all modules
            that have it.
        seed: of the random numbers in it. Those of the program go on as if it had not run.
    """
    if not isinstance(module, FSDPModule):
        raise ValueError(
            f"initialize: expected a module after fully_shard, got {type(module).__name__}"
        )
    with cast(FSDPModule, module).rewrite() as writes:
        if writes:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                (fn or reset_parameters)(module)
    unit = unit_of(module)
    group = None if unit is None else unit.tree.group
    for buffer in module.buffers():
        if not isinstance(buffer, DTensor):
            dist.broadcast(buffer, group_src=0, group=group)
    if unit is not None:
        unit.tree.was_materialized = False


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Has a method read whole parameters, as ``forward`` does.

    Args:
        module: nothing is done where it is not sharded.
        method_name: of a method.

    Raises:
        ValueError: the module has no such method.
    """
    if isinstance(module, torchs.FSDPModule):
        torchs.register_fsdp_forward_method(module, method_name)


def share_comm_ctx(modules: list[torchs.FSDPModule]) -> None:
    """Shares streams between modules; there are none where parameters lie on the host once."""
    theirs = [one for one in modules if not isinstance(one, UnitModule)]
    if theirs:
        torchs.share_comm_ctx(theirs)
