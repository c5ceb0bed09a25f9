"""dreamcomm.trace: one file with the timelines of all ranks."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm._torch.groups import backend_of
from dreamcomm.observe.records import Record
from helpers.logs import Kept
from helpers.pool import Fresh, Pool
from helpers.processes import replies, value_of

pytestmark = pytest.mark.beyond_gloo("Gloo writes no timeline")

PHASES = ("wait", "copy in", "reduce", "copy out")


def traced(path: str) -> None:
    dist.barrier()
    with dreamcomm.trace(path):
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(1 << 20))
        inner = dist.new_group(ranks=[1, 0], backend="dreamcomm")
        dist.broadcast(torch.ones(10), 0, group=inner)
        dist.destroy_process_group(inner)
        if dist.get_rank() == 0:
            dist.send(torch.ones(2000), 1)
        else:
            dist.recv(torch.ones(2000), 0)
    dist.barrier()


def load(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def lasting(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def test_the_file_has_all_ranks_and_lanes(pool: Pool, tmp_path: Path) -> None:
    pool.run(traced, str(tmp_path / "run.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    events = load(tmp_path / "run.json")
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    for rank in (0, 1):
        found = lasting(events, rank)
        counts = Counter(event["name"] for event in found)
        assert counts["all_reduce"] == 2
        assert counts["broadcast"] == 1  # of a group that came and went meanwhile
        assert counts["barrier"] == 0  # before and after
        assert all(counts[phase] > 0 for phase in PHASES[:3])
        lanes = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        for event in found:
            lane = lanes[rank, event["tid"]].rsplit(": ", 1)[1]
            assert lane == (event["name"] if event["name"] in PHASES else "calls")


def test_phases_lie_in_their_calls(pool: Pool, tmp_path: Path) -> None:
    pool.run(traced, str(tmp_path / "run.json"))
    events = load(tmp_path / "run.json")
    for rank in (0, 1):
        found = [event for event in lasting(events, rank) if event["tid"] < 5]  # default group
        calls = {e["args"]["call"]: e for e in found if e["name"] not in PHASES}
        for event in found:
            call = calls[event["args"]["call"]]
            assert call["ts"] <= event["ts"] + 0.001
            assert event["ts"] + event["dur"] <= call["ts"] + call["dur"] + 0.001


def test_ranks_meet_in_a_call(pool: Pool, tmp_path: Path) -> None:
    """On one clock nobody leaves an all_reduce before the last one has come."""
    pool.run(traced, str(tmp_path / "run.json"))
    events = load(tmp_path / "run.json")
    reduces = [e for e in events if e["ph"] == "X" and e["name"] == "all_reduce"]
    for call in {event["args"]["call"] for event in reduces}:
        pair = [event for event in reduces if event["args"]["call"] == call]
        assert len(pair) == 2
        last = max(event["ts"] for event in pair)
        assert all(event["ts"] + event["dur"] >= last for event in pair)
        late = [event for event in pair if "waited_us" in event["args"]]
        for event in late:
            assert event["args"]["for_rank"] != event["pid"]


def test_messages_have_a_track(pool: Pool, tmp_path: Path) -> None:
    pool.run(traced, str(tmp_path / "run.json"))
    events = [e for e in load(tmp_path / "run.json") if e["ph"] in ("b", "e")]
    assert Counter(e["name"] for e in events) == {"send to rank 1": 2, "recv from rank 0": 2}
    for begin in (e for e in events if e["ph"] == "b"):
        (end,) = (e for e in events if e["ph"] == "e" and e["id"] == begin["id"])
        assert begin["args"]["bytes"] == 8000
        assert begin["ts"] <= end["ts"]


def traced_on_rank_0(path: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dreamcomm")
    logger.addHandler(handler)
    try:
        if dist.get_rank() == 0:
            trace = dreamcomm.trace(path, patience=0.1)
            dist.all_reduce(torch.ones(10))
            trace.stop()
            trace.stop()
        else:
            dist.all_reduce(torch.ones(10))
    finally:
        logger.removeHandler(handler)
    return said


def test_a_missing_part_is_told_and_the_others_are_there(pool: Pool, tmp_path: Path) -> None:
    said, _ = pool.run(traced_on_rank_0, str(tmp_path / "run.json"))
    assert len(said) == 1
    assert "lacks ranks" in said[0]
    assert ".rank1" in said[0]
    assert {event["pid"] for event in load(tmp_path / "run.json")} == {0}


def traced_until_rank_0_died(path: str, noticed: str) -> str:
    """The last warning; rank 0 is noticed by a call, also of a group that ends, or by none."""
    kept = Kept()
    logging.getLogger("dreamcomm").addHandler(kept)
    with dreamcomm.trace(path):
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if noticed == "by no call":
            backend = backend_of(dist.group.WORLD)
            while not backend._has_ended(0):
                time.sleep(0.01)
        else:
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(10))
        if noticed == "by a call, and the group ends":
            dist.destroy_process_group()
    return kept.texts[-1]


@pytest.mark.parametrize("noticed", ["by a call", "by a call, and the group ends", "by no call"])
def test_without_rank_0_the_others_say_where_their_parts_are(
    fresh: Fresh, tmp_path: Path, noticed: str
) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    target = folder / "run.json"
    ranks = fresh.start(traced_until_rank_0_died, str(target), noticed, world=3)
    _, *others = replies(ranks, 60.0)
    parts = sorted(str(path) for path in folder.iterdir())
    assert [part.rsplit(".", 1)[1] for part in parts] == ["rank1", "rank2"]
    for part, reply in zip(parts, others, strict=True):
        assert reply.error is None, reply.error
        assert f"{target} is made by rank 0, and it has ended or its group has f" in reply.value
        assert f"this rank's part stays at {part}, and dreamcomm.merge_traces(" in reply.value
    dreamcomm.merge_traces(parts, target)
    assert {event["pid"] for event in load(target)} == {1, 2}


def traced_until_rank_1_died(path: str) -> str:
    kept = Kept()
    logging.getLogger("dreamcomm").addHandler(kept)
    with dreamcomm.trace(path, patience=3600.0):
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(10))
    return kept.texts[-1]


def test_for_the_part_of_a_rank_that_has_ended_nobody_waits(fresh: Fresh, tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    ranks = fresh.start(traced_until_rank_1_died, str(target), world=2)
    text = value_of(replies(ranks, 60.0), 0)
    assert f"the trace {target} lacks ranks that have ended" in text
    assert {event["pid"] for event in load(target)} == {0}


def traced_with_an_error(path: str) -> list[str]:
    kept = Kept()
    logger = logging.getLogger("dreamcomm")
    logger.addHandler(kept)
    try:
        with dreamcomm.trace(path), pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(10 + dist.get_rank()))
    finally:
        logger.removeHandler(kept)
    dist.barrier()
    return kept.texts


def test_an_error_that_leaves_the_group_alive_is_no_reason_to_warn(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(traced_with_an_error, str(tmp_path / "run.json")) == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def traced_too_little(path: str) -> None:
    with dreamcomm.trace(path, calls=2, spans=3):
        for _ in range(5):
            dist.all_reduce(torch.ones(10))
    dist.barrier()


def test_the_last_are_kept_and_the_lost_are_counted(pool: Pool, tmp_path: Path) -> None:
    pool.run(traced_too_little, str(tmp_path / "run.json"))
    content = json.loads((tmp_path / "run.json").read_text())
    for rank in (0, 1):
        found = lasting(content["traceEvents"], rank)
        assert sum(event["name"] == "all_reduce" for event in found) == 2
        assert sum(event["name"] in PHASES for event in found) == 3
        lost = content["otherData"]["dropped"][f"rank {rank}, group default"]
        assert lost >= 3 + 5 * 2 - 3


def test_bad_arguments_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        dreamcomm.trace(tmp_path / "none" / "run.json")
    for calls in (0, 10**18):
        with pytest.raises(ValueError, match="expected calls from 1 to"):
            dreamcomm.trace(tmp_path / "run.json", calls=calls)
    for spans in (1.5, "5", True):
        with pytest.raises(TypeError, match="expected spans to be an int"):
            dreamcomm.trace(tmp_path / "run.json", spans=spans)  # type: ignore[arg-type]
    for patience in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected patience from 0 on"):
            dreamcomm.trace(tmp_path / "run.json", patience=patience)
    for path in (tmp_path, "", "a\0b"):
        with pytest.raises(ValueError, match="the path of a file"):
            dreamcomm.trace(path)
    for name in (os.fsencode(tmp_path) + b"/caf\xe9", os.fsdecode(b"caf\xe9")):
        with pytest.raises(ValueError, match="expected a path in UTF-8"):
            dreamcomm.trace(name)  # type: ignore[arg-type]
    for length in (300, 250):  # with 250 the trace could be written, and its parts could not
        with pytest.raises(ValueError, match=r"no file can be at .*: File name too long"):
            dreamcomm.trace(tmp_path / ("a" * length))
    with dreamcomm.trace(tmp_path / "run.json"):
        pass  # none of these runs


def test_a_deleted_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match=r"no file can be at 'run\.json': No such file"):
        dreamcomm.trace("run.json")


def test_what_is_no_regular_file_is_left_alone(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            dreamcomm.trace(path)
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            dreamcomm.merge_traces([Path(__file__)], path)
        with pytest.raises(ValueError, match=f"{path} is no part of a trace"):
            dreamcomm.merge_traces([path], tmp_path / "run.json")
    assert pipe.is_fifo()
    assert link.is_symlink()
    file.touch()
    link.unlink()
    link.symlink_to(file)
    with dreamcomm.trace(link):
        pass


def test_a_dropped_trace_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dreamcomm.trace(tmp_path / "run.json")
    assert "run.json is not written: nobody called its stop()" in caplog.text
    with dreamcomm.trace(tmp_path / "run.json"):
        pass


def test_a_trace_at_the_programs_end_is_told(tmp_path: Path) -> None:
    code = f"import dreamcomm; kept = dreamcomm.trace({str(tmp_path / 'run.json')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert [line for line in lines if "run.json" in line], done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def trace_and_fork(path: str) -> None:
    dist.barrier()
    with dreamcomm.trace(path):
        dist.all_reduce(torch.ones(10))
        child = os.fork()
        if child == 0:
            sys.exit()  # leaves the block, too
        os.waitpid(child, 0)
        dist.all_reduce(torch.ones(10))
    dist.barrier()


def test_a_forked_child_writes_no_part(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run(trace_and_fork, str(tmp_path / "run.json"))
    events = load(tmp_path / "run.json")
    for rank in (0, 1):
        assert Counter(one["name"] for one in lasting(events, rank))["all_reduce"] == 2
    assert not [name for name in os.listdir(tmp_path) if ".rank" in name]


def hold_an_ended_group(path: str, store: str) -> None:
    """On one rank only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    held = dist.group.WORLD if rank == 0 else None
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    files = dist.FileStore(store, world)
    dist.init_process_group("dreamcomm", store=files, rank=rank, world_size=world)
    with dreamcomm.trace(path, patience=5):
        dist.all_reduce(torch.ones(10))
    dist.barrier()
    del held


