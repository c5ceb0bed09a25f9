"""Local SGD: ranks step apart, and average their parameters now and then."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dreamcomm.averaging.agreement import check_saved
from dreamcomm.averaging.mean import average_
from dreamcomm.averaging.model import LocalModel, check_count
from dreamcomm.averaging.wrapper import WrappedOptimizer

__all__ = ["LocalSGD"]


class LocalSGD(WrappedOptimizer):
    """Averages the parameters of all ranks in every n-th step (Stich 2019; Lin et al. 2020). ::

        model = Model()                       # not wrapped: gradients stay each rank's own
        optimizer = LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), every=8)

    It is an optimizer around the given one: schedulers work on it. A rank sends 2(N-1)/N of the
    parameters' bytes in every n-th step, and nothing in the others. The state of the given
    optimizer, such as momentum, stays each rank's own. ``every=1`` with plain SGD is training with
    averaged gradients. All ranks have to call :meth:`step` equally often, and to resume at the same
    step: the first average, also after ``load_state_dict``, checks that on all ranks.

    Args:
        model: the same on all ranks; they start with rank 0's parameters and buffers.
        optimizer: over its parameters.
        every: steps between two averages.
        group: of the ranks; None is the default group.
        start: average in each of the first steps, so many (post-local SGD).
        buffers: "average": floating buffers are averaged too; "local": they are not.

    Raises:
        ValueError: the ranks' models or settings differ, or a number is out of range. All ranks
            raise if one does.
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
    """

    OWN_KEY = "local_sgd"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int,
        group: dist.ProcessGroup | None = None,
        start: int = 0,
        buffers: str = "average",
    ) -> None:
        def settings() -> dict[str, Any]:
            check_count("LocalSGD", "every", every, 1)
            check_count("LocalSGD", "start", start, 0)
            return {"every": every, "start": start}

        self._model = LocalModel(model, optimizer, group, buffers, "LocalSGD", settings)
        super().__init__(optimizer)
        self._every, self._start = every, start
        self.steps = 0
        self._in_step = False  # whether all ranks are known to count the same steps

    def _stepped(self) -> None:
        self.steps += 1
        if self.steps <= self._start or (self.steps - self._start) % self._every == 0:
            self._model.check("step")
            if not self._in_step:
                self._model.check_steps("step", self.steps)
                self._in_step = True
            self._average()

    @torch.no_grad()
    def average_now(self) -> None:
        """Averages parameters and buffers, as at the end of a round. Collective.

        For evaluation, and at the end of training; rounds go on as they were.

        Raises:
            ValueError: the ranks have made different numbers of steps.
            RuntimeError: the model has other parameters than the optimizer steps.
        """
        self._model.check("average_now")
        self._model.check_steps("average_now", self.steps)
        self._average()

    def _average(self) -> None:
        average_([*self._model.parameters, *self._model.buffers()], self._model.group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._is_complete:
            try:
                self._model.use(self.optimizer)
            except ValueError:
                self.param_groups.pop()
                raise

    def _own_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def _check_own(self, state: dict[str, Any]) -> None:
        check_saved("LocalSGD", state, ["steps"])

    def _load_own(self, state: dict[str, Any]) -> None:
        self.steps, self._in_step = state["steps"], False
