"""Where one copy of the parameters a host does not serve, torch's own ``fully_shard`` shards.

The module's class becomes one that torch's code takes for its own::

    FSDPMlp          no_sync, reduce_gradients, clip_grad_norm_, report, rewrite, zero_grad
    FSDPModule       torch's methods
    Mlp              the module's class, and its bases
    ElsewhereModule  for isinstance, as it is found before these in any other order
    FSDPModule       ours

INVARIANT: ``__mro__[2]`` is the module's class. ``FSDPModule.__new__`` makes an instance of it, as
for a slice of an ``nn.Sequential``, and dynamo looks it up, by this number, in the table in which
torch's ``fully_shard`` has just entered it. Python's own order has our classes in front of torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import fully_shard

from dreamcomm.buckets.averages import AVERAGE, given_count
from dreamcomm.invariant.loop import ShardLoop, loop_of
from dreamcomm.zero.units.elsewhere.norm import clip_
from dreamcomm.zero.units.elsewhere.rewrite import rewriting
from dreamcomm.zero.units.elsewhere.state import (
    accumulated,
    forget_gradients,
    groups_of,
    no_reduction,
    reduce_accumulated,
)
from dreamcomm.zero.units.face import FSDPModule

__all__ = ["ElsewhereModule", "shard_elsewhere"]

M = TypeVar("M", bound="nn.Module | list[nn.Module]")


class ElsewhereModule(FSDPModule):
    """A module that torch's ``fully_shard`` has sharded, with the methods of this library."""

    _why_elsewhere: str

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank, and communicate none.

        Where the backward pass runs counts, not the forward pass. The next backward pass outside,
        or :meth:`reduce_gradients`, reduces what has accumulated. Holds for the module and all
        below. Settings are as before at the end, also after an error. Not collective.
        """
        with no_reduction(groups_of(cast(nn.Module, self))):
            yield

    def count(self, number: float | Tensor) -> None:
        """Raises RuntimeError: torch's function averages over ranks, not over counts."""
        given_count(AVERAGE, number, "fully_shard", dist.group.WORLD)

    @property
    def shards(self) -> ShardLoop:
        """Raises RuntimeError: torch's function does not add along a tree."""
        return loop_of(None, "fully_shard")

    def mean(self, losses: Tensor | Sequence[Tensor | float]) -> Tensor:
        """Raises RuntimeError, as :attr:`shards`."""
        return self.shards.mean(losses)

    def reduce_gradients(self) -> None:
        """Reduces what :meth:`no_sync` has accumulated, here and below. Collective.

        It is added to ``grad`` of the parameters. Does nothing where nothing has accumulated. Call
        it on all ranks, outside of a backward pass. As in torch's backward passes all ranks must
        have gradients of the same parameters, unless ``set_reduce_scatter_unused_params(True)``
        counts those that a rank has not used as zeros.
        """
        reduce_accumulated(groups_of(cast(nn.Module, self)))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales gradients so that their norm is ``max_norm`` at most. Collective.

        Reduces what has accumulated first. Counts all parameters here and below that torch shards;
        ``ignored_params`` are each rank's own, neither counted nor scaled.

        Args:
            max_norm: of all gradients together.
            norm_type: the p of the norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: whether to raise where the norm is not finite.

        Returns:
            The norm before, float32, of no dimension, a plain tensor, the same on all ranks.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set. On all ranks;
                gradients are as before.
        """
        groups = groups_of(cast(nn.Module, self))
        reduce_accumulated(groups)
        parameters = [one.sharded_param for group in groups for one in group.fsdp_params]
        device = groups[0].device if groups else torch.device("cpu")
        with torch.no_grad():
            return clip_(parameters, device, max_norm, float(norm_type), error_if_nonfinite)

    @contextmanager
    def rewrite(self) -> Iterator[bool]:
        """Lets the first rank of the mesh write whole parameters, for all ranks. Collective.

        For initialisation, surgery, or a checkpoint that one rank has read. Inside, that rank has
        plain ``nn.Parameter`` of whole shapes registered, here and below, and changes their values
        in place; ``load_state_dict`` does so. At the end all ranks have them in their shards. It
        takes one whole copy on that rank, and one parameter at a time on others. Run no forward or
        backward passes inside. Buffers and ``ignored_params`` stay each rank's.

        Yields:
            True on the rank that writes, False on others.

        Raises:
            dreamcomm.zero.units.elsewhere.rewrite.RewriteError: a ``RuntimeError``; the body failed
                on another rank, or parameters do not fit. On all ranks, and none has changed.
            Exception: what the body raised on this rank.
        """
        with rewriting(cast(nn.Module, self)) as writes:
            yield writes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, also what has accumulated under :meth:`no_sync`. Not collective.

        An optimizer's ``zero_grad()`` cannot see the latter.
        """
        forget_gradients(groups_of(cast(nn.Module, self)), set_to_none)
        super(TorchModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def report(self) -> str:
        """What runs the module, why, and bytes of this rank. Nothing is communicated."""
        groups = groups_of(cast(nn.Module, self))
        parameters = [one.sharded_param for group in groups for one in group.fsdp_params]
        gradients = [one.grad for one in parameters if one.grad is not None]
        waiting = [whole for group in groups for whole in accumulated(group)]
        meshes = ", ".join({str(one.device_mesh): None for one in parameters}) or "no mesh"
        return (
            f"torch's FSDP2 runs {type(self).__name__}: {self._why_elsewhere}\n"
            f"{len(parameters)} parameters of {sum(one.numel() for one in parameters):,d} elements,"
            f" {sum(one.nbytes for one in parameters):,d} bytes, in {len(groups)} units on "
            f"{meshes}\n"
            f"rank {dist.get_rank()} has {_local_bytes(parameters):,d} bytes of parameters, "
            f"{_local_bytes(gradients):,d} of gradients, and {_local_bytes(waiting):,d} of "
            "gradients that are not reduced yet"
        )


def shard_elsewhere(module: M, why: str, **arguments: Any) -> M:
    """Hands a module to torch's ``fully_shard``, and adds the methods of this library.

    Args:
        module: has the parameters of all below that are not sharded yet; or a list of modules that
            are one unit.
        why: what keeps it from one copy of the parameters a host, for :meth:`report`.
        arguments: as of ``torch.distributed.fsdp.fully_shard``.

    Returns:
        What was given: each a torch ``FSDPModule`` and an :class:`ElsewhereModule`.

    Raises:
        Exception: what torch raises of its arguments.
    """
    fully_shard(cast(Any, module), **arguments)
    for one in [module] if isinstance(module, nn.Module) else module:
        _take(one, why)
    return module


def _take(module: Any, why: str) -> None:
    # torch leaves a module of a list as it is where it lies in another one.
    if isinstance(module, TorchModule) and not isinstance(module, ElsewhereModule):
        taken: Any = module
        taken.__class__ = _with_methods(cast(Any, type(module)))
        taken._why_elsewhere = why


@functools.cache
def _with_methods(made: Any) -> type[nn.Module]:
    """A class such as ``made``, which is torch's, with our methods before all others."""
    original = made.__mro__[made._orig_cls_mro_index]

    def mro(cls: type) -> list[type]:
        ours = [one for one in ElsewhereModule.__mro__ if one not in TorchModule.__mro__]
        return [cls, TorchModule, *original.__mro__[:-1], *ours, object]

    # The metaclass is the one that the module's class has, with another order.
    metaclass = type("Ordered", (type(original),), {"mro": mro})
    own = {name: one for name, one in vars(ElsewhereModule).items() if not name.startswith("_")}
    body = {**own, "__deepcopy__": FSDPModule.__deepcopy__, "__doc__": original.__doc__}
    return cast(type[nn.Module], metaclass(made.__name__, (ElsewhereModule, original), body))


def _local_bytes(tensors: list[Any]) -> int:
    held = [getattr(one, "_local_tensor", one) for one in tensors]
    return sum(one.nbytes for one in held)
