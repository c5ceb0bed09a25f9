"""The channel: messages of any shape, in any order, dropped when they are old."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm import is_shared
from dreamcomm.messages.codec import Codec, described
from dreamcomm.messages.messenger import MOST_SENDS
from dreamcomm.pipeline.messages.channel import Channel, PeerFailed
from dreamcomm.pipeline.messages.key import Key, Slot
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm's messages")

TAG = 1 << 24


def made(step: int = 1) -> Channel:
    channel = Channel(dist.group.WORLD, TAG)  # type: ignore[arg-type]
    channel.begin(step, 1)
    return channel


def end(channel: Channel) -> None:
    """Leaves nothing under way when the group ends."""
    channel.drain()
    channel.end()
    dist.barrier()


def key(m: int, step: int = 1, slot: Slot = Slot.FORWARD) -> Key:
    return Key(step, slot, 1, m)


def value(m: int) -> Any:
    """A tree whose shape and dtype depend on the number."""
    dtype = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)[m % 5]
    tensor = torch.arange(3 * m + 7).remainder(5).to(dtype).view(1, -1)
    return {"x": tensor, "n": m, "empty": torch.empty(0, m), "text": "a" * m}


def same(a: Any, b: Any) -> bool:
    return (
        torch.equal(a["x"], b["x"])
        and a["x"].dtype == b["x"].dtype
        and a["n"] == b["n"]
        and a["empty"].shape == b["empty"].shape
        and a["text"] == b["text"]
    )


def backwards(count: int) -> bool:
    """Both ranks send all, then receive in the other order; more than may be under way."""
    channel, peer = made(), 1 - dist.get_rank()
    for m in range(count):
        channel.send(peer, key(m), value(m))
    right = all(same(channel.receive(peer, key(m)), value(m)) for m in reversed(range(count)))
    end(channel)
    return right


@pytest.mark.parametrize("count", [3, 3 * MOST_SENDS])
def test_no_order_of_posting_deadlocks(pool: Pool, count: int) -> None:
    assert pool.run(backwards, count) == [True, True]


def old() -> tuple[int, list[float], list[str]]:
    """Half of a step's messages are never received; the next step finds its own."""
    channel, peer = made(), 1 - dist.get_rank()
    for m in range(6):
        channel.send(peer, key(m), torch.full((1000,), float(m)))
    channel.receive(peer, key(3))
    channel.begin(2, 1)
    for m in range(6):
        channel.send(peer, key(m, step=2), torch.full((1000,), 10.0 + m))
    found = [float(channel.receive(peer, key(m, step=2))[0]) for m in range(6)]
    left = [str(one) for one in channel._arrived]
    end(channel)
    return len(left), found, left


def test_messages_of_an_older_step_are_dropped(pool: Pool) -> None:
    for count, found, left in pool.run(old):
        assert found == [10.0 + m for m in range(6)]
        assert count == 0, left


def from_all() -> list[float]:
    channel, rank, world = made(), dist.get_rank(), dist.get_world_size()
    for peer in range(world):
        if peer != rank:
            channel.send(peer, key(rank), torch.full((50_000,), float(rank)))
    others = [peer for peer in range(world) if peer != rank]
    found = [float(channel.receive(peer, key(peer)).sum()) for peer in others]
    end(channel)
    return found


def test_several_peers(pool: Pool) -> None:
    for rank, sums in enumerate(pool.run(from_all, world=4)):
        assert sums == [50_000.0 * peer for peer in range(4) if peer != rank]


def memory() -> tuple[bool, bool, tuple[int, ...], bool, bool]:
    channel, peer = made(), 1 - dist.get_rank()
    last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    strided = torch.randn(6, 6)[:, ::2]
    needs = torch.randn(3, requires_grad=True)
    torch.manual_seed(0)
    channel.send(peer, key(0), [torch.ones(5), last, strided, needs * 2, needs.detach()])
    plain, got_last, got_strided, with_grad, without = channel.receive(peer, key(0))
    contiguous = got_last.is_contiguous(memory_format=torch.channels_last)
    assert got_strided.shape == strided.shape
    end(channel)
    return (
        is_shared(plain),
        contiguous,
        tuple(got_last.shape),
        with_grad.requires_grad,
        without.requires_grad,
    )


def test_what_arrives(pool: Pool) -> None:
    for shared, contiguous, shape, needs, not_needed in pool.run(memory):
        assert shared, "received into memory that peers map"
        assert contiguous
        assert shape == (2, 3, 4, 5)
        assert needs
        assert not not_needed


