"""A layer on ranks is nn.BatchNorm on all rows together."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from helpers.pool import Pool
from sync_batch_norm.layers import CHANNELS, ROWS, Case, beside_batch_norm, own_rows

CLOSE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}
NO_STATE = (("affine", False), ("track_running_stats", False))


def close(mine: Any, theirs: Any, dtype: torch.dtype) -> None:
    if isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for name, one in mine.items():
            close(one, theirs[name], torch.float32 if dtype.itemsize == 2 else dtype)
        return
    if theirs is None:
        assert mine is None
        return
    band = CLOSE[dtype] * max(1.0, float(theirs.abs().max()) if theirs.numel() else 1.0)
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=band)


def check(pool: Pool, case: Case, world: int, rows: list[int] | None = None, **how: Any) -> None:
    everyone = pool.run(beside_batch_norm, case, rows or ROWS[world], world=world, **how)
    for found in everyone:
        for step in found:
            for mine, theirs in step.values():
                close(mine, theirs, case.dtype)
    first = [step["state"][0] for step in everyone[0]]
    for found in everyone[1:]:
        for step, other in zip(found, first, strict=True):
            for name, one in step["state"][0].items():
                assert torch.equal(one, other[name]), name


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_uneven_rows_give_batch_norms_numbers(pool: Pool, dtype: torch.dtype, world: int) -> None:
    check(pool, Case(dtype=dtype), world)


@pytest.mark.parametrize("layout", ["contiguous", "last", "permuted"])
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_dimensions_and_memory_formats(pool: Pool, dims: int, layout: str) -> None:
    check(pool, Case(dims=dims, layout=layout), 3)


@pytest.mark.parametrize(
    "options",
    [
        (("momentum", None),),
        (("momentum", 0.0),),
        (("affine", False),),
        (("bias", False),),
        (("track_running_stats", False),),
        NO_STATE,
        (("eps", 0.1), ("momentum", 0.7)),
    ],
    ids=str,
)
def test_options(pool: Pool, options: tuple[tuple[str, Any], ...]) -> None:
    check(pool, Case(options=options), 3)


@pytest.mark.parametrize("freezes", ["input", "weight", "all"])
def test_what_needs_no_gradient(pool: Pool, freezes: str) -> None:
    check(pool, Case(freezes=freezes), 3)


@pytest.mark.parametrize("layout", ["contiguous", "last", "permuted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_have_statistics_of_float32(pool: Pool, dtype: torch.dtype, layout: str) -> None:
    check(pool, Case(dtype=dtype, layout=layout), 3)


@pytest.mark.parametrize("rows", [[1, 1, 0], [0, 0, 2], [5, 5, 5]], ids=str)
def test_few_rows(pool: Pool, rows: list[int]) -> None:
    check(pool, Case(dims=2), 3, rows)


def test_three_and_seven_rows_then_a_permuted_input(pool: Pool) -> None:
    check(pool, Case(), 2, [3, 7])
    check(pool, Case(layout="permuted"), 2, [3, 7])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gloo(pool: Pool, dtype: torch.dtype) -> None:
    check(pool, Case(dtype=dtype), 3, backend="gloo")


def test_hosts(pool: Pool) -> None:
    check(pool, Case(), 4, env={"DREAMCOMM_HOSTS": "a,a,b,b"})


def all_in_16_bits(dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    layer = dreamcomm.SyncBatchNorm(CHANNELS, dtype=dtype)
    x = torch.randn(6, CHANNELS, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.to(dtype).requires_grad_()
    output = layer(x)
    output.square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == dtype
    return x.detach(), output.detach(), layer.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits(pool: Pool, dtype: torch.dtype) -> None:
    found = pool.run(all_in_16_bits, dtype)
    exact = nn.BatchNorm1d(CHANNELS)
    expected = exact(torch.cat([x.float() for x, _, _ in found]))
    output = torch.cat([output for _, output, _ in found])
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected.detach().to(dtype), rtol=0, atol=4 * CLOSE[dtype])
    for _, _, state in found:
        torch.testing.assert_close(state["running_var"], exact.running_var.to(dtype))


def one_value(rows: list[int]) -> tuple[str, int]:
    layer = dreamcomm.SyncBatchNorm(CHANNELS)
    x = own_rows(torch.ones(sum(rows), CHANNELS), rows)
    text = ""
    try:
        layer(x)
    except ValueError as error:
        text = str(error)
    layer(torch.ones(2, CHANNELS))  # the group is whole
    return text, int(layer.num_batches_tracked)


@pytest.mark.parametrize("rows", [[1, 0], [0, 1]])
def test_one_value_a_channel_is_torchs_error_on_all_ranks(pool: Pool, rows: list[int]) -> None:
    for rank, (text, batches) in enumerate(pool.run(one_value, rows)):
        assert text == (
            "Expected more than 1 value per channel when training, got input size "
            f"torch.Size([{rows[rank]}, {CHANNELS}])"
        )
        assert batches == 1


def no_rows() -> list[Any]:
    layer = dreamcomm.SyncBatchNorm(CHANNELS)
    x = torch.empty(0, CHANNELS, 2, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    return [
        output.shape,
        x.grad is not None and x.grad.shape,
        layer.state_dict(),
        layer.weight.grad,
    ]


def test_no_rows_on_any_rank(pool: Pool) -> None:
    for shape, gradient, state, of_weight in pool.run(no_rows):
        assert shape == gradient == torch.Size([0, CHANNELS, 2])
        assert torch.equal(state["running_var"], torch.ones(CHANNELS))
        assert torch.equal(of_weight, torch.zeros(CHANNELS))


def by_its_own_path(dims: int) -> bool:
    layer = dreamcomm.SyncBatchNorm(3, dtype=torch.float64)
    shape = (4, 3, *range(2, dims))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        given = {"weight": weight, "bias": bias}
        made: Tensor = torch.func.functional_call(layer, given, (x,))
        return made

    with mock.patch.object(layer, "_update", wraps=layer._update) as update:
        return torch.autograd.gradcheck(run, (x, weight, bias)) and update.call_count > 10


@pytest.mark.parametrize("dims", [2, 4, 5])
def test_gradients_are_those_of_finite_differences(pool: Pool, dims: int) -> None:
    assert pool.run(by_its_own_path, dims, world=1) == [True]


def large_mean(dtype: torch.dtype) -> float:
    """The largest error of the variance, of its size, where the mean is 1000 times the spread."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(50, CHANNELS, 8, generator=generator, dtype=torch.float64) + 1000
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    layer = dreamcomm.SyncBatchNorm(CHANNELS, momentum=1.0, dtype=dtype)
    layer(x.to(dtype))
    assert layer.running_var is not None
    exact = torch.cat(everyone).to(dtype).double().var((0, 2))
    return float((layer.running_var.double() / exact - 1).abs().max())


def test_the_variance_keeps_its_digits_beside_a_large_mean(pool: Pool) -> None:
    assert max(pool.run(large_mean, torch.float64, world=3)) < 1e-11
    assert max(pool.run(large_mean, torch.float32, world=3)) < 1e-5


def bits(rows: list[int]) -> list[Tensor]:
    found = beside_batch_norm(Case(dtype=torch.float32), rows)
    return [
        one
        for step in found
        for mine, _ in step.values()
        for one in (mine.values() if isinstance(mine, dict) else [mine])
    ]


def test_bits_are_those_of_another_run(pool: Pool) -> None:
    first, second = (pool.run(bits, ROWS[4], world=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))
