"""Collectives and messages of arrays have torch's bits, in new arrays, in `out` and in place."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arrays.kinds import FLOAT8, KINDS, TYPES, assert_same, bits, made, noise, numbers
from dreamcomm import Communicator
from helpers.pool import Pool

OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
WORLDS = [2, 3, 4]
pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's backend")


class Verb(NamedTuple):
    """A call that moves elements.

    Attributes:
        shape: of a rank's array: of the rank, the number of ranks, and the elements of a row.
        call: of the communicator, the array and the keywords.
        expected: of the rank and all ranks' arrays.
        in_place: whether the result has the array's shape on every rank.
    """

    shape: Callable[[int, int, int], tuple[int, ...]]
    call: Callable[..., Any]
    expected: Callable[[int, list[Tensor]], Tensor | None]
    in_place: bool = False


def last(world: int) -> int:
    return world - 1


def splits(source: int, target: int) -> int:
    """The rows that one rank sends to another; some send none."""
    return (source + 2 * target) % 3


def all_to_all_unequal(comm: Communicator, array: Any, **how: Any) -> Any:
    sent = [splits(comm.rank, one) for one in range(comm.size)]
    got = [splits(one, comm.rank) for one in range(comm.size)]
    return comm.all_to_all(array, got, sent, **how)


def swapped(rank: int, arrays: list[Tensor], count: Callable[[int, int], int]) -> Tensor:
    """What a rank gets by an all_to_all."""
    parts = []
    for source, whole in enumerate(arrays):
        begin = sum(count(source, one) for one in range(rank))
        parts.append(whole[begin : begin + count(source, rank)])
    return torch.cat(parts)


def part_of(rank: int, arrays: list[Tensor], whole: Tensor) -> Tensor:
    return whole.chunk(len(arrays))[rank]


VERBS: dict[str, Verb] = {
    "broadcast": Verb(
        lambda rank, world, width: (2, width),
        lambda comm, array, **how: comm.broadcast(array, last(comm.size), **how),
        lambda rank, arrays: arrays[-1],
        in_place=True,
    ),
    "all_gather": Verb(
        lambda rank, world, width: (2, width),
        lambda comm, array, **how: comm.all_gather(array, **how),
        lambda rank, arrays: torch.cat(arrays),
    ),
    "all_gather of numbers": Verb(
        lambda rank, world, width: (),
        lambda comm, array, **how: comm.all_gather(array, **how),
        lambda rank, arrays: torch.stack(arrays),
    ),
    "all_gather_v": Verb(
        lambda rank, world, width: (rank % 3, width),  # rank 0 has none
        lambda comm, array, **how: comm.all_gather_v(array, **how),
        lambda rank, arrays: torch.cat(arrays),
    ),
    "all_gather_v with sizes": Verb(
        lambda rank, world, width: ((rank + 1) % 3,),
        lambda comm, array, **how: comm.all_gather_v(
            array, [(rank + 1) % 3 for rank in range(comm.size)], **how
        ),
        lambda rank, arrays: torch.cat(arrays),
    ),
    "gather": Verb(
        lambda rank, world, width: (2, width),
        lambda comm, array, **how: comm.gather(array, last(comm.size), **how),
        lambda rank, arrays: torch.cat(arrays) if rank == len(arrays) - 1 else None,
    ),
    "scatter": Verb(
        lambda rank, world, width: (2 * world, width),
        lambda comm, array, **how: comm.scatter(array, last(comm.size), **how),
        lambda rank, arrays: part_of(rank, arrays, arrays[-1]),
    ),
    "all_to_all": Verb(
        lambda rank, world, width: (2 * world, width),
        lambda comm, array, **how: comm.all_to_all(array, **how),
        lambda rank, arrays: swapped(
            rank, arrays, lambda source, target: len(arrays[source]) // len(arrays)
        ),
        in_place=True,
    ),
    "all_to_all with splits": Verb(
        lambda rank, world, width: (sum(splits(rank, one) for one in range(world)), width),
        all_to_all_unequal,
        lambda rank, arrays: swapped(rank, arrays, splits),
    ),
}  # fmt: skip


def ways(call: Callable[..., Any], array: Any, out: Any) -> Iterator[tuple[Any, Any]]:
    """Makes a call in all ways; gives the result and what it should be the same object as.

    Args:
        call: of the array and keywords.
        array: of the kind.
        out: makes what receives the result, anew each time; None: there is no result here.
    """
    for later in (False, True):
        for into in (False, True):
            how: dict[str, Any] = {"async_op": True} if later else {}
            target = out() if into and out is not None else None
            if into:
                how["out"] = target
            found = call(array, **how)
            if later:
                handle, found = found, found.wait()
                assert handle.is_completed()
                assert handle.wait() is found, "again"
            yield found, target


def check_ways(
    call: Callable[..., Any], kind: str, given: Tensor, expected: Tensor | None, in_place: bool
) -> None:
    """All ways of a call have the expected result, and leave their input as it is."""
    array = made(kind, given)

    def out() -> Any:
        assert expected is not None
        return made(kind, torch.zeros_like(expected))

    for found, target in ways(call, array, None if expected is None else out):
        if expected is None:
            assert found is None
        else:
            assert_same(found, kind, expected)
            assert target is None or found is target
        assert bits(array) == bits(given), "the input is unchanged"
    if not in_place:
        return
    for later in (False, True):
        array = made(kind, given)
        how: dict[str, Any] = {"async_op": True} if later else {}
        found = call(array, out=array, **how)
        found = found.wait() if later else found
        if expected is None:
            assert found is None
            assert bits(array) == bits(given)
        else:
            assert found is array
            assert_same(array, kind, expected)


def by_torch(verb: str, given: Tensor, op: str) -> Tensor | None:
    """The result of a reduction by torch. Raises ValueError if it refuses."""
    how = getattr(dist.ReduceOp, op.upper())
    world = dist.get_world_size()
    memory = given.clone()
    if verb == "all_reduce":
        try:
            dist.all_reduce(memory, how)
        except ValueError as error:
            if "on complex tensors" not in str(error):
                raise
            # Python's part of torch refuses more for complex numbers than the group does.
            options = dist.AllreduceOptions()
            options.reduceOp = how
            assert dist.group.WORLD is not None
            dist.group.WORLD.allreduce([memory], options).wait()
        return memory
    if verb == "reduce":
        dist.reduce(memory, last(world), how)
        return memory if dist.get_rank() == last(world) else None
    part = torch.empty_like(memory[: len(memory) // world])
    dist.reduce_scatter_tensor(part, memory, how)
    return part


def reductions(comm: Communicator, verb: str) -> Callable[..., Any]:
    if verb == "all_reduce":
        return comm.all_reduce
    if verb == "reduce":
        return lambda array, op, **how: comm.reduce(array, last(comm.size), op, **how)
    return comm.reduce_scatter


def reduced(kind: str, verb: str, width: int, names: list[str]) -> None:
    """Checks a reduction for types and all operations."""
    comm = Communicator.from_group()
    method = reductions(comm, verb)
    for name in names:
        for number, op in enumerate(OPS):
            given = numbers(name, (comm.size, width), 100 * number + comm.rank)

            def call(array: Any, op: str = op, **how: Any) -> Any:
                return method(array, op, **how)

            try:
                expected = by_torch(verb, given, op)
            except ValueError:
                check_refused(comm, verb, call, kind, given)
                continue
            try:
                check_ways(call, kind, given, expected, verb != "reduce_scatter")
            except AssertionError as error:
                raise AssertionError(f"{op} of {name}: {error}") from error
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3, "the next call works"


def check_refused(
    comm: Communicator, verb: str, call: Callable[..., Any], kind: str, given: Tensor
) -> None:
    """All ranks refuse what torch refuses."""
    array = made(kind, given)
    in_place: dict[str, Any] = {} if verb == "reduce_scatter" else {"out": array}
    for how in ({}, {"async_op": True}, in_place):
        with pytest.raises(ValueError, match=f"rank {comm.rank} of {comm.size}: "):
            call(array, **how)
    assert bits(array) == bits(given)


def moved(kind: str, width: int, names: list[str]) -> None:
    """Checks all moves, for types."""
    comm = Communicator.from_group()
    for name in names:
        for verb_name, verb in VERBS.items():
            arrays = [
                noise(name, verb.shape(rank, comm.size, width), rank) for rank in range(comm.size)
            ]
            expected = verb.expected(comm.rank, arrays)

            def call(array: Any, verb: Verb = verb, **how: Any) -> Any:
                return verb.call(comm, array, **how)

            try:
                check_ways(call, kind, arrays[comm.rank], expected, verb.in_place)
            except AssertionError as error:
                raise AssertionError(f"{verb_name} of {name}: {error}") from error


def passed_on(kind: str, width: int, names: list[str]) -> None:
    """Each rank sends to the next one."""
    comm = Communicator.from_group()
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag, name in enumerate(names):
        given = noise(name, (2, width), comm.rank)
        expected = noise(name, (2, width), before)

        def call(array: Any, tag: int = tag, **how: Any) -> Any:
            sent = comm.send(made(kind, given), after, tag, async_op=True)  # noqa: B023
            found = comm.recv(array, before, tag, **how)
            sent.wait()
            if how.get("async_op"):
                assert found.source() == before
            return found

        check_ways(call, kind, given, expected, in_place=True)
        if comm.rank == 0:
            comm.send(made(kind, given), 1, tag)
        elif comm.rank == 1:
            assert_same(comm.recv(made(kind, given), 0, tag), kind, expected)


def from_any() -> None:
    """A receive from any rank says which one it was; tags are apart."""
    comm = Communicator.from_group()
    like = np.zeros(2, "int64")
    if comm.rank:
        comm.send(np.full(2, comm.rank), 0, tag=5)
        comm.send(np.full(2, -comm.rank), 0, tag=6)
        return
    for sign, tag in ((-1, 6), (1, 5)):
        found = set()
        for _ in range(1, comm.size):
            handle = comm.recv(like, None, tag, async_op=True)
            assert handle.wait().tolist() == [sign * handle.source()] * 2
            found.add(handle.source())
        assert found == set(range(1, comm.size))


def of_several_kinds() -> None:
    """Ranks may give arrays of several kinds, and torch's names of operations."""
    comm = Communicator.from_group()
    kind = KINDS[comm.rank % len(KINDS)]
    whole = torch.stack([numbers("float32", (4,), rank) for rank in range(comm.size)])
    given = made(kind, whole[comm.rank])
    for op in ("max", dist.ReduceOp.MAX, dist.ReduceOp(dist.ReduceOp.MAX)):
        assert_same(comm.all_reduce(given, op), kind, whole.amax(0))
    assert_same(comm.all_gather(given), kind, whole.reshape(-1))
    assert_same(comm.average(made(kind, torch.full((3,), comm.rank + 1.0))), kind,
                torch.full((3,), (comm.size + 1) / 2))  # fmt: skip
    averaged = comm.average(made(kind, torch.ones(3)), async_op=True).wait()
    assert_same(averaged, kind, torch.ones(3))
    comm.barrier()
    assert comm.barrier(async_op=True).wait() is None


