"""The norm of gradients: the same bits however many ranks share the work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.buckets.clip import clip_
from dreamcomm.buckets.norm import BLOCK, block_counts, norm_of, owned_blocks
from dreamcomm.buckets.protocol import ClipPart
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("the kernels are dreamcomm's")

SIZES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 0, 7]


def some(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    found = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    return [*found, torch.randn(30, 40, generator=generator).to(dtype).t()]


def norms(dtype: torch.dtype) -> float:
    world = dist.group.WORLD
    assert world is not None
    return norm_of(some(dtype), world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ranks_of_any_number_find_the_same_bits(pool: Pool, dtype: torch.dtype) -> None:
    alone = pool.run(norms, dtype, world=1)[0]
    squares = sum(float(one.double().square().sum()) for one in some(dtype))
    assert alone == pytest.approx(squares**0.5, rel=1e-12)
    for world in (2, 3, 4):
        assert pool.run(norms, dtype, world=world) == [alone] * world


def test_each_block_has_one_owner() -> None:
    assert block_counts([0, 1, BLOCK, BLOCK + 1]) == [0, 1, 1, 2]
    for total in (0, 1, 2, 7, 100):
        for world in (1, 2, 3, 7):
            shares = [owned_blocks(total, rank, world) for rank in range(world)]
            assert [block for low, high in shares for block in range(low, high)] == [*range(total)]
            assert max(high - low for low, high in shares) <= -(-total // world)


def clip_what_is_not_finite() -> tuple[str, float]:
    parameter = torch.nn.Parameter(torch.ones(10))
    parameter.grad = torch.full((10,), 2.0)
    parameter.grad[3] = float("inf")
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(RuntimeError) as caught:
        clip_(ClipPart([parameter], world), 1.0, 2.0, True)
    return str(caught.value), parameter.grad[0].item()


def test_a_norm_that_is_not_finite_is_an_error_where_it_is_asked_for(pool: Pool) -> None:
    for rank, (error, kept) in enumerate(pool.run(clip_what_is_not_finite)):
        assert f"rank {rank}: the 2-norm of the gradients is inf" in error
        assert kept == 2.0


def other_norms() -> list[float]:
    world = dist.group.WORLD
    assert world is not None
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([3.0, -0.5, 2.0, 1.0])
    part = ClipPart([parameter], world)
    return [float(clip_(part, 1e9, p, False)) for p in (float("inf"), float("-inf"), 1.0)]


def test_other_norms_are_torchs(pool: Pool) -> None:
    assert pool.run(other_norms, world=2) == [[3.0, 0.5, 6.5]] * 2
