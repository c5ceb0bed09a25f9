"""An optimizer around another one, which does the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from dreamcomm.averaging.model import LocalModel
from dreamcomm.ranks.parameters import stepped

__all__ = ["WrappedOptimizer", "load_numbered"]


class _Wrapped:
    """An attribute of the wrapped optimizer, read and written there.

    The wrapped optimizer's ``load_state_dict`` replaces its groups and state, so a wrapper must not
    keep them.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: WrappedOptimizer, owner: type | None = None) -> Any:
        return getattr(wrapper.optimizer, self._name)

    def __set__(self, wrapper: WrappedOptimizer, value: Any) -> None:
        if wrapper._is_complete:  # Optimizer.__init__ gives empty ones before
            setattr(wrapper.optimizer, self._name, value)


class WrappedOptimizer(Optimizer):
    """Has the parameter groups and the state of the optimizer that it wraps.

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

    param_groups = _Wrapped()
    state = _Wrapped()
    defaults = _Wrapped()
    # Hooks that the wrapped optimizer's state_dict and load_state_dict call.
    _optimizer_state_dict_pre_hooks = _Wrapped()
    _optimizer_state_dict_post_hooks = _Wrapped()
    _optimizer_load_state_dict_pre_hooks = _Wrapped()
    _optimizer_load_state_dict_post_hooks = _Wrapped()

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    @property
    def _is_complete(self) -> bool:
        """False in Optimizer.__init__, which makes groups of its own."""
        return "optimizer" in self.__dict__

    def __getstate__(self) -> dict[str, Any]:
        name = type(self).__name__
        raise TypeError(
            f"{name}: it cannot be copied or pickled, because it belongs to a process group; save "
            f"its state_dict(), and make {name} again"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the wrapped optimizer, and then does what is due.

        Args:
            closure: computes the loss again and returns it; the wrapped optimizer calls it.
        """
        loss: Any = None
        if set(map(id, stepped(self.optimizer))) != self._model.averaged.numbers.keys():
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
        else:
            self._skip_wrapped()
        self._stepped()
        return loss

    def _skip_wrapped(self) -> None:
        """Has a wrapped one of this kind count a step in which nothing is stepped."""
        if isinstance(self.optimizer, WrappedOptimizer):
            self.optimizer._begin()
            self.optimizer._skip_wrapped()
            self.optimizer._stepped()

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
        if self._is_complete:
            self.optimizer.add_param_group(param_group)

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
