"""Every collective on an accelerator's tensors, against the same sums made by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.device_checks import (
    SIZES,
    TYPES,
    check_all_to_all,
    check_gathering,
    check_rooted,
    check_scattering,
    operations_on,
    reduced,
    same,
    values,
)
from helpers.devices import on_device, run_on_devices

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")

WORLDS = (1, 2, 3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_all_reduce_computes_every_operation_on_every_type(world: int, dtype: torch.dtype) -> None:
    def body(backend: Any, rank: int) -> None:
        for wrapped in operations_on(dtype):
            for size in SIZES:
                parts = [values(r, size, dtype) for r in range(world)]
                tensor = on_device(parts[rank])
                backend.allreduce([tensor], wrapped).wait()
                same(tensor, reduced(parts, wrapped))

    run_on_devices(world, body)


def test_all_reduce_computes_what_has_the_same_bits() -> None:
    def body(backend: Any, rank: int) -> None:
        tensor = on_device(torch.tensor([1 + 2j, -3j]) * (rank + 1))
        backend.allreduce([tensor]).wait()
        same(tensor, torch.tensor([3 + 6j, -9j]))
        tensor = on_device(torch.tensor([40_000 + rank], dtype=torch.uint16))
        backend.allreduce([tensor]).wait()
        same(tensor, torch.tensor([80_001 - 65_536], dtype=torch.uint16))
        for op, expected in (("BOR", True), ("BAND", False)):
            tensor = on_device(torch.tensor([rank == 0]))
            backend.allreduce([tensor], dist.ReduceOp(getattr(dist.ReduceOp, op))).wait()
            same(tensor, torch.tensor([expected]))

    run_on_devices(2, body)


@pytest.mark.parametrize("world", WORLDS)
def test_each_collective_moves_what_it_should(world: int) -> None:
    def body(backend: Any, rank: int) -> None:
        for size in SIZES:
            check_rooted(backend, rank, world, size)
            check_gathering(backend, rank, world, size)
            check_scattering(backend, rank, world, size)
            check_all_to_all(backend, rank, world, size)

    run_on_devices(world, body)


def test_tensors_that_are_not_plain_memory_are_staged_on_the_device() -> None:
    def body(backend: Any, rank: int) -> None:
        whole = torch.arange(12.0).reshape(3, 4) * (rank + 1)
        tensor = on_device(whole)
        columns = tensor.as_strided((4, 3), (1, 4))
        backend.allreduce([columns]).wait()
        same(tensor, torch.arange(12.0).reshape(3, 4) * 3)

    run_on_devices(2, body)


def test_tensors_of_host_and_device_take_their_own_paths_in_one_group() -> None:
    def body(backend: Any, rank: int) -> None:
        for turn in range(20):
            on_cpu = torch.full((100,), float(rank + turn))
            tensor = on_device(on_cpu)
            work = backend.allreduce([tensor])
            backend.allreduce([on_cpu]).wait()
            work.wait()
            expected = torch.full((100,), float(1 + 2 * turn))
            same(tensor, expected)
            assert torch.equal(on_cpu, expected)

    run_on_devices(2, body)
