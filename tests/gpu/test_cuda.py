"""Ranks as processes on real GPUs, all on one if there is but one. Skipped where there is none."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import dreamcomm
from dreamcomm import spawn
from helpers import cuda_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
SIZES = [1, 1000, 1 << 20]


def options(**more: Any) -> dreamcomm.Options:
    return dreamcomm.Options(cuda="dreamcomm", cuda_heap_bytes=256 << 20, costs="fixed", **more)


def run(fn: Any, world: int = 2, args: tuple[Any, ...] = (), seconds: float = 60) -> list[Any]:
    return spawn(fn, world, args=args, options=options(), timeout=seconds, start_method="spawn")


def test_this_librarys_kernels_carry_the_tensors() -> None:
    for text in run(cuda_ranks.transport):
        assert "GPU kernels: 2 ranks" in text


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_say_what_the_cpus_do(world: int) -> None:
    run(cuda_ranks.all_collectives, world, (DTYPES, SIZES))


@pytest.mark.parametrize("part", ["order", "training"])
def test_what_is_built_on_them(part: str) -> None:
    run(getattr(cuda_ranks, part))


def test_a_stuck_rank_is_named() -> None:
    told = run(cuda_ranks.stuck, args=(9.0,), seconds=6)
    assert "rank 1" in told[0]
    assert "all_reduce(SUM, 4 x float32)" in told[0]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """Starts the processes itself, because spawn() would end the other one."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    arguments = (str(tmp_path / "store"), answer, 6.0)
    ranks = [
        context.Process(target=cuda_ranks.beside_a_killed, args=(rank, *arguments))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert "rank 1" in answer.get(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("hosts", ["a,a,b,b", "a,b,b", "a,b,a,c"])
def test_calls_between_hosts_say_what_the_cpus_do(hosts: str) -> None:
    """Kernels within each of the pretended hosts, NCCL between them."""
    world = hosts.count(",") + 1
    for text in spawn(
        cuda_ranks.between_hosts, world, args=(hosts,), init=False, start_method="spawn"
    ):
        assert "of this host; between hosts torch's own group" in text


def test_the_group_that_goes_to_nccl() -> None:
    results = spawn(cuda_ranks.over_nccl, 2, init=False, start_method="spawn")
    assert results == [[3.0] * 4] * 2
