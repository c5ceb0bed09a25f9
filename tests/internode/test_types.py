"""Every dtype and every operation between hosts, against NumPy in the documented order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from collectives import bits
from internode.hosts import TWO_OF_TWO, Hosts, Placement, size_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

COUNTS = (1, 5001, 100_001)
# The halves, which are added up and sent in float32, are tested with all collectives.
DTYPES = tuple(dtype for dtype in bits.DTYPES if dtype not in bits.HALVES)


def inputs_of(size: int, dtype: str, count: int) -> list[bits.Array]:
    rng = np.random.default_rng(count)
    return [bits.random_array(dtype, count, rng) for _ in range(size)]


def expected(placement: Placement, op: str, dtype: str, inputs: list[bits.Array]) -> bytes:
    """The ranks of each host in their order, then the hosts; AVG divides once, at the end."""
    within = "SUM" if op == "AVG" else op
    sums = [
        bits.reduce(within, dtype, [inputs[r] for r in ranks], [factor_of(r) for r in ranks])
        for ranks in placement
    ]
    total = bits.reduce("SUM" if op == "PREMUL_SUM" else within, dtype, sums)
    if op == "AVG":
        parts = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        total = bits.divide(total.view(parts), size_of(placement))
    return bits.to_bytes(bits.to_tensor(total, str(total.dtype)))


def factor_of(rank: int) -> float:
    return (0.5, 3.0, 1.5, 2.0)[rank]


def op_of(name: str) -> Any:
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(factor_of(dist.get_rank()))
    return getattr(dist.ReduceOp, name)


def reduce_all(placement: Placement, dtypes: tuple[str, ...]) -> int:
    """By all_reduce, reduce and reduce_scatter; how many."""
    rank, size = dist.get_rank(), dist.get_world_size()
    done = 0
    for dtype in dtypes:
        for count in COUNTS:
            inputs = inputs_of(size, dtype, count)
            for name in bits.ops_of(dtype):
                want = expected(placement, name, dtype, inputs)
                own = bits.to_tensor(inputs[rank], dtype)
                everywhere, at_last, shard = own.clone(), own.clone(), own.clone()
                dist.all_reduce(everywhere, op_of(name))
                dist.reduce(at_last, size - 1, op_of(name))
                dist.reduce_scatter(shard, [own.clone() for _ in range(size)], op_of(name))
                results = [everywhere, shard, *([at_last] if rank == size - 1 else [])]
                for result in results:
                    assert bits.to_bytes(result) == want, (dtype, name, count)
                    done += 1
    return done


@pytest.mark.parametrize("placement", [TWO_OF_TWO], ids=str)
def test_every_operation_of_every_dtype(hosts: Hosts, placement: Placement) -> None:
    for done in hosts.run(placement, reduce_all, placement, DTYPES, timeout=240):
        assert done >= 2 * len(COUNTS) * sum(len(bits.ops_of(dtype)) for dtype in DTYPES)
