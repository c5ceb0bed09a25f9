"""Forwards that change tensors in place, or ask for their mode, are split as they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dreamcomm.pipeline.split import StagePart, make_parts
from pipeline.split_chain import run, same
from pipeline.split_models import WIDTH, Block, numbers

Forward = Callable[[Any, Tensor, Any], Any]


class Model(nn.Module):
    """Blocks, a few tensors, and a forward that each test has its own of."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("n", torch.ones(WIDTH))
        self.register_buffer("same_n", self.n)
        self.table = torch.ones(WIDTH)
        self.last: Any = None
        self._forward = forward

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self._forward(self, x, mask)


def blocks(model: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    for layer in model.layers:
        x = layer(x, mask)
    return x


def compare(model: nn.Module, parts: list[StagePart] | None = None, **kwargs: Tensor) -> None:
    """Two calls of the parts, and of a copy of the module."""
    model.zero_grad()
    other = copy.deepcopy(model)
    parts = parts or make_parts(model)
    for seed in (0, 1):
        x = numbers(4, WIDTH, seed=seed)
        copies = [{name: one.clone() for name, one in kwargs.items()} for _ in range(2)]
        torch.manual_seed(seed)
        expected = other(x.clone(), **copies[0])
        expected.sum().backward()
        torch.manual_seed(seed)
        same(run(parts, (x.clone(),), copies[1]), expected)
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad)
    same(dict(model.named_buffers()), dict(other.named_buffers()))


def method(model: Any, x: Tensor, mask: Any) -> Any:
    mask.mul_(3.0)
    return blocks(model, x, mask)


def item(model: Any, x: Tensor, mask: Any) -> Any:
    mask[:, 0] = 0.0
    return blocks(model, x, mask)


def view(model: Any, x: Tensor, mask: Any) -> Any:
    flat = mask.view(-1)
    flat += 1
    return blocks(model, x, mask)


def data(model: Any, x: Tensor, mask: Any) -> Any:
    mask.data *= 2
    return blocks(model, x, mask)


def inplace(model: Any, x: Tensor, mask: Any) -> Any:
    F.relu(mask, inplace=True)
    return blocks(model, x, mask)


def out(model: Any, x: Tensor, mask: Any) -> Any:
    torch.mul(mask, 3, out=mask)
    return blocks(model, x, mask)


def between(model: Any, x: Tensor, mask: Any) -> Any:
    for layer in model.layers:
        x = layer(x, mask * 1.0)
        mask -= 0.5
    return x


@pytest.mark.parametrize("forward", [method, item, view, data, inplace, out, between])
def test_a_keyword_argument_changed_in_place_is_sent_on(forward: Forward) -> None:
    compare(Model(forward), mask=numbers(4, WIDTH))


def test_a_keyword_argument_that_is_only_read_is_not_sent() -> None:
    def masked(model: Any, x: Tensor, mask: Any) -> Any:
        rows = x.shape[0]
        rows += mask.shape[0]  # a number: its shape is no change of the mask
        return blocks(model, x, mask & mask) * rows

    mask = torch.ones(4, 1, dtype=torch.bool)
    first = make_parts(Model(masked))[0]
    assert not any(one is mask for one in first.run((numbers(4, WIDTH),), {"mask": mask}))


def alias(model: Any, x: Tensor, _: Any) -> Any:
    for layer in model.layers:
        y = layer(x)
        r = y * 1.0
        k = r
        r += y
        x = r + k
    return x


def residual(model: Any, x: Tensor, _: Any) -> Any:
    x = x * 1.0
    for layer in model.layers:
        r = x
        x += layer(x * 1.0)
        x = x * 0.5 + r
    return x


def all_operators(model: Any, x: Tensor, _: Any) -> Any:
    k = y = blocks(model, x) * 1.0
    y += 5
    y -= 1
    y *= 2
    y /= 3
    y **= 2
    y %= 7
    y @= torch.ones(WIDTH, WIDTH)  # torch has no in-place form
    return k + y


