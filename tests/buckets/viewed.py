"""Models whose gradients are views of memory that autograd, or a hook, still reads.

A row's `stem(x)` and a view of the parameter are added: the gradients of both are one tensor, or
views of one. It goes on to the stem after it has become the parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

FEATURES = 2
SIZES = {"large": (130, 256), "small": (4, 6)}  # gradients that are reduced in place, and not


def _turned(rows: int, columns: int) -> Tensor:
    return torch.randn(columns, rows).t()


def _plain(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns)


def _pairs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns // 2, 2)


View = Callable[[list[nn.Parameter]], Tensor]

# How many parameters there are, how each is made, and the tensor [1, rows, columns] of them.
VIEWS: dict[str, tuple[int, Callable[[int, int], Tensor], View]] = {
    "itself": (1, lambda r, c: torch.randn(1, r, c), lambda p: p[0]),
    "view": (1, _plain, lambda p: p[0].view(1, *p[0].shape)),
    "reshape": (1, lambda r, c: torch.randn(r * c), lambda p: p[0].reshape(1, -1, 2)),
    "expand": (1, _plain, lambda p: p[0].expand(1, -1, -1)),
    "unsqueeze": (1, _plain, lambda p: p[0].unsqueeze(0)),
    "squeeze": (1, lambda r, c: torch.randn(1, 1, r, c), lambda p: p[0].squeeze(0)),
    "transpose": (1, _plain, lambda p: p[0].t()[None]),
    "transposed": (1, _turned, lambda p: p[0].t()[None]),
    "permute": (1, lambda r, c: torch.randn(r, c, 1), lambda p: p[0].permute(2, 0, 1)),
    "movedim": (1, lambda r, c: torch.randn(r, 1, c), lambda p: p[0].movedim(1, 0)),
    "select": (1, lambda r, c: torch.randn(2, r, c), lambda p: p[0][1][None]),
    "split": (1, _plain, lambda p: torch.cat(p[0][None].split(2, 1), 1)),
    "unbind": (1, _plain, lambda p: torch.stack(p[0].unbind())[None]),
    "stack": (2, _plain, lambda p: torch.stack(p).view(1, -1, p[0].shape[1])),
    "cat": (2, _plain, lambda p: torch.cat(p)[None]),
    "two": (2, _plain, lambda p: p[0][None] + p[1][None]),
    "as_strided": (1, _plain, lambda p: p[0].as_strided((1, p[0].numel() // 2, 2), (0, 2, 1))),
    "complex": (1, _pairs, lambda p: torch.view_as_complex(p[0])[None]),
    "flipped": (1, _plain, lambda p: p[0].flip(0)[None]),
}


class Viewed(nn.Module):
    """Output [1] of an input [1, FEATURES]."""

    def __init__(self, view: str, size: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        count, make, self.view = VIEWS[view]
        self.added = nn.ParameterList(nn.Parameter(make(*SIZES[size])) for _ in range(count))
        shape = self.view(list(self.added)).shape
        numel = shape.numel() * (2 if view == "complex" else 1)
        self.stem, self.weight = nn.Linear(FEATURES, numel), nn.Parameter(torch.randn(numel))
        self.keep: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        # Autograd goes backward through what was computed last, so that the parameter is first.
        hidden = self.stem(x)
        view = self.view(list(self.added))
        if view.is_complex():
            hidden = torch.view_as_complex(hidden.view(-1, 2))
        hidden = hidden.view(view.shape)
        if self.keep is not None and hidden.requires_grad:
            hidden.register_hook(self.keep)
            view.register_hook(self.keep)
        total = hidden + view
        plain = torch.view_as_real(total) if total.is_complex() else total
        return (torch.sin(plain.reshape(-1)) * self.weight).sum()[None]


class Kept:
    """Keeps a view of each gradient that flows through, and a copy."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, gradient: Tensor) -> None:
        self.pairs.append((gradient.view(-1).detach(), gradient.clone().view(-1)))

    def are_equal(self) -> bool:
        return bool(self.pairs) and all(torch.equal(one, copy) for one, copy in self.pairs)


def cases() -> Iterator[tuple[str, str]]:
    for view in VIEWS:
        for size in SIZES:
            yield view, size


def row(step: int, rank: int) -> Tensor:
    return torch.randn(1, FEATURES, generator=torch.Generator().manual_seed(10 * step + rank))


def trained_alone(view: str, size: str, ranks: int, steps: int) -> list[list[Tensor]]:
    """The parameters after each step, of the mean of all ranks' losses."""
    model = Viewed(view, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            of_rank = torch.autograd.grad(
                model(row(step, rank)).square().sum() / ranks, list(model.parameters())
            )
            for one, gradient in zip(model.parameters(), of_rank, strict=True):
                one.grad = gradient.clone() if one.grad is None else one.grad + gradient
        optimizer.step()
        found.append([one.detach().clone() for one in model.parameters()])
    return found
