"""Trains a small GPT in stages on different ranks, as two pipelines side by side.

    torchrun --nproc-per-node 4 examples/pipeline.py --schedule 1f1b

The four ranks are a mesh of 2 x 2: two stages, and two pipelines that each take half of the rows.
--data says what averages their gradients: dreamcomm's DistributedDataParallel (ddp) or its
ZeroOptimizer (zero1, zero2), which also shards the optimizer's state. With none, all four ranks
are one pipeline of four stages.

With --checkpoint FOLDER it saves there every ten steps, and goes on from there: 20 steps and 20
more print the losses of 40 at once. The second part may have another schedule, other stages or
another --data. --timeline says where to draw the last step; the gaps are the bubble.
`python examples/pipeline.py` starts four ranks itself, by dreamcomm.spawn.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from dreamcomm import zero
from dreamcomm.pipeline import Pipeline

DOCS = Path(__file__).parents[1] / "docs"
LENGTH, BATCH = 64, 32  # characters, rows of all pipelines' step
# One entry for each parameter, so that a rank has those of its stages.
BY_PARAMETER = StateDictOptions(flatten_optimizer_state_dict=True)


class GPT(nn.Module):
    """Predicts each next character from those before it. Nothing in it knows of stages."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=True)
            for _ in range(8)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for the character after each one. The first and the last stage share a weight."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.tokens(x) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def prepare(
    pipe: Pipeline, data: str, group: dist.ProcessGroup
) -> tuple[torch.optim.Optimizer, nn.Module]:
    """The optimizer of this rank's stages, and the module to keep: it averages while it lives."""
    module = pipe.module
    if data.startswith("zero"):
        options = {"process_group": group, "stage": int(data[-1]), "lr": 3e-3}
        return zero.ZeroOptimizer(pipe.parameters(), torch.optim.AdamW, **options), module
    if data == "ddp":
        module = dreamcomm.DistributedDataParallel(module, process_group=group)
    return torch.optim.AdamW(pipe.parameters(), lr=3e-3), module


def state_of(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds of this rank. Names are the whole module's."""
    return {
        "model": get_model_state_dict(pipe.module),
        "optimizer": get_optimizer_state_dict(pipe.module, optimizer, options=BY_PARAMETER),
        "steps": pipe.steps,
    }


def resume(pipe: Pipeline, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Loads a checkpoint. Dropout masks depend on the number of steps that are done."""
    state = state_of(pipe, optimizer)
    zero.load(state, folder)
    set_model_state_dict(pipe.module, state["model"])
    set_optimizer_state_dict(pipe.module, optimizer, state["optimizer"], options=BY_PARAMETER)
    pipe.steps = state["steps"]


def train_step(pipe: Pipeline, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    """One step on a pipeline's rows; returns their loss, on all of the pipeline's ranks."""
    losses: list[Tensor] = []
    optimizer.zero_grad()
    pipe.step(rows[:, :-1], target=rows[:, 1:], losses=losses, return_outputs=False)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    return torch.stack(losses).mean()


def train(options: argparse.Namespace) -> None:
    """Runs on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text = "".join(path.read_text() for path in sorted(options.text))
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(one) for one in text])
    windows = codes.unfold(0, LENGTH + 1, LENGTH)  # each ends with the first of the next

    stages = world if options.data == "none" else world // 2
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("pipe", "data"))
    torch.manual_seed(0)
    pipe = Pipeline(
        GPT(len(characters)),
        options.micro_batches,
        schedule=options.schedule,
        loss_fn=loss_of,
        mesh=mesh,
        loss="all",
    )
    pipelines = mesh["data"].get_group()
    optimizer, _module = prepare(pipe, options.data, pipelines)
    if options.checkpoint and options.checkpoint.exists():
        resume(pipe, optimizer, options.checkpoint)
    share = slice(mesh.get_local_rank("data"), None, mesh["data"].size())
    for step in range(pipe.steps + 1, options.steps + 1):
        # A step's rows depend on its number alone, so a resumed run has them too.
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(step))
        loss = train_step(pipe, optimizer, windows[order[:BATCH]][share])
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=pipelines)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.9g}")  # nine digits are all bits
        if options.checkpoint and (step % 10 == 0 or step == options.steps):
            zero.save(state_of(pipe, optimizer), options.checkpoint)

    reports = [""] * world
    dist.all_gather_object(reports, str(pipe.report()))
    picture = pipe.report().picture()
    if rank == 0:
        for number, report in enumerate(reports):
            print(f"rank {number}: {report}")
        if options.timeline != "none":
            Path(options.timeline).write_text(picture)
            print(f"wrote {options.timeline}")


def main() -> None:
    """Starts ranks, or is one of torchrun's."""
    parser = argparse.ArgumentParser()
    schedules = ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"]
    parser.add_argument("--schedule", choices=schedules, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--data", choices=["none", "ddp", "zero1", "zero2"], default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--text", type=Path, nargs="+", default=[*DOCS.glob("*.md")])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--timeline", default="pipeline.svg", help="a file, or none")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        dreamcomm.spawn(train, 4, args=(options,))
        return
    dist.init_process_group("dreamcomm")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
