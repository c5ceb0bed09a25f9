"""The contract of a messenger is one, whatever carries the messages."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm.messages.channel import KeyedChannel
from dreamcomm.messages.endpoint import Arriving
from dreamcomm.messages.gloo_endpoint import GlooEndpoint
from dreamcomm.messages.messenger import MOST_SENDS, Messenger
from dreamcomm.messages.over import messenger_over
from dreamcomm.messages.shared_endpoint import SharedEndpoint
from dreamcomm.ranks.errors import RankLeft, RankLost
from helpers.pool import Fresh, Pool
from helpers.processes import replies, value_of

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm's messages")

TAG = 1 << 24
# What carries the messages: torch's Gloo in a group of its own, or in one of dreamcomm.
CARRIERS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "two nodes": {"hosts": "a,b"},
    "gloo": {"shared_memory": False},
}
ENDPOINTS = {"shared memory": SharedEndpoint, "two nodes": SharedEndpoint}
carriers = pytest.mark.parametrize("carrier", [*CARRIERS, "torch's gloo"])


def made(carrier: str) -> Messenger:
    group = dist.new_group(backend="gloo") if carrier == "torch's gloo" else dist.group.WORLD
    messenger = messenger_over(group, TAG)  # type: ignore[arg-type]
    assert isinstance(messenger.endpoint, ENDPOINTS.get(carrier, GlooEndpoint))
    return messenger


def run(pool: Pool, function: Callable[..., Any], carrier: str, *args: Any, **how: Any) -> Any:
    if carrier == "two nodes" and how.get("world", 2) > 2:
        pytest.skip("two nodes of one rank each")
    return pool.run(function, carrier, *args, options=CARRIERS.get(carrier), **how)


def awaited(messenger: Messenger, seconds: float = 20.0) -> Arriving:
    """The next message, looked for without waiting."""
    until = time.monotonic() + seconds
    while (found := messenger.accept(0)) is None:
        assert time.monotonic() < until, "no message has come"
        time.sleep(0.001)
    return found


def outcome(act: Callable[[], Any]) -> tuple[float, str, Any]:
    """The seconds until a rank is lost, the error's class, and the rank."""
    begin = time.monotonic()
    try:
        while True:
            act()
    except RankLost as error:
        return time.monotonic() - begin, type(error).__name__, error.rank


# Arrival and order.


def looks(carrier: str) -> Any:
    messenger, peer = made(carrier), 1 - dist.get_rank()
    begin = time.monotonic()
    before = messenger.accept(0), messenger.accept(50)
    waited = time.monotonic() - begin
    dist.barrier()
    for number in range(20):
        value = {"x": torch.full((number * 1000,), float(number)), "text": "a" * 100 * number}
        messenger.send(peer, (number, 1, -1, 1 << 40), value, mark=number % 3)
    found = [awaited(messenger) for _ in range(20)]
    values = [messenger.value(one) for one in found]
    messenger.close()
    dist.barrier()
    return before, waited, [(one.source, one.key, one.mark) for one in found], values


@carriers
def test_it_is_known_whether_a_message_has_come(pool: Pool, carrier: str) -> None:
    for rank, (before, waited, found, values) in enumerate(run(pool, looks, carrier)):
        assert before == (None, None)
        assert 0.04 < waited < 1.0
        assert found == [(1 - rank, (n, 1, -1, 1 << 40), n % 3) for n in range(20)]
        for number, value in enumerate(values):
            assert torch.equal(value["x"], torch.full((number * 1000,), float(number)))
            assert value["text"] == "a" * 100 * number


def crosswise(carrier: str, count: int) -> list[float]:
    """All ranks send more than may be under way, and accept none before."""
    messenger = made(carrier)
    for number in range(count):
        for peer in messenger.peers:
            messenger.send(peer, (number, 0, 0, 0), torch.full((20_000,), float(number)))
    messenger.drain()
    sums = dict.fromkeys(messenger.peers, 0.0)
    for _ in range(count * len(messenger.peers)):
        arriving = awaited(messenger)
        assert float(messenger.value(arriving)[-1]) == arriving.key[0]
        sums[arriving.source] += arriving.key[0]
    messenger.close()
    assert messenger.accept(0) is None
    messenger.close()
    dist.barrier()
    return list(sums.values())