def buffer(model: Any, x: Tensor, _: Any) -> Any:
    n = model.n
    n += 1
    return blocks(model, x) * model.n


def own_buffer(model: Any, x: Tensor, _: Any) -> Any:
    model.n += 1
    model.n = model.n.mul_(2)
    return blocks(model, x) * model.n * model.same_n


def plain(model: Any, x: Tensor, _: Any) -> Any:
    model.table += 1
    return blocks(model, x) * model.table


@pytest.mark.parametrize("forward", [alias, residual, all_operators, buffer, own_buffer, plain])
def test_in_place_operators_change_what_others_refer_to(forward: Forward) -> None:
    compare(Model(forward))


def test_a_number_is_not_changed_in_place() -> None:
    def sizes(model: Any, x: Tensor, _: Any) -> Any:
        rows = before = x.shape[0]
        rows += 1
        return blocks(model, x) * rows * before

    compare(Model(sizes))


def new_buffer(model: Any, x: Tensor, _: Any) -> Any:
    model.n = model.n + 1
    return blocks(model, x)


def new_parameter(model: Any, x: Tensor, _: Any) -> Any:
    y = blocks(model, x)
    y += 1
    model.weight = y
    return y


def other_name(model: Any, x: Tensor, _: Any) -> Any:
    model.table = model.n.add_(1)
    return blocks(model, x)


def kept(model: Any, x: Tensor, _: Any) -> Any:
    model.last = blocks(model, x)
    return model.last


@pytest.mark.parametrize("forward", [new_buffer, new_parameter, other_name, kept])
def test_an_assignment_to_the_module_is_refused_with_its_line(forward: Forward) -> None:
    model = Model(forward)
    error = r"test_split_changes.py:\d+, `model\.\w+ = .*`: it assigns '\w+' of a module"
    with pytest.raises(ValueError, match=error):
        make_parts(model)
    left_as_it_was(model)


def left_as_it_was(model: Any) -> None:
    tensors = [model.n, model.same_n, model.weight, model.table]
    assert [type(one) for one in tensors] == [Tensor, Tensor, nn.Parameter, Tensor]
    assert model.n is model.same_n
    assert model.last is None
    assert not any(issubclass(type(one), fx.Proxy) for one in vars(model).values())


@pytest.mark.parametrize("name", ["n", "weight"])
def test_a_trace_that_breaks_off_leaves_the_module_as_it_was(name: str) -> None:
    def broken(model: Any, x: Tensor, _: Any) -> Any:
        model.last = 1
        table = model._parameters if name == "weight" else model._buffers
        table[name] = x
        raise RuntimeError("stop")

    model, assign = Model(broken), nn.Module.__setattr__
    with pytest.raises(ValueError, match=re.escape('`raise RuntimeError("stop")`: stop')):
        make_parts(model)
    assert nn.Module.__setattr__ is assign
    left_as_it_was(model)


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = blocks(self, F.dropout(x, 0.5, self.training))
        return F.dropout(x, self.drop.p, self.drop.training)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Trunk()

    def forward(self, x: Tensor) -> Any:
        return self.transformer(x)


def test_the_mode_of_each_module_counts() -> None:
    model = Outer()
    parts = make_parts(model)
    compare(model, parts)
    model.transformer.eval()
    compare(model, parts)
    model.transformer.drop.train()
    compare(model, parts)


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_parts_have_what_the_other_mode_uses(made: bool, used: bool) -> None:
    def forward(model: Any, x: Tensor, _: Any) -> Any:
        x = blocks(model, x)
        return model.head(x) * model.weight if model.training is used else x

    model = Model(forward).train(made)
    parts = make_parts(model)
    assert {one.training for one in model.modules()} == {made}
    assert (list(parts[2].units), set(parts[2].tensors)) == (["layers.2", "head"], {"weight"})
    compare(model.train(used), parts)
