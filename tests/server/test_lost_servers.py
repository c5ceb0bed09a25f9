"""Servers that are killed: workers are told at once, and go on with new ones to the same bits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamcomm.server import ParameterServer, ServerLost, ServerUnreachable
from dreamcomm.server.checkpoint import Checkpoint
from dreamcomm.server.worker import Worker
from helpers.pool import Fresh
from helpers.processes import replies
from helpers.processes import values as values_of
from server.serving import (
    PATIENCE,
    Board,
    Momentum,
    board_file,
    differing,
    free_address,
    give_gradients,
    held_store,
    noted,
    parameters,
    seconds,
    simulated,
    start_fast,
    values,
    worker,
)

SHAPES = ((1_200_000,), (2, 2), (400,), ())
WORKERS, STEPS, FATAL = (10, 11), 8, 4  # the server dies at its update 4
DIED = 0  # of the board: when


def die(board: Board) -> None:
    board[DIED] = time.monotonic_ns()
    os.kill(os.getpid(), signal.SIGKILL)


def serve(rank: int, address: str, folder: str, servers: int, how: dict[str, Any]) -> Any:
    """Ranks below ``servers`` are the servers; the next one takes the place of the killed one."""
    start_fast()
    board = Board(f"{folder}/board")
    victim, every = how["victim"], how.get("every", 1)
    index = victim if rank == servers else rank
    if rank == servers:
        while not board[DIED]:
            time.sleep(0.001)
    server = ParameterServer(
        parameters(*SHAPES, value=0.5), Momentum, staleness=how["staleness"], workers=len(WORKERS),
        index=index, servers=servers, store=address, timeout=PATIENCE,
    )  # fmt: skip
    path = Path(folder, f"server-{index}")
    if rank == servers and path.exists():
        server.load_state_dict(torch.load(path))
    first = server.version
    dies = rank == victim

    def on_update(one: ParameterServer) -> None:
        if dies and one.version == FATAL and how["when"] == "before the write":
            die(board)

    if dies and how["when"] == "after the write":
        write = Checkpoint.write

        def writing(self: Checkpoint, version: int, state: Any) -> None:
            write(self, version, state)
            if version == FATAL:
                die(board)

        Checkpoint.write = writing  # type: ignore[method-assign]
    with noted() as log:
        report = server.serve(checkpoint=path, every=every, on_update=on_update)
    return first, report, log.texts()


def train(rank: int, address: str, folder: str, servers: int, how: dict[str, Any]) -> Any:
    """A worker of the number ``rank``; goes on with a new server."""
    start_fast()
    tensors, board = parameters(*SHAPES), Board(f"{folder}/board")
    optimizer = worker(tensors, servers, store=address, rank=rank)
    seen: dict[int, Any] = {}
    heard: list[Any] = []
    while optimizer.version < STEPS:
        step = optimizer.version
        give_gradients(tensors, rank, step)
        retry(optimizer, step, board, heard)
        seen[optimizer.version] = values(tensors)
    optimizer.close()
    return heard, seen


def retry(optimizer: Worker, step: int, board: Board, heard: list[Any]) -> None:
    while optimizer.version == step:
        try:
            optimizer.step()
        except ServerLost as error:
            heard.append((time.monotonic() - board[DIED] / 1e9, str(error), error.index))
            optimizer.reconnect()


def act(rank: int, address: str, folder: str, servers: int, how: dict[str, Any]) -> Any:
    role = serve if rank <= servers else train
    return role(
        rank if rank <= servers else WORKERS[rank - servers - 1], address, folder, servers, how
    )


def run(fresh: Fresh, folder: Path, address: str, servers: int, env: Any = None, **how: Any) -> Any:
    board_file(folder)
    how = {"staleness": 0, "victim": 0, "when": "before the write"} | how
    world = servers + 1 + len(WORKERS)
    ranks = fresh.start(act, address, str(folder), servers, how, world=world, group=False, env=env)
    others = [one for rank, one in enumerate(ranks) if rank != how["victim"]]
    found = values_of(replies(others, PATIENCE))
    found.insert(how["victim"], None)
    return found[:servers], found[servers], found[servers + 1 :]


def check_heard(workers: Any, index: int, slack: float) -> None:
    for number, (heard, _) in zip(WORKERS, workers, strict=True):
        [(late, text, of_index)] = heard
        assert late < 1.0 + slack
        assert of_index == index
        assert text.startswith(f"worker {number}: server {index} of 'server' is lost (")
        assert "its process has ended" in text
        assert text.endswith("Start it anew from its checkpoint, under the same name, and call "
                             "reconnect()")  # fmt: skip


def check_equal(workers: Any) -> None:
    """The weights of all versions are those of a run without any loss."""
    tensors = parameters(*SHAPES, value=0.5)
    expected = simulated(tensors, Momentum(tensors), [WORKERS] * STEPS)
    for _, seen in workers:
        assert set(range(1, STEPS + 1)) - seen.keys() <= {FATAL}
        for version, found in seen.items():
            assert differing(found, expected[version - 1]) == [], version


@pytest.mark.parametrize("when", ["before the write", "after the write"])
@pytest.mark.parametrize("holds", [False, True], ids=["store apart", "store in the server"])
def test_training_goes_on_with_a_new_server(
    fresh: Fresh, tmp_path: Path, holds: bool, when: str, slack: float
) -> None:
    with held_store() as apart:
        address = free_address() if holds else apart
        _, (first, report, _), workers = run(fresh, tmp_path, address, 1, when=when)
    check_heard(workers, 0, slack)
    check_equal(workers)
    assert first == (FATAL if when == "after the write" else FATAL - 1)
    assert (report.version, report.updates) == (STEPS, STEPS - first)


@pytest.mark.parametrize(
    ("victim", "when", "holds"),
    [
        (0, "before the write", False),
        pytest.param(1, "before the write", False, marks=pytest.mark.long),
        (1, "after the write", True),
        (0, "after the write", True),
        pytest.param(0, "before the write", True, marks=pytest.mark.long),
        pytest.param(1, "after the write", False, marks=pytest.mark.long),
    ],
)
def test_one_of_two_servers_is_lost(
    fresh: Fresh, tmp_path: Path, victim: int, when: str, holds: bool, slack: float
) -> None:
    """Another step() goes on with the step that failed, and pushes once to each server."""
    with held_store() as apart:
        address = free_address() if holds else apart
        found = run(fresh, tmp_path, address, 2, victim=victim, when=when)
    servers, (first, report, _), workers = found
    check_heard(workers, victim, slack)
    check_equal(workers)
    (_, of_other, texts) = servers[1 - victim]
    assert (of_other.version, of_other.updates) == (STEPS, STEPS)
    assert {one.pushes for one in of_other.workers.values()} == {STEPS}
    assert (report.version, report.updates) == (STEPS, STEPS - first)
    lost_store = [text for text in texts if "has lost its store" in text]
    assert len(lost_store) == (1 if holds and victim == 0 else 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_server_that_is_killed_at_any_time(
    fresh: Fresh, tmp_path: Path, seed: int, slack: float
) -> None:
    """By the clock, not by what it does."""
    board = Board(board_file(tmp_path))
    with held_store() as address:
        how = {"staleness": 0, "victim": 0, "when": ""}
        ranks = fresh.start(
            act, address, str(tmp_path), 2, how, world=3 + len(WORKERS), group=False
        )
        while not (tmp_path / "server-0").exists():
            time.sleep(0.001)
        time.sleep(0.004 * seed)
        board[DIED] = time.monotonic_ns()
        ranks[0].kill()
        _, (first, report, _), *workers = values_of(replies(ranks[1:], PATIENCE))
    check_equal(workers)
    for heard, _ in workers:
        for late, _, _ in heard:
            assert late < 1.0 + slack
    assert report.version == STEPS or first == STEPS


def asynchronous(rank: int, address: str, folder: str) -> Any:
    """Rank 0 is killed, rank 1 its successor, 2 and 3 the workers."""
    start_fast()
    if rank < 2:
        how = {"staleness": 2, "victim": 0, "when": "before the write"}
        return serve(rank, address, folder, 1, how)
    tensors = parameters(*SHAPES)
    optimizer = worker(tensors, store=address)
    lost, steps = 0, 0
    while steps < 20:
        give_gradients(tensors, rank, steps)
        try:
            optimizer.step()
            steps += 1
        except ServerLost:
            lost += 1
            back = optimizer.reconnect()
            assert back == optimizer.version
    optimizer.close()
    return lost, optimizer.report()


def test_asynchronous_workers_go_on(fresh: Fresh, tmp_path: Path) -> None:
    board_file(tmp_path)
    with held_store() as address:
        ranks = fresh.start(asynchronous, address, str(tmp_path), world=4, group=False)
        (first, report, _), *workers = values_of(replies(ranks[1:], PATIENCE))
    assert first == FATAL - 1
    assert sum(lost for lost, _ in workers) >= 1  # one may have joined afterwards
    assert max(report.staleness) <= 2
    assert report.version == first + sum(one.pushes for one in report.workers.values())


def unreachable(rank: int, address: str, path: str) -> Any:
    """The server is killed and no other one started."""
    start_fast()
    tensors = parameters((3,))
    if rank == 0:
        ParameterServer(tensors, Momentum, workers=1, store=address).serve(
            on_update=lambda _: die(Board(path))
        )
    optimizer = worker(tensors, store=address, rank=4)
    give_gradients(tensors, rank, 0)
    told = seconds(optimizer.step, ServerLost)
    again = seconds(optimizer.step, ServerLost)
    pull = seconds(optimizer.pull, ServerLost)
    late = seconds(lambda: optimizer.reconnect(timeout=0.5), ServerUnreachable)
    optimizer.close()
    closed = seconds(optimizer.step, ServerLost)
    return told, again, pull, late, closed


@pytest.mark.parametrize("holds", [False, True], ids=["store apart", "store in the server"])
def test_no_worker_waits_for_a_server_that_does_not_come_back(
    fresh: Fresh, tmp_path: Path, holds: bool, slack: float
) -> None:
    with held_store() as apart:
        address = free_address() if holds else apart
        ranks = fresh.start(unreachable, address, board_file(tmp_path), world=2, group=False)
        [found] = values_of(replies(ranks[1:], PATIENCE))
    told, again, pull, late, closed = found
    assert told[1:] == (
        "ServerLost",
        "worker 4: server 0 of 'server' is lost (its process has ended). Start it anew from its "
        "checkpoint, under the same name, and call reconnect()",
    )
    for took, kind, text in (again, pull):
        assert kind == "ServerLost"
        assert "is lost; call reconnect() when it has been started anew" in text
        assert took < 0.5 + slack
    assert late[1] == "ServerUnreachable"
    assert late[0] < 1.5 + slack
    words = "no process holds the store at" if holds else "has not been started anew within 0.5 s"
    assert words in late[2]
    assert closed[1] == "ServerLost"
    assert "was left by close()" in closed[2]
