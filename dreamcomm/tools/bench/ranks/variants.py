"""The variants that are timed in one case: dreamcomm's layers, the other backend, the ceiling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dreamcomm.tools.bench.ranks.buffers import Buffers, make_buffers
from dreamcomm.tools.bench.ranks.calls import Bound, bind, bind_barrier
from dreamcomm.tools.bench.ranks.timing import time_calls
from dreamcomm.tools.bench.ranks.verify import RandomInputs, fill, find_error, rewritten_inputs

if TYPE_CHECKING:
    from torch import Tensor

    from dreamcomm.tools.bench.cases import Case
    from dreamcomm.tools.bench.ranks.team import Team

DREAMCOMM, CORE, CEILING = "dreamcomm", "core", "ceiling"
UNTOUCHED = 99  # the value of elements that were not written, for verification

Timer = Callable[[str, "Tensor", "Tensor", int], list[float]]


@dataclass(frozen=True)
class DistVariant:
    """A backend, called through torch.distributed. ``buffers`` is None for a barrier."""

    name: str
    case: Case
    buffers: Buffers | None
    calls: list[Bound]
    start_together: Bound
    settle: Callable[[], object] | None

    def sample(self) -> list[float]:
        """See :class:`dreamcomm.tools.bench.ranks.timing.Sampled`."""
        if self.buffers is not None:
            self.buffers.rewrite()
        if self.settle is not None:
            self.settle()
        self.start_together()
        return time_calls(self.calls, self.settle)

    def error(self) -> str | None:
        """Runs every call once on random data; returns the first wrong element as text, or None."""
        if self.buffers is None:
            return None
        rank, case = self.buffers.rank, self.case
        source = RandomInputs(case.world, signed=case.dtype != "uint8")
        self.buffers.output.fill_(UNTOUCHED)
        fill(self.buffers.input, rank, source)
        for call in self.calls:
            call()
        return find_error(case.op, rank, case.world, case.total, self.buffers.output, source)


@dataclass(frozen=True)
class BareVariant:
    """A timer of the compiled module: the bare core, or only its memory accesses."""

    name: str
    case: Case
    buffers: Buffers
    timer: Timer

    def sample(self) -> list[float]:
        """See :class:`dreamcomm.tools.bench.ranks.timing.Sampled`."""
        if self.name == CEILING:
            return self.timer(self.case.op, *self.buffers.as_float32(), 1)
        return self.timer(self.case.op, self.buffers.input, self.buffers.output, 1)

    def error(self) -> str | None:
        """The first wrong element after one burst, or None; the ceiling computes nothing."""
        self.sample()
        if self.name == CEILING:
            return None
        case, rank, output = self.case, self.buffers.rank, self.buffers.output
        return find_error(case.op, rank, case.world, case.total, output, rewritten_inputs)


Variant = DistVariant | BareVariant


def line_up(case: Case, team: Team) -> list[Variant]:
    """Everything that takes turns in this case, dreamcomm first.

    Raises:
        MemoryError: the heap is full.
    """
    make = team.heap if case.placement == "heap" else team.private
    variants: list[Variant] = []
    own = bare = None
    if case.op != "barrier":
        own = make_buffers(case, team.rank, make, case.in_slice)
        # The timers take whole tensors only.
        bare = make_buffers(case, team.rank, make, False) if case.in_slice else own
    if "dist" in case.layers:
        variants.append(dist_variant(DREAMCOMM, case, team, team.dream, own))
    if "core" in case.layers and bare is not None:
        variants.append(BareVariant(CORE, case, bare, team.backend._time_core))
    if team.other is not None and team.versus is not None:
        theirs = None if own is None else make_buffers(case, team.rank, team.private, case.in_slice)
        variants.append(dist_variant(team.versus, case, team, team.other, theirs))
    if bare is not None and team.device == "cpu":
        variants.append(BareVariant(CEILING, case, bare, team.backend._time_ceiling))
    return variants


def dist_variant(
    name: str, case: Case, team: Team, group: dist.ProcessGroup, buffers: Buffers | None
) -> DistVariant:
    """Binds the calls of one backend; all start from dreamcomm's barrier, so that none gains."""
    calls = bind_barrier(group, case.burst) if buffers is None else bind(case.op, group, buffers)
    (together,) = bind_barrier(team.dream, 1)
    return DistVariant(name, case, buffers, calls, together, team.settle)