def test_a_group_that_has_ended_is_in_no_trace(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run(hold_an_ended_group, str(tmp_path / "run.json"), str(tmp_path / "store"))
    events = load(tmp_path / "run.json")
    for rank in (0, 1):
        assert Counter(one["name"] for one in lasting(events, rank))["all_reduce"] == 1


def wait_until_running() -> None:
    """Until the group's thread has begun a call that a trace sees."""
    recorder = backend_of(None)._recorder
    assert recorder is not None
    deadline = time.monotonic() + 30
    while True:
        noted = recorder.trace_records()
        if noted is not None and any(Record.of(one).state == "running" for one in noted[0]):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def trace_in_the_middle(first: str, second: str) -> None:
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    trace = dreamcomm.trace(first, patience=0)
    works = []
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(10), async_op=True)]
        wait_until_running()
    trace.stop()
    with dreamcomm.trace(second):
        if dist.get_rank() == 0:
            store.set("the second trace runs", "")
        else:
            store.wait(["the second trace runs"])
            dist.all_reduce(torch.ones(10))
        for work in works:
            work.wait()
        dist.broadcast(torch.ones(10), 0)
    dist.barrier()


def test_a_call_begun_before_a_trace_is_not_in_it(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run(trace_in_the_middle, str(tmp_path / "first"), str(tmp_path / "second"))
    found = json.loads((tmp_path / "second").read_text())
    events = lasting(found["traceEvents"], 0)
    assert Counter(one["name"] for one in events)["all_reduce"] == 0
    (call,) = [one for one in events if one["name"] == "broadcast"]
    assert all(one["ts"] >= call["ts"] for one in events)
    assert found["otherData"]["dropped"] == {}


def trace_and_change(path: str, folder: str) -> list[str]:
    """The error of the block comes out; the file lies where it was asked for."""
    os.chdir(Path(path).parent)
    with pytest.raises(ArithmeticError), dreamcomm.trace(Path(path).name):  # noqa: PT012
        dist.all_reduce(torch.ones(10))
        os.chdir(folder)
        raise ArithmeticError
    dist.barrier()
    return sorted(os.listdir(folder))


def test_a_relative_path_stays_where_it_was(fresh: Fresh, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert fresh.run(trace_and_change, str(tmp_path / "run.json"), str(other)) == [[], []]
    assert {event["pid"] for event in load(tmp_path / "run.json")} == {0, 1}


def traced_twice(path: str, slow: int) -> list[str]:
    """Traces to one path, one rank late to end the first."""
    for nbytes in (40, 400):
        with dreamcomm.trace(path):
            dist.all_reduce(torch.ones(nbytes // 4))
            if dist.get_rank() == slow and nbytes == 40:
                time.sleep(0.3)
    dist.barrier()
    return sorted(os.listdir(Path(path).parent))


@pytest.mark.parametrize("slow", [0, 1])
def test_traces_to_one_path_do_not_mix(pool: Pool, tmp_path: Path, slow: int) -> None:
    assert pool.run(traced_twice, str(tmp_path / "run.json"), slow) == [["run.json"]] * 2
    calls = [event for event in load(tmp_path / "run.json") if event["name"] == "all_reduce"]
    assert {(event["pid"], event["args"]["bytes"]) for event in calls} == {(0, 400), (1, 400)}
    assert len(calls) == 2


def trace_nothing(path: str) -> None:
    for number in range(2):
        with dreamcomm.trace(path):
            if number == 0:
                dist.all_reduce(torch.ones(10))
        dist.barrier()


def test_a_second_trace_has_nothing_of_the_first(pool: Pool, tmp_path: Path) -> None:
    pool.run(trace_nothing, str(tmp_path / "run.json"))
    assert not [event for event in load(tmp_path / "run.json") if event["ph"] == "X"]


def traced_late(path: str) -> None:
    with dreamcomm.trace(path, patience=0.05):
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    dist.barrier()


def test_a_late_part_is_added(pool: Pool, tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    pool.run(traced_late, str(target))
    assert {event["pid"] for event in load(target)} == {0}
    (part,) = (path for path in tmp_path.iterdir() if path != target)
    dreamcomm.merge_traces([str(part)], str(target))
    assert {event["pid"] for event in load(target)} == {0, 1}
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(ValueError, match="no part of a trace"):
        dreamcomm.merge_traces([__file__], target)


def test_the_trace_may_be_among_its_parts(pool: Pool, tmp_path: Path) -> None:
    """As where a pattern finds both."""
    target = tmp_path / "run.json"
    pool.run(traced_late, str(target))
    before = load(target)
    again = f"{tmp_path}/../{tmp_path.name}/run.json"
    dreamcomm.merge_traces([again], target)
    assert load(target) == before
    dreamcomm.merge_traces([*tmp_path.iterdir(), again], target)
    after = load(target)
    assert [event for event in after if event["pid"] == 0] == before
    assert {event["pid"] for event in after} == {0, 1}
    assert list(tmp_path.iterdir()) == [target]


def test_a_part_may_be_named_twice(pool: Pool, tmp_path: Path) -> None:
    target, other = tmp_path / "run.json", tmp_path / "other.json"
    pool.run(traced_late, str(target))
    os.link(target, tmp_path / "link")
    before = load(target)
    dreamcomm.merge_traces(
        [target, tmp_path / "link", f"{tmp_path}/../{tmp_path.name}/link"], other
    )
    assert load(other) == before
    assert not target.exists()
    assert not (tmp_path / "link").exists()


@pytest.mark.parametrize(
    "text",
    [
        "5",
        '{"traceEvents": [], "otherData": 5}',
        '{"traceEvents": [1], "otherData": {"dropped": {}}}',
        '{"traceEvents": 5, "otherData": {"dropped": {}}}',
        '{"traceEvents": [{"ts": "1"}], "otherData": {"dropped": {}}}',
        '{"traceEvents": [], "otherData": {"dropped": 5}}',
        '{"traceEvents": [], "otherData": {"dropped": {}, "trace": []}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_part_is_told(tmp_path: Path, text: str) -> None:
    part = tmp_path / "part"
    part.write_text(text)
    with pytest.raises(ValueError, match="part is no part of a trace"):
        dreamcomm.merge_traces([part], tmp_path / "run.json")
    assert part.read_text() == text


def test_a_trace_is_made_of_parts(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_text("kept")
    with pytest.raises(ValueError, match="expected a trace's parts, got none"):
        dreamcomm.merge_traces([], target)
    with pytest.raises(TypeError, match="expected a list of parts, got the path"):
        dreamcomm.merge_traces(str(target), target)
    assert target.read_text() == "kept"


def trace_after_a_shrink(path: str) -> None:
    """A group beside the default one is as large as that, and older."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 1:
        return
    dist.shrink_group([1])
    with dreamcomm.trace(path):
        dist.all_reduce(torch.ones(10))
    del group


def test_a_trace_is_of_the_default_group(fresh: Fresh, tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    found = replies(fresh.start(trace_after_a_shrink, str(target), world=3), timeout=60)
    assert not any(reply.error for reply in found), found
    assert list(tmp_path.glob("run.json*")) == [target]
    assert {event["pid"] for event in load(target)} >= {0, 1}  # as the shrunk group counts


def test_one_trace_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dreamcomm.trace(tmp_path / "run.json"):  # noqa: SIM117 - the first has to run
        with pytest.raises(RuntimeError, match="runs already"):
            dreamcomm.trace(tmp_path / "other.json")
    assert "no group of dreamcomm was there" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_trace_begins_once(tmp_path: Path) -> None:
    with dreamcomm.trace(tmp_path / "run.json") as ended:
        pass
    with pytest.raises(RuntimeError, match="has ended, and begins no second time"), ended:
        pass
