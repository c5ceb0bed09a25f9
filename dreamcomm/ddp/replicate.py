"""Data parallelism in place: the module keeps its class's methods and its parameters' names."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm._torch.ddp import broadcast_buffers_, broadcast_module, find_tensors
from dreamcomm._torch.groups import given_group
from dreamcomm.buckets.averages import averages_of
from dreamcomm.buckets.clip import clip_
from dreamcomm.buckets.engine import Caps
from dreamcomm.buckets.protocol import ClipPart
from dreamcomm.ddp.checks import check_module
from dreamcomm.ddp.early_steps import refuse_early_steps
from dreamcomm.ddp.engine import Reducer
from dreamcomm.ddp.report import Report
from dreamcomm.ddp.watch import BufferWatch
from dreamcomm.invariant.agreement import check_shards
from dreamcomm.invariant.loop import ShardLoop, loop_of
from dreamcomm.ranks.parameters import (
    TrainedParameter,
    check_equal_models,
    check_group,
    find_parameters,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

__all__ = ["ReplicatedModule", "replicate"]

M = TypeVar("M", bound=nn.Module)
MIB = 1 << 20
WHAT = "replicate"


class ReplicatedModule:
    """What :func:`replicate` adds to a module. A copy, and what is unpickled, is a plain module."""

    _replicate_reducer: Reducer
    _replicate_hooks: tuple[RemovableHandle, RemovableHandle]
    _replicate_loop: ShardLoop

    def _plain(self) -> nn.Module:
        """The module as it was before, on the same parameters."""
        module = cast(nn.Module, self)
        own: type[nn.Module] = type(module).__mro__[2]  # after ReplicatedModule
        plain = own.__new__(own)
        left_out = ("_replicate_reducer", "_replicate_hooks", "_replicate_loop")
        plain.__dict__.update({k: v for k, v in module.__dict__.items() if k not in left_out})
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = copy.copy(module.__dict__[name])
            # A slice of a Sequential has the class of the whole, and no hooks.
            for handle in module.__dict__.get("_replicate_hooks", ()):
                hooks.pop(handle.id, None)
            plain.__dict__[name] = hooks
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._plain()
        return _blank, (type(plain),), cast(Any, plain.__reduce_ex__(protocol))[2]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to this rank's gradients alone."""
        with self._replicate_reducer.no_sync():
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward passes reduce, as FSDP2's method of this name."""
        if not requires_gradient_sync:
            self._replicate_reducer.refuse_accumulation("set_requires_gradient_sync(False)")
        self._replicate_reducer.sync = requires_gradient_sync

    def count(self, number: float | Tensor) -> None:
        """As :meth:`DistributedDataParallel.count`."""
        self._replicate_reducer.count(number, WHAT)

    def mean(self, losses: Tensor | Sequence[Tensor | float]) -> Tensor:
        """As :meth:`DistributedDataParallel.mean`."""
        return self.shards.mean(losses)

    @property
    def shards(self) -> ShardLoop:
        """As :attr:`DistributedDataParallel.shards`."""
        return loop_of(self.__dict__.get("_replicate_loop"), WHAT)

    def reduce_gradients(self) -> None:
        """Reduces what has accumulated, without a backward pass. Collective."""
        self._replicate_reducer.refuse_accumulation("reduce_gradients()")
        self._replicate_reducer.reduce_now()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """As :meth:`DistributedDataParallel.clip_grad_norm_`. Collective."""
        (part,) = self.clip_parts()
        return clip_(part, max_norm, norm_type, error_if_nonfinite)

    def clip_parts(self) -> list[ClipPart]:
        """As :meth:`DistributedDataParallel.clip_parts`."""
        return self._replicate_reducer.clip_parts()

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """As torch's ``DistributedDataParallel.register_comm_hook``."""
        self._replicate_reducer.register_hook(state, hook)

    def report(self) -> Report:
        """The bucket plan, and times and bytes of the latest step."""
        return Report.of(self._replicate_reducer.plan, self._replicate_reducer.report())


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = 25,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    forward_sync_buffers: bool = True,
    reduce: str | float = "mean",
    invariant_shards: int | None = None,
    seed: int = 0,
) -> M:
    """Makes a module's backward passes reduce its gradients over all ranks, in place.

    The module stays the same object, of a class that derives from its own and from
    :class:`ReplicatedModule`; ``state_dict()`` has the same names as before. The name and the idea
    are those of ``torch.distributed._composable.replicate``.

    Args:
        module: as for :class:`DistributedDataParallel`. Its values become rank 0's.
        mesh: of one dimension; its group reduces.
        group: in place of ``mesh``; None is the default group.
        process_group: another word for ``group``.
        bucket_cap_mb: mebibytes at which a bucket is closed.
        static_graph, find_unused_parameters, forward_sync_buffers, reduce, invariant_shards, seed:
            as for :class:`DistributedDataParallel`.

    Returns:
        The module.

    Raises:
        ValueError, TypeError: as :class:`DistributedDataParallel`.
    """
    if sum(one is not None for one in (mesh, group, process_group)) > 1:
        raise ValueError(f"{WHAT}: give mesh or group, not both")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"{WHAT}: expected a mesh of one dimension, got {mesh}; give a part of it")
    if not bucket_cap_mb > 0:
        raise ValueError(f"{WHAT}: expected bucket_cap_mb above 0, got {bucket_cap_mb}")
    group = given_group(group or process_group) if mesh is None else mesh.get_group(mesh_dim=0)
    averages = averages_of(reduce, WHAT)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{WHAT}: expected a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, ReplicatedModule):
        raise ValueError(f"{WHAT}: the module is replicated already")
    parameters = find_parameters(module, ())
    check_module(module, parameters, WHAT)
    check_group(group, parameters, WHAT)
    shards = check_shards(invariant_shards, seed, group, module, parameters, WHAT)
    averages = replace(averages, shards=shards)
    check_equal_models(group, parameters, WHAT, list(module.named_buffers()))
    caps = Caps(int(bucket_cap_mb * MIB) or 1, MIB)
    reducer = Reducer(
        parameters,
        group,
        caps,
        averages=averages,
        static_graph=static_graph,
        finds_unused=parameters[0].parameter.device.type == "cpu" or find_unused_parameters,
    )
    broadcast_module(module, group, set(), buffers=True)
    me = weakref.ref(module)
    reducer.follow(module, lambda: _found_in(me), WHAT, checks=True)
    watch = BufferWatch(group, WHAT, module.named_buffers())
    own = type(module)
    module.__class__ = type(f"Replicated{own.__name__}", (ReplicatedModule, own), {})
    cast(Any, module)._replicate_reducer = reducer
    if shards:
        cast(Any, module)._replicate_loop = ShardLoop(
            lambda: reducer, lambda: _alive(me), group, shards, seed, WHAT
        )
        refuse_early_steps(reducer)
    cast(Any, module)._replicate_hooks = (
        module.register_forward_pre_hook(_before_forward(watch if forward_sync_buffers else None)),
        module.register_forward_hook(_after_forward),
    )
    return module


