"""A call that one rank cannot make fails on all ranks with the reason, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dreamcomm import Communicator
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's backend")

NO_ARRAY = "expected an array (NumPy, torch, a buffer, or what has __dlpack__), got "


class Wrong(NamedTuple):
    """A call that is refused.

    Attributes:
        call: of the communicator.
        error: that it raises.
        words: what the error's text has after the verb.
        verb: the call's name.
        right: the call of ranks that are right; None: an all_reduce.
    """

    call: Callable[[Communicator], Any]
    error: type[Exception]
    words: str
    verb: str = "all_reduce"
    right: Callable[[Communicator], Any] | None = None


class Producer:
    """Speaks DLPack alone."""

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **how: Any) -> Any:
        return self.elements.__dlpack__(**how)


# As JAX's arrays: their export says that they can be written.
Constant = type("Constant", (Producer,), {"__module__": "jaxlib._jax"})


def three() -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.arange(3.0)


def constant() -> np.ndarray[Any, np.dtype[np.float64]]:
    made = three()
    made.setflags(write=False)
    return made


def into(out: Any) -> Callable[[Communicator], Any]:
    return lambda comm: comm.all_reduce(three(), out=out)


def of(array: Any) -> Callable[[Communicator], Any]:
    return lambda comm: comm.all_reduce(array)


def pending(
    begin: Callable[[Communicator, Any, Any], Any], then: Callable[[Communicator, Any, Any], Any]
) -> Callable[[Communicator], Any]:
    """A call while another one is pending; all ranks begin it."""

    def call(comm: Communicator) -> Any:
        array, out = three(), three()
        handle = begin(comm, array, out)
        try:
            return then(comm, array, out)
        finally:
            assert handle.wait().tolist() == [0, comm.size, 2 * comm.size]

    return call


def begin_into(comm: Communicator, array: Any, out: Any) -> Any:
    return comm.all_reduce(array, out=out, async_op=True)


def begin_right(comm: Communicator) -> Any:
    return pending(begin_into, lambda comm, array, out: comm.all_reduce(three()))(comm)


# As an array and as `out`, where both are refused alike.
UNKNOWN = {
    "another byte order": (np.zeros(3, ">f8"), ValueError, "elements of type >f8 are in another"),
    "objects": (np.zeros(3, object), TypeError, "no collective has elements of type object"),
    "records": (np.zeros(3, [("a", "f8")]), TypeError, "no collective has elements of type"),
    "dates": (
        np.zeros(3, "datetime64[s]"),
        TypeError,
        "no collective has elements of type datetime64[s]",
    ),
    "texts": (np.zeros(3, "U3"), TypeError, "no collective has elements of type <U3"),
    "long doubles": (
        np.zeros(3, np.longdouble),
        TypeError,
        "no collective has elements of type float128",
    ),
    "a number": (3.0, TypeError, f"{NO_ARRAY}float"),
    "a sparse tensor": (torch.zeros(3).to_sparse(), TypeError, "expected a dense tensor, got a"),
}

CASES: dict[str, Wrong] = {
    **{f"{name}": Wrong(of(one), error, f"array: {words}")
       for name, (one, error, words) in UNKNOWN.items()},
    **{f"out is {name}": Wrong(into(one), error, f"out: {words}")
       for name, (one, error, words) in UNKNOWN.items()},
    "a list of numbers": Wrong(of([1.0, 2.0]), TypeError, f"array[0]: {NO_ARRAY}float"),
    "an array with a mask": Wrong(
        of(np.ma.masked_array([1.0, 2.0], [True, False])), TypeError, "array: a masked array"
    ),
    "out is a scalar": Wrong(
        lambda comm: comm.all_reduce(np.float64(1), out=np.float64(1)),
        ValueError,
        "out: NumPy's scalars never change, so it cannot receive the result",
    ),
    "nothing": Wrong(of(None), TypeError, f"array: {NO_ARRAY}NoneType"),
    "an empty tree": Wrong(of({}), ValueError, "array: the tree holds no array"),
    "out is read-only": Wrong(into(constant()), ValueError, "out: it is read-only, so it cannot"),
    "in place in a read-only array": Wrong(
        lambda comm: comm.all_reduce((found := constant()), out=found),
        ValueError,
        "out: it is read-only, so it cannot",
    ),
    "out is bytes": Wrong(
        lambda comm: comm.all_reduce(np.zeros(3, "uint8"), out=b"abc"),
        ValueError,
        "out: it is read-only, so it cannot",
    ),
    "out is read-only by DLPack": Wrong(
        into(Producer(constant())), ValueError, "out: it is read-only, so it cannot"
    ),
    "out is a constant": Wrong(
        into(Constant(three())), ValueError, "out: arrays of jaxlib never change, so it cannot"
    ),
    "out of another shape": Wrong(
        into(np.zeros((3, 1))), ValueError, "out: expected the shape (3,), got (3, 1)"
    ),
    "out of another type": Wrong(
        into(np.zeros(3, "f4")), ValueError, "out: expected elements of float64, got float32"
    ),
    "out is broadcast": Wrong(
        into(torch.zeros(1, dtype=torch.float64).expand(3)),
        ValueError,
        "out: some of its elements share memory",
    ),
    "out is broadcast, by NumPy": Wrong(
        into(np.lib.stride_tricks.as_strided(three(), (3,), (0,))),
        ValueError,
        "out: some of its elements share memory",
    ),
    "out overlaps itself": Wrong(
        lambda comm: comm.all_reduce(
            torch.zeros(2, 2), out=torch.zeros(3).as_strided((2, 2), (1, 1))
        ),
        ValueError,
        "out: some of its elements share memory",
    ),
    "out on another device": Wrong(
        into(torch.zeros(3, dtype=torch.float64, device="meta")),
        ValueError,
        "out: expected an array on cpu, got one on meta",
    ),
    "op": Wrong(
        lambda comm: comm.all_reduce(three(), "mean"),
        ValueError,
        "op: expected one of sum, avg, product, min, max, band, bor, bxor, got 'mean'",
    ),
    "src": Wrong(
        lambda comm: comm.broadcast(three(), 2),
        ValueError,
        "src: expected a rank from 0 to 1, got 2",
        "broadcast",
    ),
    "src of another type": Wrong(
        lambda comm: comm.scatter(three(), "1"),  # type: ignore[call-overload]
        TypeError,
        "src: expected a rank, got '1'",
        "scatter",
    ),
    "dst": Wrong(
        lambda comm: comm.reduce(three(), -1),
        ValueError,
        "dst: expected a rank from 0 to 1, got -1",
        "reduce",
    ),
    "dst of another type": Wrong(
        lambda comm: comm.gather(three(), True),
        TypeError,
        "dst: expected a rank, got True",
        "gather",
    ),
    "input splits": Wrong(
        lambda comm: comm.all_to_all(three(), None, [1, 1]),
        ValueError,
        "input_split_sizes: expected 2 sizes from 0 on that make 3 rows, got [1, 1]",
        "all_to_all",
    ),
    "negative splits": Wrong(
        lambda comm: comm.all_to_all(three(), [4, -1], [1, 2]),
        ValueError,
        "output_split_sizes: expected 2 sizes from 0 on, got [4, -1]",
        "all_to_all",
    ),
    "splits of too many ranks": Wrong(
        lambda comm: comm.all_to_all(three(), None, [1, 1, 1]),
        ValueError,
        "input_split_sizes: expected 2 sizes from 0 on",
        "all_to_all",
    ),
    "no splits": Wrong(
        lambda comm: comm.all_to_all(three()),
        ValueError,
        "input_split_sizes: 3 rows cannot be divided equally among 2 ranks",
        "all_to_all",
    ),
    "sizes": Wrong(
        lambda comm: comm.all_gather_v(three(), [2, 2]),
        ValueError,
        "sizes: this rank has 3 rows, got 2",
        "all_gather_v",
    ),
    "rows to gather": Wrong(
        lambda comm: comm.all_gather_v("abc"), TypeError, f"array: {NO_ARRAY}str", "all_gather_v",
        lambda comm: comm.all_gather_v(three()),
    ),
    "rows that cannot be divided": Wrong(
        lambda comm: comm.reduce_scatter(three()),
        ValueError,
        "array: 3 rows cannot be divided equally among 2 ranks",
        "reduce_scatter",
    ),
    "a number that cannot be divided": Wrong(
        lambda comm: comm.scatter(np.array(1.0)),
        ValueError,
        "array: no dimension cannot be divided equally among 2 ranks",
        "scatter",
    ),
    "out of a gather": Wrong(
        lambda comm: comm.all_gather(three(), out=np.zeros(5)),
        ValueError,
        "out: expected the shape (6,) or (2, 3), got (5,)",
        "all_gather",
    ),
    "out is another tree": Wrong(
        lambda comm: comm.all_reduce(
            {"a": three(), "b": three()}, out={"a": three(), "c": three()}
        ),
        ValueError,
        "out: expected a tree like array, got another one: ['b'], ['c']",
    ),
    "an array of out's tree": Wrong(
        lambda comm: comm.all_reduce({"a": [three()]}, out={"a": [constant()]}),
        ValueError,
        "out['a'][0]: it is read-only",
    ),
    "an array of a tree": Wrong(
        of({"a": three(), "b": [np.zeros(2, object)]}),
        TypeError,
        "array['b'][0]: no collective has elements of type object",
    ),
    "a pending call writes the array": Wrong(
        pending(begin_into, lambda comm, array, out: comm.all_reduce(out)),
        ValueError,
        "array: a pending all_reduce writes it: wait for its handle first",
        right=begin_right,
    ),
    "a pending call writes out": Wrong(
        pending(begin_into, lambda comm, array, out: comm.all_reduce(three(), out=out)),
        ValueError,
        "out: a pending all_reduce writes it: wait for its handle first",
        right=begin_right,
    ),
    "a pending call writes in place": Wrong(
        pending(
            lambda comm, array, out: comm.all_reduce(array, out=array, async_op=True),
            lambda comm, array, out: comm.all_reduce(array, out=array),
        ),
        ValueError,
        "array: a pending all_reduce writes it: wait for its handle first",
        right=begin_right,
    ),
    "a pending call reads out": Wrong(
        pending(begin_into, lambda comm, array, out: comm.all_reduce(three(), out=array)),
        ValueError,
        "out: a pending all_reduce reads it: wait for its handle first",
        right=begin_right,
    ),
    "a pending call writes an array of a tree": Wrong(
        pending(begin_into, lambda comm, array, out: comm.all_reduce({"x": out[1:]})),
        ValueError,
        "array['x']: a pending all_reduce writes it: wait for its handle first",
        right=begin_right,
    ),
}  # fmt: skip


def next_works(comm: Communicator) -> None:
    assert comm.all_reduce(np.ones(2)).tolist() == [comm.size] * 2
    both = comm.all_reduce({"a": np.ones(2), "b": np.ones(1, "i4")})
    assert [one.tolist() for one in both.values()] == [[comm.size] * 2, [comm.size]]


def refused(names: list[str], everyone: bool) -> None:
    """Calls that rank 1 or all ranks cannot make."""
    comm = Communicator.from_group()
    for name in names:
        case = CASES[name]
        try:
            check(comm, case, everyone or comm.rank == 1)
            next_works(comm)
        except BaseException as error:
            raise AssertionError(f"{name}: {error!r}") from error


def check(comm: Communicator, case: Wrong, is_wrong: bool) -> None:
    if is_wrong:
        with pytest.raises(case.error) as found:
            case.call(comm)
        text = str(found.value)
        assert type(found.value) is case.error
        assert text.startswith(f"rank {comm.rank} of 2: {case.verb}: {case.words}"), text
        return
    right = case.right or (lambda comm: comm.all_reduce(three()))
    with pytest.raises(dist.DistBackendError) as failed:
        right(comm)
    text = str(failed.value)
    assert "rank 1 refused its call" in text, text
    assert f"{case.verb}: {case.words}" in text, text


def test_refusals_of_all_ranks(pool: Pool) -> None:
    pool.run(refused, list(CASES), True)


def test_refusals_of_one_rank(pool: Pool) -> None:
    pool.run(refused, list(CASES), False)


def unwritten() -> None:
    """What is refused as `out` stays as it is, and its rank alive."""
    comm = Communicator.from_group()
    for make in (Producer, Constant):
        elements = constant()
        with pytest.raises(ValueError, match="out: "):
            comm.all_reduce(np.ones(3), out=make(elements))
        assert elements.tolist() == [0, 1, 2]
    backwards = three()
    out: Any = Producer(backwards[::-1])
    assert comm.all_reduce(three(), out=out) is out
    assert backwards[::-1].tolist() == [0, comm.size, 2 * comm.size]
    out = Producer(backwards)
    found: Any = comm.all_reduce(Producer(three()[::-1]), out=out)
    assert found is out
    assert backwards.tolist() == [2 * comm.size, comm.size, 0]
    next_works(comm)


def test_what_torchs_import_of_dlpack_takes_wrongly(pool: Pool) -> None:
    """It writes read-only arrays, and ends the process for a negative stride."""
    pool.run(unwritten)


TWO_DEVICES = (
    "all_reduce: array: the tree's arrays are on several devices: array['a'] on cpu and "
    "array['b'] on meta"
)


def two_devices(everyone: bool) -> None:
    comm = Communicator.from_group()
    if not everyone and comm.rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1 refused its call 1: all_reduce: "):
            comm.all_reduce({"a": torch.zeros(2)})
    else:
        with pytest.raises(ValueError) as found:  # noqa: PT011
            comm.all_reduce({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})
        assert str(found.value) == f"rank {comm.rank} of 2: {TWO_DEVICES}"
    next_works(comm)


@pytest.mark.parametrize("everyone", [False, True])
def test_trees_on_two_devices(pool: Pool, everyone: bool) -> None:
    pool.run(two_devices, everyone)


def untold() -> None:
    """A refusal that cannot be told to other ranks is the communicator's last collective."""
    comm = Communicator.from_group()
    with pytest.raises(TypeError) as found:
        comm.all_reduce("x")
    for call in (comm.all_reduce, comm.all_gather, comm.all_gather_object):
        with pytest.raises(RuntimeError, match="this rank has refused a call before") as last:
            call(np.ones(2))
        assert str(last.value).endswith(str(found.value).partition(": ")[2])
    next_works(Communicator.from_group())


