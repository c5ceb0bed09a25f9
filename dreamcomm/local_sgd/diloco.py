"""DiLoCo: ranks step apart, and an outer optimizer steps with the mean of how far they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dreamcomm.averaging.agreement import agree
from dreamcomm.averaging.loads import Loads
from dreamcomm.averaging.mean import average_, flat_buffer, start_mean
from dreamcomm.averaging.model import LocalModel
from dreamcomm.averaging.wrapper import WrappedOptimizer, load_numbered
from dreamcomm.local_sgd.diloco_checks import (
    check_diloco,
    check_first_weights,
    check_fragments,
    check_state,
)
from dreamcomm.local_sgd.diloco_flights import Flight
from dreamcomm.local_sgd.diloco_outer import described_outer, give_pseudo_gradient, made_outer
from dreamcomm.local_sgd.fragments import cut_fragments, due_fragments
from dreamcomm.ranks.pieces import by_kind, views

__all__ = ["DiLoCo"]


class DiLoCo(WrappedOptimizer):
    """Steps an outer optimizer once in many steps (Douillard et al. 2023, "DiLoCo"). ::

        inner = torch.optim.AdamW(model.parameters(), 4e-4)
        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        optimizer = DiLoCo(model, inner, outer, every=100, fragments=4, overlap=5)

    Each rank keeps a second copy of the parameters, the outer ones, equal on all ranks. Every n-th
    step the outer parameters minus the rank's own, the pseudo-gradient, are averaged over the
    ranks, the outer optimizer steps the outer parameters with that, and the rank's own become them.
    ``every=1`` with outer SGD of rate 1 and inner SGD is training with averaged gradients. Frozen
    parameters get the mean of the ranks, which no outer step follows. The outer parameters are a
    copy: weights that the model loads later are an error, unless :meth:`take_weights` follows.

    With fragments, parts of the model take turns, each once in n steps, so that a step sends about
    1/F of the bytes. With overlap, a mean is started in one step and applied some steps later, and
    training goes on meanwhile (Douillard et al. 2025, "Streaming DiLoCo").

    It is an optimizer around the inner one: schedulers work on it, and on ``outer``. All ranks have
    to call :meth:`step` equally often, and to resume at the same step: the first synchronization,
    also after ``load_state_dict``, checks that on all ranks. Beside the inner optimizer a rank
    needs the outer parameters, the outer optimizer's state, and for each fragment under way its
    pseudo-gradient. A pseudo-gradient that is not finite spreads to all ranks.

    A state may be saved at any step: a mean under way is waited for, and saved with its due step.
    Each rank saves its own, as ranks differ inside of a round.

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
        ValueError: the ranks' models or settings differ, or a number is out of range. All ranks
            raise if one does.
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
        def settings() -> dict[str, Any]:
            check_diloco(every, fragments, overlap, wire_dtype, alpha)
            return {
                "every": every, "fragments": fragments, "overlap": overlap,
                "wire_dtype": wire_dtype, "alpha": float(alpha),
            }  # fmt: skip

        self._model = LocalModel(model, inner, group, buffers, "DiLoCo", settings)
        own = self._model.parameters
        super().__init__(inner)
        self._every, self._overlap, self._alpha = every, overlap, alpha
        self._wire_dtype = wire_dtype
        self._outer_parameters = [nn.Parameter(one.detach().clone()) for one in own]

        def made() -> dict[str, str]:
            check_fragments(fragments, len(own))
            self.outer = made_outer(outer, self._model.averaged.numbers, self._outer_parameters)
            return described_outer(self.outer)

        agree("DiLoCo", self._model.group, made)
        self._fragments = cut_fragments([one.nbytes for one in own], fragments)
        self._flights: list[Flight] = []
        self.steps = self._settled = 0  # the latest one after which all fragments had nothing new
        self._in_step = False  # whether all ranks are known to count the same steps
        self._loads = Loads(model, self._model.averaged.names, own)

    # A step.

    def _begin(self) -> None:
        self._check_weights("step")

    def _check_weights(self, call: str) -> None:
        """Raises for weights that were loaded, and that the outer parameters would replace."""
        if self.steps == 0:
            check_first_weights(
                self._model.averaged.names, self._model.parameters, self._outer_parameters
            )
        elif name := self._loads.changed():
            raise RuntimeError(
                f"DiLoCo.{call}: rank {dist.get_rank(self._model.group)}: parameter {name!r} was "
                f"changed by load_state_dict after step {self.steps}, and the next outer step "
                "would take it back; call take_weights() on all ranks after that, to train on from "
                "the loaded weights, or load the DiLoCo's own state of then too"
            )

    def _stepped(self) -> None:
        self.steps += 1
        self._loads.forget()
        fragments = len(self._fragments)
        due = due_fragments(self.steps, self._every, fragments)
        if due:
            self._model.check("step")
        for fragment in due:
            if not self._in_step:
                self._model.check_steps("step", self.steps)
                self._in_step = True
            self._start(fragment, self.steps + self._overlap)
            if fragment == fragments - 1:
                average_(self._model.buffers(), self._model.group)
        while self._flights and self._flights[0].due <= self.steps:
            self._apply(self._flights.pop(0))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Ends what is under way, and synchronizes all other fragments at once. Collective.

        For evaluation, and at the end of training: all ranks then have the outer parameters,
        whatever ``alpha`` is. Rounds go on as they were. A fragment whose mean is under way, or
        began in the latest step, is not averaged again, because momentum alone would move it: what
        ranks have stepped since that mean began is left out.

        Raises:
            ValueError: the ranks have made different numbers of steps.
            RuntimeError: the model has loaded other weights, or has other parameters.
        """
        self._check_weights("synchronize")
        self._model.check("synchronize")
        self._model.check_steps("synchronize", self.steps)
        begun = self._begun()
        self._finish()
        for fragment in range(len(self._fragments)):
            if fragment not in begun and self._settled != self.steps:
                self._start(fragment, self.steps)
        self._settled = self.steps
        average_(self._model.buffers(), self._model.group)
        self._finish()
        for outer, own in zip(self._outer_parameters, self._model.parameters, strict=True):
            own.detach().copy_(outer.detach())
        self._loads.forget()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Trains on from the weights that the model has loaded. Collective.

        As when DiLoCo was made, all ranks get rank 0's parameters and buffers, and the outer
        parameters become them. Means under way are dropped. The states of both optimizers, such as
        momentum, stay as they are.

        Raises:
            ValueError: the ranks have made different numbers of steps.
            RuntimeError: the model has other parameters than the optimizer steps.
        """
        self._model.check("take_weights")
        self._model.check_steps("take_weights", self.steps)
        for flight in self._flights:
            flight.wait()
        self._flights = []
        self._model.broadcast()
        for outer, own in zip(self._outer_parameters, self._model.parameters, strict=True):
            outer.detach().copy_(own.detach())
        self._settled = self.steps
        self._loads.forget()

    def _begun(self) -> set[int]:
        """Fragments that need no other mean: one is under way, or began in the latest step."""
        under_way = {one.fragment for one in self._flights}
        if self.steps == 0:
            return under_way
        return under_way | set(due_fragments(self.steps, self._every, len(self._fragments)))

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
            parts = views(flat, [one.shape for one in own])
            for part, start, end in zip(parts, outer, own, strict=True):
                part.copy_(start - end)
            flats.append(flat)
            if dist.get_world_size(group) > 1:
                works.append(start_mean(flat, group))
        self._flights.append(Flight(fragment, due, flats, works))

    def _apply(self, flight: Flight) -> None:
        """Steps the outer parameters of a fragment, and gives them to the rank's own."""
        flight.wait()
        numbers = self._fragments[flight.fragment]
        for kind, flat in zip(self._by_kind(flight.fragment), flight.flats, strict=True):
            outer = [self._outer_parameters[number] for number in kind]
            parts = views(flat, [one.shape for one in outer])
            for number, one, part in zip(kind, outer, parts, strict=True):
                give_pseudo_gradient(one, part, self._model.parameters[number].requires_grad)
        self.outer.step()
        for number in numbers:
            outer_one, own = self._outer_parameters[number], self._model.parameters[number]
            outer_one.grad = None
            mixes = self._alpha and own.requires_grad
            kept = own.detach() * self._alpha if mixes else None
            own.detach().copy_(outer_one.detach())
            if kept is not None:
                own.detach().mul_(1.0 - self._alpha).add_(kept)

    def _by_kind(self, fragment: int) -> list[list[int]]:
        return by_kind(self._fragments[fragment], self._model.parameters)

    # State.

    def _own_state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "settled": self._settled,
            "schedule": self._schedule(),
            "outer": self.outer.state_dict(),
            "outer_parameters": [one.detach().clone() for one in self._outer_parameters],
            "flights": [one.saved() for one in self._flights],
            "under_way": len(self._flights),
        }

    def _schedule(self) -> dict[str, int]:
        return {
            "every": self._every, "fragments": len(self._fragments), "overlap": self._overlap
        }  # fmt: skip

    def _check_own(self, state: dict[str, Any]) -> None:
        check_state(state, self._outer_parameters, self._fragments, self._schedule())

    def _load_own(self, state: dict[str, Any]) -> None:
        self.steps, self._settled, self._in_step = state["steps"], state["settled"], False
        with torch.no_grad():
            for one, saved in zip(self._outer_parameters, state["outer_parameters"], strict=True):
                one.copy_(saved)
        load_numbered(self.outer, state["outer"])
        self._loads.expect()
        self._flights = []
        for flight in state["flights"]:
            kinds = self._by_kind(flight["fragment"])
            devices = [self._outer_parameters[numbers[0]].device for numbers in kinds]
            flats = [m.to(device) for m, device in zip(flight["means"], devices, strict=True)]
            self._flights.append(Flight(flight["fragment"], flight["due"], flats, []))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_complete:
            raise RuntimeError(
                "DiLoCo.add_param_group: the fragments are fixed; make DiLoCo after the last group"
            )
        super().add_param_group(param_group)