def _blank(kind: type[nn.Module]) -> nn.Module:
    """A module that pickle then fills."""
    return kind.__new__(kind)


def _found_in(module: weakref.ref[M]) -> tuple[nn.Module, list[TrainedParameter]]:
    found = _alive(module)
    return found, find_parameters(found, ())


def _alive(module: weakref.ref[M]) -> M:
    found = module()
    assert found is not None  # its own methods call this
    return found


def _before_forward(watch: BufferWatch | None) -> Any:
    """``watch``: of the buffers that get rank 0's values; None: they do not."""

    def before(module: nn.Module, _: Any) -> None:
        reducer = cast(Reducer, module._replicate_reducer)
        if torch.is_grad_enabled() and reducer.sync:
            reducer.prepare_for_forward()
        buffers = list(module.named_buffers())
        loop = module.__dict__.get("_replicate_loop")
        if loop is not None and loop.is_running:
            return  # each shard begins with those of the step
        if watch is not None and buffers and reducer.sync:
            watch.check(buffers)
            broadcast_buffers_([one for _, one in buffers], reducer.group)

    return before


def _after_forward(module: nn.Module, _: Any, output: Any) -> None:
    if torch.is_grad_enabled():
        cast(Reducer, module._replicate_reducer).prepare_for_backward(find_tensors(output))
