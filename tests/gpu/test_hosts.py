"""Collectives on accelerators of several hosts: kernels within each, an engine between them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from helpers.device_checks import (
    SIZES,
    TYPES,
    check_all_to_all,
    check_gathering,
    check_rooted,
    check_scattering,
    operations_on,
    same,
)
from helpers.devices import Engines, device_module, on_device, on_host, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")

HOSTS = ("a,a,b,b", "a,b,b", "b,a,b,c", "a,b")
CHUNK = 256  # bytes at a time: some ten chunks of the largest tensors


def world_of(hosts: str) -> int:
    return hosts.count(",") + 1


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sums in another order have other bits."""
    generator = torch.Generator().manual_seed(10 + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 4, (size,), generator=generator).to(dtype)


def same_bits(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(on_host(tensor).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("hosts", "halves", "types"),
    [
        *(pytest.param(one, "float32", TYPES, marks=pytest.mark.long) for one in HOSTS[:2]),
        *((one, "float32", TYPES) for one in HOSTS[2:]),
        *((one, "16bit", (torch.float16, torch.bfloat16)) for one in HOSTS[1:3]),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} types",
)
def test_sums_have_the_bits_of_the_hosts_tensors(
    hosts: str, halves: str, types: tuple[torch.dtype, ...]
) -> None:
    def body(backend: Any, rank: int) -> None:
        for dtype in types:
            for op in operations_on(dtype):
                check_reductions(backend, rank, dtype, op)

    run_on_devices(world_of(hosts), body, hosts=hosts, halves=halves, chunk=CHUNK)


def check_reductions(backend: Any, rank: int, dtype: torch.dtype, op: Any) -> None:
    world = backend.size()
    for size in (1, 300):
        mine = numbers(rank, size, dtype)
        there = on_device(mine)
        backend.allreduce([there], op).wait()
        backend.allreduce([mine], op).wait()
        same_bits(there, mine)
        mine = numbers(rank, size, dtype)
        there = on_device(mine)
        rooted = dist.ReduceOptions()
        rooted.reduceOp, rooted.rootRank = op, world - 1
        backend.reduce([there], rooted).wait()
        backend.reduce([mine], rooted).wait()
        same_bits(there, mine)
        rows = numbers(rank, world * size, dtype)
        scattered = dist.ReduceScatterOptions()
        scattered.reduceOp = op
        shard = torch.zeros(size, dtype=dtype)
        there = on_device(shard)
        backend._reduce_scatter_base(there, on_device(rows), scattered).wait()
        backend._reduce_scatter_base(shard, rows, scattered).wait()
        same_bits(there, shard)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("chunk", [CHUNK, 1 << 20])
def test_each_collective_moves_what_it_should(hosts: str, chunk: int) -> None:
    def body(backend: Any, rank: int) -> None:
        for size in SIZES:
            check_rooted(backend, rank, backend.size(), size)
            check_gathering(backend, rank, backend.size(), size)
            check_scattering(backend, rank, backend.size(), size)
            check_all_to_all(backend, rank, backend.size(), size)

    for board in run_on_devices(world_of(hosts), body, hosts=hosts, chunk=chunk):
        assert board.failure() == ""


@pytest.mark.parametrize("hosts", ["b,a,b,c", "a,b,b,b"])
def test_every_rank_may_be_the_root(hosts: str) -> None:
    def body(backend: Any, rank: int) -> None:
        for root in range(backend.size()):
            for size in (0, 1, 300):
                check_rooted(backend, rank, backend.size(), size, root)

    run_on_devices(4, body, hosts=hosts, chunk=CHUNK)


def test_tensors_in_pieces_and_calls_of_many_tensors() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.arange(1200.0).reshape(30, 40) * (rank + 1))
        backend.allreduce([tensor.as_strided((40, 30), (1, 40))]).wait()
        same(tensor, torch.arange(1200.0).reshape(30, 40) * 10)
        sizes = (1, 300, 0, 7)
        tensors = [on_device(torch.full((size,), rank + 1.0)) for size in sizes]
        backend.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        for size, tensor in zip(sizes, tensors, strict=True):
            same(tensor, torch.full((size,), 10.0))

    run_on_devices(4, body, hosts="b,a,b,c", chunk=CHUNK)


def test_sums_of_what_has_the_same_bits_and_blocks_of_no_bytes() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.tensor([1 + 2j, -3j] * 50) * (rank + 1))
        backend.allreduce([tensor], dist.ReduceOp(dist.ReduceOp.AVG)).wait()
        same(tensor, torch.tensor([1 + 2j, -3j] * 50) * 2.5)
        tensor = on_device(torch.tensor([60_000 + rank], dtype=torch.uint16))
        backend.allreduce([tensor]).wait()
        same(tensor, torch.tensor([(240_000 + 6) % 65_536], dtype=torch.uint16))
        after, before = (rank + 1) % 4, (rank - 1) % 4
        sent, received = on_device(torch.full((3,), float(rank))), on_device(torch.zeros(3))
        splits = (
            [3 if peer == before else 0 for peer in range(4)],
            [3 if peer == after else 0 for peer in range(4)],
        )
        backend.alltoall_base(received, sent, *splits, dist.AllToAllOptions()).wait()
        same(received, torch.full((3,), float(before)))

    run_on_devices(4, body, hosts="a,b,b,a", chunk=CHUNK)


