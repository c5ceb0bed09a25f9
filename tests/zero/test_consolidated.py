"""Whole states on one rank, and states that one rank has saved for all."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from helpers.pool import Pool
from zero.checkpoints import bits, build, check_same, train, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")
BF16, F32 = torch.bfloat16, torch.float32


def consolidated(path: str, how: str, kind: str, masters: bool) -> None:
    """Rank 1 saves for all: into new optimizers of all ranks, and into torch's own."""
    dtype, more = (BF16, {"master_dtype": F32}) if masters else (F32, {})
    module, optimizer = build("odd", kind, how, dtype, **more)
    train(module, optimizer, range(2), dtype)
    expected = bits(module, optimizer)
    sharded = whole(optimizer.state_dict())
    optimizer.consolidate_state_dict(to=1)  # type: ignore[attr-defined]
    kept: Any = None
    if dist.get_rank() == 1:
        kept = optimizer.state_dict()
        check_same(whole(kept), sharded)
        torch.save(kept, path)
    else:
        with pytest.raises(RuntimeError, match="consolidated on rank 1 of the group"):
            optimizer.state_dict()
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    train(module, optimizer, range(2, 4), dtype)
    if kept is not None:
        check_same(whole(kept), sharded)  # the copy stays as it was
    onward = bits(module, optimizer)  # the step has dropped it

    dist.barrier()
    saved = torch.load(path, weights_only=True)
    module, optimizer = build("odd", kind, how, dtype, **more)
    module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    check_same(bits(module, optimizer), expected)
    train(module, optimizer, range(2, 4), dtype)
    check_same(bits(module, optimizer), onward)
    if not masters:
        _, plain = build("odd", kind, "alone")
        plain.load_state_dict(saved)
        for number, parts in plain.state_dict()["state"].items():
            check_same(parts, saved["state"][number])


def test_a_whole_state_loads_everywhere(pool: Pool, tmp_path: Path) -> None:
    for number, (how, kind) in enumerate(itertools.product(("1", "wrapped 2"), ("adamw", "sgd"))):
        pool.run(consolidated, str(tmp_path / str(number)), how, kind, False, world=3)
    pool.run(consolidated, str(tmp_path / "16 bits"), "2", "adamw", True)


def refused(folder: str) -> list[str]:
    """Rank 0 saves its own state, and all load it."""
    module, optimizer = build("mlp", "adamw", "1")
    train(module, optimizer, range(2))
    by_names = get_optimizer_state_dict(module, optimizer)
    if dist.get_rank() == 0:
        torch.save([optimizer.state_dict(), by_names], f"{folder}/first")
    torch.save(optimizer.state_dict(), f"{folder}/each {dist.get_rank()}")
    before = bits(module, optimizer)
    dist.barrier()
    by_number, by_names = torch.load(f"{folder}/first", weights_only=False)
    said = []
    for load in (
        lambda: optimizer.load_state_dict(by_number),
        lambda: set_optimizer_state_dict(module, optimizer, by_names),
    ):
        if dist.get_rank() == 0:  # else the ranks' numbers of loads would differ
            said.append("")
            continue
        with pytest.raises(ValueError, match="nothing has changed") as error:
            load()
        said.append(str(error.value))
    # Each rank's own file is right.
    train(module, optimizer, range(2, 3))
    module, optimizer = build("mlp", "adamw", "1")
    optimizer.load_state_dict(torch.load(f"{folder}/each {dist.get_rank()}", weights_only=False))
    check_same(bits(module, optimizer)["optimizer"], before["optimizer"])
    with pytest.raises(ValueError, match="expected a rank from 0 to 1 as to, got 2"):
        optimizer.consolidate_state_dict(to=2)  # type: ignore[attr-defined]
    return said


def test_another_ranks_rows_are_refused(pool: Pool, tmp_path: Path) -> None:
    _, said = pool.run(refused, str(tmp_path))
    for text in said:
        assert "rank 1: ZeroOptimizer: expected this rank's part of 'exp_avg'" in text
        assert "got that of rank 0 of the ranks [0, 1]" in text
        for way in ("dreamcomm.zero.save", "torch.distributed.checkpoint", "consolidate_state"):
            assert way in text


def of_fewer_ranks(path: str, saves: bool) -> str:
    """The part of rank 0 of two, on rank 0 of three."""
    module, optimizer = build("mlp", "adamw", "1")
    if saves:
        train(module, optimizer, range(1))
        if dist.get_rank() == 0:
            torch.save(optimizer.state_dict(), path)
        return ""
    with pytest.raises(ValueError, match="expected this rank's part") as error:
        optimizer.load_state_dict(torch.load(path, weights_only=False))
    return str(error.value)


def test_a_part_of_another_world_is_refused(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    pool.run(of_fewer_ranks, path, True)
    for text in pool.run(of_fewer_ranks, path, False, world=3):
        assert "got that of rank 0 of the ranks [0, 1]" in text
