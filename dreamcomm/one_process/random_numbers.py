"""Random numbers of replicas: keyed by the call and the replica, whatever the threads' timing.

torch draws all random CPU numbers of a process from one generator, so that dropout in two threads
gives other masks in every run. A replica has a generator of its own here, whose seed is drawn, for
each call and replica, from that one generator. So ``torch.manual_seed``, and a restored state,
decide all of them. It is moved back if no replica has drawn a number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from dreamcomm._C import rewind, thread_generator

__all__ = ["CallNumbers", "serving_threads"]

# Guards the one name of torch that serving_threads() replaces.
REPLACING = threading.Lock()


class CallNumbers:
    """The generators of one call's replicas.

    Args:
        count: the number of replicas.
    """

    def __init__(self, count: int) -> None:
        self._source = thread_generator() or torch.default_generator
        self._before = self._source.get_state()
        seeds = _draw(count, self._source)
        self._after = self._source.get_state()
        self.generators = [Generator(device="cpu").manual_seed(seed) for seed in seeds.tolist()]
        self._at_start = [one.get_state() for one in self.generators]

    def finish(self) -> None:
        """Moves torch's generator back, if neither a replica nor anybody else has drawn."""
        now = [one.get_state() for one in self.generators]
        if not all(map(torch.equal, now, self._at_start)):
            return
        alone = Generator(device="cpu")
        alone.set_state(self._before)
        _draw(len(now), alone)
        if torch.equal(alone.get_state(), self._after):  # no other thread drew beside the seeds
            rewind(self._source, self._after, self._before)


def _draw(count: int, generator: Generator) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=generator)


class _OfThread:
    """Stands for torch's CPU generator where torch.random's functions use it.

    In a replica's thread they act on its own one. torch.utils.checkpoint saves, sets and restores
    the state by them, so that a segment draws the same numbers when it is computed again.
    """

    def __init__(self, default: Generator) -> None:
        self.default, self.users = default, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(thread_generator() or self.default, name)


@contextmanager
def serving_threads() -> Iterator[None]:
    """Has torch.get_rng_state, set_rng_state, manual_seed and fork_rng serve their own thread.

    It lasts for the block, and for those of other threads. Threads of no replica see no difference.
    """
    random: Any = torch.random
    with REPLACING:
        if not isinstance(random.default_generator, _OfThread):
            random.default_generator = _OfThread(random.default_generator)
        stand_in: _OfThread = random.default_generator
        stand_in.users += 1
    try:
        yield
    finally:
        with REPLACING:
            stand_in.users -= 1
            if not stand_in.users:
                random.default_generator = stand_in.default
