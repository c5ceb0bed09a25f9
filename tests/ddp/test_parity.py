"""dreamcomm.DistributedDataParallel and replicate train as one process does, and as torch's class.

Under SGD with momentum, as AdamW hides wrong scales; gradient norms are compared in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from ddp.models import MODELS, batch, make, norm, rows_of
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def train(
    model: nn.Module,
    steps: int,
    optimizer: str,
    dtype: torch.dtype,
    part: Callable[[Tensor], Tensor],
) -> tuple[list[float], list[Tensor]]:
    """The gradients' norms, and the weights at the end."""
    stepper, norms = OPTIMIZERS[optimizer](model), []
    for step in range(steps):
        x, y = (part(one) for one in batch(step, dtype))
        stepper.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(norm(model))
        stepper.step()
    return norms, [p.detach().clone() for p in model.parameters()]


def own_part(data: Tensor) -> Tensor:
    return rows_of(data, dist.get_rank(), dist.get_world_size())


def all_of(data: Tensor) -> Tensor:
    return data


def wrapped(name: str, dtype: torch.dtype, how: str) -> nn.Module:
    if how == "replicate":
        return dreamcomm.replicate(make(name, dtype), bucket_cap_mb=0.2)
    if how == "torch":
        unused = name == "odd"
        return nn.parallel.DistributedDataParallel(
            make(name, dtype), bucket_cap_mb=0.2, find_unused_parameters=unused
        )
    return dreamcomm.DistributedDataParallel(make(name, dtype), bucket_cap_mb=0.2)


Trained = tuple[list[float], list[Tensor]]


def both(
    name: str, dtype: torch.dtype, steps: int, optimizer: str, how: str, other: str
) -> tuple[Trained, Trained]:
    """Of our wrapper, and of one process or torch's class."""
    ours = train(wrapped(name, dtype, how), steps, optimizer, dtype, own_part)
    if other == "alone":
        return ours, train(make(name, dtype), steps, optimizer, dtype, all_of)
    return ours, train(wrapped(name, dtype, other), steps, optimizer, dtype, own_part)


def check_close(found: list[Any], tolerance: float) -> None:
    for (norms, weights), (norms_alone, weights_alone) in found:
        assert norms == pytest.approx(norms_alone, rel=tolerance)
        for one, other in zip(weights, weights_alone, strict=True):
            assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    for (norms, weights), _ in found[1:]:  # all ranks have the same bits
        assert norms == found[0][0][0]
        assert all(map(torch.equal, weights, found[0][0][1]))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["ddp", pytest.param("replicate", marks=pytest.mark.long)])
def test_float32_is_as_one_process(pool: Pool, name: str, world: int, how: str) -> None:
    check_close(pool.run(both, name, torch.float32, 20, "sgd", how, "alone", world=world), 1e-5)


@pytest.mark.parametrize(
    ("name", "world", "optimizer", "how"),
    [
        ("odd", 3, "sgd", "ddp"),
        ("gpt", 2, "adamw", "replicate"),
        *(
            pytest.param(name, world, optimizer, "ddp", marks=pytest.mark.long)
            for name in MODELS
            for world in (2, 3, 4)
            for optimizer in OPTIMIZERS
        ),
    ],
)
def test_float64_is_as_one_process(
    pool: Pool, name: str, world: int, optimizer: str, how: str
) -> None:
    """Over 100 steps."""
    found = pool.run(
        both, name, torch.float64, 100, optimizer, how, "alone", world=world, timeout=200
    )
    check_close(found, 1e-9)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_torchs_class(pool: Pool, name: str, world: int) -> None:
    """torch divides before it adds, and ours after: for powers of two that is the same."""
    for (norms, weights), (others, other_weights) in pool.run(
        both, name, torch.float32, 5, "sgd", "ddp", "torch", world=world
    ):
        assert norms == others
        assert all(map(torch.equal, weights, other_weights))


def test_three_ranks_are_close_to_torchs_class(pool: Pool) -> None:
    check_close(pool.run(both, "gpt", torch.float32, 10, "sgd", "ddp", "torch", world=3), 1e-6)


def test_runs_are_equal(pool: Pool) -> None:
    first, second = (
        pool.run(both, "cnn", torch.float32, 5, "sgd", "ddp", "torch", world=3) for _ in range(2)
    )
    for (norms, weights), (norms_again, again) in zip(
        (ours for ours, _ in first), (ours for ours, _ in second), strict=True
    ):
        assert norms == norms_again
        assert all(map(torch.equal, weights, again))


def born() -> tuple[int, int]:
    """Bytes that a rank reduces, and those that were copied for it."""
    model = dreamcomm.DistributedDataParallel(make("gpt"))
    optimizer = sgd(model)
    for step in range(3):
        x, y = (own_part(one) for one in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    report = model.report()
    return report.nbytes, report.copied_nbytes


def test_large_gradients_are_reduced_where_they_are_made(pool: Pool) -> None:
    for nbytes, copied in pool.run(born):
        large = sum(p.nbytes for p in make("gpt").parameters() if p.nbytes >= 128 << 10)
        assert copied == nbytes - large
