"""The last operations, in the format of torch's Flight Recorder, by torch's own analyser."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm.observe.comm_log import write_record
from helpers.pool import Fresh, Pool

pytestmark = pytest.mark.beyond_gloo("Gloo's operations are not in the Flight Recorder")


def analyse(folder: Path, out: Path) -> tuple[Any, str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "-o", out],
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    with out.open("rb") as file:
        return pickle.load(file)[1], said


def some_calls(folder: str) -> str:
    group = dist.new_group(backend="dreamcomm", pg_options=dreamcomm.Options(log=True))
    x, y = torch.ones(8), torch.ones(16, dtype=torch.bfloat16)
    dist.all_reduce(x, group=group)
    dist.all_gather_single(torch.empty(16), x, group=group)
    dist.reduce_scatter_single(torch.empty(8, dtype=torch.bfloat16), y, group=group)
    dist.broadcast(y, 1, group=group)
    dist.all_to_all_single(torch.empty(16, dtype=torch.bfloat16), y, group=group)
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        dist.send(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
    path = dreamcomm.dump_flight_record(f"{folder}/rank_")
    dist.destroy_process_group(group)
    return str(path)


def dump_at_once(folder: str) -> int:
    """Threads that write the same file."""
    group = dist.new_group(backend="dreamcomm", pg_options=dreamcomm.Options(log=True))
    dist.all_reduce(torch.ones(8), group=group)
    with ThreadPoolExecutor(4) as threads:
        made = [threads.submit(dreamcomm.dump_flight_record, f"{folder}/rank_") for _ in range(100)]
        return len({one.result() for one in made})


def test_threads_may_dump_at_once(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(dump_at_once, str(tmp_path)) == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["rank_0", "rank_1"]


def test_torchs_analyser_matches_the_ranks(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    paths = pool.run(some_calls, str(folder))
    assert paths == [str(folder / "rank_0"), str(folder / "rank_1")]
    found, said = analyse(folder, tmp_path / "found")
    names = [one.collective_name.removeprefix("gloo:") for one in found.collectives]
    assert names[:6] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "barrier",
    ], said
    assert all(one.pass_check for one in found.collectives), said


def messages_among_calls(folder: str) -> None:
    group = dist.new_group(backend="dreamcomm", pg_options=dreamcomm.Options(log=True))
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(8), torch.empty(8)
    for _ in range(3):
        dist.all_reduce(x, group=group)
        works = [
            dist.P2POp(dist.isend, x, (rank + 1) % world, group),
            dist.P2POp(dist.irecv, y, (rank - 1) % world, group),
        ]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        if rank == 2:
            dist.send(x, 0, group=group)
        elif rank == 0:
            dist.recv(y, 2, group=group)
    dreamcomm.dump_flight_record(f"{folder}/rank_")
    dist.destroy_process_group(group)


def test_messages_are_those_of_pairs(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    pool.run(messages_among_calls, str(folder), world=3)
    found, said = analyse(folder, tmp_path / "found")
    assert all(one.pass_check for one in found.collectives), said
    assert len(found.ncclcalls) == 3 * 3 + 3 * 2 * 3 + 3 * 2
    assert "Not all ranks" not in said


def diverge(folder: str) -> None:
    """Rank 1 leaves a call out, and rank 0 waits for it."""
    dist.all_reduce(torch.ones(8))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(4))


def test_a_failed_group_leaves_its_record(fresh: Fresh, tmp_path: Path) -> None:
    folder = tmp_path / "records" / "of_this_job"  # which nobody has made
    env = {"DREAMCOMM_LOG": "1", "DREAMCOMM_FLIGHT_RECORD": str(folder / "rank_")}
    fresh.run(diverge, str(folder), env=env, group_timeout=2.0)
    with (folder / "rank_0").open("rb") as file:
        record = pickle.load(file)
    states = [(one["profiling_name"], one["state"]) for one in record["entries"]]
    assert states == [("gloo:all_reduce", "completed"), ("gloo:all_reduce", "started")]
    assert record["pg_status"]["0"]["last_completed_collective"] == 1
    assert record["pg_status"]["0"]["last_started_collective"] == 2


@pytest.mark.parametrize("prefix", ["/dev/null/rank_", "nul\0"])
def test_a_record_that_cannot_be_written_is_told_in_words(
    caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    write_record(prefix)
    (warning,) = caplog.messages
    assert warning.startswith("the flight record of DREAMCOMM_FLIGHT_RECORD is not written: ")


def ask_without_a_log(folder: str) -> None:
    with pytest.raises(ValueError, match="keeps a log"):
        dreamcomm.dump_flight_record(f"{folder}/rank_")


def test_without_a_log_there_is_nothing_to_write(pool: Pool, tmp_path: Path) -> None:
    pool.run(ask_without_a_log, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