def test_a_refusal_over_gloo(pool: Pool) -> None:
    pool.run(untold, options={"shared_memory": False})


def overlapping(step: int) -> str:
    """The text of a refusal of `out` whose elements share memory, at strides that torch lacks."""
    comm = Communicator.from_group()
    memory = np.zeros(64, "uint8")[24:]
    out = np.ndarray((3,), "f8", memory.base, 24, (step,))
    try:
        comm.all_reduce(three(), out=out)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("step", [-4, 4, 1])
def test_elements_of_out_that_share_memory_at_strides_torch_lacks(pool: Pool, step: int) -> None:
    for text in pool.run(overlapping, step):
        assert "out: some of its elements share memory" in text


def one_out_for_two() -> str:
    """The text of a refusal of a tree whose results would overwrite each other."""
    comm = Communicator.from_group()
    out = three()
    try:
        comm.all_reduce([three(), np.ones(3)], out=[out, out])
    except ValueError as error:
        return str(error)
    return ""


def test_one_out_for_two_arrays_of_a_tree(pool: Pool) -> None:
    for text in pool.run(one_out_for_two):
        assert "out[1]: it and out[0] lie in each other's memory" in text


def pending_backwards(later: str) -> str:
    """The text of a refusal of what a pending call writes, at strides that torch lacks."""
    comm = Communicator.from_group()
    out = three()
    handle = comm.all_reduce(three(), out=out[::-1], async_op=True)
    try:
        if later == "array":
            comm.all_reduce(out)
        elif later == "in place":
            comm.all_reduce(out, out=out)
        elif later == "backwards":
            comm.all_reduce(out[::-1])
        else:
            comm.all_reduce(three(), out=out)
        found = ""
    except ValueError as error:
        found = str(error)
    handle.wait()
    return found


