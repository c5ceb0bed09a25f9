"""Trains a small GPT whose optimizer state, and gradients, are sharded over the ranks.

    torchrun --nproc-per-node 2 examples/zero.py --stage 2

--how says what averages gradients: the optimizer itself (bare), the optimizer in the buckets of
dreamcomm's DistributedDataParallel (wrapped), or torch's DistributedDataParallel (torch, which is
for stage 1). Stages 1 and 2, bare and wrapped, print the same losses, bit for bit.

With --checkpoint FOLDER it saves there every ten steps, and goes on from there: 20 steps and 20
more print the losses of 40 at once. The second part may have another stage, wrapped in place of
bare, or 1, 4 or 8 ranks, whose losses differ in the last digits.
`python examples/zero.py` starts two ranks itself, by dreamcomm.spawn.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dreamcomm
from dreamcomm import zero

DOCS = Path(__file__).parents[1] / "docs"
LENGTH, BATCH, ACCUMULATED = 64, 16, 2  # characters, rows of all ranks' step, backward passes


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
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


def prepare(module: nn.Module, how: str, stage: int) -> tuple[nn.Module, zero.ZeroOptimizer]:
    """The module to call, and its optimizer."""
    options = {"stage": stage, "lr": 3e-3}
    if how == "wrapped":
        module = dreamcomm.DistributedDataParallel(module)
    elif how == "torch":
        module = nn.parallel.DistributedDataParallel(module)
        options["reduce"] = False
    return module, zero.ZeroOptimizer(module.parameters(), torch.optim.AdamW, **options)


def train_step(model: nn.Module, optimizer: zero.ZeroOptimizer, rows: Tensor, holder: Any) -> float:
    """One step on a rank's rows; returns the loss, averaged over all ranks."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for number, part in enumerate(rows.chunk(ACCUMULATED), start=1):
        # Only the last backward pass, or the step after it, reduces what has added up.
        with nullcontext() if number == ACCUMULATED else holder.no_sync():
            logits = model(part[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / ACCUMULATED).backward()
        total += loss.detach() / ACCUMULATED
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


def state_of(model: nn.Module, optimizer: zero.ZeroOptimizer, done: int) -> dict[str, Any]:
    """What a checkpoint holds. Names are the bare module's, whatever is around it."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "done": done}


def resume(model: nn.Module, optimizer: zero.ZeroOptimizer, folder: Path) -> int:
    """Loads a checkpoint; returns the steps that are done."""
    state = state_of(model, optimizer, 0)
    zero.load(state, folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return state["done"]


def train(options: argparse.Namespace) -> None:
    """Runs on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text = "".join(path.read_text() for path in sorted(options.text))
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(one) for one in text])
    windows = codes.unfold(0, LENGTH + 1, LENGTH)  # each ends with the first of the next

    torch.manual_seed(0)
    module = GPT(len(characters))
    model, optimizer = prepare(module, options.how, options.stage)
    holder = model if options.how == "torch" else optimizer
    is_resumed = options.checkpoint and options.checkpoint.exists()
    done = resume(model, optimizer, options.checkpoint) if is_resumed else 0
    for step in range(done + 1, options.steps + 1):
        # A step's rows depend on its number alone, so a resumed run has them too.
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(step))
        loss = train_step(model, optimizer, windows[order[:BATCH]][rank::world], holder)
        if rank == 0:
            print(f"step {step}: loss {loss:.9g}")  # nine digits are all bits
        if options.checkpoint and (step % 10 == 0 or step == options.steps):
            zero.save(state_of(model, optimizer, step), options.checkpoint)

    report = zero.memory_report(optimizer)
    if rank == 0:
        print(report)
        for stage in range(4):
            print(zero.estimate(module, world, stage, optimizer=torch.optim.AdamW))


def main() -> None:
    """Starts ranks, or is one of torchrun's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["bare", "wrapped", "torch"], default="bare")
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text", type=Path, nargs="+", default=[*DOCS.glob("*.md")])
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if options.how == "torch" and options.stage == 2:
        parser.error("torch's DistributedDataParallel keeps whole gradients: take stage 1")
    if "RANK" not in os.environ:
        dreamcomm.spawn(train, 2, args=(options,))
        return
    dist.init_process_group("dreamcomm")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
