"""What is said when a call on an accelerator's tensors goes wrong, and what is left."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.devices import device_module, on_device, on_host, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")


def told_by(work: Any) -> str:
    """What the work fails with when its kernel has ended."""
    with pytest.raises(dist.DistBackendError) as raised:
        work.wait(timedelta(seconds=30))
    return str(raised.value)


def one_works(backend: Any, rank: int) -> None:
    tensor = on_device(torch.ones(10))
    backend.allreduce([tensor]).wait()
    assert torch.equal(on_host(tensor), torch.full((10,), 2.0))


def test_a_mismatch_is_told_on_both_ranks_and_ends_the_group_for_devices() -> None:
    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        text = told_by(backend.allreduce([on_device(torch.ones(10 + rank))]))
        assert f"all_reduce(SUM, {10 + rank} x float32) on rank {rank}" in text
        other = f"all_reduce(SUM, {11 - rank} x float32)"
        assert f"rank {1 - rank} made another call: {other}" in text
        with pytest.raises(dist.DistBackendError, match="takes no more tensors on GPUs"):
            backend.allreduce([on_device(torch.ones(10))])
        assert backend.failure is not None
        tensor = torch.ones(10)
        backend.allreduce([tensor]).wait()
        assert torch.equal(tensor, torch.full((10,), 2.0))

    run_on_devices(2, body)


def test_a_late_rank_is_named_at_the_deadline() -> None:
    told: dict[int, str] = {}
    both = threading.Barrier(2)

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        if rank == 0:
            told[0] = told_by(backend.allreduce([on_device(torch.ones(10))]))
        both.wait()

    run_on_devices(2, body, seconds=1)
    assert "rank 1, which has not entered this call; of calls on CPU tensors it" in told[0]
    assert "all_reduce(SUM, 10 x float32)" in told[0]


def test_abort_ends_a_call_that_waits() -> None:
    both = threading.Barrier(2)

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        if rank == 0:
            work = backend.allreduce([on_device(torch.ones(10))])
            time.sleep(0.1)
            assert not work.is_completed()
            backend.abort()
            assert "abort" in told_by(work)
        both.wait()

    run_on_devices(2, body)


def test_a_rank_that_gives_the_group_up_outside_of_calls_is_told_of_at_once() -> None:
    told: dict[int, str] = {}
    begun, both = threading.Event(), threading.Barrier(2)

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        if rank == 0:
            work = backend.allreduce([on_device(torch.ones(10))])
            begun.set()
            told[0] = told_by(work)  # long before the timeout of 60 s
            assert "rank 1 has aborted the group: abort() was called" in backend.failure
        else:
            begun.wait(60)
            backend.abort()
        both.wait()

    run_on_devices(2, body)
    assert "all_reduce(SUM, 10 x float32) on rank 0 of 2 (call 2 on GPUs) cannot finish" in told[0]
    assert "rank 1 has aborted the group: abort() was called" in told[0]


def test_a_wait_with_a_timeout_gives_up_and_the_call_goes_on() -> None:
    aborted = threading.Event()

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        held = device_module().Gate() if rank == 1 else None
        tensor = on_device(torch.ones(10))
        work = backend.allreduce([tensor])
        if held:
            aborted.wait(60)
            held.open()
        else:
            with pytest.raises(dist.DistBackendError, match="Timed out waiting 50 ms"):
                work.wait(timedelta(milliseconds=50))
            aborted.set()
        work.wait()
        assert torch.equal(on_host(tensor), torch.full((10,), 2.0))

    run_on_devices(2, body)


def test_bad_calls_are_refused_before_anything_is_sent() -> None:
    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        here, there = on_device(torch.ones(4)), torch.ones(4)
        with pytest.raises(ValueError, match="expected 'tensors' on privateuseone:"):
            backend.allreduce_coalesced([here, there])
        with pytest.raises(ValueError, match="expected 'output' on privateuseone:"):
            backend._allgather_base(torch.ones(8), here)
        device_module().use_device(rank + 2)
        with pytest.raises(ValueError, match=r"calls are on privateuseone:\d, that of its first"):
            backend.allreduce([on_device(torch.ones(4))])
        device_module().use_device(rank)
        one_works(backend, rank)

    run_on_devices(2, body)


def test_what_kernels_do_not_do_goes_to_torchs_own_group() -> None:
    def body(backend: Any, rank: int) -> None:
        for dtype, op in ((torch.complex64, "PRODUCT"), (torch.int32, "BAND")):
            with pytest.raises(
                (RuntimeError, ValueError), match=r"torch's own group|takes tensors"
            ):
                backend.allreduce(
                    [on_device(torch.ones(4, dtype=dtype))],
                    dist.ReduceOp(getattr(dist.ReduceOp, op)),
                )
        one_works(backend, rank)

    run_on_devices(2, body)


def test_ranks_that_cannot_meet_say_why() -> None:
    def body(backend: Any, rank: int) -> None:
        with pytest.raises(RuntimeError, match="handed to torch's own group"):
            backend.allreduce([on_device(torch.ones(4))])
        assert "expected pages of a multiple of" in backend.explain("all_reduce", 16)

    run_on_devices(2, body, page_bytes=100)


def test_closing_releases_the_memory_of_the_group() -> None:
    before = device_module().memory_in_use()
    inside: list[int] = []

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        inside.append(device_module().memory_in_use())

    run_on_devices(2, body)
    assert min(inside) > before
    assert device_module().memory_in_use() == before


def test_a_rank_that_closes_alone_keeps_the_memory() -> None:
    before = device_module().memory_in_use()
    gone = threading.Event()

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        if rank == 1:
            backend.abort()
            backend.shutdown()
            gone.set()
        gone.wait()

    run_on_devices(2, body)
    assert device_module().memory_in_use() > before


def test_a_group_that_was_shut_down_says_so() -> None:
    def body(backend: Any, rank: int) -> None:
        backend.shutdown()
        with pytest.raises(dist.DistBackendError, match="was shut down"):
            backend.allreduce([on_device(torch.ones(4))])
        with pytest.raises(dist.DistBackendError, match="was shut down"):
            backend.send([on_device(torch.ones(4))], 1 - rank, 0)

    run_on_devices(2, body)


def test_parts_of_which_one_cannot_be_computed_go_to_torchs_own_group_together() -> None:
    def body(backend: Any, rank: int) -> None:
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        parts = [on_device(torch.ones(4)), on_device(torch.ones(4, dtype=torch.uint16))]
        with pytest.raises(RuntimeError, match="handed to torch's own group"):
            backend.allreduce_coalesced(parts, opts)
        one_works(backend, rank)

    run_on_devices(2, body)


def test_shutting_down_after_the_group_has_failed_does_not_wait_for_kernels() -> None:
    gone = threading.Event()

    def body(backend: Any, rank: int) -> None:
        one_works(backend, rank)
        if rank == 1:
            gone.wait()
            return
        backend.allreduce([on_device(torch.ones(10))])  # which rank 1 does not make
        backend.abort()
        backend.shutdown()
        gone.set()

    run_on_devices(2, body)


def test_a_group_is_shrunk_without_waiting_for_the_excluded_rank() -> None:
    closed = threading.Barrier(3)

    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.ones(10))
        backend.allreduce([tensor]).wait()
        assert torch.equal(on_host(tensor), torch.full((10,), 3.0))
        if rank != 1:
            small = backend.shrink([1], 0, None)
            begin = time.monotonic()
            backend.shutdown()
            assert time.monotonic() - begin < 4  # ranks that close together wait longer
            one_works(small, small.rank())
            small.shutdown()
        closed.wait()

    run_on_devices(3, body)
