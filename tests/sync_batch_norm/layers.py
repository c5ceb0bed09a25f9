"""A layer on ranks beside nn.BatchNorm on all rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import dreamcomm

CHANNELS = 5
KINDS: dict[int, type[_BatchNorm]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
INNER: dict[int, tuple[int, ...]] = {2: (), 3: (6,), 4: (3, 4), 5: (2, 3, 2)}
ROWS = {2: [3, 7], 3: [7, 0, 3], 4: [1, 3, 0, 7]}


@dataclass(frozen=True)
class Case:
    """How a layer is made and called.

    Attributes:
        dims: of the input.
        dtype: of the input.
        layout: "contiguous", "last" (channels last) or "permuted" (neither).
        options: of the layer.
        freezes: what needs no gradient: "input", "weight" or "all".
    """

    dims: int = 4
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"
    options: tuple[tuple[str, Any], ...] = ()
    freezes: str = ""


def own_rows(data: Tensor, rows: list[int]) -> Tensor:
    rank = dist.get_rank()
    return data[sum(rows[:rank]) : sum(rows[: rank + 1])]


def laid_out(data: Tensor, layout: str) -> Tensor:
    if layout == "last" and data.dim() > 3:
        last = torch.channels_last if data.dim() == 4 else torch.channels_last_3d
        return data.contiguous(memory_format=last)
    if layout == "permuted":
        order = [data.dim() - 1, 0, *range(1, data.dim() - 1)]
        back = [order.index(d) for d in range(data.dim())]
        return data.permute(order).contiguous().permute(back)
    return data.clone(memory_format=torch.contiguous_format)


def make(case: Case) -> _BatchNorm:
    torch.manual_seed(3)
    dtype = torch.float32 if case.dtype.itemsize == 2 else case.dtype
    layer = KINDS[case.dims](CHANNELS, dtype=dtype, **dict(case.options))
    with torch.no_grad():
        for one in (layer.weight, layer.bias):
            if one is not None:
                one.uniform_(-1, 1)
                one.requires_grad_(case.freezes not in ("weight", "all"))
    return layer


def passes(layer: nn.Module, x: Tensor, dy: Tensor, case: Case) -> tuple[Tensor, Tensor | None]:
    """The output, and the input's gradient."""
    x = laid_out(x, case.layout).requires_grad_(case.freezes not in ("input", "all"))
    output: Tensor = layer(x)
    if output.requires_grad:
        output.backward(laid_out(dy, "contiguous" if case.layout == "last" else case.layout))
    return output.detach(), x.grad


def state_of(layer: _BatchNorm) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in layer.state_dict().items()}


def summed(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    total = gradient.detach().clone()
    dist.all_reduce(total)
    return total


def copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def beside_batch_norm(
    case: Case, rows: list[int], steps: int = 2, backend: str = ""
) -> list[dict[str, Any]]:
    """For each step what this rank found ("mine") and what it should have ("theirs")."""
    reference = make(case)
    group = dist.new_group(backend=backend) if backend else None
    layer = dreamcomm.convert_sync_batchnorm(copy.deepcopy(reference), group)
    assert type(layer) is dreamcomm.SyncBatchNorm
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        shape = (sum(rows), CHANNELS, *INNER[case.dims])
        x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        x, dy = (3 * x + 2).to(case.dtype), dy.to(case.dtype)
        exact = case.dtype if case.dtype.itemsize > 2 else torch.float32
        theirs, their_gradient = passes(reference, x.to(exact), dy.to(exact), case)
        mine, my_gradient = passes(layer, own_rows(x, rows), own_rows(dy, rows), case)
        assert mine.dtype == case.dtype
        assert my_gradient is None or my_gradient.dtype == case.dtype
        found.append(
            {
                "output": (mine, own_rows(theirs, rows)),
                "input": (
                    my_gradient,
                    None if their_gradient is None else own_rows(their_gradient, rows),
                ),
                **{
                    f"gradient of {name}": (summed(one.grad), copied(other.grad))
                    for (name, one), other in zip(
                        layer.named_parameters(), reference.parameters(), strict=True
                    )
                },
                "state": (state_of(layer), state_of(reference)),
            }
        )
    return found
