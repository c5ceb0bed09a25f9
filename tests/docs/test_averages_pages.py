"""The code of docs/token_means.md and docs/invariant_shards.md runs, and does what they say."""

from __future__ import annotations

import contextlib
import io
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dreamcomm
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("documents what only dreamcomm has")

DOCS = Path(__file__).parents[2] / "docs"
CLASSES, LENGTH = 5, 6


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def run(code: str, **names: Any) -> dict[str, Any]:
    found = {"F": F, "dreamcomm": dreamcomm, "nullcontext": nullcontext, **names}
    exec(compile(code, "page", "exec"), found)
    return found


# Means over tokens.


class Tagger(nn.Module):
    """Logits of each token; as transformers' models, a loss for labels, shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.head = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

    def forward(
        self, inputs: Tensor, labels: Tensor | None = None, num_items_in_batch: int = 0
    ) -> Any:
        logits = self.head(self.tokens(inputs))
        if labels is None:
            return logits
        flat = logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum")
        return SimpleNamespace(loss=loss / num_items_in_batch)


def tokens(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of this rank, of which some targets are ignored."""
    generator = torch.Generator().manual_seed(10 * rank + number)
    inputs = torch.randint(9, (1 + rank + number, LENGTH), generator=generator)
    targets = torch.randint(CLASSES, inputs.shape, generator=generator)
    targets[0, : 2 + rank] = -100
    return inputs, targets


def gradients(module: nn.Module) -> list[Tensor]:
    return [one.grad for one in module.parameters() if one.grad is not None]


def check_gradients(module: nn.Module, loss: Tensor, alone: nn.Module) -> None:
    loss.backward()
    for ours, theirs in zip(gradients(module), gradients(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def all_tokens(module: nn.Module, numbers: range, shift: int = 0) -> Tensor:
    """The mean over all ranks' tokens that count."""
    loss, count = torch.zeros(()), 0
    for rank in range(dist.get_world_size()):
        for number in numbers:
            inputs, targets = tokens(rank, number)
            logits = module(inputs)[:, : LENGTH - shift].flatten(0, 1)
            flat = targets[:, shift:].flatten()
            loss = loss + F.cross_entropy(logits, flat, reduction="sum")
            count += int((flat != -100).sum())
    return loss / count


def token_means() -> None:
    first, several, transformers, weighted = blocks("token_means.md")
    rank, alone = dist.get_rank(), Tagger()
    module = Tagger()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    inputs, targets = tokens(rank)
    model = run(first, module=module, optimizer=optimizer, inputs=inputs, targets=targets)["model"]
    check_gradients(module, all_tokens(alone, range(1)), alone)

    for one in (module, alone):
        one.zero_grad()
    batch = {"inputs": inputs, "labels": targets}
    run(transformers, model=model, batch=batch)
    check_gradients(module, all_tokens(alone, range(1), shift=1), alone)

    parts = [(x, y.clamp(min=0)) for x, y in (tokens(rank, number) for number in range(3))]
    with contextlib.suppress(TypeError):  # the page clips to 1
        model.clip_grad_norm_ = lambda norm: None
    run(several, model=model, optimizer=optimizer, parts=parts)
    alone.zero_grad()
    total, count = torch.zeros(()), 0
    for other in range(dist.get_world_size()):
        for number in range(3):
            x, y = tokens(other, number)
            flat = alone(x).flatten(0, 1)
            total = total + F.cross_entropy(flat, y.clamp(min=0).flatten(), reduction="sum")
            count += y.numel()
    check_gradients(module, total / count, alone)
    check_weighted(weighted)


def check_weighted(code: str) -> None:
    torch.manual_seed(2)
    module, alone = nn.Linear(4, 3), nn.Linear(4, 3)
    alone.load_state_dict(module.state_dict())
    model = dreamcomm.DistributedDataParallel(module, reduce="tokens")
    world = dist.get_world_size()
    inputs, targets = torch.randn(world, 5, 4), torch.randint(3, (world, 5))
    weights = torch.rand(world, 5)
    rank = dist.get_rank()
    run(code, model=model, inputs=inputs[rank], targets=targets[rank], weights=weights[rank])
    each = F.cross_entropy(alone(inputs.flatten(0, 1)), targets.flatten(), reduction="none")
    check_gradients(module, (each @ weights.flatten()) / weights.sum(), alone)


def test_the_page_on_means_over_tokens(pool: Pool) -> None:
    pool.run(token_means)


# Invariant shards.


def invariant(epochs: int) -> tuple[str, list[Tensor], dict[str, int]]:
    """What the first block prints, the weights after both, and the state of the third."""
    loop, data, resume = blocks("invariant_shards.md")
    torch.manual_seed(1)
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 4, generator=generator)
    y = torch.randint(3, (16,), generator=generator)

    def batch_of(step: int, shard: int) -> tuple[Tensor, Tensor]:
        return x[2 * shard :][:2] + step, y[2 * shard :][:2]

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = run(loop, module=module, optimizer=optimizer, steps=2, batch_of=batch_of)
    model = found["model"]
    model.shards.step = 0
    dataset = TensorDataset(x.repeat(33, 1), y.repeat(33))  # more than two steps of 8 x 32
    run(
        data,
        model=model,
        optimizer=optimizer,
        dataset=dataset,
        epochs=epochs,
        DataLoader=DataLoader,
    )
    save, load = resume.split("...\n")
    state = run(save, model=model)["state"]
    run(load, model=model, state=state)
    return printed.getvalue(), [one.detach() for one in module.parameters()], state["shards"]


def test_the_page_on_invariant_shards(pool: Pool) -> None:
    (alone,) = pool.run(invariant, 2, world=1)
    printed, weights, state = alone
    assert len(printed.splitlines()) == 2
    assert state == {"shards": 8, "step": 4, "seed": 0, "threads": 1}
    for world in (2, 4):
        for text, theirs, of_theirs in pool.run(invariant, 2, world=world):
            assert (text, of_theirs) == (printed, state)
            assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
