"""Batches by shard, in an order and with random numbers that no number of ranks changes.

A permutation of the data set is cut into steps, and each step into the batches of its shards::

    permutation   | step 0                      | step 1                      | ...   rest: dropped
                  | shard 0 | shard 1 | .. V-1  | shard 0 | shard 1 | .. V-1  |
    rank 0 of 2   |  reads     reads            |  reads     reads            |
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from dreamcomm.invariant.seeds import Purpose, own_random_state, seed_of

__all__ = ["Loop", "SeededDataset", "ShardBatch", "ShardSampler", "seeded"]

T_co = TypeVar("T_co", covariant=True)


class Loop(Protocol):
    """Where the training is.

    Attributes:
        shards: of a step, on all ranks together.
        seed: the same on all ranks.
        step: the number of training steps that are done.
        local: the numbers of this rank's shards.
    """

    @property
    def shards(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def local(self) -> range: ...


class ShardBatch(list[int]):
    """The places in the data set of one shard's items, and the seed to read them with."""

    def __init__(self, items: Iterable[int], seed: int) -> None:
        super().__init__(items)
        self.seed = seed


class ShardSampler(Sampler[list[int]]):
    """Yields this rank's batches, from the training's next step to the end of its epoch.

    Every epoch has a permutation of its own, made of the seed. The loop's step says which epoch it
    is, so there is no ``set_epoch``. After ``load_state_dict`` a new iterator goes on where
    the saved training was, also at another number of ranks.

    Example::

        loader = DataLoader(seeded(data), batch_sampler=ShardSampler(data, loop, 32))

    Args:
        data_source: the data set; only its length is read.
        loop: where the training is.
        batch_size: items of each shard. A step takes ``loop.shards`` times as many.
        shuffle: False takes the items in their order in every epoch.

    Raises:
        ValueError: the data set has too few items for one step.
    """

    def __init__(
        self, data_source: Sized, loop: Loop, batch_size: int, *, shuffle: bool = True
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"ShardSampler: expected a batch_size from 1 on, got {batch_size}")
        self._data, self._loop, self._shuffle = data_source, loop, shuffle
        self.batch_size = batch_size
        _ = self.steps_per_epoch  # raises

    @property
    def steps_per_epoch(self) -> int:
        """The steps that the data set has items for."""
        needed = self._loop.shards * self.batch_size
        steps = len(self._data) // needed
        if steps == 0:
            raise ValueError(
                f"ShardSampler: a step takes {needed} items, {self.batch_size} for each of "
                f"{self._loop.shards} shards, and the data set has {len(self._data)}; "
                "give more items, or a smaller batch_size or invariant_shards"
            )
        return steps

    def __len__(self) -> int:
        """The number of this rank's batches that are left in the epoch."""
        steps = self.steps_per_epoch
        return (steps - self._loop.step % steps) * len(self._loop.local)

    def __iter__(self) -> Iterator[list[int]]:
        loop, size, steps = self._loop, self.batch_size, self.steps_per_epoch
        seed, shards, local, done = loop.seed, loop.shards, loop.local, loop.step
        order = self._order(seed, done // steps)
        for step in range(done, done - done % steps + steps):
            for shard in local:
                begin = (step % steps * shards + shard) * size
                items = order[begin : begin + size].tolist()
                yield ShardBatch(items, seed_of(seed, Purpose.READING, step, shard))

    def _order(self, seed: int, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(len(self._data), device="cpu")
        generator = torch.Generator().manual_seed(seed_of(seed, Purpose.ORDER, epoch))
        return torch.randperm(len(self._data), generator=generator, device="cpu")


class SeededDataset(Dataset[T_co]):
    """Reads each batch with random numbers of its own. See :func:`seeded`."""

    def __init__(self, dataset: Dataset[T_co]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> T_co:
        return self._dataset[index]

    def __getitems__(self, batch: Sequence[int]) -> Sequence[T_co]:
        if not isinstance(batch, ShardBatch):
            raise TypeError(
                "seeded: expected a batch of ShardSampler, which has a seed, got "
                f"{type(batch).__name__}; give the DataLoader batch_sampler=ShardSampler(...), "
                "and make seeded(...) its outermost data set"
            )
        with nullcontext() if get_worker_info() else _own_random_states():
            _seed_all(batch.seed)
            read = getattr(self._dataset, "__getitems__", None)
            return read(batch) if read else [self._dataset[one] for one in batch]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)


def seeded(dataset: Dataset[T_co]) -> SeededDataset[T_co]:
    """Lets a data set draw the same random numbers for a shard, in any rank or worker.

    Before it reads a batch of :class:`ShardSampler`, torch's CPU generator, ``random`` and
    ``numpy.random`` get the batch's seed. In a worker process they keep it, so it counts in the
    collate function, too. In the main process their states are restored after the items are read:
    a collate function that draws random numbers needs ``num_workers`` from 1 on.

    A generator object of the data set's own is not seeded.

    Args:
        dataset: has items by number. Its attributes are reached through the result.

    Raises:
        TypeError: the data set has no items by number.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"seeded: expected a data set with items by number, got {type(dataset).__name__}; "
            "ranks cannot divide another one by shards"
        )
    return SeededDataset(dataset)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % (1 << 32))


@contextmanager
def _own_random_states() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    with own_random_state():
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