@carriers
@pytest.mark.parametrize("world", [2, 3])
def test_no_order_of_posting_deadlocks(pool: Pool, carrier: str, world: int) -> None:
    count = 2 * MOST_SENDS
    for sums in run(pool, crosswise, carrier, count, world=world):
        assert sums == [sum(range(count))] * (world - 1)


# Sends.


def frees(carrier: str) -> tuple[int, int]:
    """What a peer has taken is freed, without a wait for it."""
    messenger, rank = made(carrier), dist.get_rank()
    if rank == 0:
        messenger.send(1, (0, 0, 0, 0), torch.zeros(1 << 23))
        before = len(messenger._sends) + getattr(messenger.endpoint, "_placed_bytes", 0)
        dist.barrier()
    else:
        dist.barrier()
        messenger.value(awaited(messenger))
        before = 1
    dist.barrier()
    until = time.monotonic() + 10
    while messenger._sends and time.monotonic() < until:
        messenger.forget_sent()
    messenger.forget_sent()
    after = len(messenger._sends) + getattr(messenger.endpoint, "_placed_bytes", 0)
    messenger.close()
    return before, after


@carriers
def test_what_was_taken_is_freed(pool: Pool, carrier: str) -> None:
    for before, after in run(pool, frees, carrier):
        assert before > 0
        assert after == 0


# Time.


def interrupted(carrier: str) -> float:
    """A signal's error ends a wait that nothing else would end."""

    def stop(*_: Any) -> None:
        raise InterruptedError

    messenger = made(carrier)
    kept = signal.signal(signal.SIGALRM, stop)
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            messenger.accept(30_000)
        took = time.monotonic() - begin
    finally:
        signal.signal(signal.SIGALRM, kept)
    dist.barrier()
    messenger.close()
    return took


@carriers
def test_a_signal_ends_a_wait(pool: Pool, carrier: str, slack: float) -> None:
    for took in run(pool, interrupted, carrier):
        assert took < 1.0 + slack


@carriers
def test_the_timeout_is_the_groups(pool: Pool, carrier: str) -> None:
    if carrier != "torch's gloo":  # made without the group's
        assert run(pool, timeout, carrier, group_timeout=17.0) == [17.0, 17.0]


def timeout(carrier: str) -> float:
    return made(carrier).timeout


# Loss and departure.


def loses(carrier: str, path: str, how: str) -> Any:
    """Rank 1 sends a message and ends; rank 0 takes it, and then waits."""
    messenger = made(carrier)
    messenger.send(1 - messenger.rank, (0, 0, 0, 0), torch.ones(100))
    messenger.value(awaited(messenger))
    messenger.drain()
    if messenger.rank == 1:
        messenger.send(0, (1, 0, 0, 0), torch.ones(200))
        while not Path(path).exists():
            time.sleep(0.001)
        os._exit(7)
    last = awaited(messenger)
    survives = carrier == "shared memory"  # a connection that is reset loses what is unread
    total = 0.0 if survives else float(messenger.value(last).sum())
    Path(path).touch()
    if how == "waiting":
        found = outcome(lambda: messenger.accept(1000))
    else:
        found = outcome(lambda: messenger.send(1, (2, 0, 0, 0), torch.ones(2_000_000)))
    return last.key[0], float(messenger.value(last).sum()) if survives else total, found


@carriers
@pytest.mark.parametrize("how", ["waiting", "sending"])
def test_a_peer_that_ends_is_an_error_of_every_wait(
    fresh: Fresh, tmp_path: Path, carrier: str, how: str, slack: float
) -> None:
    ranks = fresh.start(loses, carrier, str(tmp_path / "end"), how, options=CARRIERS.get(carrier))
    number, total, (took, error, rank) = value_of(replies(ranks, 60), 0)
    assert (number, total, rank) == (1, 200.0, 1)
    assert took < 1.0 + slack
    assert error in ("RankLost", "RankLeft")
    if carrier == "shared memory":
        assert error == "RankLost"


