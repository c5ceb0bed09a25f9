"""Pipelines with reduce="tokens": all gradients' sum over all counts' sum, divided once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dreamcomm.pipeline.counting import TokenWindow
from helpers.pool import Pool
from pipeline.pipe_models import make
from pipeline.token_pipes import (
    RATE,
    WAYS,
    by_one_process,
    close,
    made,
    next_tokens,
    step,
    summed,
    tied_gradients,
    tokens,
    trained,
    window_gradients,
    world_of,
)

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def check(pool: Pool, name: str, case: str, counts: bool, **options: Any) -> None:
    world = world_of(name)
    ranks = pool.run(trained, name, case, counts, options, world=world)
    norms, weights = by_one_process(case, world // 2)
    seen: set[str] = set()
    for found, state in ranks:
        assert found == pytest.approx(norms, rel=1e-6, abs=1e-12)  # they are float32
        for key, value in state.items():
            close(value, weights[key])
        seen |= state.keys()
    assert seen == weights.keys()


@pytest.mark.parametrize("counts", [False, True], ids=["returned", "given"])
@pytest.mark.parametrize("name", list(WAYS))
def test_steps_are_divided_by_all_their_counts(pool: Pool, name: str, counts: bool) -> None:
    check(pool, name, "uneven", counts)


@pytest.mark.parametrize("case", ["idle", "none", "weights", "large"])
@pytest.mark.parametrize("name", ["alone", "ddp-mean", "ddp-tokens", "zero1-tokens", "zero2-mean"])
def test_any_counts_are_exact(pool: Pool, name: str, case: str) -> None:
    check(pool, name, case, case == "large")


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved1f1b", "zb-h1"])
def test_schedules_that_cut_backward_passes(pool: Pool, schedule: str) -> None:
    check(pool, "ddp-tokens", "uneven", True, schedule=schedule)


def test_the_older_name_is_the_same(pool: Pool) -> None:
    check(pool, "ddp-mean", "uneven", True, scale_grads="count")


def test_two_hosts(pool: Pool) -> None:
    world = world_of("zero2-tokens")
    env = {"DREAMCOMM_HOSTS": "a,b,a,b"}
    found = pool.run(trained, "zero2-tokens", "uneven", True, {}, world=world, env=env)
    _, weights = by_one_process("uneven", 2)
    for _, state in found:
        for key, value in state.items():
            close(value, weights[key])


@pytest.mark.parametrize("name", ["alone", "ddp-mean", "ddp-tokens"])
def test_shared_weights(pool: Pool, name: str) -> None:
    module = make("gpt", torch.float64)
    total = torch.tensor(0)
    for number in range(2):
        for share in range(world_of(name) // 2):
            x, y = tokens(number, share)
            loss, count = next_tokens(module(x), y)
            loss.backward()
            total += count
    expected: dict[str, Tensor] = {}
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None
        expected[key] = parameter.grad / total
    for found in pool.run(tied_gradients, name, world=world_of(name)):
        for key, gradient in found.items():
            close(gradient, expected[key])


def reduced_outside(name: str) -> dict[str, Tensor]:
    """Weights after two steps under no_sync(), and the optimizer's, which reduces at stage 1."""
    way = made(name, summed)
    for number in (0, 2):
        step(way, "uneven", number, True, reduces=False)
    if way.keeps is not None:
        way.keeps.reduce_gradients()
    way.optimizer.step()
    return {key: one.detach().clone() for key, one in way.pipe.named_parameters()}


@pytest.mark.parametrize("name", ["ddp-tokens", "zero1-tokens", "zero2-tokens"])
def test_what_counts_may_reduce_by_itself(pool: Pool, name: str) -> None:
    module = make("mlp", torch.float64)
    window_gradients(module, "uneven", [0, 2], 2)
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    weights = dict(module.named_parameters())
    for found in pool.run(reduced_outside, name, world=4):
        for key, value in found.items():
            close(value, weights[key].detach())


def test_whole_numbers_stay_whole() -> None:
    window = TokenWindow(adds_means=False)
    for count in (2**53, 1, 2**24):
        window.add(count, [])
    assert window.total == 2**53 + 1 + 2**24
    assert isinstance(window.total, int)
