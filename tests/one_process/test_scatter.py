"""Arguments are split, and outputs joined, as by torch.nn.DataParallel."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import dreamcomm


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.function(*inputs, **kwargs)


class Pair(NamedTuple):
    left: Any
    right: Any


def call(function: Any, *inputs: Any, count: int = 2, dim: int = 0, **kwargs: Any) -> Any:
    return dreamcomm.DataParallel(Calls(function), count, dim=dim)(*inputs, **kwargs)


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return torch.equal(mine, theirs)
    if isinstance(theirs, dict):
        return list(mine) == list(theirs) and all(same(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, tuple | list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


def nested(x: Tensor) -> Any:
    return [x, (x.sin(), x.cos(), [x + 1]), x, OrderedDict(a=x, b=[x.sin()]), Pair(x, None)]


def test_nested_outputs() -> None:
    x = torch.randn(4, 3)
    found, expected = call(nested, x), nested(x)
    assert same(found, expected)
    kinds = [type(one) for one in found]
    assert kinds == [Tensor, tuple, Tensor, OrderedDict, Pair]
    assert isinstance(found[1][2], list)


def test_nested_inputs() -> None:
    x = torch.randn(20, 3)
    seen: list[Any] = []

    def function(a: Any, b: Any, *, c: Any) -> Tensor:
        seen.append((a, b, c))
        out: Tensor = b["z"][0] + c.left
        return out

    found = call(function, "words", {"z": (x, [None])}, c=Pair(x.cos(), 3))
    assert torch.equal(found, x + x.cos())
    assert len(seen) == 2
    for a, b, c in seen:
        assert a == "words"
        assert isinstance(b["z"], tuple)
        assert b["z"][1] == [None]
        assert isinstance(c, Pair)
        assert c.right == 3
        assert len(c.left) == 10


@pytest.mark.parametrize("empty", [[], {}, ()])
def test_empty_containers(empty: Any) -> None:
    x = torch.randn(20, 3)
    found = call(
        lambda input: input["data"] + len(input["unused"]), input={"data": x, "unused": empty}
    )
    assert torch.equal(found, x)


def test_several_arguments() -> None:
    def function(one: Tensor, other: Tensor, by: float, more: Tensor | None = None) -> Tensor:
        return by * (one * other if more is None else one * other + more)

    a, b, c = (torch.randn(5, 5, requires_grad=True) for _ in range(3))
    for kwargs in ({}, {"more": c}):
        expected = function(a, b, 0.5, **kwargs)
        wanted = torch.autograd.grad(expected.square().sum(), (a, b))
        found = call(function, a, b, 0.5, count=3, **kwargs)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (a, b)), wanted)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_another_dimension(dim: int) -> None:
    x = torch.randn(6, 5, 7)
    shapes: list[int] = []
    found = call(lambda x: shapes.append(x.shape[dim]) or x * 2, x, count=3, dim=dim)
    assert torch.equal(found, 2 * x)
    assert sorted(shapes) == sorted(one.shape[dim] for one in x.chunk(3, dim))


def test_scalars_become_a_vector() -> None:
    x = torch.arange(6.0, requires_grad=True)
    found = call(lambda x: x.sum(), x, count=3)
    assert torch.equal(found, torch.tensor([1.0, 5.0, 9.0]))
    (found * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1, 2, 2, 3, 3]))  # type: ignore[arg-type]
    assert torch.equal(call(lambda x: x.sum(), x, count=3, dim=-1), found)


def test_without_arguments_or_without_tensors() -> None:
    assert torch.equal(call(lambda: torch.ones(2)), torch.ones(2)), "one replica is called"
    assert torch.equal(call(lambda word: torch.ones(2), "word"), torch.ones(4)), "each one is"


def test_one_replica_is_the_module() -> None:
    x = torch.tensor(3.0)
    assert call(lambda x: {"any": x}, x, count=1)["any"] is x


@dataclass
class Batch:
    x: Tensor


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([{"all": Batch(torch.ones(4))}], r"argument 0\['all'\], a Batch, so each replica would"),
        ([torch.tensor(1.0)], r"argument 0 has shape \[\]; pass a Python number"),
        (
            [torch.ones(8, 2), torch.ones(1, 2)],
            r"argument 0 of shape \[8, 2\] into 2 parts.*argument 1 of shape \[1, 2\] into 1",
        ),
        (
            [{"x": torch.ones(5), "y": [torch.ones(1)]}],
            r"argument 0\['x'\].*argument 0\['y'\]\[0\]",
        ),
        (
            [pack_padded_sequence(torch.ones(3, 2), torch.tensor([3, 2]))],
            "argument 0, a PackedSequence",
        ),
    ],
)
def test_arguments_that_cannot_be_split_alike(inputs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(lambda *_: torch.ones(1), *inputs)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: {"a": x, str(x[0].item()): x}, ValueError, "other keys in the output: "),
        (lambda x: [x] * int(x[0].item() + 1), ValueError, "lengths 1, 3 in the output"),
        (lambda x: (x, {"k": "text"}), TypeError, r"the output\[1\]\['k'\], a str: replicas have"),
        (lambda x: None if x[0] else x, TypeError, "replicas return Tensor, NoneType"),
        (lambda x: 3, TypeError, "the output, a int"),
    ],
)
def test_outputs_that_cannot_be_joined(function: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(function, torch.arange(4.0))


def test_memory_of_outputs_is_the_callers() -> None:
    x = torch.ones(4, 3)
    out = call(lambda x: x, x)
    out.mul_(2)
    assert torch.equal(x, torch.ones(4, 3))


def test_a_packed_output_is_refused() -> None:
    def function(x: Tensor) -> Any:
        return pack_padded_sequence(x[:, None], torch.tensor([len(x)]))

    with pytest.raises(TypeError, match="the output, a PackedSequence: unpack it in forward"):
        call(function, torch.ones(4))
