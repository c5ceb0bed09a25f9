"""Runs a chain of parts in one process as a pipeline does, and compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dreamcomm.pipeline.split import StagePart


def floating(values: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(values)
    return [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def run(parts: list[StagePart], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs forward and backward as a pipeline does: each part sees tensors of its own."""
    steps: list[tuple[Any, Any]] = []
    values: Any = args
    for part in parts:
        inputs = pytree.tree_map_only(Tensor, leaf, values) if steps else values
        own = {name: one for name, one in kwargs.items() if part.takes(name)}
        own = pytree.tree_map_only(Tensor, torch.clone, own)  # each rank has a copy of its own
        given = pytree.tree_map_only(Tensor, torch.clone, inputs) if steps else inputs
        values = part.run(given, own)  # a leaf cannot be changed in place
        steps.append((inputs, values))
    gradients = [torch.ones_like(one) for one in floating(values)]
    for inputs, outputs in reversed(steps):
        ends = [(o, g) for o, g in zip(floating(outputs), gradients, strict=True) if g is not None]
        if ends:
            torch.autograd.backward([o for o, _ in ends], [g for _, g in ends])
        gradients = [one.grad for one in floating(inputs)]
    return values


def parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [one for module in modules for one in module.parameters()]


def same(one: Any, other: Any) -> None:
    leaves, structure = pytree.tree_flatten(one)
    leaves2, structure2 = pytree.tree_flatten(other)
    assert structure == structure2
    for a, b in zip(leaves, leaves2, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
