"""Collectives in the order of an accelerator's streams, with the host waiting for nothing."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.devices import device_module, on_device, on_host, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")

SLOW = 0.2  # seconds of a device's work


def options(asynchronous: bool) -> Any:
    made = dist.AllreduceOptions()
    made.asyncOp = asynchronous
    return made


def made_slowly(number: float, size: int = 1000) -> torch.Tensor:
    """Zeros, that become the number when the device gets there."""
    tensor = on_device(torch.zeros(size))
    device_module().delay(SLOW)
    tensor.copy_(torch.full((size,), number))
    return tensor


def everything(number: float, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), number)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_waits_for_work_before_it_and_work_after_it_for_the_call(asynchronous: bool) -> None:
    def body(backend: Any, rank: int) -> None:
        held = device_module().Gate()
        tensor = made_slowly(rank + 1.0)
        work = backend.allreduce([tensor], options(asynchronous))
        work.wait()
        after = on_device(torch.zeros(1000))
        after.copy_(tensor)
        tensor.copy_(torch.zeros(1000))
        assert not work.is_completed()
        held.open()  # the host has reached this line without waiting for the device
        assert torch.equal(on_host(after), everything(3.0))
        assert work.is_completed()

    run_on_devices(2, body)


def test_wait_orders_the_stream_that_is_current_then() -> None:
    def body(backend: Any, rank: int) -> None:
        device = device_module()
        for asynchronous in (False, True):
            tensor = made_slowly(rank + 1.0)
            work = backend.allreduce([tensor], options(asynchronous))
            before = device.use_stream(device.new_stream())
            work.wait()
            assert torch.equal(on_host(tensor), everything(3.0))
            device.use_stream(before)

    run_on_devices(2, body)


def test_an_asynchronous_call_leaves_the_stream_to_the_caller() -> None:
    seen = threading.Event()

    def body(backend: Any, rank: int) -> None:
        held = device_module().Gate() if rank == 1 else None  # rank 0's call waits for this
        tensor = on_device(everything(rank + 1.0))
        work = backend.allreduce([tensor], options(True))
        own = on_device(everything(7.0))
        if held:
            seen.wait(60)
            held.open()
        else:
            assert torch.equal(on_host(own), everything(7.0))
            seen.set()
        work.wait()
        assert torch.equal(on_host(tensor), everything(3.0))

    run_on_devices(2, body)


def test_calls_of_several_streams_keep_the_order_they_were_made_in() -> None:
    def body(backend: Any, rank: int) -> None:
        device = device_module()
        streams = [device.new_stream() for _ in range(3)]
        for turn in range(30):
            device.use_stream(streams[turn % 3])
            if turn % 5 == rank:
                device.delay(0.01)
            tensors = [on_device(everything(rank + turn + part)) for part in range(3)]
            works = [
                backend.allreduce([tensor], options((turn + part) % 2 == 0))
                for part, tensor in enumerate(tensors)
            ]
            for part, work in enumerate(works):
                work.wait()
                assert torch.equal(on_host(tensors[part]), everything(1.0 + 2 * (turn + part)))

    run_on_devices(2, body)


def test_a_tensor_may_be_dropped_while_an_asynchronous_call_uses_it() -> None:
    def body(backend: Any, rank: int) -> None:
        results = []
        for turn in range(10):
            flat = on_device(torch.zeros(2 * 1000))
            part = on_device(everything(rank + 10.0 * turn))
            work = backend._allgather_base(flat, part, gathering(asynchronous=True))
            del part
            gc.collect()
            results.append((turn, flat, work))
        for turn, flat, work in results:
            work.wait()
            expected = torch.cat([everything(10.0 * turn), everything(1 + 10.0 * turn)])
            assert torch.equal(on_host(flat), expected)

    run_on_devices(2, body)


def gathering(asynchronous: bool) -> Any:
    from torch._C._distributed_c10d import AllgatherOptions

    made = AllgatherOptions()
    made.asyncOp = asynchronous
    return made


def test_coalesced_calls_are_one_work() -> None:
    def body(backend: Any, rank: int) -> None:
        tensors = [on_device(everything(rank + part)) for part in range(3)]
        backend._start_coalescing()
        for tensor in tensors:
            backend.allreduce([tensor])
        work = backend._end_coalescing()
        work.wait()
        for part, tensor in enumerate(tensors):
            assert torch.equal(on_host(tensor), everything(1.0 + 2 * part))

    run_on_devices(2, body)


def test_a_barrier_on_a_device_holds_the_host() -> None:
    opened = threading.Event()

    def open_later(gate: Any) -> None:
        opened.set()
        gate.open()

    def body(backend: Any, rank: int) -> None:
        where = dist.BarrierOptions()
        where.device_ids = [rank]
        backend.barrier(where).wait()
        if rank == 1:
            threading.Timer(SLOW, open_later, [device_module().Gate()]).start()
        backend.barrier(where).wait()
        assert opened.is_set()

    run_on_devices(2, body)


def test_futures_are_ready_for_streams_that_wait_for_them() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = made_slowly(rank + 1.0)
        future = backend.allreduce([tensor], options(True)).get_future()
        (result,) = future.wait()
        assert torch.equal(on_host(result), everything(3.0))
        doubled = backend.allreduce([tensor], options(True)).get_future()
        done = doubled.then(lambda value: [on_host(value.value()[0])]).wait()
        assert torch.equal(done[0], everything(6.0))

    run_on_devices(2, body)


def test_what_is_captured_into_a_graph_asks_the_device_for_nothing() -> None:
    """The stand-in captures nothing, but what must not be done in a capture is left out."""

    def body(backend: Any, rank: int) -> None:
        device = device_module()
        device.capture(True)
        with pytest.raises(dist.DistBackendError, match="a graph cannot capture a group's first"):
            backend.allreduce([on_device(everything(1.0))])
        device.capture(False)
        tensor = on_device(everything(1.0))
        backend.allreduce([tensor]).wait()
        where = torch.device("privateuseone", rank)
        kept = backend.allocate_tensor(1000, dtype=torch.float32, device=where)
        device.capture(True)
        other = backend.allocate_tensor(1000, dtype=torch.float32, device=where)
        assert not backend._holds(other)
        work = backend.allreduce([tensor], options(False))
        work.wait()
        with pytest.raises(dist.DistBackendError, match="was captured into a graph, and runs when"):
            work.is_completed()
        place = kept.data_ptr()
        del kept
        device.capture(False)
        again = backend.allocate_tensor(1000, dtype=torch.float32, device=where)
        assert again.data_ptr() != place, "replays may use it"
        assert torch.equal(on_host(tensor), everything(4.0))

    run_on_devices(2, body, registered=1 << 20)
