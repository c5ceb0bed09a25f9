"""Shards' batches are the same at every world size, after a resume, and in any worker."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from dreamcomm.invariant.sampler import SeededDataset, ShardBatch, ShardSampler, seeded
from dreamcomm.invariant.seeds import Purpose, own_random_state, seed_of

ITEMS, SHARDS, BATCH = 101, 8, 3  # 4 steps an epoch, and 5 items are left over
Batches = list[list[tuple[list[int], int]]]  # by shard: items and seeds


@dataclass
class Loop:
    local: range
    shards: int = SHARDS
    seed: int = 5
    step: int = 0


def loops(world: int, step: int = 0, seed: int = 5) -> list[Loop]:
    per = SHARDS // world
    return [
        Loop(range(rank * per, (rank + 1) * per), step=step, seed=seed) for rank in range(world)
    ]


def batches(world: int, steps: int, first: int = 0, seed: int = 5, **options: Any) -> Batches:
    """What all ranks of a world read, epoch after epoch."""
    found: Batches = [[] for _ in range(SHARDS)]
    for loop in loops(world, first, seed):
        sampler = ShardSampler(range(ITEMS), loop, BATCH, **options)
        while loop.step < first + steps:
            left, reading = len(sampler), iter(sampler)
            got = list(reading)
            assert len(got) == left
            for begin in range(0, left, len(loop.local)):
                loop.step += 1
                for number, batch in zip(loop.local, got[begin:], strict=False):
                    assert isinstance(batch, ShardBatch)
                    found[number].append((list(batch), batch.seed))
    return [shard[:steps] for shard in found]


def test_every_world_size() -> None:
    wanted = batches(1, 8)
    for world in (2, 4, 8):
        assert batches(world, 8) == wanted
    for epoch in (0, 1):
        items = [
            i for shard in wanted for batch, _ in shard[4 * epoch : 4 * epoch + 4] for i in batch
        ]
        assert len(set(items)) == len(items) == 96
    assert wanted[0][0][0] != wanted[0][4][0]
    seeds = [seed for shard in wanted for _, seed in shard]
    assert len(set(seeds)) == len(seeds)
    assert batches(1, 8, seed=6) != wanted


def test_resume_within_an_epoch() -> None:
    wanted = batches(1, 11)
    for world in (1, 2, 8):
        assert batches(world, 5, first=6) == [shard[6:11] for shard in wanted]


def test_in_order() -> None:
    [(first, _)], *_, [(last, _)] = batches(2, 1, shuffle=False)
    assert first == [0, 1, 2]
    assert last == [21, 22, 23]


def test_refusals() -> None:
    loop = Loop(range(4))
    with pytest.raises(ValueError, match=r"takes 24 items, 3 for each of 8 shards, and .* has 23"):
        ShardSampler(range(23), loop, 3)
    with pytest.raises(ValueError, match="batch_size from 1 on, got 0"):
        ShardSampler(range(23), loop, 0)


class Noisy(Dataset[list[float]]):
    """Each item draws from all generators, and keeps a state of its own between draws."""

    name = "noisy"

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> list[float]:
        draws = (float(torch.rand(())), random.random(), float(numpy.random.rand()))
        return [float(index), *draws]


class AtOnce(Noisy):
    def __getitems__(self, batch: Sequence[int]) -> list[list[float]]:
        return [[*self[one], float(torch.rand(()))] for one in batch]


def read(data: Dataset[list[float]], world: int, workers: int) -> list[list[list[float]]]:
    """The items of the first two steps, by step and shard."""
    found: dict[tuple[int, int], list[list[float]]] = {}
    for loop in loops(world, step=2):
        loader = DataLoader(
            seeded(data),
            batch_sampler=ShardSampler(range(ITEMS), loop, BATCH),
            num_workers=workers,
            collate_fn=list,
        )
        assert len(loader) == 2 * len(loop.local)
        for number, batch in enumerate(loader):
            step, place = divmod(number, len(loop.local))
            found[step, loop.local[place]] = batch
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("data", [Noisy(), AtOnce()])
def test_augmentation_in_any_worker(data: Dataset[list[float]]) -> None:
    wanted = read(data, 1, workers=0)
    draws = [one for batch in wanted for item in batch for one in item[1:]]
    assert len(set(draws)) == len(draws)
    assert read(data, 4, workers=0) == wanted
    assert read(data, 1, workers=2) == wanted
    assert read(data, 2, workers=2) == wanted


def test_main_process_keeps_its_states() -> None:
    def draws() -> list[float]:
        return Noisy()[0]

    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    seed()
    wanted = draws()
    seed()
    data: Any = seeded(Noisy())
    data.__getitems__(ShardBatch([1, 2], 7))
    with pytest.raises(IndexError):
        seeded(Broken()).__getitems__(ShardBatch([1], 7))
    assert draws() == wanted


class Broken(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        raise IndexError(torch.rand(()))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_seeded_stands_for_its_data_set() -> None:
    data: Any = seeded(Noisy())
    assert len(data) == ITEMS
    assert data.name == "noisy"
    assert data[3][0] == 3.0
    for copied in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert isinstance(copied, SeededDataset)
        assert copied.name == "noisy"
    with pytest.raises(AttributeError):
        _ = data.nothing
    batch = pickle.loads(pickle.dumps(ShardBatch([4, 2], 7)))
    assert (list(batch), batch.seed) == ([4, 2], 7)
    loaders: Iterable[DataLoader[Any]] = (
        DataLoader(data, batch_size=2),
        DataLoader(Subset(data, [1, 2]), batch_size=2),
    )
    for loader in loaders:
        with pytest.raises(TypeError, match=r"got list; give .* batch_sampler=ShardSampler"):
            next(iter(loader))
    with pytest.raises(TypeError, match="got Stream"):
        seeded(Stream())


def test_seeds() -> None:
    """Equal everywhere and always, as a resume depends on them."""
    assert seed_of(0, Purpose.READING, 3, 5) == 7993905508282383834
    made = {seed_of(*numbers) for numbers in [(1,), (1, 2), (12,), (1, 2, 0), (-1, 2), (2**70,)]}
    assert len(made) == 6
    assert all(0 <= one < 2**63 for one in made)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="invalid literal"), own_random_state():
        int(f"seeded {torch.manual_seed(4)}")
    assert torch.equal(torch.rand(2), wanted)
