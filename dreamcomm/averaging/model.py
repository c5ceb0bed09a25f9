"""The model that ranks train apart, and what has to be equal about it at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dreamcomm._torch.ddp import broadcast_tensors
from dreamcomm._torch.groups import given_group
from dreamcomm.averaging.agreement import agree, check_equal_steps
from dreamcomm.averaging.averaged import Averaged
from dreamcomm.ranks.parameters import check_equal_models, check_group, find_parameters

__all__ = ["BUFFERS", "LocalModel", "check_count"]

BUFFERS = ("average", "local")


class LocalModel:
    """A model whose parameters an optimizer steps on each rank apart. Collective.

    All ranks start with rank 0's parameters and buffers. Tensors in the same memory, such as
    weights that are tied by ``.data``, are averaged once.

    Args:
        model: the same on all ranks.
        optimizer: over some or all of its parameters.
        group: of the ranks; None is the default group.
        buffers: "average": floating buffers, such as the statistics of a batch norm, are averaged
            with the parameters; "local": they stay this rank's own.
        what: that makes it, for errors.
        settings: checks what else is given, and returns what all ranks have to give.

    Attributes:
        averaged: the tensors.

    Raises:
        ValueError: the models, optimizers' parameters or settings differ, the optimizer has other
            parameters than the model, tensors overlap in part, or there is no group. All ranks
            raise if one does.
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
        check_equal_models(self.group, find_parameters(model), what)
        agree(what, self.group, self.averaged.described)
        self.broadcast()

    def broadcast(self) -> None:
        """Gives all ranks rank 0's parameters and buffers. Collective."""
        broadcast_tensors([*self.module.parameters(), *self.module.buffers()], self.group)

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
        trained = find_parameters(model)
        if not trained:
            raise ValueError(f"{what}: the model has no parameters")
        check_group(self.group, trained, what)
        self.use(optimizer)

    def use(self, optimizer: Optimizer) -> None:
        """Averages what the optimizer steps from now on.

        Raises:
            ValueError: a parameter is not the model's, or tensors overlap in part. Nothing changes
                then.
        """
        self.averaged = Averaged(self.module, optimizer, self.averages_buffers, self._what)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are averaged, one for each memory, in the model's order."""
        return self.averaged.parameters

    def buffers(self) -> list[Tensor]:
        """The buffers that are averaged."""
        return self.averaged.buffers()

    def check(self, call: str) -> None:
        """Raises RuntimeError where the model has other parameters than are averaged."""
        self.averaged.check(call)

    def check_steps(self, call: str, steps: int) -> None:
        """Raises ValueError on all ranks where they have made different numbers. Collective."""
        check_equal_steps(f"{self._what}.{call}", steps, self.group)


def check_count(what: str, name: str, value: Any, least: int) -> None:
    """Raises ValueError if a number is no int from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what}: expected {name} to be an int of at least {least}, got {value!r}")
