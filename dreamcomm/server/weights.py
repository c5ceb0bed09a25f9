"""A server's parameters: one optimizer, a version for each update, and copies for readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dreamcomm.memory import empty
from dreamcomm.server.layout import Flats, Layout, TensorSpec

__all__ = ["Snapshot", "Weights", "specs_of"]


@dataclass(frozen=True)
class Snapshot:
    """The weights of one version, which do not change any more.

    Attributes:
        version: the number of updates before.
        flats: the parameters, by dtype.
        gradients: those of the latest update, or None.
    """

    version: int
    flats: Flats
    gradients: Flats | None = None


class Weights:
    """Parameters and their optimizer. The caller holds a lock.

    INVARIANT: a snapshot is made while no update runs, and never written again. A reader sends one
    snapshot, so it never sends weights of two versions, however slow its worker is.

    Args:
        parameters: what the optimizer steps.
        optimizer: over them.
        names: of the parameters; "" where they have none.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> None:
        self.parameters, self.optimizer = list(parameters), optimizer
        self.layout = Layout(specs_of(parameters, names))
        self.version = 0
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """The weights as they are."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self.version, self._copied())
        return self._snapshot

    def _copied(self) -> Flats:
        flats = {
            dtype: empty(size, dtype=dtype, device="cpu")
            for dtype, size in self.layout.sizes.items()
        }
        for view, parameter in zip(self.layout.views(flats), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return flats

    def step(self, gradients: Flats, absent: Iterable[int], *, keep: bool) -> None:
        """Makes one step of the optimizer.

        Args:
            gradients: by dtype, in the layout.
            absent: numbers of parameters without a gradient, which the optimizer leaves alone.
            keep: the next snapshot also has the gradients.
        """
        missing = set(absent)
        views = self.layout.views(gradients)
        for number, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            parameter.grad = None if number in missing else view.to(parameter.device)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.version += 1
        self._snapshot = None
        if keep:
            self._snapshot = Snapshot(self.version, self._copied(), gradients)

    def state_dict(self) -> dict[str, Any]:
        """Version, parameters and the optimizer's state: copies of the parameters."""
        return {
            "version": self.version,
            "parameters": [parameter.detach().clone() for parameter in self.parameters],
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of other parameters.
        """
        saved = state["parameters"]
        shapes = [tuple(one.shape) for one in saved]
        if shapes != [spec.shape for spec in self.layout.specs]:
            raise ValueError(
                f"ParameterServer.load_state_dict: expected parameters of the shapes "
                f"{[spec.shape for spec in self.layout.specs]}, got {shapes}; load the checkpoint "
                "of this server's model, with the same number of servers"
            )
        with torch.no_grad():
            for parameter, one in zip(self.parameters, saved, strict=True):
                parameter.copy_(one)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = int(state["version"])
        self._snapshot = None


def specs_of(parameters: Sequence[Tensor], names: Sequence[str]) -> list[TensorSpec]:
    """What a worker's parameters are compared with."""
    return [
        TensorSpec(name, tuple(one.shape), one.dtype)
        for one, name in zip(parameters, names, strict=True)
    ]
