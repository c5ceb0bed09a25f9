"""What ``grad`` is once a gradient was reduced into shards: a tensor without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from dreamcomm.buckets.engine import BucketEngine

__all__ = ["ShardedGradient", "local_shard"]

aten = torch.ops.aten


class ShardedGradient(Tensor):
    """Stands in for a gradient of which each rank has a shard. It can be cleared, and unscaled.

    Everything else raises, as its values are not on this rank.
    """

    stands_for_shards = True  # see buckets.protocol.is_sharded

    _name: str
    _engine: weakref.ref[BucketEngine]
    _index: int
    _group: dist.ProcessGroup

    @staticmethod
    def __new__(
        cls, parameter: Tensor, name: str, engine: BucketEngine, index: int
    ) -> ShardedGradient:
        make = cast(Any, Tensor)._make_wrapper_subclass
        self = cast(
            ShardedGradient,
            make(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device),
        )
        self._name, self._engine, self._index = name, weakref.ref(engine), index
        self._group = engine.group
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        ranks = dist.get_world_size(self._group)
        return f"ShardedGradient({self._name!r}, shape {tuple(self.shape)}, over {ranks} ranks)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no class method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        first = next(one for one in _tensors(args) if isinstance(one, ShardedGradient))
        ranks = dist.get_world_size(first._group)
        raise RuntimeError(
            f"rank {dist.get_rank(first._group)}: {func} was called on the gradient of "
            f"{first._name!r}, which was reduced into shards over {ranks} ranks: this rank has its "
            "rows only. To clip gradients call ZeroOptimizer.clip_grad_norm_(); to look at whole "
            "gradients use stage=1, and reduce them"
        )


def local_shard(gradient: ShardedGradient) -> Tensor | None:
    """This rank's elements, flat; None if there are none yet."""
    engine = gradient._engine()
    shards = None if engine is None else engine.shards
    return None if shards is None else shards.memory(gradient._index)


def _tensors(args: Iterable[Any]) -> Iterable[Any]:
    for one in args:
        if isinstance(one, (list, tuple)):
            yield from _tensors(one)
        else:
            yield one


def _zero_(gradient: ShardedGradient) -> ShardedGradient:
    shard = local_shard(gradient)
    if shard is not None:
        shard.zero_()
    return gradient


def _zero_all_(gradients: list[Tensor]) -> None:
    for one in gradients:
        if isinstance(one, ShardedGradient):
            _zero_(one)
        else:
            one.zero_()


def _unscale_(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """GradScaler's look at gradients: an infinity or NaN on any rank counts on all. Collective."""
    shards = [local_shard(one) if isinstance(one, ShardedGradient) else one for one in gradients]
    present = [shard for shard in shards if shard is not None and shard.numel() > 0]
    if present:
        torch._amp_foreach_non_finite_check_and_unscale_(present, found_inf, inverse_scale)
    group = next(one for one in gradients if isinstance(one, ShardedGradient))._group
    dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.zero_: _zero_,
    aten._foreach_zero_: _zero_all_,
    aten.detach: lambda gradient: gradient,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}
