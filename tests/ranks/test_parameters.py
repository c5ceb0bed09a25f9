"""Parameters as users give them: a module's, an iterable, pairs with names, groups of either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dreamcomm.ranks.parameters import (
    described,
    find_parameters,
    groups_of,
    named_parameters,
    stepped,
)


class Words(nn.Module):
    """Sparse words, whose weight a second layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)
        self.inner = nn.Sequential(nn.Linear(3, 5))
        self.inner[0].weight = self.words.weight


def test_a_modules_parameters_come_once_with_their_first_names() -> None:
    module = Words()
    found = find_parameters(module)
    assert [(one.name, one.sparse) for one in found] == [
        ("words.weight", True),
        ("inner.0.bias", False),
    ]
    assert [one.name for one in find_parameters(module, ["words.weight"])] == [
        "inner.0.weight",
        "inner.0.bias",
    ]


ONE, OTHER = (nn.Parameter(torch.zeros(size)) for size in (1, 2))


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        ([ONE, OTHER], [{"params": [ONE, OTHER]}]),
        (iter([ONE, OTHER]), [{"params": [ONE, OTHER]}]),
        ([("a", ONE)], [{"params": [("a", ONE)]}]),
        (
            [{"params": ONE, "lr": 1.0}, {"params": iter([OTHER])}],
            [{"params": [ONE], "lr": 1.0}, {"params": [OTHER]}],
        ),
        ([], [{"params": []}]),
    ],
    ids=["list", "iterator", "pairs", "groups", "none"],
)
def test_all_forms_become_groups(given: Any, groups: list[dict[str, Any]]) -> None:
    assert groups_of(given) == groups


@pytest.mark.parametrize(
    ("given", "words"), [(ONE, "got one tensor"), ({ONE, OTHER}, "equal on all ranks, got a set")]
)
def test_a_tensor_and_a_set_are_refused(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        groups_of(given)


def test_an_optimizers_parameters_have_names_or_numbers() -> None:
    optimizer = torch.optim.SGD([("a", ONE), ("b", OTHER)], 0.1)
    assert [name for name, _ in named_parameters(optimizer.param_groups)] == ["a", "b"]
    plain = torch.optim.SGD([{"params": [ONE]}, {"params": [OTHER]}], 0.1)
    assert [name for name, _ in named_parameters(plain.param_groups)] == [
        "parameter 0",
        "parameter 1",
    ]
    assert all(one is two for one, two in zip(stepped(plain), (ONE, OTHER), strict=True))


def test_a_tensor_is_described_by_shape_and_dtype() -> None:
    assert described(torch.zeros(2, 3)) == "of shape (2, 3), torch.float32"
