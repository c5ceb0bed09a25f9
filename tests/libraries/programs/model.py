"""The model that every program trains, its data, and the words that a program ends with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH, CLASSES, ROWS, STEPS = 32, 8, 16, 4


def make_model(hidden: int = 64) -> nn.Sequential:
    """Equal weights on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def make_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """A rank's own."""
    rows = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(ROWS, WIDTH, generator=rows), torch.randint(CLASSES, (ROWS,), generator=rows))
        for _ in range(STEPS)
    ]


def make_dataset(ranks: int) -> torch.utils.data.TensorDataset:
    """The batches of all ranks, for libraries that deal the rows themselves."""
    parts = [batch for rank in range(ranks) for batch in make_batches(rank)]
    rows, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return torch.utils.data.TensorDataset(rows, labels)


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()


def result(backend: str, found: Iterable[Tensor]) -> str:
    """One line for the test: the backend that ran, and a hash of all bits."""
    bits = hashlib.sha256()
    for tensor in found:
        bits.update(tensor.detach().contiguous().numpy().tobytes())
    return f"result {backend} {bits.hexdigest()}\n"


def report(backend: str, found: Iterable[Tensor]) -> None:
    os.write(1, result(backend, found).encode())  # in one piece, as the ranks share it
