"""Trains a small GPT on this project's documentation, and goes on from checkpoints bit for bit.

    torchrun --nproc-per-node 2 examples/ddp.py

With --checkpoint run.pt it saves its state there every ten steps, and starts from that file where
there is one: 20 steps and 20 more print the same losses as 40 at once. --picture losses.png draws
them. `python examples/ddp.py` starts two ranks itself, by dreamcomm.spawn.
"""

import argparse
import itertools
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import dreamcomm

DOCS = Path(__file__).parents[1] / "docs"
LENGTH, BATCH, ACCUMULATED = 64, 8, 2  # characters, rows of a rank's step, its backward passes


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for the character after each one."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def train_step(
    model: dreamcomm.DistributedDataParallel, optimizer: torch.optim.Optimizer, rows: Tensor
) -> float:
    """One step on a rank's rows; returns the loss, averaged over all ranks."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for number, part in enumerate(rows.chunk(ACCUMULATED), start=1):
        # Only the last backward pass reduces: what the passes have added up.
        with nullcontext() if number == ACCUMULATED else model.no_sync():
            logits = model(part[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / ACCUMULATED).backward()
        total += loss.detach() / ACCUMULATED
    model.clip_grad_norm_(1.0)
    optimizer.step()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


def save(path: Path, state: dict) -> None:
    """Rank 0 writes the state, and the random state of every rank. Collective."""
    random = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(random, torch.get_rng_state())
    if dist.get_rank() == 0:
        torch.save({**state, "random": random}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # a crash leaves the old file or the new one


def train(options: argparse.Namespace) -> None:
    """Runs on every rank."""
    rank = dist.get_rank()
    text = "".join(path.read_text() for path in sorted(options.text))
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(one) for one in text])
    windows = codes.unfold(0, LENGTH + 1, LENGTH)  # each ends with the first of the next

    torch.manual_seed(0)
    model = dreamcomm.DistributedDataParallel(GPT(len(characters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # each rank drops out other activations
    sampler = DistributedSampler(windows)
    epoch = done = 0  # batches of this epoch that are done
    losses: list[float] = []
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        if len(saved["random"]) != dist.get_world_size():
            raise SystemExit(f"{options.checkpoint} is of {len(saved['random'])} ranks")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, done, losses = saved["epoch"], saved["done"], saved["losses"]
        torch.set_rng_state(saved["random"][rank])

    while len(losses) < options.steps:
        sampler.set_epoch(epoch)
        batches = list(BatchSampler(sampler, BATCH, drop_last=True))[done:]
        # With a generator of its own a loader leaves the default one as it is.
        loader = DataLoader(windows, batch_sampler=batches, generator=torch.Generator())
        for rows in itertools.islice(loader, options.steps - len(losses)):
            losses.append(train_step(model, optimizer, rows))
            done += 1
            if rank == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.9g}")  # nine digits are all bits
            if options.checkpoint and (len(losses) % 10 == 0 or len(losses) == options.steps):
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                save(options.checkpoint, {**state, "epoch": epoch, "done": done, "losses": losses})
        epoch, done = epoch + 1, 0

    if rank == 0:
        print(model.report())
        if options.picture:
            draw(losses, options.picture)


def draw(losses: list[float], path: Path) -> None:
    """Needs matplotlib."""
    from matplotlib import pyplot  # only for --picture

    pyplot.plot(range(1, len(losses) + 1), losses)
    pyplot.xlabel("step")
    pyplot.ylabel("loss, nats per character")
    pyplot.savefig(path)


def main() -> None:
    """Starts ranks, or is one of torchrun's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text", type=Path, nargs="+", default=[*DOCS.glob("*.md")])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        dreamcomm.spawn(train, 2, args=(options,))
        return
    dist.init_process_group("dreamcomm")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
