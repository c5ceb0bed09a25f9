"""Errors say where in the program each rank made its call."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("Gloo does not compare calls")


def call_in_two_places() -> tuple[str, int]:
    tensor = torch.ones(3 + dist.get_rank())
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        trace = error.__traceback__
        assert trace is not None
        text, line = str(error), trace.tb_lineno
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [float(dist.get_world_size())] * 3
    return text, line


@pytest.mark.parametrize("world", [2, 3])
def test_different_calls_are_told_with_both_ranks_lines(pool: Pool, world: int) -> None:
    found = pool.run(call_in_two_places, world=world)
    lines = [line for _, line in found]
    assert lines[0] != lines[1]
    for rank, (text, line) in enumerate(found):
        sites = re.findall(r"test_sites\.py:(\d+) in call_in_two_places", text)
        other = lines[1] if rank == 0 else lines[0]
        assert sites == [str(line), str(other)], text


def call_asynchronously() -> str:
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    try:
        work.wait()
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_where_no_python_runs_no_line_is_told(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(call_asynchronously)):
        assert f"rank {rank} called all_reduce(SUM, {3 + rank} x float32" in text
        assert " at " not in text.split("No data")[0]
