"""The model that ranks train apart, and what has to be equal about it at the start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dreamcomm._torch.ddp import broadcast_tensors
from dreamcomm._torch.groups import given_group
from dreamcomm.buckets.parameters import TrainedParameter, check_equal_models, check_group

__all__ = ["BUFFERS", "LocalModel", "check_count", "check_equal_settings"]

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

    Raises:
        ValueError: the models differ, the optimizer has other parameters, or there is no group.
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None,
        buffers: str,
        what: str,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{what}: expected a module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{what}: expected an optimizer of torch, got {type(optimizer).__name__}"
            )
        if buffers not in BUFFERS:
            raise ValueError(f"{what}: expected buffers to be one of {BUFFERS}, got {buffers!r}")
        self.group, self.module, self._what = given_group(group), model, what
        self.averages_buffers = buffers == "average"
        trained = [TrainedParameter(name, one) for name, one in model.named_parameters()]
        if not trained:
            raise ValueError(f"{what}: the model has no parameters")
        check_group(self.group, trained, what)
        check_equal_models(self.group, trained, what)
        self.parameters = self.stepped_by(optimizer)
        broadcast_tensors([*model.parameters(), *model.buffers()], self.group)

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


def check_count(what: str, name: str, value: Any, least: int) -> None:
    """Raises ValueError if a number is no int from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what}: expected {name} to be an int of at least {least}, got {value!r}")


def check_equal_settings(what: str, settings: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks where ranks have given different settings. Collective."""
    every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, settings, group=group)
    for rank, theirs in enumerate(every):
        for name in _differing(every[0], theirs):
            raise ValueError(
                f"{what}: rank {rank} has {name}={theirs[name]!r}, and rank 0 has "
                f"{name}={every[0][name]!r}; give all ranks the same"
            )


def _differing(one: dict[str, Any], other: dict[str, Any]) -> Iterable[str]:
    return [name for name in one if one[name] != other.get(name)]
