"""Real text that every Python carries: the help topics of ``pydoc``, as bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = 256  # Bytes: no tokenizer, and any text fits.
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """The text, split: one-dimensional int64 tensors of byte values."""

    train: Tensor
    validation: Tensor

    def unigram_entropy(self) -> float:
        """Nats per byte that a model reaches which knows the byte frequencies and no context."""
        counts = torch.bincount(torch.cat([self.train, self.validation]), minlength=VOCABULARY)
        shares: list[float] = (counts / counts.sum()).tolist()
        return -sum(share * math.log(share) for share in shares if share > 0)


def load_corpus() -> Corpus:
    """Joins the topics in alphabetical order; the last tenth is for validation."""
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return Corpus(text[:cut], text[cut:])


def sample_batch(
    text: Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the same windows one byte on: two (batch, context) int64."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator, device=text.device)
    windows = text[starts + torch.arange(context + 1, device=text.device)]
    return windows[:, :-1], windows[:, 1:]
