"""Objects between ranks arrive equal, and their arrays writable; errors are told to all ranks."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm import Communicator
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's backend")


class Point:
    """An object of a class, with an array."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.array = np.full(3, place, "f4")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and same(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


def same(one: Any, other: Any) -> bool:
    """Equal, with arrays of the same types, shapes and bits."""
    if isinstance(one, np.ndarray):
        return (
            type(other) is type(one)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and bool(one == other)


def arrays_of(thing: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(thing, np.ndarray):
        return [thing]
    if isinstance(thing, Point):
        return [thing.array]
    inner = thing.values() if isinstance(thing, dict) else thing
    return [a for one in inner for a in arrays_of(one)] if isinstance(thing, (dict, list)) else []


def things(rank: int) -> dict[str, Any]:
    """Objects of a rank: those of two ranks differ."""
    random = np.random.default_rng(rank)
    base = random.random((6, 8))
    return {
        "nothing": None if rank % 2 else "something",
        "a number": rank,
        "a text": "é" * rank,
        "empty": [{}, (), "", b""],
        "999 bytes": bytes([rank]) * (999 - 24 - 33),
        **{f"{size} bytes": bytes([rank]) * size for size in range(960, 1040, 7)},
        "large": {"text": "x" * 100_000, "rank": rank},
        "an array": base,
        "many arrays": [np.full(number % 4, rank, "i2") for number in range(300)],
        "a large array": random.random(70_001),
        "empty arrays": [np.zeros(0), np.zeros((3, 0), "i4"), base, np.zeros(0, "u1")],
        "only empty arrays": [np.zeros(0)] * (rank + 1),
        "strides": [base[::2, 1::3], base.T, base[::-1], np.asfortranarray(base), base[1:]],
        "types": [np.array([rank, None], object), np.array([rank], ">i4"), np.float32(rank)],
        "a number's array": np.array(rank),
        "a tensor": torch.arange(5) + rank,
        "a class": Point(rank),
        "more for some": [np.full(100 * rank, rank)] * rank,
        "in parts": {"a": np.zeros(1000, "f4"), "b": [bytearray(b"x" * 2000), "y" * 3000]},
    }


def assert_arrived(found: Any, expected: Any, name: str) -> None:
    assert same(found, expected), name
    for array in arrays_of(found):
        assert array.flags.writeable, name
        if array.dtype != object:
            array[...] = 0
    assert not arrays_of(found) or all(
        not one.any() for one in arrays_of(found) if one.dtype != object
    )


def exchanged() -> None:
    """All calls, for objects of all sizes."""
    comm = Communicator.from_group()
    rank, size = comm.rank, comm.size
    everyone = [things(one) for one in range(size)]
    mine = things(rank)
    for name, thing in mine.items():
        expected = [one[name] for one in everyone]
        for root in range(size):
            found = comm.broadcast_object(thing if rank == root else None, root)
            if rank == root:
                assert found is thing
            else:
                assert_arrived(found, expected[root], name)
            gathered = comm.gather_object(thing, root)
            assert (gathered is not None) == (rank == root)
            for one, other in zip(gathered or [], expected, strict=rank == root):
                assert_arrived(one, other, name)
            own = comm.scatter_object(expected if rank == root else None, root)
            assert_arrived(own, expected[rank], name)
        found = comm.all_gather_object(thing)
        assert len(found) == size
        for one, other in zip(found, expected, strict=True):
            assert_arrived(one, other, name)
        assert same(thing, expected[rank]), "a rank's own object is unchanged"
        if rank == 0:
            for other in range(1, size):
                comm.send_object(thing, other)
                assert_arrived(comm.recv_object(other), expected[other], name)
        else:
            assert_arrived(comm.recv_object(0), expected[0], name)
            comm.send_object(thing, 0)


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_objects_arrive(pool: Pool, world: int) -> None:
    pool.run(exchanged, world=world)


def apart() -> None:
    """What arrives has its own memory, also on the rank that has sent it to itself."""
    comm = Communicator.from_group()
    mine = [np.full(1000, comm.rank)]
    found = comm.all_gather_object(mine)
    assert not np.shares_memory(found[comm.rank][0], mine[0])
    for one in found:
        one[0][:] = -1
    assert mine[0][0] == comm.rank
    scattered = comm.scatter_object([mine] * comm.size if comm.rank == 0 else None)
    scattered[0][:] = -1
    gathered = comm.gather_object(mine)
    if gathered is not None:
        gathered[0][0][:] = -1
    assert mine[0][0] == comm.rank


def test_what_arrives_has_its_own_memory(pool: Pool) -> None:
    pool.run(apart)


def from_any() -> None:
    comm = Communicator.from_group()
    if comm.rank:
        for number in range(3):
            comm.send_object((comm.rank, number, np.full(2000 * number, comm.rank)), 0, tag=9)
        return
    found: dict[int, int] = dict.fromkeys(range(1, comm.size), 0)
    for _ in range(3 * (comm.size - 1)):
        rank, number, array = comm.recv_object(tag=9)
        assert number == found[rank], "those of a rank arrive in order"
        found[rank] += 1
        assert array.tolist() == [rank] * (2000 * number)
    assert set(found.values()) == {3}


@pytest.mark.parametrize("world", [2, 4])
def test_from_any_rank(pool: Pool, world: int) -> None:
    pool.run(from_any, world=world)


def tags() -> None:
    """Objects and arrays of one tag do not meet, nor those of other tags."""
    comm = Communicator.from_group()
    last = (1 << 20) - 1
    numbers = [0, 1, 2, 3, 4, 5, last - 1, last]
    if comm.rank == 0:
        arrays = [np.full(1024, tag % 251, "u1") for tag in numbers]
        sent = [
            comm.send(array, 1, tag, async_op=True)
            for array, tag in zip(arrays, numbers, strict=True)
        ]
        for tag in numbers:
            comm.send_object({"tag": tag, "array": np.full(500, tag)}, 1, tag)
        for one in sent:
            one.wait()
        return
    for tag in numbers:
        found = comm.recv_object(0, tag)
        assert found["tag"] == tag
        assert found["array"].tolist() == [tag] * 500
    for tag in reversed(numbers):
        assert comm.recv(np.zeros(1024, "u1"), 0, tag).tolist() == [tag % 251] * 1024


def test_tags(pool: Pool) -> None:
    pool.run(tags)


def unpicklable() -> None:
    """An object that rank 1 cannot pickle, or a wrong argument."""
    comm = Communicator.from_group()
    is_wrong = comm.rank == 1
    lock: Any = threading.Lock()
    calls: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
        ("broadcast_object", lambda: comm.broadcast_object([lock], 1), TypeError, "pickle"),
        (
            "all_gather_object",
            lambda: comm.all_gather_object(lock if is_wrong else 1),
            TypeError,
            "pickle",
        ),
        (
            "gather_object",
            lambda: comm.gather_object(lock if is_wrong else 1),
            TypeError,
            "pickle",
        ),
        (
            "scatter_object",
            lambda: comm.scatter_object([1, lock] if is_wrong else None, 1),
            TypeError,
            "pickle",
        ),
        (
            "scatter_object",
            lambda: comm.scatter_object([1] if is_wrong else None, 1),
            ValueError,
            "things: expected 2, one for each rank, got 1",
        ),
        (
            "scatter_object",
            lambda: comm.scatter_object(None, 1),
            ValueError,
            "things: expected 2, one for each rank, got None",
        ),
        (
            "broadcast_object",
            lambda: comm.broadcast_object(1, 2 if is_wrong else 0),
            ValueError,
            "src: expected a rank from 0 to 1, got 2",
        ),
        (
            "gather_object",
            lambda: comm.gather_object(1, 2 if is_wrong else 0),
            ValueError,
            "dst: expected a rank from 0 to 1, got 2",
        ),
    ]
    for verb, call, error, words in calls:
        with pytest.raises(error if is_wrong else dist.DistBackendError) as found:
            call()
        text = str(found.value)
        assert words in text, text
        if is_wrong:
            assert text.startswith(f"rank 1 of 2: {verb}: "), text
        else:
            assert "rank 1 refused its call" in text, text
            assert f"{verb}: " in text, text
        assert comm.all_gather_object(comm.rank) == [0, 1], "the next call works"
        assert comm.all_reduce(np.ones(1)).tolist() == [2]


def test_what_cannot_be_pickled(pool: Pool) -> None:
    pool.run(unpicklable)


class Broken:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


def unreadable() -> None:
    """An object that cannot be unpickled; the next calls work."""
    comm = Communicator.from_group()
    if comm.rank == 0:
        comm.send_object([Broken(), np.zeros(2000)], 1)
    else:
        with pytest.raises(ValueError, match="not a number"):
            comm.recv_object(0)
    with pytest.raises(ValueError, match="not a number"):
        comm.all_gather_object(Broken() if comm.rank == 0 else 1)
    assert comm.all_gather_object(comm.rank) == [0, 1]
    with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
        comm.send_object(threading.Lock(), 1 - comm.rank)
    with pytest.raises(ValueError, match="dst: expected another rank than this one"):
        comm.send_object(1, comm.rank)
    for tag in (-1, (1 << 20) + 1, "1"):
        with pytest.raises(ValueError, match="tag: expected a number from 0 to 1048575"):
            comm.recv_object(tag=tag)  # type: ignore[arg-type]
    if comm.rank == 0:
        comm.send_object("next", 1)
    else:
        assert comm.recv_object() == "next"


def test_what_cannot_be_unpickled(pool: Pool) -> None:
    pool.run(unreadable)


def first_tag_of_none() -> str:
    """The error of a tag that no user has."""
    comm = Communicator.from_group()
    with pytest.raises((ValueError, TypeError)) as found:
        comm.send_object(threading.Lock(), 1 - comm.rank, 1 << 20)  # is not sent in any case
    return str(found.value)


def test_the_first_tag_that_no_user_has(pool: Pool) -> None:
    for text in pool.run(first_tag_of_none):
        assert "tag: expected a number from 0 to 1048575" in text


def between_calls() -> None:
    """Collectives of objects share the order of other calls."""
    comm = Communicator.from_group()
    array = np.ones(3)
    handle = comm.all_reduce(array, async_op=True)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))
    assert handle.wait().tolist() == [comm.size] * 3
    assert dreamcomm.stats()["all_reduce"]["calls"] == 1


def test_between_other_calls(pool: Pool) -> None:
    pool.run(between_calls, world=3)
