"""A wrong call says what was wrong with it, on every rank, and leaves the group usable."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from dreamcomm import Options
from dreamcomm.info import monitored_barrier, transport
from helpers.pool import Fresh, Pool
from helpers.processes import replies

pytestmark = pytest.mark.beyond_gloo("words and recovery are dreamcomm's own")

f32 = torch.float32


def default_group() -> Any:
    """The default group itself, for calls that torch.distributed checks beforehand."""
    return dist.group.WORLD


def zeros(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


FREED = "storage was freed: it has 0 bytes, the tensor needs 16"


def freed(left: int = 0, part: slice = slice(None)) -> torch.Tensor:
    tensor = zeros(4)[part]
    tensor.untyped_storage().resize_(left)
    return tensor


def pair(count: int = 2, dtype: torch.dtype = f32) -> list[torch.Tensor]:
    return [zeros(count, dtype=dtype) for _ in range(dist.get_world_size())]


# Calls that every rank makes alike. Each with what its message must hold.
ALIKE: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "all_gather list length": (
        lambda: dist.all_gather(pair()[:1], zeros(2)),
        ("all_gather", "expected", "list of 2", "got 1"),
    ),
    "all_gather size": (
        lambda: dist.all_gather(pair(3), zeros(2)),
        ("all_gather", "expected", "2 elements", "got 3"),
    ),
    "all_gather_into_tensor size": (
        lambda: dist.all_gather_into_tensor(zeros(5), zeros(2)),
        ("all_gather", "expected", "4 elements", "got 5"),
    ),
    "all_gather_into_tensor dtype": (
        lambda: dist.all_gather_into_tensor(zeros(4, dtype=torch.int32), zeros(2)),
        ("all_gather", "expected", "float32", "got int32"),
    ),
    "reduce_scatter list length": (
        lambda: dist.reduce_scatter(zeros(2), pair()[:1]),
        ("reduce_scatter", "expected", "list of 2", "got 1"),
    ),
    "reduce_scatter_tensor size": (
        lambda: dist.reduce_scatter_tensor(zeros(2), zeros(5)),
        ("reduce_scatter", "expected", "elements", "got 5"),
    ),
    "reduce_scatter_tensor dtype": (
        lambda: dist.reduce_scatter_tensor(zeros(2, dtype=torch.float64), zeros(4)),
        ("reduce_scatter", "expected", "got"),
    ),
    "splits whose sum wraps around": (
        lambda: dist.all_to_all_single(
            zeros(3), zeros(3), [2**63 - 1, 2**63 - 1], [2**63 - 1, 2**63 - 1]
        ),
        ("all_to_all", "expected split sizes", "0 to its first dimension, 3"),
    ),
    "memory that was freed, sent": (
        lambda: default_group().send([freed()], 1 - dist.get_rank(), 0),
        ("send", "expected 'tensor' to have memory", FREED),
    ),
    "memory that was freed, received": (
        lambda: dist.recv(freed(), 1 - dist.get_rank()),
        ("recv", "expected 'tensor' to have memory", FREED),
    ),
    "memory that was freed, in a batch": (
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, freed(), 1 - dist.get_rank())]),
        ("recv", "expected 'tensor' to have memory", FREED),
    ),
    "memory that was freed": (
        lambda: dist.all_reduce(freed()),
        ("all_reduce", "expected 'tensor' to have memory", FREED),
    ),
    "memory that was freed, asynchronous": (
        lambda: dist.all_reduce(freed(), async_op=True),
        ("all_reduce", "expected 'tensor' to have memory", FREED),
    ),
    "memory that was freed, behind an offset": (
        lambda: dist.all_reduce(freed(part=slice(2, 4)), async_op=True),
        ("all_reduce", "expected 'tensor' to have memory", FREED),
    ),
    "memory that was freed, strided": (
        lambda: dist.broadcast(freed(part=slice(0, 4, 2)), 0, async_op=True),
        ("broadcast", "to have memory", "it has 0 bytes, the tensor needs 12"),
    ),
    "memory that was freed in part": (
        lambda: dist.all_reduce(freed(8), async_op=True),
        ("all_reduce", "to have memory", "it has 8 bytes, the tensor needs 16"),
    ),
    "memory that was freed, in a list": (
        lambda: dist.all_gather([zeros(4), freed()], zeros(4), async_op=True),
        ("all_gather", "expected 'tensor_list' to have memory", FREED),
    ),
    "memory that was freed, coalesced": (
        lambda: default_group().allreduce_coalesced([zeros(4), freed()]),
        ("all_reduce", "expected 'tensors' to have memory", FREED),
    ),
    "all_to_all_single splits": (
        lambda: dist.all_to_all_single(zeros(4), zeros(4), [2, 2], [1, 2]),
        ("all_to_all", "split", "expected", "4", "[1, 2]"),
    ),
    "all_to_all_single not divisible": (
        lambda: dist.all_to_all_single(zeros(3), zeros(3)),
        ("all_to_all", "multiple", "2", "[3]"),
    ),
    "all_to_all_single dtype": (
        lambda: dist.all_to_all_single(zeros(4, dtype=torch.int64), zeros(4)),
        ("different dtypes", "int64", "float32"),  # torch's own words
    ),
    "all_to_all list length": (
        lambda: dist.all_to_all(pair()[:1], pair()[:1]),
        ("all_to_all", "list of 2", "got 1"),
    ),
    "gather dtype": (
        lambda: default_group().gather([[*pair(2, torch.int8)]], [zeros(2)], _gather_options()),
        ("gather", "expected", "got"),
    ),
    "bits of floats": (
        lambda: dist.all_reduce(zeros(2), dist.ReduceOp.BXOR),
        ("all_reduce", "BXOR", "float32"),
    ),
    "average of booleans": (
        lambda: dist.all_reduce(zeros(2, dtype=torch.bool), dist.ReduceOp.AVG),
        ("all_reduce", "AVG", "bool"),
    ),
    "minimum of complex": (
        lambda: dist.reduce_scatter(
            zeros(2, dtype=torch.complex64), pair(2, torch.complex64), dist.ReduceOp.MIN
        ),
        ("reduce_scatter", "MIN", "complex64"),
    ),
    "half of an integer": (
        lambda: dist.all_reduce(zeros(2, dtype=torch.int32), _premul(0.5)),
        ("all_reduce", "0.5", "int32"),
    ),
    "factor beyond int8": (
        lambda: dist.all_reduce(zeros(2, dtype=torch.int8), _premul(300.0)),
        ("all_reduce", "300", "int8"),
    ),
    "expanded memory": (
        lambda: dist.all_reduce(zeros(1).expand(4)),
        ("all_reduce", "expected", "clone"),
    ),
    "root out of range": (
        lambda: default_group().broadcast([zeros(2)], _root(dist.BroadcastOptions(), 7)),
        ("broadcast", "expected", "0 to 1", "got 7"),
    ),
    "negative peer": (
        lambda: default_group().send([zeros(2)], -3, 0),
        ("send", "expected", "got -3"),
    ),
}


def _premul(factor: float) -> Any:
    return dist._make_nccl_premul_sum(factor)


def _root(options: Any, rank: int) -> Any:
    options.rootRank = rank
    options.rootTensor = 0
    return options


def _gather_options() -> Any:
    options = dist.GatherOptions()
    options.rootRank = 0
    return options


def make_wrong_call(name: str) -> tuple[str, str]:
    """The class and text of what the call raises; then the group must work."""
    call, _ = ALIKE[name]
    try:
        work = call()
        if work is not None:
            work.wait()
    except (ValueError, RuntimeError) as error:
        found = type(error).__name__, str(error)
    else:
        found = "", "no error"
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    return found


@pytest.mark.parametrize("name", ALIKE)
def test_wrong_arguments(pool: Pool, name: str) -> None:
    _, fragments = ALIKE[name]
    found = pool.run(make_wrong_call, name)
    if name == "gather dtype":  # only the root gives a list that can be wrong
        found = found[:1]
    for kind, text in found:
        assert kind in ("ValueError", "DistBackendError"), text
        missing = [fragment for fragment in fragments if fragment not in text]
        assert not missing, f"{missing} not in: {text}"


# Calls that differ between the ranks: by rank.
DIFFERENT: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "count": (lambda rank: dist.all_reduce(zeros(3 + rank)), ("3 x float32", "4 x float32")),
    "dtype": (
        lambda rank: dist.all_reduce(zeros(4, dtype=(f32, torch.int32)[rank])),
        ("4 x float32", "4 x int32"),
    ),
    "op": (
        lambda rank: dist.all_reduce(zeros(4), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
        ("SUM", "MAX"),
    ),
    "kind": (
        lambda rank: dist.broadcast(zeros(4), 0) if rank else dist.all_reduce(zeros(4)),
        ("all_reduce", "broadcast"),
    ),
    "root": (lambda rank: dist.broadcast(zeros(4), rank), ("root 0", "root 1")),
    "parts of a coalesced call": (
        lambda rank: default_group().allreduce_coalesced([zeros(4)] * (2 + rank)).wait(),
        ("1 more to come", "2 more to come"),
    ),
    "splits": (
        lambda rank: dist.all_to_all_single(zeros(4), zeros(4), [[2, 2], [1, 3]][rank], [2, 2]),
        ("all_to_all", "rank 0", "rank 1"),
    ),
}


def make_different_calls(name: str, count: int) -> str:
    call, _ = DIFFERENT[name]
    text = "no error"
    for _ in range(count):
        try:
            call(dist.get_rank())
        except dist.DistBackendError as error:
            text = str(error)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    return text


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_name_both_and_move_nothing(pool: Pool, name: str) -> None:
    _, fragments = DIFFERENT[name]
    for text in pool.run(make_different_calls, name, 3):
        missing = [part for part in ("rank 0", "rank 1", *fragments) if part not in text]
        assert not missing, f"{missing} not in: {text}"


def asynchronous_difference() -> str:
    data = zeros(3 + dist.get_rank())
    work = dist.all_reduce(data, async_op=True)
    try:
        work.wait()
    except dist.DistBackendError as error:
        text = str(error)
        assert work.exception() is not None
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0
    return text


def test_an_asynchronous_call_fails_in_wait(pool: Pool) -> None:
    for text in pool.run(asynchronous_difference):
        assert "3 x float32" in text
        assert "4 x float32" in text


def wrong_message_size() -> str:
    try:
        if dist.get_rank() == 0:
            dist.send(zeros(4), 1, tag=9)
        else:
            dist.recv(zeros(3), 0, tag=9)
        text = ""
    except dist.DistBackendError as error:
        text = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0
    return text


def test_a_message_of_another_size(pool: Pool) -> None:
    text = pool.run(wrong_message_size)[1]
    for part in ("tag 9", "12 bytes", "16", "rank 0"):
        assert part in text


def coalesce_wrongly() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(zeros(2), dist.ReduceOp.BAND)
        dist.all_reduce(zeros(2), dist.ReduceOp.BAND)


def failed_coalescing() -> float:
    """An error inside a coalescing block does not swallow later calls."""
    with pytest.raises((ValueError, RuntimeError)):
        coalesce_wrongly()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_failed_coalescing_block(pool: Pool) -> None:
    assert pool.run(failed_coalescing) == [2.0, 2.0]


def failed_batch() -> list[float]:
    """An error inside of a batch of messages does not spoil the next one."""
    peer = 1 - dist.get_rank()
    data, room = torch.ones(4), torch.zeros(4)
    no_memory = torch.zeros(1).expand(4)
    with pytest.raises(ValueError, match="clone"):
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, no_memory, peer)]
        )
    dist.recv(torch.zeros(4), peer)  # what was sent before the error
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, room, peer)]
    ):
        work.wait()
    return room.tolist()


def test_a_failed_batch(pool: Pool) -> None:
    assert pool.run(failed_batch) == [[1.0] * 4] * 2


def staged_in_inference_mode() -> list[float]:
    """Calls that copy to and from a temporary on another thread."""
    peer = 1 - dist.get_rank()
    with torch.inference_mode():
        data = torch.ones(4, 4).t()[::2]
        work = dist.all_reduce(data, async_op=True)
        assert work is not None
        work.wait()
        room = torch.zeros(4, 4).t()[::2]
        for one in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, room, peer)]
        ):
            one.wait()
        return [data.sum().item(), room.sum().item()]


def test_strided_tensors_in_inference_mode(pool: Pool) -> None:
    assert pool.run(staged_in_inference_mode) == [[16.0, 16.0]] * 2


def written_outside_of_inference_mode(is_async: bool) -> list[Any]:
    """A contiguous tensor is written in place; a strided one through a temporary."""
    peer = 1 - dist.get_rank()
    with torch.inference_mode():
        whole, strided, room = torch.ones(4), torch.ones(4, 4).t()[::2], torch.zeros(4, 4).t()[::2]
    for data in (whole, strided):
        work = dist.all_reduce(data, async_op=is_async)
        if work is not None:
            work.wait()
    sent = dist.isend(whole, peer)
    if is_async:
        received = dist.irecv(room[0], peer)
        assert received is not None
        received.wait()
    else:
        dist.recv(room[0], peer)
    assert sent is not None
    sent.wait()
    return [whole.tolist(), strided.unique().tolist(), room[0].tolist(), torch.is_grad_enabled()]


@pytest.mark.parametrize("is_async", [False, True])
def test_inference_tensors_outside_of_inference_mode(pool: Pool, is_async: bool) -> None:
    found = pool.run(written_outside_of_inference_mode, is_async)
    assert found == [[[2.0] * 4, [2.0], [2.0] * 4, True]] * 2


def one_tensor_twice() -> float:
    data = torch.ones(3)
    dist.all_reduce_coalesced([data, data])
    return data[0].item()


def test_a_tensor_twice_in_a_coalesced_call_is_reduced_once(pool: Pool) -> None:
    assert pool.run(one_tensor_twice) == [2.0, 2.0]


def no_ranks_in_time(rank: int, store: str) -> str:
    if rank == 1:
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        dist.init_process_group(
            "dreamcomm",
            store=dist.FileStore(store, 2),
            rank=0,
            world_size=2,
            timeout=timedelta(seconds=0.5),
        )
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(fresh: Fresh, tmp_path: Path) -> None:
    text = fresh.run(no_ranks_in_time, str(tmp_path / "store"), group=False)[0]
    for part in ("rank 0 of 2", "rank 1 has not come", "10000 ms"):
        assert part in text


def wait_for_ever() -> float:
    """A timeout that reaches beyond the end of the clock."""
    group = dist.new_group(timeout=timedelta(days=365 * 400))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert transport(group).startswith("shm")
    return total.item()


def test_a_timeout_beyond_the_clock(pool: Pool) -> None:
    assert pool.run(wait_for_ever) == [2.0, 2.0]


def wait_for_the_longest(options: dict[str, Any]) -> float:
    """timedelta.max, which torch reads as a time long past, wherever a timeout can be given."""
    longest = timedelta.max
    group = dist.new_group(timeout=longest, pg_options=Options(timeout=longest, **options))
    total = torch.ones(1)
    works = [dist.all_reduce(total, group=group, async_op=True), dist.barrier(group, async_op=True)]
    for work in works:
        assert work is not None
        work.wait(longest)
    peer = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, total, peer, group),
            dist.P2POp(dist.irecv, torch.ones(1), peer, group),
        ]
    ):
        work.wait(longest)
    group.monitored_barrier(longest, False)
    monitored_barrier(group, longest)
    monitored_barrier(group, 1e300)
    _set_pg_timeout(longest, group)
    dist.barrier(group)
    return total.item()


@pytest.mark.parametrize("hosts", ["", "a,b"])
def test_the_longest_timeout(pool: Pool, hosts: str) -> None:
    assert pool.run(wait_for_the_longest, {"hosts": hosts}) == [2.0, 2.0]


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": "foo"}, "'foo'"),
    "no page": ({"page_bytes": 0}, "page_bytes"),
    "large page": ({"page_bytes": 2**63}, "page_bytes"),
    "large message": ({"message_bytes": 2**63}, "message_bytes"),
    "large heap": ({"heap_bytes": 2**63}, "heap_bytes"),
    "small message": ({"message_bytes": 1}, "message_bytes"),
    "wire": ({"internode_dtype": "8bit"}, "'8bit'"),
    "blank in a host": ({"hosts": "a, b"}, "without blanks"),
    "no host": ({"hosts": "a,,b"}, "'a,,b'"),
    "no last host": ({"hosts": "a,b,"}, "'a,b,'"),
    "timeout": ({"timeout": timedelta(seconds=-1)}, "timeout"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(name: str) -> None:
    fields, fragment = WRONG_OPTIONS[name]
    with pytest.raises(ValueError, match=fragment):
        Options(**fields)


def test_options_are_values() -> None:
    options = Options(algorithm="ring", page_bytes=2**16, timeout=timedelta(seconds=5))
    again = pickle.loads(pickle.dumps(options))
    assert again == options == copy.deepcopy(options)
    assert again != Options()
    assert again.timeout == timedelta(seconds=5)


def test_options_have_second_names() -> None:
    assert Options(algorithm="two_shot") == Options(algorithm="direct")
    assert Options(algorithm="zero_copy").algorithm == "heap"
    options = Options(halves_between_hosts="16bit")
    assert options.internode_dtype == options.halves_between_hosts == "16bit"
    options.halves_between_hosts = "float32"
    options.algorithm = "two_shot"
    assert options == Options(algorithm="direct")


def different_options(rank: int, store: str) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        dist.init_process_group(
            "dreamcomm",
            store=dist.FileStore(store, 2),
            rank=rank,
            world_size=2,
            pg_options=Options(fixed_order=rank == 0),
        )
    return str(caught.value)


def test_options_that_differ_between_ranks(fresh: Fresh, tmp_path: Path) -> None:
    for text in fresh.run(different_options, str(tmp_path / "store"), group=False):
        assert "differently: fixed_order=" in text
        assert "fixed_order=1" in text
        assert "fixed_order=0" in text
        assert "algorithm" not in text
        assert "use_local_synchronization" not in text


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def differ_where_rank_0_keeps_the_store(rank: int, port: int) -> str:
    """Rank 0 ends its process with the error, and the store with it."""
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)
    options = Options(fixed_order=rank == 0)
    with pytest.raises(RuntimeError) as caught:
        dist.init_process_group(
            "dreamcomm", store=store, rank=rank, world_size=3, pg_options=options
        )
    if rank == 0:
        os._exit(7)
    return str(caught.value)


def test_all_ranks_hear_of_different_options_from_a_store_that_goes(fresh: Fresh) -> None:
    ranks = fresh.start(differ_where_rank_0_keeps_the_store, free_port(), world=3, group=False)
    found = replies(ranks, timeout=60)
    assert "process ended with 7" in str(found[0].error)
    for reply in found[1:]:
        assert reply.error is None, reply.error
        assert "set up the same group differently" in reply.value


def one_rank_has_no_descriptors(rank: int, port: int) -> str:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    if rank == 1:
        free = os.dup(0)  # the lowest there is: all below are taken
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, 4096))
    with pytest.raises(RuntimeError) as caught:
        dist.init_process_group("dreamcomm", store=store, rank=rank, world_size=2)
    return str(caught.value)


def test_a_rank_that_cannot_set_up_tells_the_others(fresh: Fresh) -> None:
    found = fresh.run(one_rank_has_no_descriptors, free_port(), group=False)
    for text in found:
        assert "Too many open files" in text
    assert "rank 1" in found[0]