def long_description() -> bool:
    channel, peer = made(), 1 - dist.get_rank()
    sent = {f"name {n}": torch.full((n + 1,), n) for n in range(200)}
    channel.send(peer, key(0), sent)
    channel.send(peer, key(1), torch.ones(3))
    first, second = channel.receive(peer, key(1)), channel.receive(peer, key(0))
    end(channel)
    return bool(first.sum() == 3) and all(torch.equal(second[k], v) for k, v in sent.items())


def test_a_description_longer_than_a_header(pool: Pool) -> None:
    assert pool.run(long_description) == [True, True]


def failing() -> tuple[Any, Any]:
    """Rank 1 fails; rank 0 learns of it in a receive that nothing will end."""
    channel, rank = made(), dist.get_rank()
    seen: Any = None
    if rank == 1:
        channel.send(0, key(0), torch.ones(3))
        channel.tell_failure("the reason")
        channel.tell_failure("told once")
    else:
        try:
            channel.receive(1, key(7))
        except PeerFailed as error:
            seen = (error.source, error.reason)
    channel.begin(2, 1)
    channel.send(1 - rank, key(0, step=2), torch.full((2,), float(rank)))
    got: Tensor = channel.receive(1 - rank, key(0, step=2))
    end(channel)
    return seen, got.tolist()


def test_a_failure_ends_a_receive(pool: Pool) -> None:
    first, second = pool.run(failing)
    assert first == ((1, "the reason"), [1.0, 1.0])
    assert second == (None, [0.0, 0.0])


def headers(count: int) -> list[Any]:
    """Headers of the compiled channel: with and without room for the description."""
    from dreamcomm import _C
    from dreamcomm._torch.groups import backend_of

    channel, peer = _C.HeaderChannel(backend_of(None), TAG), 1 - dist.get_rank()
    texts = [b"x" * 10, b"y" * 2000]
    sent = [channel.send(peer, (1 << 40, n, -1, 3, 4), texts[n % 2], [n, -1]) for n in range(count)]
    assert sent == [n % 2 == 0 for n in range(count)]
    found = [channel.next(10_000) for _ in range(count)]
    for n, one in enumerate(found):
        assert one == (peer, (1 << 40, n, -1, 3, 4), texts[0] if n % 2 == 0 else 2000, (n, -1))
    channel.cancel()
    dist.barrier()
    assert channel.pending() == 0
    assert channel.next(0) is None
    channel.cancel()
    assert channel.next(0) is None  # posted anew, without the error of the one that was cancelled
    dist.barrier()  # a rank that has left is an error of the other one's receive
    return found


@pytest.mark.parametrize("count", [1, 40])
def test_headers(pool: Pool, count: int) -> None:
    first, second = pool.run(headers, count)
    assert len(first) == len(second) == count


def placed() -> tuple[bool, bool, list[str]]:
    """A tensor in the sender's heap: taken once, refused where nothing can lie."""
    from dreamcomm._torch.groups import backend_of

    backend, rank = backend_of(None), dist.get_rank()
    one = backend._place(torch.full((1001,), float(rank), dtype=torch.float64))
    assert one is not None
    before = one.taken
    offsets: list[Any] = [None, None]
    dist.all_gather_object(offsets, one.offset)
    texts = []
    for bad in (-1, 1 << 60):
        with pytest.raises(ValueError, match="can lie") as caught:
            backend._take_placed(1 - rank, bad, [1001], torch.float64)
        texts.append(str(caught.value))
    into = backend._take_placed(1 - rank, offsets[1 - rank], [7, 143], torch.float64)
    assert is_shared(into)
    dist.barrier()
    return before, one.taken and bool((into == 1 - rank).all()), texts


def test_placed_tensors(pool: Pool) -> None:
    for before, after, texts in pool.run(placed):
        assert not before
        assert after
        assert "no message of" in texts[0]


def test_what_cannot_be_sent_is_refused() -> None:
    codec = Codec()
    with pytest.raises(TypeError, match="cannot be sent"):
        codec.encode([lambda: None])
    with pytest.raises(TypeError, match="sparse"):
        codec.encode(torch.eye(3).to_sparse())
    assert described((torch.ones(2, 3), [None, "a"], {"k": 1.5})) == (
        "(float32 [2, 3], [None, 'a'], {'k': 1.5})"
    )
