"""Tensors in an accelerator's registered memory: collectives read and write them in place."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from helpers.devices import device_module, on_device, on_host, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")

MIB = 1 << 20
CHEAP = 1e-15  # seconds of a turn: in place from a few bytes on


def made(backend: Any, rank: int, host: torch.Tensor) -> torch.Tensor:
    """A copy in registered memory."""
    where = torch.device("privateuseone", rank)
    tensor = backend.allocate_tensor(host.numel(), dtype=host.dtype, device=where)
    tensor.copy_(host.reshape(-1))
    return tensor.view(host.shape)


def test_sums_of_registered_tensors_are_made_in_place() -> None:
    def body(backend: Any, rank: int) -> None:
        assert backend.supports_tensor_alloc(torch.device("privateuseone", rank))
        for size in (1, 7, 1000, 50_000):
            host = torch.arange(float(size)) + rank
            expected = 3 * torch.arange(float(size)) + 3
            tensor = made(backend, rank, host)
            assert backend._holds(tensor)
            before = device_module().calls_in_place()
            backend.allreduce([tensor]).wait()
            assert torch.equal(on_host(tensor), expected)
            assert device_module().calls_in_place() > before
            # One rank's is not registered.
            tensor = on_device(host) if rank == 1 else made(backend, rank, host)
            backend.allreduce([tensor]).wait()
            assert torch.equal(on_host(tensor), expected)

    run_on_devices(3, body, registered=MIB, turn=CHEAP)


def test_shards_of_registered_tensors_are_moved_in_place() -> None:
    def body(backend: Any, rank: int) -> None:
        whole = torch.arange(4000.0)
        flat = made(backend, rank, torch.where(torch.arange(4000) // 2000 == rank, whole, 0))
        own = flat[2000 * rank : 2000 * rank + 2000]
        backend._allgather_base(flat, own, AllgatherOptions()).wait()
        assert torch.equal(on_host(flat), whole)
        output = made(backend, rank, torch.zeros(2000))
        backend._reduce_scatter_base(output, flat, ReduceScatterOptions()).wait()
        assert torch.equal(on_host(output), 2 * whole[2000 * rank : 2000 * rank + 2000])
        sent = dist.BroadcastOptions()
        sent.rootRank = 1
        backend.broadcast([output], sent).wait()
        assert torch.equal(on_host(output), 2 * whole[2000:])

    before = device_module().calls_in_place()
    run_on_devices(2, body, registered=MIB, turn=CHEAP)
    assert device_module().calls_in_place() - before >= 5  # a broadcast reads the root's alone


def test_memory_is_used_again_when_streams_are_through_with_it() -> None:
    def body(backend: Any, rank: int) -> None:
        for turn in range(8):
            tensors = [made(backend, rank, torch.full((50_000,), rank + turn * 1.0))]
            works = [backend.allreduce(tensors)]  # asynchronous, and dropped before its end
            del tensors
            gc.collect()
            tensors = [made(backend, rank, torch.full((50_000,), -1.0))]
            for work in works:
                work.wait()
            (result,) = works[0].result()
            assert torch.equal(on_host(result), torch.full((50_000,), 1.0 + 2 * turn))
            assert torch.equal(on_host(tensors[0]), torch.full((50_000,), -1.0))

    run_on_devices(2, body, registered=MIB, turn=CHEAP)


def test_where_it_is_full_tensors_lie_elsewhere_and_explain_says_so() -> None:
    def body(backend: Any, rank: int) -> None:
        kept = made(backend, rank, torch.ones(200_000))
        other = made(backend, rank, torch.ones(200_000))
        assert backend._holds(kept)
        assert not backend._holds(other)
        backend.allreduce([other]).wait()
        assert torch.equal(on_host(other), torch.full((200_000,), 2.0))
        assert "1 requests found it full" in backend.explain("all_reduce", 16)

    run_on_devices(2, body, registered=MIB)


def test_tensors_outlive_their_group() -> None:
    before = device_module().memory_in_use()
    kept: dict[int, torch.Tensor] = {}

    def body(backend: Any, rank: int) -> None:
        kept[rank] = made(backend, rank, torch.full((1000,), rank * 1.0))
        on_host(kept[rank])

    run_on_devices(2, body, registered=MIB)
    gc.collect()
    assert device_module().memory_in_use() == before + 2
    for rank, tensor in kept.items():
        device_module().use_device(rank)
        tensor.copy_(torch.full((1000,), 5.0))
        assert torch.equal(on_host(tensor), torch.full((1000,), 5.0))
    del tensor
    kept.clear()
    gc.collect()
    assert device_module().memory_in_use() == before


def test_without_it_nothing_is_registered() -> None:
    def body(backend: Any, rank: int) -> None:
        assert not backend.supports_tensor_alloc(torch.device("privateuseone", rank))
        tensor = made(backend, rank, torch.ones(10))
        assert not backend._holds(tensor)
        backend.allreduce([tensor]).wait()
        assert torch.equal(on_host(tensor), torch.full((10,), 2.0))

    run_on_devices(2, body)