def forms_of_out() -> None:
    """`out` of a gather may have a dimension for the ranks; that of a part may be one row."""
    comm = Communicator.from_group()
    rank, size = comm.rank, comm.size
    given = np.arange(6.0).reshape(2, 3) + 10 * rank
    stacked = np.stack([np.arange(6.0).reshape(2, 3) + 10 * one for one in range(size)])
    out: Any = np.zeros((size, 2, 3))
    assert comm.all_gather(given, out=out) is out
    assert np.array_equal(out, stacked)
    whole: Any = np.zeros((size, 2, 3))
    assert (comm.gather(given, out=whole) is whole) == (rank == 0)
    assert np.array_equal(whole, stacked if rank == 0 else np.zeros_like(whole))
    rows = np.arange(3.0 * size).reshape(size, 3)
    for row in (np.zeros(3), np.zeros((1, 3))):
        assert comm.reduce_scatter(rows, out=row) is row
        assert np.array_equal(row.reshape(3), size * rows[rank])
        row[:] = 0
        assert comm.scatter(rows if rank == 0 else None, out=row) is row
        assert np.array_equal(row.reshape(3), rows[rank])


def own_block_of_out() -> None:
    """A gather whose array is the rank's own block of `out`."""
    comm = Communicator.from_group()
    out = np.full((comm.size, 5), -1.0)
    out[comm.rank] = comm.rank
    assert comm.all_gather(out[comm.rank], out=out) is out
    assert out.tolist() == [[one] * 5 for one in range(comm.size)]
    out[:] = -1
    out[comm.rank] = comm.rank
    assert comm.all_gather(out[comm.rank], out=out.reshape(-1)).base is out
    assert out.tolist() == [[one] * 5 for one in range(comm.size)]
    line = np.arange(8.0)
    comm.all_reduce(line[:6], out=line[2:])
    assert line.tolist() == [0, 1, *(comm.size * one for one in range(6))], "they overlap"


