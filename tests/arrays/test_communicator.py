"""A communicator shares its group's order, is split, closed, and keeps no memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import dreamcomm
from dreamcomm import Communicator
from helpers.pool import Fresh, Pool

MIB = 1 << 20
pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's backend")


def works(comm: Communicator) -> None:
    assert comm.all_reduce(np.ones(2)).tolist() == [comm.size] * 2


def shared_order() -> None:
    """Calls of torch and of communicators of one group meet, and are counted together."""
    comm, other = Communicator.from_group(), Communicator()
    assert (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
    first = comm.rank == 0
    before = dreamcomm.stats()["all_reduce"]["calls"]
    for turn in range(3):
        memory = torch.full((3,), float(comm.rank + turn))
        expected = float(sum(rank + turn for rank in range(comm.size)))
        if first:
            dist.all_reduce(memory)
        elif turn == 1:
            other.all_reduce(memory, out=memory)
        else:
            memory = torch.from_numpy(comm.all_reduce(memory.numpy()))
        assert memory.tolist() == [expected] * 3
    work = dist.all_reduce(theirs := torch.ones(2), async_op=True)
    handle = comm.all_reduce(np.full(2, 2.0), async_op=True)
    works(other)
    assert handle.wait().tolist() == [2 * comm.size] * 2
    assert work is not None
    work.wait()
    assert theirs.tolist() == [comm.size] * 2
    assert dreamcomm.stats()["all_reduce"]["calls"] == before + 6
    assert repr(comm) == f"<Communicator: rank {comm.rank} of {comm.size}>"


@pytest.mark.parametrize("world", [2, 3])
def test_torchs_calls_are_in_the_same_order(pool: Pool, world: int) -> None:
    pool.run(shared_order, world=world)


def counted() -> None:
    """Each verb is counted as torch's call is."""
    comm = Communicator.from_group()
    x = np.ones(comm.size)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "broadcast": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x),
        "all_gather": lambda: comm.all_gather(x),
        "gather": lambda: comm.gather(x),
        "scatter": lambda: comm.scatter(x),
        "reduce_scatter": lambda: comm.reduce_scatter(x),
        "all_to_all": lambda: comm.all_to_all(x),
        "barrier": lambda: comm.barrier(),
    }
    for name, call in calls.items():
        before = {one: counts["calls"] for one, counts in dreamcomm.stats().items()}
        call()
        before[name] += 1
        assert {one: counts["calls"] for one, counts in dreamcomm.stats().items()} == before
    calls_before = dreamcomm.stats()["all_reduce"]["calls"]
    comm.all_reduce([x, x.astype("f4"), x])
    assert dreamcomm.stats()["all_reduce"]["calls"] == calls_before + 2, "one for each type"


def test_calls_are_counted(pool: Pool) -> None:
    pool.run(counted)


def of_groups() -> None:
    """A group of some ranks; a rank outside gets an error."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            Communicator.from_group(group)
        return
    comm = Communicator.from_group(group)
    assert (comm.rank, comm.size) == (dist.get_rank() // 2, 2)
    assert comm.all_gather(np.array(dist.get_rank())).tolist() == [0, 2]
    other = 1 - comm.rank
    sent = comm.send(np.array(comm.rank), other, async_op=True)
    assert comm.recv(np.array(0), other) == other
    sent.wait()


def test_a_part_of_the_ranks(pool: Pool) -> None:
    pool.run(of_groups, world=3)


def of_gloo(path: str) -> None:
    """Torch's own backend carries no such calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(ValueError, match="does not use the backend dreamcomm"):
        Communicator.from_group(dist.new_group(backend="gloo"))
    dist.barrier()  # the other rank may still connect
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="no default group"):
        Communicator.from_group()
    store = FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with pytest.raises(ValueError, match="does not use the backend dreamcomm"):
        Communicator()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size, "the group is as it was"


def test_a_group_of_another_backend(pool: Pool, tmp_path: Path) -> None:
    pool.run(of_gloo, str(tmp_path / "store"))