@pytest.mark.parametrize("later", ["array", "in place", "backwards", "out"])
def test_what_a_pending_call_writes_at_strides_torch_lacks(pool: Pool, later: str) -> None:
    for text in pool.run(pending_backwards, later):
        assert "a pending all_reduce writes it" in text


def different() -> None:
    """Calls that are each good, but not the same ones."""
    comm = Communicator.from_group()
    first = comm.rank == 0
    types = ["f4", "i4"] if first else ["i4", "f4"]
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.all_gather(np.zeros(3 + comm.rank)), "all_gather(4 x float64"),
        (lambda: comm.all_reduce(np.zeros(3 + comm.rank)), "all_reduce(SUM, 4 x float64"),
        (lambda: comm.all_reduce(np.zeros(3, "f4" if first else "f8")), "3 x float32"),
        (lambda: comm.all_reduce(three(), "sum" if first else "max"), "MAX, 3 x float64"),
        (lambda: comm.broadcast(three(), comm.rank), "root 1"),
        (lambda: comm.broadcast(three()) if first else comm.all_reduce(three()), "broadcast("),
        (lambda: comm.all_to_all(np.zeros(4), [3, 1], [2, 2]), "expects 24"),
        (lambda: comm.all_reduce({"a" if first else "b": three()}), "layout"),
        (lambda: comm.all_reduce({"a": three()} if first else [three()]), "layout"),
        (lambda: comm.all_reduce({"a": three()} if first else three()), "layout"),
        (lambda: comm.all_reduce([np.zeros(1 + comm.rank), np.zeros(2 - comm.rank)]), "layout"),
        (lambda: comm.all_reduce([np.zeros((2, 3) if first else (3, 2))]), "layout"),
        (lambda: comm.all_reduce([np.zeros(2, "f4" if first else "i4")]), "layout"),
        (lambda: comm.all_reduce([np.zeros(2, one) for one in types]), "layout"),
        (lambda: comm.broadcast([np.zeros((2, 3) if first else (3, 2))]), "layout"),
        (lambda: comm.all_reduce([three(), None] if first else [None, three()]), "layout"),
        (lambda: comm.all_reduce([three()], out=[three()] if first else None, op="sum" if first
                                 else "max"), "MAX"),
    ]  # fmt: skip
    for call, words in calls:
        with pytest.raises(dist.DistBackendError) as found:
            call()
        text = str(found.value)
        assert text.startswith("the ranks made different calls: "), text
        assert words in text, text
        assert "refused" not in text
        next_works(comm)


