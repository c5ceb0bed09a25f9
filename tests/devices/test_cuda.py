"""Ranks as processes on real GPUs, all on one if there is but one. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dreamcomm
from dreamcomm import RankError, spawn
from helpers import cuda_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def options(**more: Any) -> dreamcomm.Options:
    return dreamcomm.Options(cuda="dreamcomm", cuda_heap_bytes=256 << 20, costs="fixed", **more)


def run(fn: Any, world: int = 2, args: tuple[Any, ...] = (), seconds: float = 60) -> list[Any]:
    return spawn(fn, world, args=args, options=options(), timeout=seconds, start_method="spawn")


def test_this_librarys_kernels_carry_the_tensors() -> None:
    for text in run(cuda_ranks.transport):
        assert "GPU kernels: 2 ranks" in text


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_collectives_say_what_the_cpus_do(world: int, dtype: torch.dtype, registered: bool) -> None:
    for size in (1, 1000, 1 << 20):
        run(cuda_ranks.collectives, world, (dtype, size, registered))


@pytest.mark.parametrize("part", ["messages", "streams", "graph", "ddp", "fsdp"])
def test_what_is_built_on_them(part: str) -> None:
    run(getattr(cuda_ranks, part))


def test_a_stuck_rank_is_named() -> None:
    told = run(cuda_ranks.stuck, args=(8.0,), seconds=3)
    assert "rank 1" in told[0]
    assert "all_reduce(SUM, 4 x float32)" in told[0]


def test_a_killed_rank_ends_the_others_calls() -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        run(cuda_ranks.killed, seconds=3)


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
