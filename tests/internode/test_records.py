"""The log, the trace, the flight record and top of multi-node groups."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm.observe.records import Line
from dreamcomm.observe.top import RankState, snapshot
from helpers.logs import warnings_of_all_threads
from internode.hosts import Hosts
from internode.test_collectives import TWO_OF_TWO
from observe.test_flight_recorder import analyse
from observe.test_trace import PHASES, lasting, load

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

ONE_AND_TWO = [[0], [1, 2]]
LATE = 0.1  # seconds by which a rank is late


def logged() -> Any:
    return dist.new_group(backend="dreamcomm", pg_options=dreamcomm.Options(log=True))


def traced(paths: list[str], patience: float) -> list[str]:
    """A small call, a large one, and a message to another host; what was warned of."""
    rank = dist.get_rank()
    dist.barrier()
    with warnings_of_all_threads() as said:
        with dreamcomm.trace(paths[rank], patience=patience):
            dist.all_reduce(torch.ones(100))
            dist.all_reduce(torch.ones(1 << 20))
            if rank == 0:
                dist.send(torch.ones(2000), 2)
            elif rank == 2:
                dist.recv(torch.ones(2000), 0)
        dist.barrier()
    return said


def ranks_in(path: Path) -> set[int]:
    return {event["pid"] for event in load(path) if event["ph"] == "X"}


def test_a_trace_has_the_ranks_of_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    paths = [str(folder / "run.json")] * 3
    assert hosts.run(ONE_AND_TWO, traced, paths, 30.0) == [[], [], []]
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    events = load(folder / "run.json")
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for rank in range(3):
        of_lane: dict[str, list[dict[str, Any]]] = {}
        for event in lasting(events, rank):
            of_lane.setdefault(lanes[rank, event["tid"]], []).append(event)
        calls = {one["args"]["call"]: one for one in of_lane["default: calls"]}
        assert [one["name"] for one in calls.values()] == ["all_reduce"] * 2
        assert [one["args"]["bytes"] for one in calls.values()] == [400, 4 << 20]
        assert {one["args"]["algorithm"] for one in calls.values()} <= {"leaders", "carriers"}
        for one in of_lane.get("default: between hosts", []):
            call = calls[one["args"]["call"]]
            assert call["ts"] <= one["ts"] <= call["ts"] + call["dur"]
        within = {lane for lane in of_lane if ", within the host: " in lane}
        assert within <= {f"default, within the host: {lane}" for lane in ("calls", *PHASES)}
        assert within or rank == 0
    assert "default: between hosts" in {lanes[e["pid"], e["tid"]] for e in lasting(events, 0)}
    messages = Counter(e["name"] for e in events if e["ph"] == "b")
    assert messages == {"send to rank 2": 1, "recv from rank 0": 1}


def test_hosts_without_a_common_folder_write_one_each(hosts: Hosts, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    paths = [str(folder / "run.json") for folder in (here, there, there)]
    said = hosts.run(ONE_AND_TWO, traced, paths, 0.5)
    (file,) = there.iterdir()
    assert file.name.startswith("run.")
    assert ranks_in(file) == {1, 2}
    assert ranks_in(here / "run.json") == {0}
    assert "(ranks 1, 2), as no part of these has appeared" in said[0][0]
    assert file.name in said[0][0]
    assert str(file) in said[1][0]
    assert said[2] == []
    dreamcomm.merge_traces([file], here / "run.json")
    assert ranks_in(here / "run.json") == {0, 1, 2}


def test_an_impatient_host_is_in_the_trace_all_the_same(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    hosts.run(ONE_AND_TWO, traced_late, str(folder / "run.json"))
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    assert ranks_in(folder / "run.json") == {0, 1, 2}


def traced_late(path: str) -> None:
    trace = dreamcomm.trace(path, patience=0.3)
    dist.all_reduce(torch.ones(100))
    if dist.get_rank() == 2:
        trace.stop()
    dist.barrier()
    if dist.get_rank() == 1:
        trace.stop()
    dist.barrier()
    trace.stop()


def lines_of_calls() -> tuple[str, str, dict[tuple[str, int], Line]]:
    """The table, what was printed, and the lines."""
    group = logged()
    rank = dist.get_rank()
    for _ in range(3):
        dist.all_reduce(torch.ones(100), group=group)
    dist.all_gather_single(torch.empty(40), torch.ones(10), group=group)
    dist.barrier(group=group)
    if rank == 3:
        time.sleep(LATE)
    dist.broadcast(torch.ones(10), 0, group=group)
    for receiver in (1, 2):  # of this host, and of another
        if rank == 0:
            dist.send(torch.ones(2000), receiver, group=group)
        elif rank == receiver:
            dist.recv(torch.ones(2000), 0, group=group)
    dist.barrier(group=group)
    found = dreamcomm.comm_log(group)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        dist.destroy_process_group(group)
    lines = {(line.operation, line.nbytes): line for line in found.lines}
    return str(found), said.getvalue(), lines


def test_the_log_is_of_the_groups_calls(hosts: Hosts) -> None:
    for rank, (table, said, lines) in enumerate(hosts.run(TWO_OF_TWO, lines_of_calls)):
        assert table.startswith(f"Communication of rank {rank} of 4 in group ")
        assert said == (table + "\n" if rank == 0 else "")
        counts = {key: line.calls for key, line in lines.items()}
        messages = {0: {("send", 8000): 2}, 1: {("recv", 8000): 1}, 2: {("recv", 8000): 1}}
        assert counts == {
            ("all_reduce", 400): 3,
            ("all_gather", 40): 1,
            ("broadcast", 40): 1,
            ("barrier", 0): 2,
            **messages.get(rank, {}),
        }
        late = lines["broadcast", 40]
        if rank == 3:
            assert late.waited < 0.5 * LATE * 1e9
        else:
            assert late.slowest == 3
            assert LATE * 1e9 * 0.9 <= late.waited <= late.total
        assert "rank 3 (100%)" in table or rank == 3


def dump_calls(folder: str) -> None:
    group = logged()
    rank = dist.get_rank()
    for _ in range(2):
        dist.all_reduce(torch.ones(8), group=group)
    for receiver in (1, 2):
        if rank == 0:
            dist.send(torch.ones(8), receiver, group=group)
        elif rank == receiver:
            dist.recv(torch.ones(8), 0, group=group)
    dreamcomm.dump_flight_record(f"{folder}/rank_")
    dist.destroy_process_group(group)


def test_torchs_analyser_matches_the_ranks_of_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    hosts.run(TWO_OF_TWO, dump_calls, str(folder))
    found, said = analyse(folder, tmp_path / "found")
    names = [one.collective_name.removeprefix("gloo:") for one in found.collectives]
    assert names[:2] == ["all_reduce", "all_reduce"], said
    assert all(one.pass_check for one in found.collectives), said
    assert "Not all ranks" not in said


def ranks_of_this_group() -> list[RankState]:
    everyone = snapshot()[0]
    teams = {one.team for one in everyone if one.pid == os.getpid() and one.group == "default"}
    return [one for one in everyone if one.team in teams]


def look_while_others_wait() -> list[RankState]:
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    seen: list[RankState] = []
    if dist.get_rank() == 2:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            seen = ranks_of_this_group()
            if [one.waits_for() for one in seen][:2] == [1, 2]:
                break
            time.sleep(0.05)
    dist.broadcast(torch.ones(256), 2)
    return seen


def test_top_shows_the_groups_calls_and_whom_they_wait_for(hosts: Hosts) -> None:
    *_, seen = hosts.run(ONE_AND_TWO, look_while_others_wait)
    assert [(one.rank, one.size) for one in seen] == [(0, 3), (1, 3), (2, 3)]
    assert [one.doing() for one in seen] == [
        "in broadcast, after barrier",
        "in broadcast, after barrier",
        "outside, after barrier",
    ]
    assert [one.waits_for() for one in seen] == [1, 2, -1]
    assert [one.nbytes for one in seen] == [1024, 1024, 0]
    assert len({one.sequence for one in seen[:2]}) == 1
    for one in seen:
        counts = {name: calls for name, (calls, _, _) in one.counts.items() if calls}
        assert counts == {"all_reduce": 1, "barrier": 1}
        assert one.moved() > 0


def look_while_rank_0_receives() -> RankState | None:
    data = torch.ones(5000)
    dist.barrier()
    seen = None
    if dist.get_rank() == 0:
        dist.recv(data, 2)
    elif dist.get_rank() == 2:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            seen = ranks_of_this_group()[0]
            if seen.messages:
                break
            time.sleep(0.05)
        dist.send(data, 0)
    dist.barrier()
    after = ranks_of_this_group()
    assert all(one.messages == 0 for one in after)
    dist.barrier()
    return seen


def test_top_shows_messages_between_hosts(hosts: Hosts) -> None:
    *_, seen = hosts.run(ONE_AND_TWO, look_while_rank_0_receives)
    assert seen is not None
    assert seen.doing() == "recv from rank 2"
    assert seen.message is not None
    assert seen.message.nbytes == 20000


def explained() -> str:
    return dreamcomm.explain("all_reduce", 1000)


def test_explain_maps_the_hosts(hosts: Hosts) -> None:
    for text in hosts.run([[0, 2], [1]], explained):
        assert "rank 0 is local 0, rank 2 is local 1; they map each other's memory" in text
        assert "rank 1 is local 0; alone, and no other host's: " in text