def test_ranks_that_differ(pool: Pool) -> None:
    pool.run(different)


def other_order() -> None:
    """A dict's order of keys is the rank's own."""
    comm = Communicator.from_group()
    names = [f"{one}" for one in range(12)]
    if comm.rank == 1:
        names.reverse()
    tree = {name: np.full(2, float(name), "f4" if int(name) % 2 else "f8") for name in names}
    inner = {"x": tree, "y": {name: tree[name].copy() for name in reversed(names)}}
    for one in (comm.all_reduce(inner), comm.all_reduce(inner, async_op=True).wait()):
        for part in one.values():
            assert {name: array.tolist() for name, array in part.items()} == {
                name: [float(name) * comm.size] * 2 for name in names
            }
    out = {name: np.zeros_like(tree[name]) for name in sorted(names, key=hash)}
    comm.all_reduce(tree, out=out)
    assert all(out[name][0] == float(name) * comm.size for name in names)


def test_dicts_that_were_filled_in_another_order(pool: Pool) -> None:
    pool.run(other_order)


def messages() -> None:
    """A message that is refused is known to its own rank alone."""
    comm = Communicator.from_group()
    other = 1 - comm.rank
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: comm.send(three(), comm.rank), ValueError, "send: dst: expected another rank"),
        (lambda: comm.send(three(), 2), ValueError, "send: dst: expected a rank from 0 to 1"),
        (lambda: comm.send([1], other), TypeError, f"send: array: {NO_ARRAY}list"),
        (lambda: comm.send(three(), other, -1), ValueError, "send: tag: expected a number from 0"),
        (lambda: comm.recv(three(), other, 1 << 20), ValueError, "recv: tag: expected a number"),
        (lambda: comm.recv(three(), comm.rank), ValueError, "recv: src: expected another rank"),
        (lambda: comm.recv(three(), other, out=constant()), ValueError, "recv: out: it is read-"),
        (lambda: comm.recv(three(), other, out=np.zeros(2)), ValueError, "recv: out: expected the"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error) as found:
            call()
        assert str(found.value).startswith(f"rank {comm.rank} of 2: {words}"), str(found.value)
    sent = comm.send(np.full(3, comm.rank), other, async_op=True)
    assert comm.recv(np.zeros(3, int), other).tolist() == [other] * 3
    sent.wait()
    next_works(comm)


