"""Replicas compute what one process computes, with the same bits in every run."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import dreamcomm
from one_process.models import (
    MODELS,
    batch,
    in_parts,
    loss_of,
    make,
    one_thread,
    same_bits,
    step_of,
)

REPLICAS = [2, 3, 4]
pytestmark = pytest.mark.filterwarnings("ignore:DataParallel. each replica has changed buffer")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("count", REPLICAS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_bits_of_one_process_on_the_parts(name: str, count: int) -> None:
    module, x = make(name), batch(name)
    expected = in_parts(module, x, count)
    found = step_of(dreamcomm.DataParallel(module, count), module, x)
    assert same_bits(found, expected)


@pytest.mark.parametrize("count", REPLICAS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "tied"])
def test_training_is_that_of_one_process_on_the_batch(name: str, count: int) -> None:
    alone, module = make(name), make(name)
    wrapped = dreamcomm.DataParallel(module, count)
    ways: list[tuple[nn.Module, Any]] = [(alone, alone), (module, wrapped)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one, _ in ways]
    for step in range(5):
        norms, losses = [], []
        for (one, call), optimizer in zip(ways, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(call(batch(name, step)))
            loss.backward()
            norms.append(get_total_norm([p.grad for p in one.parameters() if p.grad is not None]))
            losses.append(loss.detach())
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        assert (mine.grad is None) == (theirs.grad is None)


@pytest.mark.parametrize("count", REPLICAS)
def test_running_statistics_are_those_of_replica_0(count: int) -> None:
    module, alone = make("cnn"), make("cnn")
    wrapped = dreamcomm.DataParallel(module, count)
    for step in range(3):
        x = batch("cnn", step)
        wrapped(x)
        alone(x.chunk(count)[0])
    for (name, mine), theirs in zip(module.named_buffers(), alone.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("name", MODELS)
def test_a_hundred_runs_have_equal_bits(name: str) -> None:
    module, x = make(name), batch(name)
    if name == "mlp":
        module.insert(2, nn.Dropout(0.4))
    before = copy.deepcopy(module.state_dict())
    wrapped = dreamcomm.DataParallel(module, 3)
    delays = random.Random(5)

    def delay(*_: Any) -> None:
        if delays.random() < 0.1:
            time.sleep(delays.random() * 2e-3)

    for one in module.modules():
        one.register_forward_pre_hook(delay)
        one.register_full_backward_hook(delay)
    first = None
    for _ in range(100):
        module.load_state_dict(before)
        torch.manual_seed(11)
        found = step_of(wrapped, module, x)
        first = first or found
        assert same_bits(found, first)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_or_uneven_rows(rows: int) -> None:
    module, x = make("mlp"), batch("mlp")[:rows]
    wrapped = dreamcomm.DataParallel(module, 4)
    assert same_bits(step_of(wrapped, module, x), in_parts(module, x, 4))


def test_no_rows() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    output = wrapped(torch.empty(0, 10))
    assert output.shape == (0, 5)
    output.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("count", REPLICAS)
def test_gradients_of_inputs(count: int) -> None:
    module = make("mlp")
    x = batch("mlp").requires_grad_()
    expected = torch.autograd.grad(loss_of(module(x)), x)[0]
    found = torch.autograd.grad(loss_of(dreamcomm.DataParallel(module, count)(x)), x)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    assert all(p.grad is None for p in module.parameters())


def test_gradients_accumulate_over_calls() -> None:
    module, alone = make("gpt"), make("gpt")
    wrapped = dreamcomm.DataParallel(module, 2)
    for step in range(2):
        loss_of(wrapped(batch("gpt", step))).backward()
        loss_of(alone(batch("gpt", step))).backward()
    (loss_of(wrapped(batch("gpt", 3))) + loss_of(wrapped(batch("gpt", 4)))).backward()
    (loss_of(alone(batch("gpt", 3))) + loss_of(alone(batch("gpt", 4)))).backward()
    for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-6)


def test_what_a_script_changes_between_steps_is_followed() -> None:
    module = make("mlp")
    wrapped = dreamcomm.DataParallel(module, 2)
    x = batch("mlp")

    def check(x: torch.Tensor) -> None:
        assert same_bits(step_of(wrapped, module, x), in_parts(module, x, 2))

    check(x)
    module[0].weight.data = torch.randn(24, 10)  # another tensor
    check(x)
    module[2].requires_grad_(False)
    check(x)
    module[2] = nn.Linear(24, 24)
    check(x)
    module.append(nn.Softplus())
    check(x)
    module.double()
    check(x.double())
    module[0].register_forward_hook(lambda *args: args[-1] * 2)
    check(x.double())
    module[0].weight = nn.Parameter(torch.ones(24, 10, dtype=torch.float64))
    check(x.double())