def leaves(carrier: str) -> Any:
    """Rank 1 fails for good, tells it, and leaves."""
    messenger = made(carrier)
    messenger.send(1 - messenger.rank, (0, 0, 0, 0), None)
    awaited(messenger)
    if messenger.rank == 1:
        messenger.tell(0, (9, 0, 0, 0), "why" * 1000)
        messenger.leave()
        return None
    time.sleep(0.3)
    last = awaited(messenger)
    told = messenger.value(last)
    until = time.monotonic() + 10
    while carrier != "shared memory" and not messenger.departure(1) and time.monotonic() < until:
        time.sleep(0.01)
    messenger.leave()
    return last.key, told, messenger.departure(1)


@pytest.mark.parametrize("carrier", ["shared memory", "gloo", "torch's gloo"])
def test_last_words_arrive(pool: Pool, carrier: str) -> None:
    key, told, departure = run(pool, leaves, carrier)[0]
    assert key == (9, 0, 0, 0)
    assert told.startswith("whywhy")
    assert told.endswith(" ... (cut)")
    if carrier != "shared memory":
        assert departure == "it has left"


# Sessions.


def sessions(carrier: str, count: int, ahead: int) -> tuple[list[int], list[str]]:
    """Rank 0 is several sessions ahead of the others, which accept no message of a later one."""
    messenger = made(carrier)
    seen = []
    for number in range(count):
        if messenger.rank and number:
            time.sleep(0.01)
        for peer in messenger.peers:
            messenger.send(peer, (number, 0, 0, 0), torch.full((10,), float(number)))
        wanted = number - ahead if messenger.rank == 0 else number
        while len(seen) < len(messenger.peers) * (wanted + 1):
            seen.append(awaited(messenger).key[0])
        messenger.close(sends_end=False)
    while len(seen) < len(messenger.peers) * count:
        seen.append(awaited(messenger).key[0])
    messenger.close()
    dist.barrier()
    return seen, left_over()


def left_over() -> list[str]:
    """The threads of messages that go on for more than a moment."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        names = [one.name for one in threading.enumerate() if "dreamcomm messages" in one.name]
        if not names:
            break
        time.sleep(0.01)
    return names


@carriers
@pytest.mark.parametrize(("world", "ahead"), [(2, 0), (2, 3), (3, 2)])
def test_nothing_is_received_after_the_last_session(
    pool: Pool, carrier: str, world: int, ahead: int
) -> None:
    for seen, threads in run(pool, sessions, carrier, 8, ahead, world=world):
        assert sorted(seen) == sorted(list(range(8)) * (world - 1))
        assert threads == []


def unused(carrier: str) -> list[str]:
    """Sessions in which only some ranks send, and none."""
    messenger = made(carrier)
    messenger.close()
    if messenger.rank == 0:
        messenger.send(1, (1, 0, 0, 0), torch.ones(5))
    else:
        awaited(messenger)
    messenger.close()
    messenger.close()
    dist.barrier()
    return left_over()


@carriers
def test_sessions_need_not_be_used(pool: Pool, carrier: str) -> None:
    assert run(pool, unused, carrier) == [[], []]


def test_a_departure_is_a_loss() -> None:
    assert issubclass(RankLeft, RankLost)
    assert RankLeft(3, "why").rank == 3


class Kept(KeyedChannel):
    """Keeps all messages."""

    def keeps(self, arriving: Arriving) -> bool:
        return True

    def described(self, key: tuple[int, ...]) -> str:
        return f"message {key}"


def late_message(carrier: str) -> tuple[Any, int, int]:
    """The value, how often rank 1 has looked whether rank 0 left, and receives left under way."""
    messenger = made(carrier)
    channel, key = Kept(messenger), (1, 2, 3, 4)
    looks = 0
    endpoint = messenger.endpoint
    departure = endpoint.departure

    def counted(peer: int) -> str:
        nonlocal looks
        looks += 1
        return departure(peer)

    endpoint.departure = counted  # type: ignore[method-assign]
    value = None
    if messenger.rank == 0:
        time.sleep(0.4)  # the other rank looks after 0.1 s
        messenger.send(1, key, "late")
    else:
        value = channel.receive(0, key)
    dist.barrier()
    messenger.close()
    return value, looks, len(getattr(endpoint, "_watched", ()))


@carriers
def test_a_wait_that_is_over_leaves_no_receive_under_way(pool: Pool, carrier: str) -> None:
    (_, _, left), (value, looks, own_left) = run(pool, late_message, carrier)
    assert value == "late"
    assert looks > 0
    assert left == own_left == 0
