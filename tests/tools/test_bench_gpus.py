"""``dreamcomm bench --versus nccl``: what of it needs no GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import dreamcomm
from dreamcomm.tools.bench import run as bench_run
from dreamcomm.tools.bench.cases import Case, Grid
from dreamcomm.tools.bench.flags import Flags
from dreamcomm.tools.bench.gpus import (
    check_gpus,
    on_gpus,
    options_for,
    registered_bytes,
    why_not_carried,
)
from dreamcomm.tools.bench.result import CaseResult, Settings
from dreamcomm.tools.bench.run import plan, run_bench
from tools import bench_ranks

MIB = 1 << 20
CASE = Case("all_reduce", "float32", MIB, 2, "heap", True, ("dist",))
HEAD = "all_reduce of 16 bytes a rank over shm: one_shot\n  (heap of this rank: none: x)\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on a machine with two of them, until something runs on one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(bench_run, "is_usable", lambda _: True)
    return monkeypatch


def test_both_placements_are_timed_on_gpus(gpus: Any) -> None:
    cases = plan(Flags(ops=("all_reduce",), sizes="1KiB"), None, False, "nccl", (None, None))
    assert [case.placement for case in cases] == ["private", "heap"]
    assert {case.layers for case in cases} == {("dist",)}


def test_the_bare_core_is_not_there_for_gpus() -> None:
    with pytest.raises(ValueError, match="through the layer dist only"):
        on_gpus([Grid(("all_reduce",), (1024,), layers=("core",))])


def test_nccl_takes_a_gpu_for_each_rank(gpus: Any) -> None:
    check_gpus([CASE])
    with pytest.raises(ValueError, match=r"asks for 3 ranks, and this machine has 2 GPUs"):
        check_gpus([CASE, replace(CASE, world=3)])


def test_dreamcomms_own_kernels_are_asked_for(gpus: Any) -> None:
    """The default option hands tensors on GPUs to NCCL, which would be timed beside itself."""
    given: list[Any] = []

    def spawn(fn: Any, world: int, *, args: Any, options: Any, start_method: str) -> Any:
        given.append(options)
        return [[CaseResult(case, "skipped") for case in args[0]]]

    gpus.setattr(bench_run, "spawn", spawn)
    for versus in ("nccl", "gloo"):
        run_bench([CASE], Settings(versus=versus))
    assert (given[0].cuda, given[1]) == ("dreamcomm", None)
    assert given[0].cuda_heap_bytes >= 2 * CASE.tensor_bytes()


def test_registered_memory_holds_the_largest_case_twice() -> None:
    large = replace(CASE, op="all_gather", bytes=8 * MIB, in_place=False)
    private = replace(CASE, bytes=64 * MIB, placement="private")
    assert registered_bytes([CASE, large, private]) >= 2 * (8 + 4) * MIB
    assert registered_bytes([CASE, large, private]) < 64 * MIB
    assert registered_bytes([private]) == 0
    assert options_for([private], "gloo") is None


OPTION = "torch's own NCCL group, as the option cuda says"
REST = "; what it does not do goes to torch's own NCCL group; sparse all_reduce goes to Gloo)"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"GPU kernels: 2 ranks, this one on cuda:0{REST}", None),
        (f"{OPTION}; sparse all_reduce goes to Gloo)", OPTION),
        (f"rank 1: no peer access{REST}", "rank 1: no peer access"),
    ],
)
def test_explain_says_whether_they_carry_the_calls(words: str, why: str | None) -> None:
    assert why_not_carried(f"{HEAD}  (tensors on cuda: {words}") == why


def test_a_group_without_shared_memory_says_so() -> None:
    text = "all_reduce of 4 bytes: torch's own group carries it, because the ranks share no memory"
    assert why_not_carried(text) == text


@pytest.mark.beyond_gloo("asks dreamcomm")
@pytest.mark.parametrize(
    ("cuda", "why"), [("nccl", "as the option cuda says"), ("dreamcomm", "no tensor on such")]
)
def test_what_explain_says_here_is_understood(cuda: str, why: str) -> None:
    found = dreamcomm.spawn(
        bench_ranks.why_not_carried_here, 2, options=dreamcomm.Options(cuda=cuda)
    )
    assert re.search(why, found[0])


@pytest.mark.beyond_gloo("measures dreamcomm")
def test_nccl_is_not_timed_in_dreamcomms_name() -> None:
    (found,) = dreamcomm.spawn(bench_ranks.carried_by_nccl, 2, args=([CASE], Settings()))[0]
    assert found.status == "skipped"
    assert found.timings == {}
    assert found.notes == (
        "dreamcomm's kernels do not carry tensors on GPUs here: rank 1: no peer access",
    )
