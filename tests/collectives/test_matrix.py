"""Every collective over every dtype, reduction and layout, blocking and not, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from collectives import bits
from collectives.executor import run_plan
from collectives.plan import KINDS, LAYOUTS, REDUCING, Plan, Step
from helpers.pool import Pool


def steps_of(kind: str, world: int) -> tuple[Step, ...]:
    """All dtypes and reductions; counts, layouts, roots and modes take turns."""
    turn = itertools.cycle(
        itertools.product((1, 5, 1024, 0, 33), LAYOUTS, (False, True), (False, True))
    )
    steps: list[Step] = []
    for dtype in bits.DTYPES:
        for op in bits.ops_of(dtype) if kind in REDUCING else ("SUM",):
            for factor in (0.5, 3.0) if op == "PREMUL_SUM" else (1.0,):
                count, layout, asynchronous, in_place = next(turn)
                number = len(steps)
                step = Step(
                    kind=kind,
                    dtype=dtype,
                    op=op,
                    factor=factor,
                    count=count,
                    group=0,
                    root=number % world,
                    peer=(number + 1) % world,
                    tag=number % 5,
                    layouts=(layout, "contiguous"),
                    in_place=in_place,
                    asynchronous=asynchronous,
                    drain=number % 4 == 0,
                    seed=number,
                )
                steps.append(step)
    return tuple(steps)


@pytest.mark.beyond_gloo("gloo has fewer dtypes, reductions and layouts")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_all_dtypes_and_reductions(pool: Pool, kind: str, world: int) -> None:
    steps = steps_of(kind, world)
    done = pool.run(run_plan, Plan(world, (tuple(range(world)),), steps), world=world)
    assert done == [len(steps)] * world


@pytest.mark.beyond_gloo("gloo has no one-rank fast path for every dtype")
def test_a_world_of_one(pool: Pool) -> None:
    kinds = [kind for kind in KINDS if kind not in ("send", "send_any", "shift")]
    steps = tuple(step for kind in kinds for step in steps_of(kind, 1))
    assert pool.run(run_plan, Plan(1, ((0,),), steps), world=1) == [len(steps)]


def reduce_nan(dtype: torch.dtype) -> list[list[float]]:
    rank = dist.get_rank()
    found = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        data = torch.tensor([1.0, float("nan"), 2.0, float("inf")], dtype=dtype)
        data = data if rank == 1 else torch.tensor([float("nan"), 1.0, 3.0, 0.0], dtype=dtype)
        dist.all_reduce(data, op)
        found.append(data.tolist())
    return found


@pytest.mark.beyond_gloo("gloo drops a NaN of some ranks and has no bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_min_and_max_hand_on_nan(pool: Pool, dtype: torch.dtype) -> None:
    for smallest, largest in pool.run(reduce_nan, dtype):
        assert smallest[0] != smallest[0]
        assert smallest[1] != smallest[1]
        assert smallest[2:] == [2.0, 0.0]
        assert largest[0] != largest[0]
        assert largest[1] != largest[1]
        assert largest[2:] == [3.0, float("inf")]


def reduce_sizes() -> list[bytes]:
    """Bits of the first elements of sums of more and more elements."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    data = torch.randn(3_000_001, generator=generator)
    heads = []
    for count in (16, 1000, 100_000, 3_000_001):
        part = data[:count].clone()
        dist.all_reduce(part)
        heads.append(bits.to_bytes(part[:16]))
    return heads


@pytest.mark.beyond_gloo("gloo's order of addition depends on the size")
@pytest.mark.parametrize("world", [3, 4])
def test_bits_do_not_depend_on_the_size_or_the_rank(pool: Pool, world: int) -> None:
    heads = pool.run(reduce_sizes, world=world)
    assert len({head for of_rank in heads for head in of_rank}) == 1
