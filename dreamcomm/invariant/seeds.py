"""Seeds that depend on what is drawn, not on the rank or the worker that draws it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch

__all__ = ["Purpose", "own_random_state", "seed_of"]


class Purpose(IntEnum):
    """The first number of a seed, so that no two uses share their random numbers."""

    ORDER = 0
    READING = 1
    TRAINING = 2


def seed_of(seed: int, *numbers: int) -> int:
    """Makes a seed of 63 bits, equal on all machines.

    Args:
        seed: the user's, of any size and sign.
        numbers: say what is drawn: a purpose, then such as the step and the shard.
    """
    text = "/".join(str(int(one)) for one in (seed, *numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def own_random_state() -> Iterator[None]:
    """Puts the state of torch's CPU generator back at the end, also after an error."""
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
