"""Models that are split in tests: each with a way to make arguments of any number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

WIDTH, TOKENS, CONTEXT = 8, 11, 9


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        return x + (h if mask is None else h * mask)


class NanoGpt(nn.Module):
    """All is inside a ModuleDict; the head is the embedding; forward has optional targets."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.block_size = CONTEXT
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(TOKENS, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Block() for _ in range(layers)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"{t} is longer than {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss


class MaskedGpt(nn.Module):
    """Like examples/zero.py: a mask made of a length, and position weights used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        out: Tensor = self.head(h)
        return out


class Tied(nn.Module):
    """An nn.Sequential of blocks, a Parameter of the top module, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH))
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.blocks(self.embedding(x) + self.position[: x.shape[1]])
        logits = F.linear(hidden * self.scale, self.embedding.weight)
        return {"logits": logits, "pair": [logits.mean(), x.shape[1]], "none": None}


class Unet(nn.Module):
    """Two lists of equal length, and a skip from each block of one to one of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(1, 4, 3, padding=1)
        self.downs = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2)]) for _ in range(2)
        )
        self.middle = nn.Conv2d(4, 4, 1)
        self.ups = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(5, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        h, skips = self.into(image), []
        for convolution, pool in self.downs:
            h = F.relu(convolution(h))
            skips.append(h)
            h = pool(h)
        h = self.middle(h)
        for up in self.ups:
            skip = skips.pop()
            h = F.interpolate(h, size=skip.shape[-2:])
            h = F.relu(up(torch.cat([h, skip], 1)))
        out: Tensor = self.out(torch.cat([h, image], 1))
        return out


class Trunk(nn.Module):
    """A module with a forward of its own around the blocks, as Hugging Face has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None, flip: bool) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[0], device=x.device)
        if flip:
            x = x.flip(-1)
        mask = mask.to(x.dtype)[:, None] / math.sqrt(x.shape[-1])
        for layer in self.layers:
            x = layer(x, mask=mask) * self.gain
        return x


class HfLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, WIDTH)
        self.model = Trunk()
        self.head = nn.Linear(WIDTH, 2)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, flip: bool = False, scale: float = 1.0
    ) -> Tensor:
        out: Tensor = self.head(self.model(self.into(x), mask, flip)) * scale
        return out


class Keyword(nn.Module):
    """Its mask is a required keyword argument that blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class Takes(nn.Module):
    """A stage with two inputs, two outputs and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return (h if shift is None else h + shift), y + h


@dataclass
class Output:
    logits: Tensor
    length: int


pytree.register_dataclass(Output)


class Corners(nn.Module):
    """In-place operations, plain tensors, numbers drawn, no_grad, and a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.table = torch.arange(40.0).reshape(5, 8)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Output:
        mask = torch.zeros(x.shape[0], x.shape[0])
        mask[0] = 1.0
        mask.fill_diagonal_(2.0)
        noise = torch.randn(WIDTH)
        with torch.no_grad():
            frozen = x * 2
        constant = torch.arange(4) + 1
        for layer in self.layers:
            x = mask @ layer(x) + noise + frozen
        if self.training:
            x = x * 3
        return Output(x + self.table[: x.shape[1]].sum() + constant.sum(), x.shape[0])


def tokens(rows: int, length: int = CONTEXT, seed: int = 0) -> Tensor:
    return torch.randint(TOKENS, (rows, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