def trees(kind: str) -> None:
    """A tree of arrays of all types."""
    comm = Communicator.from_group()
    mine = [
        numbers(name, (rows, 2), comm.rank) for rows, name in enumerate([*TYPES[kind], "int64"])
        if rows or kind != "memoryview"  # see buffers_of()
    ]  # fmt: skip
    expected = [by_torch("all_reduce", one, "sum") for one in mine]

    def tree() -> dict[str, Any]:
        arrays = [made(kind, one) for one in mine]
        return {"b": arrays[:3], "a": tuple(arrays[3:]), "none": None}

    def check(found: Any, tensors: list[Tensor | None]) -> None:
        assert list(found) == ["b", "a", "none"]
        assert [type(one) for one in found.values()] == [list, tuple, type(None)]
        for one, tensor in zip((*found["b"], *found["a"]), tensors, strict=True):
            assert tensor is not None
            assert_same(one, kind, tensor)

    given: Any = tree()
    check(comm.all_reduce(given), expected)
    check(comm.all_reduce(given, async_op=True).wait(), expected)
    into: Any = tree()
    for found in (
        comm.all_reduce(given, out=into),
        comm.all_reduce(given, out=into, async_op=True).wait(),
    ):
        check(into, expected)
        assert all(one is other for one, other in zip(found["a"], into["a"], strict=True))
        check(given, [*mine])
    found = comm.all_reduce(given, out=given)
    check(given, expected)
    assert all(one is other for one, other in zip(found["b"], given["b"], strict=True))
    sent = {"x": made(kind, torch.full((2,), comm.rank)), "y": [made(kind, torch.ones(3))]}
    got = comm.broadcast(sent, 1)
    assert_same(got["x"], kind, torch.ones(2, dtype=torch.int64))
    assert_same(got["y"][0], kind, torch.ones(3))


