"""invariant_shards: equal bits at 1, 2, 4 and 8 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.pool import Pool
from training.invariance import (
    COUNTS,
    SHARDS,
    WAYS,
    WEIGHTS,
    copied,
    mean_of,
    over_tokens,
    random_numbers,
    saved_and_resumed,
    signs_of_zero,
    trained,
)

pytestmark = pytest.mark.beyond_gloo("adds in a fixed order")

NAMES = ["mlp", "gpt", "cnn", "half"]
SHORT = {("mlp", "sgd"), ("gpt", "adamw"), ("cnn", "sgd"), ("half", "adamw")}
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in SHORT else pytest.mark.long)
    for name in NAMES
    for kind in ("sgd", "adamw")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("way", list(WAYS))
def test_bits_are_equal_at_every_world_size(
    pool: Pool, name: str, way: str, kind: str, soak: bool
) -> None:
    steps = 50 if soak else 5
    alone = None
    for world in (1, 2, 4, 8):
        for found in pool.run(trained, name, way, kind, steps, world=world, timeout=300):
            alone = alone or found
            assert found == alone, f"{world} ranks"


@pytest.mark.parametrize("way", [one for one in WAYS if one != "replicate"])
def test_two_hosts_have_the_bits_of_one(pool: Pool, way: str) -> None:
    name = "gpt" if way != "gathered" else "mlp"
    one = pool.run(trained, name, way, "sgd", 4, world=4)
    two = pool.run(trained, name, way, "sgd", 4, world=4, env={"DREAMCOMM_HOSTS": "a,a,b,b"})
    assert two == one


def test_all_ways_have_the_same_bits(pool: Pool) -> None:
    ways = [one for one in WAYS if "unclipped" not in one]
    found = {way: pool.run(trained, "gpt", way, "sgd", 4, world=2)[0] for way in ways}
    for way, bits in found.items():
        assert bits[:4] == found["ddp"][:4], way


@pytest.mark.parametrize("way", list(WAYS))
def test_a_run_goes_on_at_another_world_size(pool: Pool, way: str, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    (saved, *_) = pool.run(saved_and_resumed, "cnn", way, path, 3, world=4)
    for world in (2, 8):
        for found in pool.run(saved_and_resumed, "cnn", way, path, 3, world=world):
            assert found == saved, f"{world} ranks"


@pytest.mark.parametrize("way", list(WAYS))
def test_a_gradient_that_a_shard_lacks_counts_as_plus_zero(pool: Pool, way: str) -> None:
    alone = None
    for world in (1, 2, 4, 8):
        found = pool.run(signs_of_zero, way, world=world)[0]
        alone = alone or found
        assert found == alone, f"{world} ranks"
        assert len({digest for _, digest in found if digest is not None}) > 2


def test_random_numbers_are_those_of_the_step_and_the_shard(pool: Pool) -> None:
    torch.manual_seed(3)
    outside = float(torch.rand(()))
    (alone,) = pool.run(random_numbers, "ddp", world=1)
    assert len(set(alone)) == 2 * SHARDS + 1
    assert alone[-1] == outside
    for world in (2, 4):
        by_rank = pool.run(random_numbers, "ddp", world=world)
        local = SHARDS // world
        steps = [[one[step * local :][:local] for one in by_rank] for step in range(2)]
        assert [value for step in steps for rank in step for value in rank] == alone[:-1]
        assert all(one[-1] == outside for one in by_rank)


def test_a_copy_goes_on_where_the_training_was(pool: Pool) -> None:
    for kept, copy in pool.run(copied):
        assert copy == kept


def test_losses_are_added_along_the_tree(pool: Pool) -> None:
    values = [1e16, 1.0, -1e16, 1.0, 3.0, 1e16, 1.0, -1e16]  # another order has another sum
    for world in (1, 2, 4, 8):
        for found in pool.run(mean_of, values, world=world):
            assert found == (((1e16 + 1.0) + (-1e16 + 1.0)) + ((3.0 + 1e16) + (1.0 - 1e16))) / 8


@pytest.mark.parametrize("counts", [COUNTS, WEIGHTS], ids=["tokens", "weights"])
@pytest.mark.parametrize("way", ["ddp", "replicate", "zero1", "zero2", "zero3"])
def test_means_over_the_tokens_of_all_shards(pool: Pool, way: str, counts: list[float]) -> None:
    alone = None
    for world in (1, 2, 4, 8):
        for found in pool.run(over_tokens, way, counts, world=world):
            alone = alone or found
            assert found == alone, f"{world} ranks"
    assert alone is not None
    assert alone[0] is True
