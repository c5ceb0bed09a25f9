"""Gives each block of a pipeline the same random numbers, however blocks are spread over stages.

One process draws all dropout masks from one generator, in order. Ranks that each run some blocks
of some micro-batches cannot continue one sequence. Instead each call of a block begins with a seed
that is made from what identifies the call, so a recomputed call draws the same numbers, too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BlockRandomness"]


class BlockRandomness:
    """Seeds torch's generators before each call of a block.

    The CPU's generator is seeded, and the one of the current CUDA device if CUDA is in use. Only
    calls through ``unit(...)`` of units in training mode are seeded. The units carry hooks only
    within :meth:`at`.

    What draws random numbers outside of all units is not made independent of the stages. A call
    that ``torch.utils.checkpoint`` repeats in the backward pass needs an :meth:`at` around that
    pass.

    Args:
        units: the model's blocks by global name. A rank may give only its own.
        seed: the same on all ranks of a pipeline.
    """

    def __init__(self, units: Mapping[str, nn.Module], seed: int) -> None:
        self._units = dict(units)
        self._seed = seed
        self._call: _Call | None = None
        self._hooked = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Keeps the hooks on the units, so that each :meth:`at` inside need not set them anew."""
        handles = []
        self._hooked = True
        try:
            for name, unit in self._units.items():
                # Before the unit's other hooks, which may draw numbers themselves.
                handles.append(unit.register_forward_pre_hook(self._hook_of(name), prepend=True))
            yield
        finally:
            self._hooked = False
            for handle in handles:
                handle.remove()

    @contextmanager
    def at(self, step: int, microbatch: int) -> Iterator[None]:
        """Seeds the calls of units within the context.

        Afterwards the generators are as before, also after an error. The calls of a unit are
        counted from zero in each context: to recompute, enter it again with the same numbers.

        Args:
            step: the training step.
            microbatch: the micro-batch within the step.

        Raises:
            RuntimeError: if the context is entered within itself.
        """
        if self._call is not None:
            raise RuntimeError("at() cannot be entered within another at()")
        self._call = call = _Call(f"{self._seed}/{step}/{microbatch}/", _Generators(), Counter())
        try:
            if self._hooked:
                yield
            else:
                with self.hooked():
                    yield
        finally:
            self._call = None
            call.generators.restore()

    def _hook_of(self, name: str) -> Callable[[nn.Module, Any], None]:
        def before(unit: nn.Module, _: Any) -> None:
            call = self._call
            if call is not None and unit.training:
                call.generators.seed(_hash(f"{call.prefix}{name}/{call.counts[name]}"))
                call.counts[name] += 1

        return before


@dataclass
class _Call:
    """The micro-batch that runs: what seeds begin with, and how often each unit was called."""

    prefix: str
    generators: _Generators
    counts: Counter[str]


class _Generators:
    """The generators that blocks draw from. Keeps their states from before the first seed."""

    def __init__(self) -> None:
        self._before: list[tuple[torch.Generator, Tensor]] = []

    def seed(self, seed: int) -> None:
        if not self._before:
            used = [torch.default_generator]
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                used.append(torch.cuda.default_generators[torch.cuda.current_device()])
            self._before = [(one, one.get_state()) for one in used]
        for generator, _ in self._before:
            generator.manual_seed(seed)

    def restore(self) -> None:
        for generator, state in self._before:
            generator.set_state(state)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
