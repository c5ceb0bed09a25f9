"""Random numbers of replicas: keyed by the call and the replica, whatever the threads' timing.

torch draws all random CPU numbers of a process from one generator, so that dropout in two threads
gives other masks in every run. A replica has a generator of its own here, whose seed is drawn, for
each call and replica, from where that one generator stands. So ``torch.manual_seed``, and a
restored state, decide all of them. It moves on only if a replica has drawn a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from dreamcomm._C import thread_generator

__all__ = ["CallNumbers"]


class CallNumbers:
    """The generators of one call's replicas.

    Args:
        count: the number of replicas.
    """

    def __init__(self, count: int) -> None:
        _serve_threads()
        self._next = Generator(device="cpu")
        self._next.set_state(torch.get_rng_state())
        seeds = torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=self._next)
        self.generators = [Generator(device="cpu").manual_seed(seed) for seed in seeds.tolist()]
        self._at_start = [one.get_state() for one in self.generators]

    def finish(self) -> None:
        """Moves torch's generator on, if a replica has drawn: the next call has other numbers."""
        now = [one.get_state() for one in self.generators]
        if not all(map(torch.equal, now, self._at_start)):
            torch.set_rng_state(self._next.get_state())


class _OfThread:
    """Stands for torch's CPU generator where torch.random's functions use it.

    In a replica's thread they act on its own one. torch.utils.checkpoint saves, sets and restores
    the state by them, so that a segment draws the same numbers when it is computed again.
    """

    def __init__(self, default: Generator) -> None:
        self.default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(thread_generator() or self.default, name)


def _serve_threads() -> None:
    """Has torch.get_rng_state, set_rng_state, manual_seed and fork_rng serve their own thread.

    Other threads see no difference.
    """
    random: Any = torch.random
    if not isinstance(random.default_generator, _OfThread):
        random.default_generator = _OfThread(random.default_generator)
