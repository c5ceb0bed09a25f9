"""Errors say where in the program each rank made its call."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Pool
from lifecycle.groups import error_of

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


def call_by_an_old_name() -> tuple[str, int]:
    """torch wraps these with what tells that they are old."""
    line = 0
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))
        else:
            line = 1 + inspect.stack()[0].lineno
            dist.all_gather_into_tensor(torch.ones(6), torch.ones(3))
    except dist.DistBackendError as error:
        return str(error), line
    return "no error", line


def test_what_wraps_a_call_is_not_its_line(pool: Pool) -> None:
    (text, _), (_, line) = pool.run(call_by_an_old_name)
    assert f"test_sites.py:{line} in call_by_an_old_name" in text


def call_in_a_group() -> str:
    group = dist.new_group([0, 1], backend="dreamcomm")
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_a_group_is_named(pool: Pool) -> None:
    for text in pool.run(call_in_a_group):
        assert re.match(r"the ranks of group '\d+' made different calls", text), text


def differ_in_a_group_of_the_last_two() -> list[str]:
    group = dist.new_group([1, 2], backend="dreamcomm")
    rank = dist.get_rank()
    if rank == 0:
        return []
    size = error_of(lambda: dist.all_reduce(torch.ones(3 + rank), group=group))
    dist.send(torch.ones(1), 3 - rank, group=group)
    tensor = torch.ones(2)
    return [size, error_of(lambda: dist.recv(tensor, 3 - rank, group=group))]


def test_of_a_group_with_other_numbers_the_ranks_of_the_job_are_named(pool: Pool) -> None:
    for texts in pool.run(differ_in_a_group_of_the_last_two, world=3)[1:]:
        for text in texts:
            assert re.search(r"group '\d+' \(ranks 1, 2 of the job\) ", text), text


def differ_in_the_second_of_a_batch() -> tuple[str, list[float]]:
    first = torch.ones(2, 2).t()  # lies elsewhere during the call
    second = torch.ones(3 + dist.get_rank())

    def call() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(first)
            dist.all_reduce(second)

    return error_of(call), first.flatten().tolist()


def test_of_a_batch_is_told_what_was_carried_out(pool: Pool) -> None:
    for text, first in pool.run(differ_in_the_second_of_a_batch):
        assert text.endswith(
            "No data was moved; the group stays usable. In its batch, the 1 call before it was "
            "carried out: repeat only the rest"
        ), text
        assert first == [2.0] * 4


def call_asynchronously() -> str:
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    assert work is not None
    try:
        work.wait()
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


def test_of_asynchronous_calls_is_told_where_the_programs_have_come_to(pool: Pool) -> None:
    at = r"\(its main thread is at \S*test_sites\.py:\d+ in call_asynchronously\)"
    for rank, text in enumerate(pool.run(call_asynchronously)):
        assert f"rank {rank} called all_reduce(SUM, {3 + rank} x float32" in text
        assert len(re.findall(at, text)) == 2, text


def call_in(path: str, is_async: bool) -> str:
    names: dict[str, Any] = {"dist": dist, "torch": torch}
    source = "def call(count): dist.all_reduce(torch.ones(count))"
    if is_async:
        source = "def call(count): dist.all_reduce(torch.ones(count), async_op=True).wait()"
    exec(compile(source, path, "exec"), names)
    try:
        names["call"](3 + dist.get_rank())
    except dist.DistBackendError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_name_that_is_no_text_harms_nobody(pool: Pool, is_async: bool) -> None:
    """Bytes that are no UTF-8, as Python spells them."""
    for text in pool.run(call_in, "caf\udce9.py", is_async):
        assert len(re.findall(r" at caf\\udce9\.py:1 in call", text)) == 2, text
        assert "No data was moved" in text


@pytest.mark.parametrize("after", ["", "x", "xx"])
def test_of_a_long_path_the_end_is_told(pool: Pool, after: str) -> None:
    """Only whole characters of three bytes each."""
    for text in pool.run(call_in, f"{chr(0x4F5C) * 300}{after}.py", False):
        assert len(re.findall(rf" at \.\.\.{chr(0x4F5C)}+{after}\.py:1 in call", text)) == 2, text
