"""A server's parameters: one optimizer, a version for each update, and copies for readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from dreamcomm._torch.overlap import same_memory
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
        absent: the parameters that had none in it.
    """

    version: int
    flats: Flats
    gradients: Flats | None = None
    absent: tuple[int, ...] = ()


class Weights:
    """Parameters and their optimizer. The caller holds a lock.

    INVARIANT: a snapshot is made while no update runs, and never written again. A reader sends one
    snapshot, so it never sends weights of two versions, however slow its worker is.

    Args:
        parameters: what the optimizer steps.
        optimizer: over them.
        names: of the parameters; "" where they have none.
        place: index of the server, and the number of servers.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        place: tuple[int, int] = (0, 1),
    ) -> None:
        self._place = place
        self.parameters, self.optimizer = list(parameters), optimizer
        self.layout = Layout(specs_of(parameters, names))
        self.version = 0
        self._snapshot: Snapshot | None = None
        self._kept: tuple[Flats | None, tuple[int, ...]] = None, ()  # of the latest step

    def snapshot(self) -> Snapshot:
        """The weights as they are, with what was done to them since the step."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self.version, self._copied(), *self._kept)
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
        self._kept = (gradients, tuple(sorted(missing))) if keep else (None, ())

    def state_dict(self) -> dict[str, Any]:
        """Version, parameters and the optimizer's state, which the next step changes."""
        return {
            "version": self.version,
            "server": self._place,
            "optimizer_class": type(self.optimizer).__name__,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "optimizer": self.optimizer.state_dict(),
        }

    def copied_state_dict(self) -> dict[str, Any]:
        """The same, which does not change any more."""
        return deepcopy(self.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of other parameters.
        """
        self._check(state)
        self.optimizer.load_state_dict(state["optimizer"])  # first: it checks the groups, too
        with torch.no_grad():
            for parameter, one in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(one)
        self.version = int(state["version"])
        self._snapshot, self._kept = None, (None, ())

    def _check(self, state: dict[str, Any]) -> None:
        who = "ParameterServer.load_state_dict"
        own = self.state_dict()
        if own.keys() - state.keys():
            raise ValueError(
                f"{who}: expected what state_dict() of a server gives, with {sorted(own)}, got "
                f"{sorted(map(str, state))}"
            )
        if tuple(state["server"]) != self._place:
            raise ValueError(
                f"{who}: expected the state of server {self._place[0]} of {self._place[1]}, got "
                f"that of server {state['server'][0]} of {state['server'][1]}"
            )
        if state["optimizer_class"] != own["optimizer_class"]:
            raise ValueError(
                f"{who}: expected the state of {own['optimizer_class']}, got that of "
                f"{state['optimizer_class']}"
            )
        kinds = [_kind(one) for one in state["parameters"]]
        expected = [_kind(one) for one in self.parameters]
        for number, (kind, ours) in enumerate(zip_longest(kinds, expected, fillvalue="none")):
            if kind != ours:
                raise ValueError(
                    f"{who}: expected parameter {number} to be {ours}, got {kind}; load the "
                    "checkpoint of this server's model"
                )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def specs_of(
    parameters: Sequence[Tensor], names: Sequence[str], who: str = "ParameterServer"
) -> list[TensorSpec]:
    """What a worker's parameters are compared with.

    Raises:
        ValueError: parameters overlap in part.
    """
    labels = [name or f"parameter {number}" for number, name in enumerate(names)]
    groups = same_memory(zip(labels, parameters, strict=True), who)
    tied_to = {number: group[0] for group in groups for number in group[1:]}
    return [
        TensorSpec(name, tuple(one.shape), one.dtype, tied_to.get(number))
        for number, (one, name) in enumerate(zip(parameters, names, strict=True))
    ]