def colors() -> None:
    comm = Communicator.from_group()
    rank = comm.rank
    halves = comm.split(rank % 2)
    assert halves is not None
    assert (halves.rank, halves.size) == (rank // 2, 2)
    assert halves.all_gather(np.array([rank])).tolist() == [rank % 2, rank % 2 + 2]
    turned = comm.split(-7, key=-rank)
    assert turned is not None
    assert turned.rank == 3 - rank
    assert turned.all_gather(np.array([rank])).tolist() == [3, 2, 1, 0]
    mixed = comm.split(np.int64(1 << 40), key=[5, -5, 5, 0][rank])
    assert mixed is not None
    assert mixed.all_gather_object(rank) == [1, 3, 0, 2]
    some = comm.split(None if rank == 1 else 0)
    assert (some is None) == (rank == 1)
    if some is not None:
        assert some.all_gather(np.array([rank])).tolist() == [0, 2, 3]
        nested = some.split(0 if rank else 1)
        assert nested is not None
        assert nested.all_gather(np.array([rank])).tolist() == ([2, 3] if rank else [0])
        alone = nested.split(rank)
        assert alone is not None
        assert alone.all_reduce(np.array([rank])).tolist() == [rank]
        assert (alone.rank, alone.size) == (0, 1)
    assert comm.split(None) is None
    # Calls of parts are in orders of their own.
    handle = turned.all_reduce(np.ones(3), async_op=True)
    works(halves)
    works(comm)
    assert handle.wait().tolist() == [4] * 3
    if turned.rank == 1:
        turned.send_object("from 2", 2)
    elif turned.rank == 2:
        assert turned.recv_object() == "from 2"
    found: Any = halves.all_reduce({"x": np.full(2, rank)}, "max")
    assert found["x"].tolist() == [rank % 2 + 2] * 2
    halves.close()
    works(turned)
    works(comm)
    with pytest.raises(ValueError, match="closed"):
        halves.barrier()


def test_split(pool: Pool) -> None:
    pool.run(colors, world=4)


def split_refused() -> None:
    comm = Communicator.from_group()
    is_wrong = comm.rank == 1
    wrong: list[tuple[Any, Any, str]] = [
        ("a", 0, "color: expected an integer, got 'a'"),
        (1.5, 0, "color: expected an integer, got 1.5"),
        (True, 0, "color: expected an integer, got True"),
        (0, "b", "key: expected an integer, got 'b'"),
    ]
    for color, key, words in wrong:
        with pytest.raises(TypeError if is_wrong else dist.DistBackendError) as found:
            comm.split(*((color, key) if is_wrong else (0, 0)))
        assert f"split: {words}" in str(found.value)
        works(comm)
    part = comm.split(0)
    assert part is not None
    works(part)


def test_a_split_that_is_refused(pool: Pool) -> None:
    pool.run(split_refused)


def part_refuses() -> None:
    """A refusal in a part is the part's own."""
    comm = Communicator.from_group()
    part = comm.split(comm.rank // 2)
    assert part is not None
    if comm.rank < 2:
        error = ValueError if part.rank else dist.DistBackendError
        with pytest.raises(error, match="op: expected one of"):
            part.all_reduce(np.ones(2), "mean" if part.rank else "sum")
    works(part)
    works(comm)


def test_a_refusal_in_a_part(pool: Pool) -> None:
    pool.run(part_refuses, world=4)


def fails(comm: Communicator, pending: list[Any], error: Exception) -> None:
    with comm:
        pending.append(comm.all_reduce(np.ones(3), async_op=True))
        raise error


def closing() -> None:
    """close() ends pending calls, once; the group stays."""
    rank = dist.get_rank()
    with Communicator() as comm:
        out = np.zeros(3)
        handle = comm.all_reduce(np.full(3, 1.0 + rank), out=out, async_op=True)
        dropped = comm.all_reduce(np.ones(70_001), async_op=True)
        del dropped
        works(comm)
    assert handle.is_completed()
    assert handle.wait() is out
    assert out.tolist() == [sum(range(1, comm.size + 1))] * 3
    with pytest.raises(ValueError, match="closed"), comm:
        works(comm)
    comm.close()
    assert dist.is_initialized()
    error = KeyError("one")
    comm = Communicator.from_group()
    pending: list[Any] = []
    with pytest.raises(KeyError) as found:
        fails(comm, pending, error)
    assert found.value is error
    assert pending[0].is_completed()
    assert pending[0].wait().tolist() == [comm.size] * 3
    with pytest.raises(ValueError, match="closed"):
        works(comm)
    works(Communicator.from_group())


def test_close(pool: Pool) -> None:
    pool.run(closing)


def owning() -> None:
    """A communicator that has made the group ends it."""
    dist.destroy_process_group()
    for _ in range(2):
        with Communicator(timeout=timedelta(seconds=20)) as comm:
            assert (comm.rank, comm.size) == (0, 1)
            assert dist.is_initialized()
            part = comm.split(3)
            assert part is not None
            assert part.all_gather(np.ones(2)).tolist() == [1, 1]
            works(comm)
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="closed"):
            works(comm)


def test_a_communicator_that_made_the_group_ends_it(fresh: Fresh) -> None:
    fresh.run(owning, world=1)


def shared_memory() -> None:
    """In a heap with room for one array, another one has other memory until the first is freed."""
    comm = Communicator.from_group()
    count = 5 * MIB // 8

    def is_shared(array: np.ndarray[Any, Any]) -> bool:
        return dreamcomm.is_shared(torch.from_numpy(array))

    first = comm.empty(count)
    assert first.shape == (count,)
    assert first.dtype == np.float64
    assert is_shared(first)
    assert not is_shared(comm.empty(count)), "the heap is full"
    view = first[5:10]
    del first
    gc.collect()
    assert not is_shared(comm.empty((count,))), "a view has the memory"
    view[:] = comm.rank
    assert comm.all_reduce(view).tolist() == [sum(range(comm.size))] * 5
    del view
    gc.collect()
    for _ in range(5):
        assert is_shared(comm.empty(count)), "the memory came back"
    small = comm.empty((2, 3), "int16")
    assert small.shape == (2, 3)
    assert small.dtype == np.int16
    assert is_shared(small)
    assert comm.empty().shape == ()
    large = comm.empty(70_001, "f4")
    large[:] = 1
    before = dreamcomm.stats()["all_reduce"]["in_place"]
    assert comm.all_reduce(large, out=large) is large
    assert large.min() == large.max() == comm.size
    assert dreamcomm.stats()["all_reduce"]["in_place"] == before + 1
    with pytest.raises(TypeError, match="no collective has elements of type object"):
        comm.empty(3, object)
    works(comm)


def test_empty(fresh: Fresh) -> None:
    fresh.run(shared_memory, options={"heap_bytes": 8 * MIB})


def outlives() -> None:
    """An array of the heap can be used after its communicator and group."""
    with Communicator() as comm:
        array = comm.empty(1000)
    array[:] = 3
    dist.destroy_process_group()
    assert array.sum() == 3000


def test_memory_outlives_the_group(pool: Pool) -> None:
    pool.run(outlives)


def reported() -> str:
    comm = Communicator.from_group()
    works(comm)
    comm.all_reduce(np.ones(1000))
    comm.all_gather(np.ones(3))
    text = comm.report()
    handle = comm.all_reduce(np.ones(1000), async_op=True)
    assert comm.report().endswith("\n  1 pending calls")
    handle.wait()
    assert "nobody has waited for" not in comm.report()
    return text


def test_report(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(reported)):
        lines = text.splitlines()
        assert lines[0].startswith(f"rank {rank} of 2, started by a torch group; shm: 2 ranks")
        assert lines[1].startswith("  all_reduce: calls 2, sent 8,016, received 8,016, in_")
        assert lines[2].startswith("  all_gather: calls 1, sent 24, received 24, in_place")
        assert len(lines) == 3


def dropped(in_place: bool) -> None:
    """A call whose array and handle are gone completes, with what the array had."""
    comm = Communicator.from_group()
    count = 300_001
    if comm.rank == 0:
        array = np.full(count, 2.0)
        handle = comm.all_reduce(array, out=array if in_place else None, async_op=True)
        del array, handle
        gc.collect()
        junk = [np.full(count, -1.0) for _ in range(8)]
        comm.send(junk[0], 1)  # rank 1 has not begun
    else:
        comm.recv(np.empty(count), 0)
        found = comm.all_reduce(np.ones(count))
        assert found.min() == found.max() == 3
    works(comm)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_call_whose_array_and_handle_are_gone(pool: Pool, in_place: bool) -> None:
    pool.run(dropped, in_place)


def resident() -> int:
    """Bytes of memory that the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def repeated(times: int) -> None:
    """Calls of all kinds, again and again."""
    comm = Communicator.from_group()
    array, out, tensor = np.ones(100), np.ones(100), torch.ones(100)
    constant = np.ones(100)
    constant.setflags(write=False)
    tree = {"a": array, "b": [tensor, out]}
    names = np.ones((10, 10)).T
    memory: Any = memoryview(array)  # type: ignore[arg-type]

    def once() -> None:
        array[:] = 1
        out[:] = 1
        tensor[:] = 1
        comm.all_reduce(np.ones(8_000), async_op=True)  # nobody waits for it
        comm.barrier()
        comm.all_reduce(array)
        comm.all_reduce(array, out=array)
        comm.all_reduce(tensor, out=tensor)
        comm.all_reduce(names, out=names[::-1])
        comm.all_reduce(memory, "min")
        comm.all_reduce(tree, "max", out=tree)
        comm.all_reduce(tree, "max")
        comm.all_reduce(array, "max", out=out, async_op=True).wait()
        comm.all_gather(array)
        comm.broadcast(tensor)
        try:
            comm.all_reduce(array, out=constant)
        except ValueError:
            pass
        else:
            raise AssertionError("it is read-only")

    things = (array, out, tensor, constant, names, memory)
    for _ in range(300):
        once()
    gc.collect()
    counts, before = [sys.getrefcount(one) for one in things], resident()
    for _ in range(times):
        once()
    gc.collect()
    assert [sys.getrefcount(one) for one in things] == counts
    assert resident() - before < 8 * MIB


@pytest.mark.parametrize("times", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_calls_keep_no_memory(pool: Pool, times: int) -> None:
    """Twelve calls each time, and one that is refused."""
    pool.run(repeated, times, timeout=300)


def in_place(count: int, kind: str) -> list[int]:
    """How much memory the process has more after a call than before."""
    comm = Communicator.from_group()
    array: Any = np.ones(count, "f4") if kind == "numpy" else torch.ones(count)
    grown = []
    for _ in range(3):
        before = resident()
        assert comm.all_reduce(array, "max", out=array) is array
        grown.append(resident() - before)
    assert array[0] == array[-1] == 1
    return grown[1:]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("size", [8, pytest.param(64, marks=pytest.mark.long)])
def test_in_place_takes_no_memory(pool: Pool, size: int, kind: str) -> None:
    for grown in pool.run(in_place, size * MIB // 4, kind):
        assert max(grown) < MIB
