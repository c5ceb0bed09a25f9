"""Messages between two ranks on an accelerator's tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.devices import device_module, on_device, on_host, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")


def numbers(of: int, size: int) -> torch.Tensor:
    return torch.arange(float(size)) + 1000 * of


@pytest.mark.parametrize("size", [0, 1, 7, 20_000])
def test_a_message_arrives(size: int) -> None:
    def body(backend: Any, rank: int) -> None:
        if rank == 0:
            backend.send([on_device(numbers(1, size))], 2, 5).wait()
        elif rank == 2:
            tensor = on_device(torch.zeros(size))
            backend.recv([tensor], 0, 5).wait()
            assert torch.equal(on_host(tensor), numbers(1, size))

    run_on_devices(3, body)


def test_messages_of_both_ways_pass_each_other_in_the_order_sent() -> None:
    def body(backend: Any, rank: int) -> None:
        peer = 1 - rank
        sent = [backend.send([on_device(numbers(10 * rank + i, 5000))], peer, 0) for i in range(4)]
        tensors = [on_device(torch.zeros(5000)) for _ in range(4)]
        for i, tensor in enumerate(tensors):
            backend.recv([tensor], peer, 0).wait()
            assert torch.equal(on_host(tensor), numbers(10 * peer + i, 5000))
        for work in sent:
            work.wait()

    run_on_devices(2, body)


def test_a_batch_of_messages_round_a_ring_needs_no_order_of_its_own() -> None:
    def body(backend: Any, rank: int) -> None:
        after, before = (rank + 1) % 4, (rank - 1) % 4
        for turn in range(3):
            tensor = on_device(torch.zeros(3000))
            backend._start_coalescing()
            backend.send([on_device(numbers(rank + turn, 3000))], after, 0)
            backend.recv([tensor], before, 0)
            backend._end_coalescing().wait()
            assert torch.equal(on_host(tensor), numbers(before + turn, 3000))

    run_on_devices(4, body)


def test_a_batched_message_follows_the_stream_it_was_made_on() -> None:
    def body(backend: Any, rank: int) -> None:
        device = device_module()
        peer = 1 - rank
        sent, received = on_device(torch.zeros(1000)), on_device(torch.zeros(1000))
        device.synchronize()
        backend._start_coalescing()
        before = device.use_stream(device.new_stream())
        device.delay(0.1)
        sent.copy_(numbers(rank, 1000))
        backend.send([sent], peer, 0)
        device.use_stream(before)
        backend.recv([received], peer, 0)
        backend._end_coalescing().wait()
        assert torch.equal(on_host(received), numbers(peer, 1000))

    run_on_devices(2, body)


def test_a_batch_that_fails_leaves_no_batch_behind() -> None:
    def body(backend: Any, rank: int) -> None:
        device = device_module()
        tensor = on_device(torch.ones(10))
        backend._start_coalescing()
        device.use_device(rank + 2)
        elsewhere = on_device(torch.ones(10))
        device.use_device(rank)
        backend.send([tensor], 1 - rank, 0)
        backend.recv([elsewhere], 1 - rank, 0)
        with pytest.raises(ValueError, match="calls are on privateuseone"):
            backend._end_coalescing()
        with pytest.raises(ValueError, match="coalescing ends that was not started"):
            backend._end_coalescing()

    run_on_devices(2, body, seconds=2)


def test_a_message_waits_for_work_before_it_and_work_after_it_for_the_message() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.zeros(1000))
        if rank == 0:
            backend.recv([on_device(torch.zeros(1))], 1, 0).wait()
            held = device_module().Gate()
            tensor.copy_(numbers(3, 1000))
            work = backend.send([tensor], 1, 0)
            work.wait()
            tensor.copy_(torch.zeros(1000))
            held.open()  # the host has reached this line without waiting for the device
        else:
            backend.send([on_device(torch.zeros(1))], 0, 0).wait()
            backend.recv([tensor], 0, 0).wait()
            assert torch.equal(on_host(tensor), numbers(3, 1000))

    run_on_devices(2, body)


def test_tensors_that_are_not_plain_memory_are_staged() -> None:
    def body(backend: Any, rank: int) -> None:
        whole = numbers(0, 12).reshape(3, 4)
        if rank == 0:
            tensor = on_device(whole)
            backend.send([tensor.as_strided((4, 3), (1, 4))], 1, 0).wait()
            assert torch.equal(on_host(tensor), whole)
        else:
            tensor = on_device(torch.zeros(3, 4))
            backend.recv([tensor.as_strided((4, 3), (1, 4))], 0, 0).wait()
            assert torch.equal(on_host(tensor), whole)

    run_on_devices(2, body)


def test_messages_run_beside_collectives() -> None:
    def body(backend: Any, rank: int) -> None:
        peer = 1 - rank
        for turn in range(10):
            summed = on_device(numbers(rank, 500))
            received = on_device(torch.zeros(500))
            works = [backend.allreduce([summed])]
            works.append(backend.send([on_device(numbers(turn, 500))], peer, 0))
            works.append(backend.recv([received], peer, 0))
            for work in works:
                work.wait()
            assert torch.equal(on_host(summed), numbers(0, 500) + numbers(1, 500))
            assert torch.equal(on_host(received), numbers(turn, 500))

    run_on_devices(2, body)


def test_other_sizes_are_told_with_both_ranks() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.zeros(10 + rank))
        work = backend.send([tensor], 1, 0) if rank == 0 else backend.recv([tensor], 0, 0)
        with pytest.raises(dist.DistBackendError, match="a message of rank 0 to rank 1"):
            work.wait(timedelta(seconds=30))

    run_on_devices(2, body)


def test_bad_messages_are_refused() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.zeros(4))
        with pytest.raises(ValueError, match="expected 'dst' to be another rank"):
            backend.send([tensor], rank, 0)
        with pytest.raises(ValueError, match="expected 'src' to be a rank of the group"):
            backend.recv([tensor], 7, 0)
        with pytest.raises(ValueError, match="Tag must be nonnegative"):
            backend.recv([tensor], 1 - rank, -1)

    run_on_devices(2, body)
