"""The model that ranks train apart, and what has to be equal about it at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dreamcomm._torch.ddp import broadcast_tensors
from dreamcomm._torch.groups import given_group
from dreamcomm.buckets.parameters import TrainedParameter, check_equal_models, check_group
from dreamcomm.local_sgd.agreement import agree, check_equal_steps

__all__ = ["BUFFERS", "LocalModel", "check_count"]

BUFFERS = ("average", "local")


class LocalModel:
    """A model whose parameters an optimizer steps on each rank apart. Collective.

    All ranks start with rank 0's parameters and buffers.

    Args:
        model: the same on all ranks.
        optimizer: over some or all of its parameters.
        group: of the ranks; None is the default group.
        buffers: "average": floating buffers, such as the statistics of a batch norm, are averaged
            with the parameters; "local": they stay this rank's own.
        what: that makes it, for errors.
        settings: checks what else is given, and returns what all ranks have to give.

    Raises:
        ValueError: the models, optimizers' parameters or settings differ, the optimizer has other
            parameters than the model, or there is no group. All ranks raise if one does.
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None,
        buffers: str,
        what: str,
        settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.group, self.module, self._what = given_group(group), model, what
        self.averages_buffers = buffers == "average"

        def checked() -> Mapping[str, Any]:
            self._check(optimizer, buffers)
            return {**settings(), "buffers": repr(buffers)}

        agree(what, self.group, checked)
        trained = [TrainedParameter(name, one) for name, one in model.named_parameters()]
        check_equal_models(self.group, trained, what)
        agree(what, self.group, self._described)
        broadcast_tensors([*model.parameters(), *model.buffers()], self.group)

    def _check(self, optimizer: Optimizer, buffers: str) -> None:
        """Raises for what this rank cannot use."""
        model, what = self.module, self._what
        if not isinstance(model, nn.Module):
            raise TypeError(f"{what}: expected a module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{what}: expected an optimizer of torch, got {type(optimizer).__name__}"
            )
        if buffers not in BUFFERS:
            raise ValueError(f"{what}: expected buffers to be one of {BUFFERS}, got {buffers!r}")
        trained = [TrainedParameter(name, one) for name, one in model.named_parameters()]
        if not trained:
            raise ValueError(f"{what}: the model has no parameters")
        check_group(self.group, trained, what)
        self.parameters = self.stepped_by(optimizer)

    def _described(self) -> dict[str, str]:
        """What has to be equal beside the parameters' shapes: a rank averages what it steps."""
        stepped = {id(one) for one in self.parameters}
        texts = {
            f"parameter {name!r}": "in the optimizer" if id(one) in stepped else "not stepped"
            for name, one in self.module.named_parameters()
        }
        for name, one in self.module.named_buffers():
            texts[f"buffer {name!r}"] = f"of shape {tuple(one.shape)}, {one.dtype}"
        return texts

    def stepped_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The optimizer's parameters, in the model's order.

        Raises:
            ValueError: one is not the model's.
        """
        wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
        found = [one for one in self.module.parameters() if id(one) in wanted]
        if len(found) != len(wanted):
            raise ValueError(
                f"{self._what}: the optimizer has {len(wanted)} parameters, and only {len(found)} "
                "of them are the model's; give the model that it trains"
            )
        return found

    def buffers(self) -> list[Tensor]:
        """The buffers that are averaged."""
        if not self.averages_buffers:
            return []
        return [one for one in self.module.buffers() if one.is_floating_point()]

    def check_steps(self, call: str, steps: int) -> None:
        """Raises ValueError on all ranks where they have made different numbers. Collective."""
        device = self.parameters[0].device
        check_equal_steps(f"{self._what}.{call}", steps, self.group, device)


def check_count(what: str, name: str, value: Any, least: int) -> None:
    """Raises ValueError if a number is no int from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what}: expected {name} to be an int of at least {least}, got {value!r}")
