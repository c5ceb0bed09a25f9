"""Trains a small GPT with the same bits on 1, 2 or 4 ranks.

    torchrun --nproc-per-node 2 examples/invariant.py

The losses are the same to the last bit with --nproc-per-node 1 and 4.

With --checkpoint run.pt it saves its state there in the end, and starts from that file where there
is one, at any of these numbers of ranks. `python examples/invariant.py` starts two ranks itself.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dreamcomm

DOCS = Path(__file__).parents[1] / "docs"
SHARDS, ROWS, LENGTH = 4, 4, 64  # of a step; rows of a shard; characters of a row


class Texts(Dataset):
    """Pieces of this project's documentation, as numbers of characters."""

    def __init__(self) -> None:
        text = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
        known = {character: number for number, character in enumerate(sorted(set(text)))}
        self.characters = len(known)
        whole = torch.tensor([known[character] for character in text])
        self.rows = whole[: len(whole) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class GPT(nn.Module):
    """Predicts each next character from those before it, with dropout."""

    def __init__(self, characters: int, width: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.places.weight
        return self.head(self.layer(x, src_mask=mask, is_causal=True))


def train_step(
    model: dreamcomm.DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
) -> float:
    """One step on this rank's shards; returns the loss of all shards."""
    optimizer.zero_grad()
    losses = []
    for _, rows in zip(model.shards(), batches, strict=False):
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        losses.append(loss.detach())
    model.clip_grad_norm_(1.0)
    optimizer.step()
    return model.mean(losses).item()


def train(steps: int, checkpoint: Path | None) -> None:
    """Runs on every rank."""
    torch.set_num_threads(1)  # the same at all numbers of ranks
    torch.manual_seed(1)
    data = Texts()
    model = dreamcomm.DistributedDataParallel(GPT(data.characters), invariant_shards=SHARDS, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        model.shards.load_state_dict(state["shards"])
    sampler = dreamcomm.ShardSampler(data, model.shards, ROWS)
    batches = iter(DataLoader(data, batch_sampler=sampler))
    for _ in range(steps):
        loss = train_step(model, optimizer, batches)
        if dist.get_rank() == 0:
            print(f"step {model.shards.step}: loss {loss:.9g}")  # nine digits are all bits
    if checkpoint is not None and dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "shards": model.shards.state_dict()}, checkpoint)


def main() -> None:
    """Starts ranks, or is one of torchrun's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        dreamcomm.spawn(train, 2, args=(options.steps, options.checkpoint))
        return
    dist.init_process_group("dreamcomm")
    train(options.steps, options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
