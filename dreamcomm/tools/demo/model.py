"""A small GPT: pre-norm blocks, causal attention, output weights tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the model: about 12 * layers * width**2 parameters (by default 0.8 million)."""

    vocabulary: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next token: (batch, time) int64 to (batch, time, vocabulary) logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.initialise(shape)

    def initialise(self, shape: Shape) -> None:
        """Keeps activations near unit size at any width, and the residual sum at any depth."""
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.size(1) ** -0.5)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=(2 * shape.layers * weight.size(1)) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        return F.linear(x, self.tokens.weight)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameter_count(model: nn.Module) -> int:
    """The number of trained scalars; a tied weight counts once."""
    return sum(weight.numel() for weight in model.parameters())
