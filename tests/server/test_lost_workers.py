"""Workers that are killed, in every moment of a step: the others go on, and it is said."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dreamcomm.server.pair import Kind, Pair
from dreamcomm.server.worker import Worker
from helpers.pool import Fresh
from helpers.processes import replies, values
from server.serving import (
    Board,
    Momentum,
    board_file,
    differing,
    free_address,
    give_gradients,
    noted,
    parameters,
    serve_rank,
    simulated,
    start_fast,
    worker,
)
from server.serving import values as copies

VICTIM, STEPS, LAST = 1, 6, 3  # it dies in its step 3
SHAPES = ((1_600_000,), (5, 3), ())  # four pieces


def die(board: Board) -> None:
    board[VICTIM] = time.monotonic_ns()
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_message(board: Board, kind: Kind, number: int) -> None:
    """At the n-th message of a kind that it sends."""
    send, seen = Pair.send, 0

    def dying(self: Pair, which: Kind, *args: Any, **kwargs: Any) -> None:
        nonlocal seen
        seen += which == kind
        if seen == number:
            die(board)
        send(self, which, *args, **kwargs)

    Pair.send = dying  # type: ignore[method-assign]


def die_waiting(board: Board) -> None:
    """When the push is out."""
    following = Pair.next

    def dying(self: Pair, *args: Any) -> Any:
        time.sleep(0.2)  # the server has all of it
        die(board)
        return following(self, *args)

    Pair.next = dying  # type: ignore[method-assign]


def train(rank: int, address: str, path: str, staleness: int | None, when: str) -> Any:
    start_fast()
    tensors, board = parameters(*SHAPES, value=0.5), Board(path)
    if rank == 0:
        with noted() as log:
            report = serve_rank(tensors, Momentum, workers=3, store=address, staleness=staleness)
        return report, log.lines, copies(tensors)
    optimizer = worker(tensors, store=address, rank=rank)
    longest, seen = 0.0, []
    for step in range(STEPS):
        give_gradients(tensors, rank, step)
        if rank == VICTIM and step == LAST:
            _die(when, board, optimizer)
        began = time.monotonic()
        if rank != VICTIM and step == LAST and when == "in the push":
            time.sleep(0.3)
        optimizer.step()
        longest = max(longest, time.monotonic() - began)
        seen.append(copies(tensors))
    optimizer.close()
    return longest, seen, optimizer.report()


def _die(when: str, board: Board, optimizer: Worker) -> None:
    if when == "computing":
        die(board)
    elif when == "in the push":
        die_at_message(board, Kind.PUSH, 3)
    elif when == "waiting":
        die_waiting(board)
    else:
        optimizer._servers[0]._pair._backend.shutdown()  # type: ignore[union-attr]
        board[VICTIM] = time.monotonic_ns()
        time.sleep(3600)


def run(fresh: Fresh, folder: Path, staleness: int | None, when: str, **how: Any) -> Any:
    path = board_file(folder)
    ranks = fresh.start(train, free_address(), path, staleness, when, world=4, group=False, **how)
    others = [one for number, one in enumerate(ranks) if number != VICTIM]
    server, *workers = values(replies(others, 60))
    return server, workers, Board(path)[VICTIM] / 1e9


def check_said(server: Any, died: float, words: str, slack: float) -> None:
    report, lines, _ = server
    assert report.workers[VICTIM].state.startswith(f"lost: {words}")
    [(said, text)] = [line for line in lines if "is lost" in line[1]]
    assert text.startswith(f"server 0 of 'server': worker {VICTIM} is lost ({words}")
    assert text.endswith("; the others go on without it")
    assert said - died < 1.0 + slack
    assert [report.workers[rank].state for rank in (2, 3)] == ["left", "left"]


WHENS = ["computing", "in the push", "waiting"]


@pytest.mark.parametrize("when", WHENS)
def test_the_others_go_on_with_the_average_of_those_left(
    fresh: Fresh, tmp_path: Path, when: str, slack: float
) -> None:
    server, workers, died = run(fresh, tmp_path, 0, when)
    check_said(server, died, "its process has ended", slack)
    # What has arrived as a whole counts.
    has_last = when == "waiting"
    members = [(1, 2, 3)] * (LAST + has_last) + [(2, 3)] * (STEPS - LAST - has_last)
    tensors = parameters(*SHAPES, value=0.5)
    expected = simulated(tensors, Momentum(tensors), members)
    for longest, seen, report in workers:
        assert longest < 1.0 + slack
        assert report.steps == STEPS
        for step in range(STEPS):
            assert differing(seen[step], expected[step]) == [], step
    assert server[0].updates == STEPS
    assert differing(server[2], expected[-1]) == []


@pytest.mark.parametrize("when", ["computing", pytest.param("in the push", marks=pytest.mark.long)])
@pytest.mark.parametrize("staleness", [2, pytest.param(None, marks=pytest.mark.long)])
def test_a_lost_worker_holds_back_no_other(
    fresh: Fresh, tmp_path: Path, staleness: int | None, when: str, slack: float
) -> None:
    server, workers, died = run(fresh, tmp_path, staleness, when)
    check_said(server, died, "its process has ended", slack)
    assert server[0].updates == 2 * STEPS + LAST
    for longest, _, report in workers:
        assert longest < 1.0 + slack
        assert report.steps == STEPS
    assert max(server[0].staleness) <= (staleness or 100)


def test_one_that_closes_its_connection_is_lost_too(
    fresh: Fresh, tmp_path: Path, slack: float
) -> None:
    """Its process lives."""
    server, workers, died = run(fresh, tmp_path, 0, "closing")
    check_said(server, died, "it has closed the connection", slack)
    for longest, _, report in workers:
        assert longest < 1.0 + slack
        assert report.steps == STEPS


def again(rank: int, address: str, path: str) -> Any:
    """Rank 1 is killed, and started again as rank 2's process with the same number."""
    start_fast()
    tensors, board = parameters((4,), value=1.0), Board(path)
    if rank == 0:
        with noted() as log:
            report = serve_rank(tensors, Momentum, workers=2, store=address)
        return report, log.texts()
    number = 1 if rank == 2 else rank
    if rank == 2:
        while not board[1]:
            time.sleep(0.001)
    with worker(tensors, store=address, rank=number) as optimizer:
        if rank == 2:
            board[2] = 1
        for step in range(optimizer.version, 8):
            give_gradients(tensors, number, step)
            if rank == 1 and step == 3:
                die(board)
            if rank == 3 and step == 5:
                while not board[2]:
                    time.sleep(0.001)  # the new one has joined
            optimizer.step()
        return optimizer.version


def test_a_worker_is_started_again_under_its_rank(fresh: Fresh, tmp_path: Path) -> None:
    """Also before the server has noticed that the first one is lost."""
    ranks = fresh.start(again, free_address(), board_file(tmp_path), world=4, group=False)
    others = [one for number, one in enumerate(ranks) if number != 1]
    (report, texts), *versions = values(replies(others, 60))
    assert versions == [8, 8]
    assert [text for text in texts if "worker 1 has joined" in text] == [
        "server 0 of 'server': worker 1 has joined"
    ] * 2
    assert {rank: one.state for rank, one in report.workers.items()} == {1: "left", 3: "left"}
