"""Checkpoints of fully sharded modules go through other stages, wrappers and numbers of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dreamcomm import zero
from helpers.pool import Fresh, Pool
from zero.checkpoints import OPTIMIZERS, Bits, bits, build, check_same, put, state_of, train

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

Found = tuple[Bits, list[float], Bits]


def begin(model: str, kind: str, how: str, folder: str) -> Found:
    """Trains, saves and trains on: the state at the checkpoint, and what followed."""
    module, optimizer = build(model, kind, how)
    train(module, optimizer, range(3))
    zero.save(state_of(module, optimizer), folder)
    saved = bits(module, optimizer)
    losses = train(module, optimizer, range(3, 7))
    return saved, losses, bits(module, optimizer)


def resume(model: str, kind: str, how: str, folder: str, onward: str) -> Found:
    """Loads, saves again, and trains on."""
    module, optimizer = build(model, kind, how)
    state = state_of(module, optimizer)
    zero.load(state, folder)
    put(module, optimizer, state)
    loaded = bits(module, optimizer)
    zero.save(state_of(module, optimizer), onward)
    losses = train(module, optimizer, range(3, 7))
    return loaded, losses, bits(module, optimizer)


def alone(_rank: int, *args: Any) -> Found:
    return resume(*args)


def mean_losses(found: list[Found]) -> list[float]:
    return [sum(one) / len(found) for one in zip(*(losses for _, losses, _ in found), strict=True)]


HOPS = [("3", 3), ("torch 3", 1), ("3", 4), ("1", 2), ("3", 2)]
MORE = [("alone", 0), ("torch 3", 2), ("ddp", 3), ("3", 1), ("wrapped 2", 2), ("3", 2)]
# Without buffers of each rank's own. Stages 1 and 2 count no steps of what has no elements.
MODELS = ["mlp", "gpt", "tied", "cnn", "odd", "strange"]
CELLS = [one for one in itertools.product(MODELS, OPTIMIZERS) if one != ("strange", "adamw")]


def go_through(
    pool: Pool, fresh: Fresh, folder: Path, model: str, kind: str, hops: list[tuple[str, int]]
) -> None:
    """Each hop loads what the one before has saved, and trains on as the first run."""
    at = str(folder / "begin")
    begun = pool.run(begin, model, kind, "3", at, world=2)
    saved, _, onward = begun[0]
    for number, (how, world) in enumerate(hops):
        after = str(folder / str(number))
        args = model, kind, how, at, after
        if world:
            found = pool.run(resume, *args, world=world)
        else:
            found = fresh.run(alone, *args, world=1, group=False)
        for loaded, _, further in found:
            check_same(loaded, saved)
            if world == 2:
                check_same(further, onward)
        # Another number of ranks rounds sums in another order.
        assert mean_losses(found) == pytest.approx(mean_losses(begun), rel=1e-6)
        at = after


@pytest.mark.parametrize(("model", "kind"), [("gpt", "adamw"), ("strange", "sgd")])
def test_a_checkpoint_goes_through_stages_and_worlds(
    pool: Pool, fresh: Fresh, tmp_path: Path, model: str, kind: str
) -> None:
    go_through(pool, fresh, tmp_path, model, kind, HOPS)


@pytest.mark.long
@pytest.mark.parametrize(("model", "kind"), CELLS)
def test_a_checkpoint_goes_through_more_stages_and_worlds(
    pool: Pool, fresh: Fresh, tmp_path: Path, model: str, kind: str
) -> None:
    go_through(pool, fresh, tmp_path, model, kind, HOPS + MORE)