def test_messages(pool: Pool) -> None:
    pool.run(messages)


def pending_messages() -> None:
    """Arrays of pending messages, on rank 1."""
    comm = Communicator.from_group()
    if comm.rank == 0:
        for _ in range(3):
            with pytest.raises(dist.DistBackendError, match="rank 1 refused its call"):
                comm.all_reduce(three())
        comm.send(three(), 1)
        assert comm.recv(three(), 1).tolist() == [0, 1, 2]
        next_works(comm)
        return
    sent, got = three(), three()
    receiving = comm.recv(got, 0, out=got, async_op=True)
    sending = comm.send(sent, 0, async_op=True)
    with pytest.raises(ValueError, match="array: a pending recv writes it"):
        comm.all_reduce(got[1:])
    with pytest.raises(ValueError, match="array: a pending recv writes it"):
        comm.all_reduce(got, out=got)
    with pytest.raises(ValueError, match="out: a pending send reads it"):
        comm.all_reduce(three(), out=sent)
    with pytest.raises(ValueError, match="send: array: a pending recv writes it"):
        comm.send(got, 0)
    with pytest.raises(ValueError, match="recv: out: a pending send reads it"):
        comm.recv(three(), 0, out=sent)
    assert receiving.wait() is got
    sending.wait()
    next_works(comm)


