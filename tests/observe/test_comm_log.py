"""The comm log: what a group notes of its operations' times."""

from __future__ import annotations

import contextlib
import io
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm.observe.comm_log import CommLog, in_time
from dreamcomm.observe.records import Line
from helpers.pool import Fresh, Pool

pytestmark = pytest.mark.beyond_gloo("Gloo keeps no log")

LATE = 0.05  # seconds by which rank 1 is late


def logged() -> Any:
    return dist.new_group(backend="dreamcomm", pg_options=dreamcomm.Options(log=True))


def lines_of_calls() -> dict[tuple[str, int], Line]:
    group = logged()
    for _ in range(3):
        dist.all_reduce(torch.ones(100), group=group)
    if dist.get_rank() == 1:
        time.sleep(LATE)
    dist.broadcast(torch.ones(10), 0, group=group)
    dist.all_gather_single(torch.empty(20), torch.ones(10), group=group)
    shared = dreamcomm.zeros(1 << 20)
    dist.all_reduce(shared, group=group)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2000), 1, group=group)
    else:
        dist.recv(torch.ones(2000), 0, group=group)
    lines = dreamcomm.comm_log(group).lines
    dist.destroy_process_group(group)
    return {(line.operation, line.nbytes): line for line in lines}


def test_each_operation_and_size_has_its_line(pool: Pool) -> None:
    for rank, lines in enumerate(pool.run(lines_of_calls)):
        message = ("recv", "send")[rank == 0], 8000
        small, heap = ("all_reduce", 400), ("all_reduce", 4 << 20)
        assert {small, heap, ("broadcast", 40), ("all_gather", 40), message} == set(lines)
        assert lines[small].calls == 3
        assert lines[small].in_place == 0
        assert lines[heap].in_place == 1
        assert lines[message].calls == 1
        for line in lines.values():
            assert 0 < line.p50 <= line.p99
            assert line.waited <= line.total
            assert line.failed == 0


def test_the_wait_is_for_the_rank_that_comes_late(pool: Pool) -> None:
    for rank, lines in enumerate(pool.run(lines_of_calls)):
        line = lines["broadcast", 40]
        if rank == 0:
            assert line.slowest == 1
            assert LATE * 1e9 * 0.9 <= line.waited <= line.total
            assert line.for_slowest == line.waited
        else:
            assert line.slowest == -1
            assert line.waited == 0


def printed_at_the_end() -> tuple[str, str]:
    group = logged()
    dist.all_reduce(torch.ones(100), group=group)
    table = str(dreamcomm.comm_log(group))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        dist.destroy_process_group(group)
    return table, said.getvalue()


def test_rank_0_prints_the_table_at_the_end(pool: Pool) -> None:
    (table, said), (_, silent) = pool.run(printed_at_the_end)
    assert said == table + "\n"
    assert "all_reduce" in table
    assert "rank 0 of 2" in table
    assert silent == ""


def ask_without_a_log() -> str:
    with pytest.raises(ValueError, match="DREAMCOMM_LOG=1") as caught:
        dreamcomm.comm_log()
    return str(caught.value)


def test_a_group_without_a_log_says_how_to_get_one(pool: Pool) -> None:
    for said in pool.run(ask_without_a_log):
        assert "keeps no log" in said


def count_by_environment() -> int:
    dist.barrier()
    return len(dreamcomm.comm_log().lines)


def test_the_environment_turns_it_on(pool: Pool) -> None:
    assert pool.run(count_by_environment, env={"DREAMCOMM_LOG": "1"}) == [1, 1]


def test_what_a_message_waited_is_not_said_to_be_nothing() -> None:
    lines = [
        Line(operation, 1000, 1, 0, 190_000_000, 0, 1, 1, 0, -1, 0)
        for operation in ("send", "recv", "broadcast")
    ]
    rows = str(CommLog("default", 0, 2, lines)).splitlines()[2:]
    assert [row.split()[0] for row in rows if row.endswith("0%")] == ["broadcast"]


def fail_a_call() -> Line:
    group = logged()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(10 + dist.get_rank()), group=group)
    dist.barrier(group=group)
    found = dreamcomm.comm_log(group)
    assert "1 failed" in str(found)
    (failed,) = (line for line in found.lines if line.operation == "all_reduce")
    return failed


def fail_alone() -> str:
    group = logged()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(10 + dist.get_rank()), group=group)
    return str(dreamcomm.comm_log(group))


def test_where_all_calls_failed_there_is_no_empty_table(pool: Pool) -> None:
    for said in pool.run(fail_alone):
        assert said.endswith(": no call has succeeded, 1 failed")
        assert "\n" not in said


def test_failed_calls_count_apart(pool: Pool) -> None:
    for line in pool.run(fail_a_call):
        assert (line.calls, line.failed) == (0, 1)


def lose_a_message() -> list[Line]:
    group = logged()
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError):
            dist.irecv(torch.ones(10), 1, group=group).wait(timedelta(seconds=1))  # type: ignore[union-attr]
        from dreamcomm._torch.groups import backend_of

        backend_of(group).abort()
    return dreamcomm.comm_log(group).lines


def test_failed_messages_count(fresh: Fresh) -> None:
    lines, _ = fresh.run(lose_a_message)
    assert [(line.operation, line.nbytes, line.calls, line.failed) for line in lines] == [
        ("recv", 40, 0, 1)
    ]


def exchange_parts() -> list[Line]:
    group = logged()
    dist.all_to_all_single(torch.empty(30), torch.ones(30), group=group)
    return dreamcomm.comm_log(group).lines


def test_all_to_all_counts_its_whole_input(pool: Pool) -> None:
    for (line,) in pool.run(exchange_parts, world=3):
        assert line.nbytes == 120
        assert line.algbw(3) > 0


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1 us"),
        (1_234_567, "1.23 ms"),
        (999_700, "1 ms"),
        (62_000_000_000, "62 s"),
        (3_600_000_000_000, "3600 s"),
    ],
)
def test_times_have_three_digits(nanoseconds: int, text: str) -> None:
    assert in_time(nanoseconds) == text


def test_bandwidths_are_nccl_tests() -> None:
    def line(operation: str) -> Line:
        return Line(operation, 1000, 4, 0, 2000, 0, 1, 1, 0, -1, 0)

    assert line("all_reduce").algbw(4) == 2.0
    assert line("all_reduce").busbw(4) == 3.0
    for operation in ("all_gather", "reduce_scatter", "gather", "scatter"):
        assert line(operation).algbw(4) == 8.0
        assert line(operation).busbw(4) == 6.0
    assert line("all_to_all").busbw(4) == 1.5
    assert line("broadcast").busbw(4) == 2.0
    assert line("send").busbw(4) == 2.0