def other_kinds() -> None:
    """Results of scalars, bytes and arrays of Python's."""
    comm = Communicator.from_group()
    size = comm.size
    found: Any = comm.all_reduce(np.float32(2))
    assert type(found) is np.float32
    assert found == 2 * size
    gathered: Any = comm.all_gather(np.int16(comm.rank))
    assert gathered.dtype == np.int16
    assert gathered.tolist() == list(range(size))
    with pytest.raises(ValueError, match="out: NumPy's scalars never change"):
        comm.all_reduce(np.float32(2), out=np.float32(2))
    typed = comm.all_reduce(array.array("l", [1, comm.rank]))
    assert typed == array.array("l", [size, sum(range(size))])
    assert typed.typecode == "l"
    constant = comm.all_gather(bytes([comm.rank, 7]))
    assert type(constant) is bytes
    assert constant == b"".join(bytes([rank, 7]) for rank in range(size))
    changing = bytearray([comm.rank, 7])
    assert comm.broadcast(changing, 1, out=changing) is changing
    assert changing == bytearray([1, 7])
    assert type(comm.all_reduce(changing)) is bytearray
    with pytest.raises(TypeError, match="a masked array; pass what its mask means"):
        comm.all_reduce(np.ma.masked_array([1.0, 2.0], [True, False]))


def buffers(name: str) -> str:
    """All-reduces a buffer, in new memory and into `out`; returns the first one's error."""
    comm = Communicator.from_group()

    def buffer() -> Any:
        if name == "ctypes":
            return memoryview((ctypes.c_int * 3)(1, 2, 3))
        odd: Any = np.ndarray((3,), "i4", bytearray(16), 1)
        odd[:] = [1, 2, 3]
        return memoryview(odd)

    given, out = buffer(), buffer()
    expected = np.asarray(given) * comm.size
    assert comm.all_reduce(given, out=out) is out
    assert np.array_equal(np.asarray(out), expected)
    try:
        found: Any = comm.all_reduce(given)
    except ValueError as error:
        assert comm.all_reduce(np.ones(2)).tolist() == [comm.size] * 2, "the next call works"
        return str(error)
    assert type(found) is memoryview
    assert np.array_equal(np.asarray(found), expected)
    return ""


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "reduce_scatter"])
def test_reductions(pool: Pool, verb: str, kind: str, world: int) -> None:
    pool.run(reduced, kind, verb, 3, TYPES[kind], world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [moved, passed_on])
def test_moves(pool: Pool, check: Callable[..., None], kind: str, world: int) -> None:
    names = TYPES[kind] + (FLOAT8 if kind == "torch" else [])
    pool.run(check, kind, 3, names, world=world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_more_elements(pool: Pool, kind: str, world: int) -> None:
    """More than what a call passes on at once."""
    names = ["float32", "uint8"]
    for verb in ("all_reduce", "reduce", "reduce_scatter"):
        pool.run(reduced, kind, verb, 70_001, names, world=world)
    pool.run(moved, kind, 35_001, names, world=world)
    pool.run(passed_on, kind, 35_001, names, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "check", [from_any, of_several_kinds, other_kinds, forms_of_out, own_block_of_out]
)
def test_forms(pool: Pool, check: Callable[[], None], world: int) -> None:
    pool.run(check, world=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_trees(pool: Pool, kind: str, world: int) -> None:
    pool.run(trees, kind, world=world)


@pytest.mark.parametrize("name", ["ctypes", "not aligned"])
def test_buffers_that_cast_does_not_make(pool: Pool, name: str) -> None:
    assert pool.run(buffers, name) == ["", ""]