def test_barriers_on_devices_and_a_group_that_closes_while_calls_are_under_way() -> None:
    def body(backend: Any, rank: int) -> None:
        on_its_device = dist.BarrierOptions()
        on_its_device.device_ids = [rank]
        backend.barrier(on_its_device).wait()
        options = dist.AllreduceOptions()
        options.asyncOp = True
        device_module().delay(0.2)
        backend.allreduce([on_device(torch.ones(900))], options)

    run_on_devices(4, body, hosts="a,b,a,b", chunk=CHUNK)


def test_it_goes_on_registered_memory_as_on_other() -> None:
    def body(backend: Any, rank: int) -> None:
        device = torch.device("privateuseone", rank)
        tensor = backend.allocate_tensor(1000, dtype=torch.float32, device=device)
        tensor.copy_(torch.arange(1000.0) * (rank + 1))
        assert backend._holds(tensor)
        backend.allreduce([tensor]).wait()
        same(tensor, torch.arange(1000.0) * 10)

    run_on_devices(4, body, hosts="a,a,b,b", registered=1 << 20, turn=1e-9)


def test_a_rank_sends_its_share_between_hosts() -> None:
    """2 (H - 1) / H of S / L bytes, with H hosts of L ranks each."""
    sent: dict[int, int] = {}

    def body(backend: Any, rank: int) -> None:
        backend.allreduce([on_device(torch.ones(1200))]).wait()
        of_call = backend.stats()["all_reduce"]
        assert of_call["sent_between_hosts"] == of_call["received_between_hosts"]
        sent[rank] = of_call["sent_between_hosts"]

    boards = run_on_devices(4, body, hosts="a,a,b,b", chunk=CHUNK)
    assert sent == dict.fromkeys(range(4), 4800 // 2)
    assert sum(board.traffic()[1] for board in boards) == 4 * 4800 // 2


def test_the_host_waits_for_nothing_and_streams_keep_the_order() -> None:
    def body(backend: Any, rank: int) -> None:
        held = device_module().Gate()
        tensor = on_device(torch.zeros(700))
        tensor.copy_(torch.full((700,), rank + 1.0))
        gathered = on_device(torch.zeros(4 * 700))
        options = AllgatherOptions()
        options.asyncOp = True
        work = backend.allreduce([tensor])
        other = backend._allgather_base(gathered, tensor, options)
        work.wait()
        other.wait()
        after = on_device(torch.zeros(700))
        after.copy_(tensor)
        tensor.copy_(torch.zeros(700))
        assert not work.is_completed()
        held.open()
        same(after, torch.full((700,), 10.0))
        same(gathered, torch.full((4 * 700,), 10.0))

    for _ in range(5):
        run_on_devices(4, body, hosts="a,a,b,b", chunk=CHUNK)


def test_tensors_of_host_and_device_take_their_own_paths() -> None:
    def body(backend: Any, rank: int) -> None:
        for turn in range(10):
            on_cpu = torch.full((100,), float(rank + turn))
            tensor = on_device(on_cpu)
            work = backend.allreduce([tensor])
            backend.allreduce([on_cpu]).wait()
            work.wait()
            same(tensor, torch.full((100,), 6.0 + 4 * turn))
            assert torch.equal(on_cpu, torch.full((100,), 6.0 + 4 * turn))

    run_on_devices(4, body, hosts="a,b,a,b")


def test_messages_go_to_ranks_of_both_levels() -> None:
    def body(backend: Any, rank: int) -> None:
        for peer in range(4):
            if peer == rank:
                continue
            sent, received = on_device(torch.full((9,), float(rank))), on_device(torch.zeros(9))
            backend._start_coalescing()
            backend.send([sent], peer, 0)
            backend.recv([received], peer, 0)
            backend._end_coalescing().wait()
            same(received, torch.full((9,), float(peer)))

    run_on_devices(4, body, hosts="a,b,a,b")


def test_a_call_that_fails_in_one_host_fails_in_all() -> None:
    """Ranks 0 and 1, of one host, make different calls, which their kernels notice."""
    told: dict[int, str] = {}

    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.ones(700))
        backend.allreduce([tensor]).wait()
        op = dist.ReduceOp(dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)
        backend.allreduce([tensor], op).wait()
        device_module().synchronize()
        with pytest.raises(dist.DistBackendError) as failed:
            backend.allreduce([tensor]).wait()
        told[rank] = str(failed.value)

    run_on_devices(4, body, hosts="a,a,b,b", seconds=20)
    for rank in (0, 1):
        assert "(ranks 0, 1), here numbered from 0 on: " in told[rank]
        assert "made another call" in told[rank]
        assert told[rank].startswith("all_reduce(SUM, 700 x float32): on host ")
        assert told[rank].count("here numbered") == 1
    for rank in (2, 3):
        assert "has failed on a rank of another host" in told[rank]


def test_where_one_rank_cannot_all_let_torch_carry_whole_calls() -> None:
    class Broken(Engines):
        def make(self, store: Any, rank: int, size: int, options: Any, device_type: str) -> Any:
            if rank == 2 and device_type == "cuda" and not tried.is_set():
                tried.set()
                raise RuntimeError("this machine has none")
            return super().make(store, rank, size, options, device_type)

    tried = threading.Event()
    engines = Broken()

    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.tensor([rank]))
        backend.allreduce([tensor], dist.ReduceOp(dist.ReduceOp.MAX)).wait()
        same(tensor, torch.tensor([3]))
        text = backend.explain("all_reduce", 8)
        assert (
            "rank 2: what goes between hosts: RuntimeError: this machine has none"
            in text.replace("\n", " ")
        )

    run_on_devices(4, body, hosts="a,a,b,b", engines=engines)
