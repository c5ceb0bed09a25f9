"""Tensors that get gradients in a step, and are no parameters of this rank's stages.

A loss function has parameters of its own, or has captured some. They stay the user's to optimize,
clip and save, as in one process; their gradients are scaled, averaged and undone with the step's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.plan import stage_parameters
from dreamcomm.pipeline.split import MicroBatches, StagePart

__all__ = ["Outside", "given_leaves"]


class Outside:
    """What a rank may add gradients to beside its stages' parameters.

    Args:
        parts: of all stages.
        own: the numbers of this rank's.
        loss_fn: where the last stage is this rank's, or None.
        pipes: how many pipelines stand side by side.
    """

    def __init__(
        self,
        parts: Sequence[StagePart],
        own: Mapping[int, Any],
        loss_fn: Callable[..., Any] | None,
        pipes: int,
    ) -> None:
        self._parts, self._own, self._loss_fn, self._pipes = parts, own, loss_fn, pipes

    def loss_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters of a loss function that is a module, or a module's method.

        Without those of stages on other ranks: they are refused where they get a gradient.
        """
        module = _module_of(self._loss_fn)
        if module is None:
            return []
        found = [(f"loss_fn.{n}", one) for n, one in module.named_parameters() if one.requires_grad]
        return [(name, one) for name, one in found if self._stage_of(one) is None]

    def check(self, leaf: Tensor) -> None:
        """Raises RuntimeError for a tensor whose gradient could not be the step's.

        That is another rank's parameter, and with pipelines side by side one that none averages.
        """
        elsewhere = self._stage_of(leaf)
        if elsewhere is not None:
            raise RuntimeError(
                f"the parameter {elsewhere[1]!r} of stage {elsewhere[0]}, which another rank runs, "
                "gets a gradient here, where it would be lost: make it a parameter of a module of "
                "this stage as well, so that the stages share it, or detach() it"
            )
        if self._pipes > 1 and isinstance(leaf, nn.Parameter):
            raise self.not_averaged(leaf)

    def not_averaged(self, leaf: Tensor) -> RuntimeError:
        """The error of a gradient that differs between pipelines side by side."""
        return RuntimeError(
            f"{_called(leaf, self._loss_fn)} gets a gradient, is no parameter of this rank's "
            f"stages, and nothing averages it over the mesh's {self._pipes} pipelines: make it a "
            "parameter of a stage's module, or of an nn.Module that is the loss function, or "
            "detach() it"
        )

    def _stage_of(self, leaf: Tensor) -> tuple[int, str] | None:
        """The stage on another rank that has a parameter, and its name; None: this rank may."""
        found = [
            (part.number, name)
            for part in self._parts
            for name, one in stage_parameters(part)
            if one is leaf
        ]
        if any(number in self._own for number, _ in found):
            return None
        return found[0] if found else None


def given_leaves(*given: Any) -> list[Tensor]:
    """The leaves of autograd's graphs among a step's arguments.

    Each is of one pipeline's rows, so that nothing averages its gradient.
    """
    leaves = pytree.tree_leaves(given, is_leaf=lambda one: isinstance(one, MicroBatches))
    found = []
    for leaf in leaves:
        if isinstance(leaf, MicroBatches):
            found += given_leaves(*leaf.values)
        elif isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
            found.append(leaf)
    return found


def _module_of(call: Any) -> nn.Module | None:
    """The module that is called."""
    while isinstance(call, partial):
        call = call.func
    call = getattr(call, "__self__", call)
    return call if isinstance(call, nn.Module) else None


def _called(leaf: Tensor, loss_fn: Any) -> str:
    """What the user calls a tensor, if a function has captured it under a name."""
    kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
    what = f"of shape {tuple(leaf.shape)}, {leaf.dtype}"
    if not inspect.isfunction(loss_fn):
        return f"a {kind} {what}"
    captured = inspect.getclosurevars(loss_fn)
    for name, value in {**captured.globals, **captured.nonlocals}.items():
        inside = value.named_parameters(name) if isinstance(value, nn.Module) else [(name, value)]
        for path, one in inside:
            if one is leaf:
                return f"the loss function's {kind} {path!r} {what}"
    return f"a {kind} {what}"
