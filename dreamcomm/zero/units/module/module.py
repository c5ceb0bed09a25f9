"""The methods of a module whose parameters lie once on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn

from dreamcomm.buckets.clip import clip_
from dreamcomm.buckets.protocol import ClipPart
from dreamcomm.invariant.loop import ShardLoop, loop_of
from dreamcomm.zero.units.face import FSDPModule, UnshardHandle
from dreamcomm.zero.units.module.no_ops import AcceptedSetters
from dreamcomm.zero.units.module.norm import clip_part
from dreamcomm.zero.units.module.report import described
from dreamcomm.zero.units.module.rewrite import rewritten
from dreamcomm.zero.units.tree.follow import differs
from dreamcomm.zero.units.unit import Unit, unit_of

__all__ = ["UnitModule"]


class UnitModule(AcceptedSetters, FSDPModule):
    """A module whose parameters this library shards."""

    # FSDPLinear's order: [FSDPLinear, UnitModule, AcceptedSetters, FSDPModule, torch's, Linear].
    _orig_cls_mro_index = 5

    @property
    def _unit(self) -> Unit:
        unit = unit_of(cast(nn.Module, self))
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        """The module's unit, and with ``recurse`` those below."""
        if not recurse:
            return [self._unit]
        found = (unit_of(one) for one in cast(nn.Module, self).modules())
        return list(dict.fromkeys(unit for unit in found if unit is not None))

    def _get_fsdp_state(self) -> Any:
        from torch.distributed.fsdp import fully_shard

        return cast(Any, fully_shard).state(self)

    # torch's methods.

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Registers the module's whole parameters. Collective, unless ranks read them already.

        Not recursive, as torch's.

        Args:
            async_op: return a handle, for code that waits for one.
        """
        unit = self._unit
        unit.tree.unshard()
        if unit.tree.rewrites is None:
            unit.tree.form.hold(unit)
        unit.show_whole()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Registers the module's DTensors. A root's ends reading, too, and is collective."""
        self._unit.show_sharded()
        self._unit.tree.form.release(self._unit)
        if self._unit.is_root and self._unit.tree.rewrites is None:
            self._unit.tree.close()

    def reset_iter_state(self) -> None:
        """Forgets a pass that an error has ended, and its gradients. Collective.

        Raises:
            RuntimeError: the module is not the root.
        """
        if not self._unit.is_root:
            raise RuntimeError(
                "reset_iter_state(): expected the root, the module that was given to fully_shard "
                f"last, got {type(self).__name__} below it: call it on the root"
            )
        self._unit.tree.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward pass is the last before a step: ranks keep reading if not."""
        self._unit.tree.is_last_backward = bool(is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward passes reduce gradients; one setting for all units of a root."""
        if not requires_gradient_sync:
            self._unit.tree.refuse_accumulation("set_requires_gradient_sync(False)")
        for unit in self._units(recurse):
            unit.reduces = bool(requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether DTensors are registered after a forward pass.

        With False on a root, a forward pass without gradients also leaves the parameters to be
        read: ranks may then evaluate different numbers of batches.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "set_reshard_after_forward(): expected a bool, got "
                f"{type(reshard_after_forward).__name__}"
            )
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether DTensors are registered after a backward pass."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The gradients of the unit are the ranks' sum over ``factor``, not their average.

        Raises:
            ValueError: the factor is not positive.
            RuntimeError: gradients are divided by counts.
        """
        if self._unit.tree.averages.counted:
            raise RuntimeError(
                'set_gradient_divide_factor(): with reduce="tokens" gradients are divided by what '
                "count() was given: leave it out"
            )
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor(): expected more than 0, got {factor}")
        self._unit.divide_factor = float(factor)
        self._unit.tree.forget()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether passes that reduce sum gradients over the replicas of a mesh of two dimensions.

        If not, sums over the shards wait, in the type of sums, for a later pass that does, or for
        :meth:`reduce_gradients`, or an optimizer's step. Without replicas it does nothing.
        """
        for unit in self._units(recurse):
            unit.all_reduces = bool(requires_all_reduce)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Has a function change gradients of this unit in place, after they are reduced.

        Args:
            hook: gets this rank's rows of all gradients that a pass has made, in one flat tensor of
                the type of sums: reduced over the shards, and averaged over the replicas where
                there are any.
            stream: of GPUs; not used.
        """
        self._unit.all_reduce_hook = hook

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit
        unit.tree.close()
        unit.show_sharded()
        before = [
            (one.sharded, one.is_meta, dict(one.sharded.__dict__)) for one in unit.parameters()
        ]
        result = super(torchs.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for sharded, was_meta, attributes in before:
            sharded.__dict__.update(attributes)  # torch swaps them away with the tensor
            if was_meta and sharded.device.type != "meta":
                unit.tree.was_materialized = True
        return result

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of a module. Plain parameters that are new are DTensors from here on."""
        units = self._unit.tree.units()
        for unit in units if differs(units) else ():
            unit.shard_new()
        module = cast(nn.Module, super(torchs.FSDPModule, self))
        return module.named_parameters(*args, **kwargs)

    # Beyond torch's.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._unit.tree.no_sync():
            yield

    def count(self, number: float | Tensor) -> None:
        self._unit.tree.count(number)

    @property
    def shards(self) -> ShardLoop:
        return loop_of(self._unit.tree.loop, "fully_shard")

    def mean(self, losses: Tensor | Sequence[Tensor | float]) -> Tensor:
        return self.shards.mean(losses)

    def reduce_gradients(self) -> None:
        self._unit.tree.refuse_accumulation("reduce_gradients()")
        self._unit.tree.reduce_gradients()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        (part,) = self.clip_parts()
        return clip_(part, max_norm, norm_type, error_if_nonfinite)

    def clip_parts(self) -> list[ClipPart]:
        """What the norm of all gradients consists of: each rank's rows of every parameter."""
        return [clip_part(self._unit.tree)]

    def report(self) -> str:
        return described(self._unit.tree)

    def rewrite(self) -> AbstractContextManager[bool]:
        return rewritten(self._unit.tree)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, this rank's own sums too."""
        super(torchs.FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        for unit in self._units(recurse=True):
            for one in unit.parameters():
                one.is_partial = False
                for form in (one.sharded, one.whole):
                    if set_to_none:
                        form.grad = None
                    elif form.grad is not None:
                        with torch.no_grad():
                            form.grad.zero_()
