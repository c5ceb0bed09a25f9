"""Edges of a communicator's calls."""

from __future__ import annotations

import gc
import signal
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dreamcomm.arrays.communicator import Communicator
from helpers.pool import Fresh, Pool

pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's communicator")


def next_works(comm: Communicator) -> None:
    assert comm.all_reduce(np.ones(2)).tolist() == [comm.size] * 2


def aliases() -> None:
    comm = Communicator.from_group()
    rank = comm.rank
    out = np.arange(8.0) + 10 * rank
    comm.all_to_all(out, out=out)
    first = 4 * rank
    assert out.tolist() == [*(10.0 * r + first + one for r in range(2) for one in range(4))]
    out = np.arange(8.0) * (rank + 1)
    comm.broadcast(out[:6], 1, out=out[2:])
    assert out[2:].tolist() == [0, 2, 4, 6, 8, 10]
    out = np.arange(8.0) * (rank + 1)
    comm.all_reduce(out[:6], out=out[2:])
    assert out[2:].tolist() == [0, 3, 6, 9, 12, 15]


@pytest.mark.parametrize("shared", [True, False])
def test_an_input_that_shares_memory_with_out(pool: Pool, shared: bool) -> None:
    pool.run(aliases, options={"shared_memory": shared})


def trees() -> None:
    comm = Communicator.from_group()
    with pytest.raises(ValueError, match=r"out\[0\]: expected an array, got NoneType"):
        comm.all_reduce([np.ones(2)], out=[None])
    with pytest.raises(ValueError, match="out: expected a tree like array, got one ndarray"):
        comm.all_reduce([np.ones(2)], out=np.ones(2))
    next_works(comm)
    empties: list[Any] = [[None], [], {"a": [None, {}]}]
    for tree in empties:
        with pytest.raises(ValueError, match="array: the tree holds no array"):
            comm.all_reduce(tree)
        next_works(comm)
    frozen: Any = [None] if comm.rank == 0 else [np.ones(2)]
    with pytest.raises(dist.DistBackendError if comm.rank else ValueError):
        comm.all_reduce(frozen)
    next_works(comm)
    whole = np.ones(9)
    parts = [whole[:3], whole[3:6], whole[6:]]
    comm.all_reduce(parts, out=parts)
    assert whole.tolist() == [2.0] * 9
    with pytest.raises(ValueError, match="lie in each other's memory"):
        comm.all_reduce([whole[:3], whole[2:5]], out=[whole[:3], whole[2:5]])
    next_works(comm)


def test_trees(pool: Pool) -> None:
    pool.run(trees)


def dropped() -> None:
    comm = Communicator.from_group()
    backwards, tree, rows = np.zeros(3), [np.ones(2)], np.zeros((3, 2))
    comm.all_reduce(np.ones(3), out=backwards[::-1], async_op=True)
    comm.average(tree, out=tree, async_op=True)
    if comm.rank == 0:
        comm.send(np.full(3, 7.0), 1, async_op=True)
    else:
        comm.recv(rows[:, 1], 0, out=rows[:, 1], async_op=True)
    comm.close()
    assert backwards.tolist() == [2.0] * 3
    assert tree[0].tolist() == [1.0] * 2
    assert rows[:, 1].tolist() == [7.0 * comm.rank] * 3


def test_calls_whose_handles_are_dropped_write_what_they_should(pool: Pool) -> None:
    pool.run(dropped)


def verbs() -> None:
    comm = Communicator.from_group()
    block = np.ones(960, np.uint8)
    pairs: list[Any] = [
        (lambda: comm.all_gather(block), lambda: comm.all_gather_object(1)),
        (lambda: comm.broadcast(block), lambda: comm.broadcast_object(1)),
        (lambda: comm.all_gather(np.zeros((1, 4), np.int64)), lambda: comm.split(0)),
        (lambda: comm.all_to_all(np.ones(2)), lambda: comm.all_gather_v(np.ones(1), [1, 1])),
    ]
    for pair in pairs:
        with pytest.raises(dist.DistBackendError, match="the ranks made different calls"):
            pair[comm.rank]()
        next_works(comm)


def test_verbs_that_move_as_many_bytes_do_not_meet(pool: Pool) -> None:
    pool.run(verbs)


