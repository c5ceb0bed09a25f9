"""Loss scaling: one answer on all ranks to whether gradients have an infinity or NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm.buckets.found import engines_of

__all__ = ["GradScaler", "SkipsTogether", "unscale_"]


@runtime_checkable
class SkipsTogether(Protocol):
    """An optimizer whose ranks skip the same steps, and may hold different gradients before.

    Attributes:
        process_group: of the ranks.
        divides_averages: gradients are of float16, and their averages of float32. So the averages
            alone are divided: small numbers would be lost in float16, for which torch refuses it.
    """

    process_group: dist.ProcessGroup

    @property
    def divides_averages(self) -> bool: ...

    def before_unscale(self) -> None:
        """Reduces what can be looked at only when it is reduced. Collective."""

    def note_unscaled(self, inverse: Tensor) -> None:
        """All ranks know whether any gradient has an infinity.

        Args:
            inverse: what gradients were multiplied by, or are to be where ``divides_averages``; a
                float32 tensor of no dimension.
        """


class GradScaler(torch.amp.GradScaler):
    """torch's, for all ways of training: ranks that step together skip together.

    torch's class looks at this rank's gradients alone. That is right where all ranks have the same
    ones, as under a DistributedDataParallel, and where each rank skips its own steps, as with
    LocalSGD, DiLoCo and Gossip. This one asks the other ranks where it is not: for a ZeroOptimizer,
    for an optimizer of parameters which a wrapper leaves out or which several groups reduce, and
    for a Pipeline made with ``scaler=``, whose stages and optimizers all skip a step together.
    Otherwise each optimizer skips its own steps, as in torch, and the scale is that of all ranks.

    Args:
        device: of the scale; None: the accelerator, or the CPU without one.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if device is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if found is None else found.type
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._pipeline: _OfPipeline | None = None
        self._seen = _Seen()

    def decide_for(
        self, group: dist.ProcessGroup, trained: Callable[[], Sequence[Tensor]], name: str
    ) -> None:
        """Has ranks skip steps together, whatever optimizers they have. For a Pipeline.

        Args:
            group: of the ranks.
            trained: gives this rank's parameters.
            name: of what scales the losses, for errors.
        """
        self._pipeline = _OfPipeline(group, trained, name)

    def factor(self) -> float:
        """The loss scale, for a loss whose gradient is given; 1.0 where this is disabled."""
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return self.get_scale()

    def scale(self, outputs: Any) -> Any:
        """As torch's.

        Raises:
            RuntimeError: a Pipeline scales the losses.
        """
        if self._enabled and self._pipeline is not None:
            raise RuntimeError(
                f"GradScaler.scale(): {self._pipeline.name} scales its losses itself: leave it out"
            )
        return super().scale(outputs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's; with a Pipeline it is collective where this rank has no optimizer."""
        self.decide()
        if self._pipeline is not None:
            self._pipeline.skips = None
        elif self._enabled and new_scale is None:
            self._agree_on_scale()
        self._seen = _Seen()
        super().update(new_scale)

    def _agree_on_scale(self) -> None:
        """An infinity that one optimizer has skipped a step for halves all ranks' scales."""
        if not self._seen.may_differ():
            return
        states: Any = self._per_optimizer_states
        every = [one for state in states.values() for one in state["found_inf_per_device"].values()]
        found = torch.stack([one.to(every[0].device) for one in every]).amax()
        for group in self._seen.groups:
            _agree(found, self._scale_tensor(), group)
        states[id(self)]["found_inf_per_device"] = {found.device: found}

    def decide(self) -> None:
        """With a Pipeline: decides whether ranks skip this step, if no call has yet. Collective."""
        pipeline = self._pipeline
        if not self._enabled or pipeline is None or pipeline.skips is not None:
            return
        self.factor()
        found = torch.zeros((), device=self._scale_tensor().device)
        pipeline.decide(found, self._scale_tensor(), ())
        state: Any = self._per_optimizer_states[id(pipeline)]
        state["found_inf_per_device"] = {found.device: found}

    def _scale_tensor(self) -> Tensor:
        assert self._scale is not None
        return self._scale

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        together = isinstance(optimizer, SkipsTogether)
        factor, later = inv_scale, together and optimizer.divides_averages
        if together:
            optimizer.before_unscale()
        if later:
            factor = torch.ones_like(inv_scale)
        found = super()._unscale_grads_(optimizer, factor, found_inf, allow_fp16 or later)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        # A rank without gradients has looked at none.
        mine = found.setdefault(parameters[0].device, found_inf.to(parameters[0].device))
        if self._pipeline is not None:
            self._pipeline.decide(mine, self._scale_tensor(), parameters)
        else:
            groups, left = _groups_of(optimizer, parameters)
            self._seen.add(groups, left=left)
            if together or len(groups) > 1 or left:  # else all ranks of the group have the same
                for group in groups:
                    _agree(mine, self._scale_tensor(), group)
        if together:
            optimizer.note_unscaled(inv_scale)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pipeline": None, "_seen": _Seen()}


class _OfPipeline:
    """A pipeline's decision about a step.

    Attributes:
        name: of the pipeline.
        skips: the decision, 1.0 or 0.0; None before it is made.
    """

    def __init__(
        self, group: dist.ProcessGroup, trained: Callable[[], Sequence[Tensor]], name: str
    ) -> None:
        self._group, self._trained, self.name = group, trained, name
        self.skips: Tensor | None = None

    def decide(self, found: Tensor, scale: Tensor, seen: Iterable[Tensor]) -> None:
        """Writes the decision of all ranks, once a step. Collective the first time.

        Args:
            found: what is found in the gradients of ``seen``; gets the decision.
            scale: of this rank.
            seen: parameters that were looked at already.
        """
        if self.skips is None:
            looked_at = {id(one) for one in seen}
            rest = [one.grad for one in self._trained() if id(one) not in looked_at]
            present = [one for one in rest if one is not None]
            if present:
                one = torch.ones((), device=found.device)
                torch._amp_foreach_non_finite_check_and_unscale_(present, found, one)
            _agree(found, scale, self._group)
            self.skips = found.clone()
        else:
            torch.maximum(found, self.skips.to(found.device), out=found)


class _Seen:
    """The optimizers of a step, and the groups that reduce their gradients.

    Attributes:
        groups: each once, in the order in which ranks ask them.
    """

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self._optimizers, self._left = 0, False

    def add(self, groups: Sequence[dist.ProcessGroup], *, left: bool) -> None:
        """Notes an optimizer; ``left``: it has gradients that no group reduces."""
        self._optimizers += 1
        self._left |= left
        self.groups += [one for one in groups if one not in self.groups]

    def may_differ(self) -> bool:
        """Whether ranks of a group may have skipped other optimizers' steps."""
        return self._optimizers > 1 and (len(self.groups) > 1 or self._left)


def _groups_of(
    optimizer: Any, parameters: Sequence[Tensor]
) -> tuple[list[dist.ProcessGroup], bool]:
    """The groups that reduce an optimizer's gradients, and whether others stay a rank's own."""
    if isinstance(optimizer, SkipsTogether):
        return [optimizer.process_group], False
    engines, left = engines_of(parameters)  # type: ignore[arg-type]
    meshes = [getattr(one, "device_mesh", None) for one in left]  # of DTensors
    found = [engine.group for engine in engines]
    found += [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
    groups: list[dist.ProcessGroup] = []
    for group in found:
        if group not in groups:
            groups.append(group)
    return groups, None in meshes


def _agree(found: Tensor, scale: Tensor, group: dist.ProcessGroup) -> None:
    """An infinity on any rank counts on all. Collective.

    Raises:
        RuntimeError: ranks have different scales: on all ranks.
    """
    own = scale.to(found.device)
    numbers = torch.stack([found, own, -own])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    _, most, least = numbers.tolist()
    if most != -least:
        raise RuntimeError(
            f"GradScaler: ranks have loss scales from {-least} to {most}, and this one "
            f"{float(own)}: make it with the same arguments on all ranks, and load the same state"
        )
    found.copy_(numbers[0])


def unscale_(gradients: Sequence[Tensor | None], scale: Tensor) -> None:
    """Divides gradients by the loss scale, as GradScaler.unscale_ does."""
    inverse = scale.double().reciprocal().float()
    present = [one for one in gradients if one is not None and one.numel() > 0]
    if present:
        torch._foreach_mul_(present, inverse)
