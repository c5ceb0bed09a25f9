"""Collectives on an accelerator's tensors, each compared with what torch says it should give."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from helpers.devices import on_device, on_host

SIZES = (0, 1, 7, 1000)
TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def operations_on(dtype: torch.dtype) -> list[Any]:
    names = ["SUM", "PRODUCT", "MIN", "MAX"] + (["AVG"] if dtype.is_floating_point else [])
    return [dist.ReduceOp(getattr(dist.ReduceOp, name)) for name in names]


def values(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, which every type adds exactly."""
    numbers = torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(10 + rank))
    return numbers.to(dtype)


def reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    stacked = torch.stack(parts).to(torch.float64)
    if op == dist.ReduceOp.AVG:
        return stacked.mean(0).to(parts[0].dtype)
    by = {
        dist.ReduceOp.SUM: lambda t: t.sum(0),
        dist.ReduceOp.PRODUCT: lambda t: t.prod(0),
        dist.ReduceOp.MIN: lambda t: t.amin(0),
        dist.ReduceOp.MAX: lambda t: t.amax(0),
    }[op.op]
    return by(stacked).to(parts[0].dtype)


def same(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(on_host(tensor), expected, rtol=0, atol=0)


def check_rooted(backend: Any, rank: int, world: int, size: int, root: int = -1) -> None:
    parts = [values(r, size) for r in range(world)]
    root %= world
    broadcast, reduce = dist.BroadcastOptions(), dist.ReduceOptions()
    broadcast.rootRank = reduce.rootRank = root
    tensor = on_device(parts[rank])
    backend.broadcast([tensor], broadcast).wait()
    same(tensor, parts[root])
    tensor = on_device(parts[rank])
    backend.reduce([tensor], reduce).wait()
    same(tensor, sum(parts) if rank == root else parts[rank])

    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    gather.rootRank = scatter.rootRank = root
    outputs = [on_device(torch.zeros(size)) for _ in parts]
    backend.gather([outputs] if rank == root else [], [on_device(parts[rank])], gather).wait()
    for r, output in enumerate(outputs):
        same(output, parts[r] if rank == root else torch.zeros(size))
    tensor = on_device(torch.zeros(size))
    given = [[on_device(part) for part in parts]] if rank == root else []
    backend.scatter([tensor], given, scatter).wait()
    same(tensor, parts[rank])


def check_gathering(backend: Any, rank: int, world: int, size: int) -> None:
    parts = [values(r, size) for r in range(world)]
    outputs = [on_device(torch.zeros(size)) for _ in parts]
    backend.allgather([outputs], [on_device(parts[rank])]).wait()
    for output, part in zip(outputs, parts, strict=True):
        same(output, part)
    flat = on_device(torch.zeros(world * size))
    backend._allgather_base(flat, on_device(parts[rank]), AllgatherOptions()).wait()
    same(flat, torch.cat(parts))


def check_scattering(backend: Any, rank: int, world: int, size: int) -> None:
    rows = [values(r, world * size).reshape(world, size) for r in range(world)]
    expected = sum(rows)[rank]
    output = on_device(torch.zeros(size))
    backend.reduce_scatter([output], [[on_device(row) for row in rows[rank]]]).wait()
    same(output, expected)
    output = on_device(torch.zeros(size))
    flat = on_device(rows[rank].reshape(-1))
    backend._reduce_scatter_base(output, flat, dist.ReduceScatterOptions()).wait()
    same(output, expected)
    # Blocks of different sizes, which are reduced one by one.
    uneven = [[values(r, size + to) for to in range(world)] for r in range(world)]
    output = on_device(torch.zeros(size + rank))
    backend.reduce_scatter([output], [[on_device(part) for part in uneven[rank]]]).wait()
    same(output, sum(uneven[r][rank] for r in range(world)))


def check_all_to_all(backend: Any, rank: int, world: int, size: int) -> None:
    parts = [[values(9 * r + to, size + to) for to in range(world)] for r in range(world)]
    outputs = [on_device(torch.zeros(size + rank)) for _ in range(world)]
    inputs = [on_device(part) for part in parts[rank]]
    backend.alltoall(outputs, inputs, dist.AllToAllOptions()).wait()
    for r, output in enumerate(outputs):
        same(output, parts[r][rank])
    output = on_device(torch.zeros(world * (size + rank)))
    sent = on_device(torch.cat(parts[rank]))
    splits = [size + rank] * world, [size + to for to in range(world)]
    backend.alltoall_base(output, sent, *splits, dist.AllToAllOptions()).wait()
    same(output, torch.cat([parts[r][rank] for r in range(world)]))