def pending() -> None:
    comm = Communicator.from_group()
    part = comm.split(0)
    assert part is not None
    array = np.ones(4)
    handle = comm.all_reduce(array, out=array, async_op=True)
    with pytest.raises(ValueError, match="a pending all_reduce writes it"):
        part.all_reduce(array, out=array)
    handle.wait()
    part.all_reduce(array, out=array)
    assert array.tolist() == [4.0] * 4
    other = part.all_reduce(array, async_op=True)
    comm.close()
    assert "1 pending calls" in part.report()
    assert other.wait().tolist() == [8.0] * 4
    part.close()


def test_a_part_sees_the_pending_calls_of_the_whole(pool: Pool) -> None:
    pool.run(pending)


def autograd() -> None:
    comm = Communicator.from_group()
    leaf = torch.ones(2, requires_grad=True)
    hidden = leaf * 2
    loss = (hidden * hidden).sum()
    handle = comm.all_reduce(hidden.detach(), out=hidden.detach(), async_op=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)
    handle.wait()


def test_autograd_counts_a_write_that_has_begun(pool: Pool) -> None:
    pool.run(autograd)


def freed() -> None:
    comm = Communicator.from_group()
    array, grows = np.ones(1000), bytearray(8)
    gone = weakref.ref(array)
    comm.all_reduce(array, async_op=True).wait()
    handle = comm.all_reduce(grows, async_op=True)
    handle.wait()
    grows.append(1)
    del array
    gc.collect()
    assert gone() is None


def test_arrays_are_free_after_the_wait(pool: Pool) -> None:
    pool.run(freed)


class Bad:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def unpickled() -> None:
    comm = Communicator.from_group()
    thing: Any = Bad() if comm.rank == 0 else np.ones(10_000)
    if comm.rank == 0:
        with pytest.raises(ValueError, match="no number"):
            comm.gather_object(thing)
    else:
        assert comm.gather_object(thing) is None
    with pytest.raises(ValueError, match="no number"):
        comm.all_gather_object(thing)
    found = comm.gather_object(np.full(10_000, comm.rank))
    assert found is None or [one[0] for one in found] == [0, 1]
    next_works(comm)


def test_an_object_that_cannot_be_unpickled(pool: Pool) -> None:
    pool.run(unpickled)


def numbers() -> None:
    comm = Communicator.from_group()
    long = np.ones(3, np.ulonglong)
    assert comm.all_reduce(long).tolist() == [2] * 3
    comm.all_reduce(long, out=long)
    assert long.tolist() == [2] * 3
    assert comm.empty(np.int64(3)).shape == (3,)
    tag = np.int64(5)
    if comm.rank == 0:
        comm.send(long, 1, tag)
    else:
        assert comm.recv(long, 0, 5).tolist() == [2] * 3
    with pytest.raises(TypeError, match="expected a dense tensor"):
        comm.all_reduce(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    with pytest.raises(TypeError, match="key: expected an integer, got None"):
        comm.split(0, None)  # type: ignore[arg-type]
    next_works(comm)


def test_numbers_of_other_types(pool: Pool) -> None:
    pool.run(numbers)


def on_no_backend() -> None:
    comm = Communicator.from_group()
    with pytest.raises(RuntimeError):
        comm.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="this rank has refused a call before"):
        next_works(comm)


def test_a_device_without_a_backend(pool: Pool) -> None:
    pool.run(on_no_backend)


def rings(*_: object) -> None:
    raise KeyError("rings")


def signalled(in_place: bool) -> None:
    """The error of a signal's handler comes out of the call that waits."""
    comm = Communicator.from_group()
    array = np.ones(4)
    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, rings)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyError, match="rings"):
            comm.all_reduce(array, out=array if in_place else None)
        signal.signal(signal.SIGALRM, before)
    else:
        with pytest.raises(dist.DistBackendError, match="was interrupted on rank 0"):
            comm.recv(array, 0)
    with pytest.raises(dist.DistBackendError):
        comm.all_reduce(array)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_signal_ends_a_call(fresh: Fresh, in_place: bool) -> None:
    fresh.run(signalled, in_place)


def closed_meanwhile() -> None:
    """A signal's handler closes the communicator while its compiled call waits."""
    comm, array = Communicator.from_group(), np.ones(4)

    def closes(*_: object) -> None:
        comm.close()
        dist.send(torch.ones(1), 1)  # the other rank makes the call after this

    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, closes)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        dist.recv(torch.ones(1), 0)
    comm.all_reduce(array, out=array)
    assert array.tolist() == [2.0] * 4
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, before)
        with pytest.raises(ValueError, match="the communicator is closed"):
            comm.all_reduce(array, out=array)


def test_a_close_during_a_call(fresh: Fresh) -> None:
    fresh.run(closed_meanwhile)
