"""An optimizer around another one, which does the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from dreamcomm.local_sgd.model import LocalModel

__all__ = ["WrappedOptimizer", "load_numbered"]

# Names of torch's hooks that the wrapped optimizer's state_dict and load_state_dict call.
STATE_HOOKS = [
    f"_optimizer_{call}_{when}_hooks"
    for call in ("state_dict", "load_state_dict")
    for when in ("pre", "post")
]


class WrappedOptimizer(Optimizer):
    """Shares parameter groups and state with the optimizer that it wraps.

    Schedulers, hooks and ``zero_grad`` work on either. A subclass adds to :meth:`_stepped`, which
    runs after each step, and has its own part of ``state_dict``.

    Under a GradScaler it unscales the gradients itself. So it is called, and counts, also where
    this rank skips a step for an infinity, and ranks stay in the same round.

    Attributes:
        optimizer: the wrapped one.
    """

    _step_supports_amp_scaling = True  # a GradScaler then always calls step()
    OWN_KEY = "dreamcomm"  # of a subclass's part in state_dict
    _model: LocalModel  # a subclass's, of the parameters that ranks average

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.optimizer = optimizer
        for name in STATE_HOOKS:
            setattr(self, name, getattr(optimizer, name))
        self._share()

    def _share(self) -> None:
        """Again after load_state_dict, which makes new groups and a new state."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        self.defaults = self.optimizer.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the wrapped optimizer, and then does what is due.

        Args:
            closure: computes the loss again and returns it; the wrapped optimizer calls it.
        """
        loss: Any = None
        stepped = sum(len(group["params"]) for group in self.param_groups)
        if stepped != len(self._model.parameters):
            raise RuntimeError(
                f"{type(self).__name__}.step: the wrapped optimizer has got other parameters since "
                f"{type(self).__name__} was made, and the ranks would never average them; make it "
                "afterwards, or use LocalSGD and its own add_param_group"
            )
        self._begin()
        if closure is not None:
            loss = self.optimizer.step(closure)
        elif self._unscale():
            self.optimizer.step()
        self._stepped()
        return loss

    def _begin(self) -> None:
        """What a subclass checks before a step."""

    def _stepped(self) -> None:
        """What a subclass does after a step of this rank."""
        raise NotImplementedError

    def _unscale(self) -> bool:
        """Unscales gradients under a GradScaler; whether they are finite."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and float(found) != 0.0:
            return False
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer; on all ranks the same."""
        if "optimizer" not in self.__dict__:  # in Optimizer.__init__
            super().add_param_group(param_group)
            return
        self.optimizer.add_param_group(param_group)
        self._share()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and what this one keeps, under one key of its own."""
        return self.optimizer.state_dict() | {self.OWN_KEY: self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave.

        Raises:
            ValueError: it is another optimizer's.
        """
        if self.OWN_KEY not in state_dict:
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: expected a state_dict of "
                f"{type(self).__name__}, got one without {self.OWN_KEY!r}; to start from another "
                "optimizer's, load that into the wrapped one (.optimizer)"
            )
        own = state_dict[self.OWN_KEY]
        self._check_own(own)
        rest = {key: value for key, value in state_dict.items() if key != self.OWN_KEY}
        load_numbered(self.optimizer, rest)
        self._share()
        self._load_own(own)

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _check_own(self, state: dict[str, Any]) -> None:
        """Raises ValueError for what does not fit; changes nothing."""

    def _load_own(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def load_numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state whose parameters' numbers may have become texts.

    torch.distributed.checkpoint makes texts of them, and torch's optimizers leave out, without a
    word, what belongs to a text: momentum would be lost.
    """
    state = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: value
        for key, value in state_dict["state"].items()
    }
    optimizer.load_state_dict({**state_dict, "state": state})
