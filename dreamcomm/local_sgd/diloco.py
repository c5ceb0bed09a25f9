"""DiLoCo: ranks step apart, and an outer optimizer steps with the mean of how far they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dreamcomm.local_sgd.averaging import average_, flat_buffer, split, start_mean
from dreamcomm.local_sgd.diloco_checks import check_diloco, check_state
from dreamcomm.local_sgd.fragments import cut_fragments, due_fragments
from dreamcomm.local_sgd.model import LocalModel, check_equal_settings
from dreamcomm.local_sgd.wrapper import WrappedOptimizer

__all__ = ["DiLoCo"]


@dataclass
class _Flight:
    """A fragment's mean pseudo-gradient, on its way.

    Attributes:
        fragment: its number.
        due: the step after which it is applied.
        flats: by dtype.
        works: of the collectives; empty: they are over.
    """

    fragment: int
    due: int
    flats: list[Tensor]
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class DiLoCo(WrappedOptimizer):
    """Steps an outer optimizer once in many steps (Douillard et al. 2023, "DiLoCo"). ::

        inner = torch.optim.AdamW(model.parameters(), 4e-4)
        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        optimizer = DiLoCo(model, inner, outer, every=100, fragments=4, overlap=5)

    Each rank keeps a second copy of the parameters, the outer ones, equal on all ranks. Every n-th
    step the outer parameters minus the rank's own, the pseudo-gradient, are averaged over the
    ranks, the outer optimizer steps the outer parameters with that, and the rank's own become them.
    ``every=1`` with outer SGD of rate 1 and inner SGD is training with averaged gradients.

    With fragments, parts of the model take turns, each once in n steps, so that a step sends about
    1/F of the bytes. With overlap, a mean is started in one step and applied some steps later, and
    training goes on meanwhile (Douillard et al. 2025, "Streaming DiLoCo").

    It is an optimizer around the inner one: schedulers work on it, and on ``outer``. All ranks have
    to call :meth:`step` equally often. Beside the inner optimizer a rank needs the outer
    parameters, the outer optimizer's state, and for each fragment under way its pseudo-gradient. A
    pseudo-gradient that is not finite spreads to all ranks.

    Args:
        model: the same on all ranks; they start with rank 0's parameters and buffers.
        inner: an optimizer over its parameters.
        outer: makes the outer optimizer of a list of parameters; or an optimizer over the model's
            parameters that has not stepped yet, whose parameters are replaced by the outer ones.
        every: steps between two synchronizations of a fragment.
        fragments: parts of the model, from 1 to the number of parameters; ``every`` need not be
            divisible.
        overlap: steps from the start of a mean to its use, below ``every``.
        wire_dtype: torch.bfloat16 or torch.float16 rounds pseudo-gradients before they are
            averaged; None: the parameters' dtype.
        alpha: the part of a rank's own parameters that stays at a synchronization, from 0 to
            below 1: own = alpha * own + (1 - alpha) * outer.
        group: of the ranks; None is the default group.
        buffers: "average": floating buffers are averaged with the last fragment; "local": they are
            not.

    Raises:
        ValueError: the ranks' models or settings differ, or a number is out of range.
        TypeError: an argument is of the wrong kind.
    """

    OWN_KEY = "diloco"

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        outer: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
        *,
        every: int,
        fragments: int = 1,
        overlap: int = 0,
        wire_dtype: torch.dtype | None = None,
        alpha: float = 0.0,
        group: dist.ProcessGroup | None = None,
        buffers: str = "average",
    ) -> None:
        settings = {
            "every": every, "fragments": fragments, "overlap": overlap, "wire_dtype": wire_dtype,
            "alpha": alpha, "buffers": buffers,
        }  # fmt: skip
        check_diloco(every, fragments, overlap, wire_dtype, alpha)
        self._model = LocalModel(model, inner, group, buffers, "DiLoCo")
        check_equal_settings("DiLoCo", settings, self._model.group)
        own = self._model.parameters
        if fragments > len(own):
            raise ValueError(
                f"DiLoCo: expected at most a fragment for each of {len(own)} parameters, got "
                f"{fragments}"
            )
        super().__init__(inner)
        self._every, self._overlap, self._alpha = every, overlap, alpha
        self._wire_dtype = wire_dtype
        self._outer_parameters = [nn.Parameter(one.detach().clone()) for one in own]
        self.outer = _made_outer(outer, own, self._outer_parameters)
        self._fragments = cut_fragments([one.nbytes for one in own], fragments)
        self._flights: list[_Flight] = []
        self.steps = self._settled = 0  # the latest one after which all fragments had nothing new

    # A step.

    def _stepped(self) -> None:
        self.steps += 1
        fragments = len(self._fragments)
        for fragment in due_fragments(self.steps, self._every, fragments):
            self._start(fragment, self.steps + self._overlap)
            if fragment == fragments - 1:
                average_(self._model.buffers(), self._model.group)
        while self._flights and self._flights[0].due <= self.steps:
            self._apply(self._flights.pop(0))

    def synchronize(self) -> None:
        """Ends what is under way, and synchronizes all fragments at once. Collective.

        For evaluation, and at the end of training: with ``alpha=0`` all ranks then have the same
        parameters. Rounds go on as they were. A fragment whose synchronization began in the latest
        step has nothing new, and is left out.
        """
        with torch.no_grad():
            self._finish()
            every, fragments = self._every, len(self._fragments)
            fresh = due_fragments(self.steps, every, fragments) if self.steps else []
            for fragment in range(fragments):
                if fragment not in fresh and self._settled != self.steps:
                    self._start(fragment, self.steps)
            self._settled = self.steps
            average_(self._model.buffers(), self._model.group)
            self._finish()

    def _finish(self) -> None:
        while self._flights:
            self._apply(self._flights.pop(0))

    def _start(self, fragment: int, due: int) -> None:
        """Starts the mean of a fragment's pseudo-gradient."""
        group, flats, works = self._model.group, [], []
        for numbers in self._by_kind(fragment):
            own = [self._model.parameters[number] for number in numbers]
            outer = [self._outer_parameters[number].detach() for number in numbers]
            numel = sum(one.numel() for one in own)
            flat = flat_buffer(numel, own[0], self._wire_dtype)
            for part, start, end in zip(split(flat, own), outer, own, strict=True):
                part.copy_(start - end)
            flats.append(flat)
            if dist.get_world_size(group) > 1:
                works.append(start_mean(flat, group))
        self._flights.append(_Flight(fragment, due, flats, works))

    def _apply(self, flight: _Flight) -> None:
        """Steps the outer parameters of a fragment, and gives them to the rank's own."""
        flight.wait()
        numbers = self._fragments[flight.fragment]
        for kind, flat in zip(self._by_kind(flight.fragment), flight.flats, strict=True):
            outer = [self._outer_parameters[number] for number in kind]
            for one, part in zip(outer, split(flat, outer), strict=True):
                one.grad = part.to(one.dtype)
        self.outer.step()
        for number in numbers:
            outer_one, own = self._outer_parameters[number], self._model.parameters[number]
            outer_one.grad = None
            kept = own.detach() * self._alpha if self._alpha else None
            own.detach().copy_(outer_one.detach())
            if kept is not None:
                own.detach().mul_(1.0 - self._alpha).add_(kept)

    def _by_kind(self, fragment: int) -> list[list[int]]:
        """A fragment's parameters by dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number in self._fragments[fragment]:
            one = self._model.parameters[number]
            kinds.setdefault((one.dtype, one.device), []).append(number)
        return list(kinds.values())

    # State.

    def _own_state(self) -> dict[str, Any]:
        for flight in self._flights:
            flight.wait()
        return {
            "steps": self.steps,
            "outer": self.outer.state_dict(),
            "outer_parameters": [one.detach().clone() for one in self._outer_parameters],
            "flights": [
                {"fragment": one.fragment, "due": one.due, "means": [f.clone() for f in one.flats]}
                for one in self._flights
            ],
        }

    def _check_own(self, state: dict[str, Any]) -> None:
        check_state(state, self._outer_parameters, len(self._fragments))

    def _load_own(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        with torch.no_grad():
            for one, saved in zip(self._outer_parameters, state["outer_parameters"], strict=True):
                one.copy_(saved)
        self.outer.load_state_dict(state["outer"])
        self._flights = []
        for flight in state["flights"]:
            kinds = self._by_kind(flight["fragment"])
            devices = [self._outer_parameters[numbers[0]].device for numbers in kinds]
            flats = [m.to(device) for m, device in zip(flight["means"], devices, strict=True)]
            self._flights.append(_Flight(flight["fragment"], flight["due"], flats, []))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optimizer" in self.__dict__:
            raise RuntimeError(
                "DiLoCo.add_param_group: the fragments are fixed; make DiLoCo after the last group"
            )
        super().add_param_group(param_group)


def _made_outer(
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer],
    own: Sequence[nn.Parameter],
    outer: list[nn.Parameter],
) -> Optimizer:
    if not isinstance(given, Optimizer):
        made = given(outer)
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"DiLoCo: expected outer to make an optimizer, got a {type(made).__name__}"
            )
        return made
    if given.state:
        raise ValueError("DiLoCo: the outer optimizer has stepped already; give a new one")
    outer_of = {id(one): other for one, other in zip(own, outer, strict=True)}
    given_ids = [id(one) for group in given.param_groups for one in group["params"]]
    if sorted(given_ids) != sorted(outer_of):
        raise ValueError(
            "DiLoCo: the outer optimizer has other parameters than the inner one; give both "
            "model.parameters(), or give a function that makes the outer one"
        )
    for group in given.param_groups:
        group["params"] = [outer_of[id(one)] for one in group["params"]]
    return given
