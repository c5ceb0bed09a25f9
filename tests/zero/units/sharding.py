"""Models under fully_shard, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ddp.models import CONTEXT, FEATURES, MODELS, TOKENS, Block, batch, make, rows_of
from dreamcomm.zero import fully_shard


class TiedGpt(nn.Module):
    """Its head has the weight of its embedding, in another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 96, _weight=torch.randn(TOKENS, 96) / 8)
        self.blocks = nn.Sequential(*(Block(96) for _ in range(2)))
        self.head = nn.Linear(96, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :CONTEXT].abs() * 1000).long() % TOKENS
        out: Tensor = self.head(self.blocks(self.embedding(tokens))).mean(1)
        return out[:, :5]


class BatchNormCnn(nn.Module):
    """With batch norm and weights in the memory order of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 128, 3, padding=1)
        self.head = nn.Linear(128, 5)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 1, 3, 4).contiguous(memory_format=torch.channels_last)
        image = F.relu(self.second(F.relu(self.norm(self.first(image)))))
        out: Tensor = self.head(image.mean((2, 3)))
        return out


class Strange(nn.Module):
    """With frozen, unused and scalar parameters, and some of 3 rows, of 0 rows and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 190)
        self.frozen = nn.Linear(190, 190)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(190, 190)
        self.scale = nn.Parameter(torch.ones(()))
        self.three = nn.Parameter(torch.randn(3, 190) / 8)
        self.none = nn.Parameter(torch.zeros(0, 190))
        self.turned = nn.Parameter((torch.randn(190, 7) / 8).t())
        self.out = nn.Linear(190, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.into(x))))
        hidden = hidden + self.three.sum(0) + self.none.sum(0)
        hidden = hidden + self.turned[0] * self.turned[6]  # in any order of memory the same bits
        out: Tensor = self.out(hidden) * self.scale
        return out


OURS: dict[str, Callable[[], nn.Module]] = {
    **MODELS,
    "tied": TiedGpt,
    "batchnorm": BatchNormCnn,
    "strange": Strange,
}
SHARED = ["mlp", "gpt", "tied", "batchnorm", "odd", "strange"]


def made(name: str) -> nn.Module:
    """The same weights on every rank and in every call."""
    if name in MODELS:
        return make(name)
    torch.manual_seed(7)
    return OURS[name]()


def sharded(name: str, **options: Any) -> Any:
    """The model in units: its larger children, and the root."""
    return shard(made(name), **options)


def shard(module: nn.Module, **options: Any) -> Any:
    """Units of blocks, linear layers of the first level, and the root."""
    for part in module.modules():
        if isinstance(part, Block):
            fully_shard(part, **options)
    for part in module.children():
        if isinstance(part, nn.Sequential):
            for inner in part:
                if isinstance(inner, nn.Linear):
                    fully_shard(inner, **options)
        elif isinstance(part, (nn.Linear, nn.Conv2d)):
            fully_shard(part, **options)
    if isinstance(module, TiedGpt):
        fully_shard(module.embedding, **options)
    return fully_shard(module, **options)


def part(data: Tensor) -> Tensor:
    return rows_of(data, dist.get_rank(), dist.get_world_size())


def my_batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = batch(step)
    return part(x), part(y)


def whole(tensor: Tensor) -> Tensor:
    """All rows, on every rank. Collective."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def weights(module: nn.Module) -> list[Tensor]:
    return [whole(one) for one in module.parameters()]