def test_pending_messages(pool: Pool) -> None:
    pool.run(pending_messages)


def closed() -> None:
    comm, other = Communicator.from_group(), Communicator.from_group()
    comm.close()
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(three()),
        lambda: comm.all_reduce((found := three()), out=found),
        lambda: comm.all_reduce([three()]),
        lambda: comm.barrier(),
        lambda: comm.send(three(), 1 - comm.rank),
        lambda: comm.recv(three()),
        lambda: comm.all_gather_v(three()),
        lambda: comm.all_gather_object(1),
        lambda: comm.broadcast_object(1),
        lambda: comm.gather_object(1),
        lambda: comm.scatter_object([1, 2]),
        lambda: comm.send_object(1, 1 - comm.rank),
        lambda: comm.recv_object(),
        lambda: comm.split(0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^the communicator is closed$"):
            call()
    comm.close()
    next_works(other)


def test_a_closed_communicator(pool: Pool) -> None:
    pool.run(closed)


def differing_in_place() -> None:
    """The compiled door of an all_reduce in place, which has no Python frame."""
    comm = Communicator.from_group()
    array = np.ones(4, "float32" if comm.rank else "float64")
    with pytest.raises(dist.DistBackendError, match="the ranks made different calls"):
        comm.all_reduce(array, out=array)
    assert array.tolist() == [1.0] * 4
    next_works(comm)
    constant = np.ones(4)
    constant.setflags(write=False)
    with pytest.raises(ValueError, match="out: it is read-only"):
        comm.all_reduce(constant, out=constant)
    assert constant.tolist() == [1.0] * 4
    next_works(comm)


def test_calls_in_place_that_differ(pool: Pool) -> None:
    pool.run(differing_in_place)
