"""Trains a GPT of 10 million parameters apart and together: its loss, its time and its bytes.

    python benchmarks/local_sgd_loss.py --json local-sgd.json        # 8 minutes
    python benchmarks/local_sgd_loss.py --steps 60 --every 10 --turns 2

Two ranks, and each way of training starts with the same weights and sees the same rows: bytes of
the Python files that came with the interpreter. The loss is that of rows of files that are not
trained on, after so many steps, with parameters averaged. The inner optimizer is AdamW everywhere.

Times: ways take turns of ``--every`` steps in one run of the same processes, after the losses. A
turn of LocalSGD or DiLoCo has one synchronization, and a step's time is a turn's over its steps.
Bytes are those that a rank's counters say it has sent.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

import dreamcomm
from dreamcomm.local_sgd import DiLoCo, LocalSGD
from dreamcomm.tools.bench.measurement import Json, Measurement
from dreamcomm.tools.bench.turns import take_turns
from dreamcomm.tools.demo.model import GPT, next_token_loss
from models import GPT_ROWS, GPT_SHAPE

WORLD = 2
LR = 1e-3
HELD_OUT_ROWS, HELD_OUT_BATCH = 256, 32
DDP, DDP_GLOO, LOCAL = "DDP on dreamcomm", "DDP on gloo", "LocalSGD"
# By rate and momentum of the outer SGD. The first are the paper's, for hundreds of rounds.
DILOCO = {"DiLoCo, 0.7, 0.9": (0.7, 0.9), "DiLoCo, 0.8, 0.2": (0.8, 0.2)}


@dataclass(frozen=True)
class Line:
    """One way of training.

    Attributes:
        loss: held-out, at the end; None: equal to another line's by construction.
        over_ddp: loss over that of DDP on dreamcomm.
        step_ms: the median turn's time for a step.
        sent_bytes: of a rank, for a step, on average; None: not counted.
    """

    name: str
    loss: float | None
    over_ddp: float | None
    step_ms: float
    sent_bytes: float | None


class Text:
    """Rows of bytes; every 20th file is held out."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [file.read_bytes() for file in files]
        self.trained = torch.tensor(list(b"".join(t for n, t in enumerate(texts) if n % 20)))
        self.held_out = torch.tensor(list(b"".join(texts[::20])))

    def rows(self, step: int) -> Tensor:
        """This rank's rows in a step."""
        generator = torch.Generator().manual_seed(WORLD * step + dist.get_rank())
        return self._cut(self.trained, GPT_ROWS, generator)

    def loss(self, model: nn.Module) -> float:
        """Of rows that are not trained on."""
        generator = torch.Generator().manual_seed(0)
        rows = self._cut(self.held_out, HELD_OUT_ROWS, generator)
        with torch.no_grad():
            losses = [loss_of(model, batch) for batch in torch.split(rows, HELD_OUT_BATCH)]
        return float(torch.stack(losses).mean())

    @staticmethod
    def _cut(text: Tensor, rows: int, generator: torch.Generator) -> Tensor:
        length = GPT_SHAPE.context + 1
        begins = torch.randint(len(text) - length, (rows,), generator=generator)
        return torch.stack([text[begin : begin + length] for begin in begins.tolist()])


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


class Way:
    """A model and what steps it."""

    def __init__(self, name: str, every: int, gloo: dist.ProcessGroup) -> None:
        torch.manual_seed(1)
        self.name, self.model, self.turns = name, GPT(GPT_SHAPE), 0
        self.wrapped: nn.Module = self.model
        self.settle: Callable[[], None] = lambda: None
        inner = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.optimizer: Any = inner
        if name in (DDP, DDP_GLOO):
            group = gloo if name == DDP_GLOO else None
            wrapper: Any = torch.nn.parallel.DistributedDataParallel
            wrapper = wrapper if name == DDP_GLOO else dreamcomm.DistributedDataParallel
            self.wrapped = wrapper(self.model, process_group=group, gradient_as_bucket_view=True)
        elif name == LOCAL:
            self.optimizer = local = LocalSGD(self.model, inner, every=every)
            self.settle = local.average_now
        else:
            lr, momentum = DILOCO[name]
            outer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=True)
            self.optimizer = diloco = DiLoCo(self.model, inner, outer, every=every)
            self.settle = diloco.synchronize

    def run(self, text: Text, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(loss_of(self.wrapped, text.rows(step)))
            self.optimizer.step()


def sent() -> int:
    return dreamcomm.stats().get("all_reduce", {"sent": 0})["sent"]


def run_rank(
    steps: int, every: int, turns: int
) -> dict[str, tuple[float | None, list[float], float]]:
    torch.set_num_threads(1)
    text, gloo = Text(), dist.new_group(backend="gloo")
    ways = [Way(name, every, gloo) for name in (DDP, LOCAL, *DILOCO, DDP_GLOO)]
    losses: dict[str, float] = {}
    for way in ways[:-1]:
        way.run(text, 0, steps)
        if steps % every:
            way.settle()
        losses[way.name] = text.loss(way.model)
    first = steps - steps % every  # of the turns' steps: a turn ends with a synchronization

    def turn(way: Way) -> tuple[float, int]:
        """Seconds, and the bytes that this rank has sent."""
        dist.barrier()
        before, began = sent(), time.monotonic()
        way.run(text, first + way.turns * every, every)
        way.turns += 1
        dist.barrier()
        return time.monotonic() - began, sent() - before

    found = take_turns({way.name: partial(turn, way) for way in ways}, turns, 1, rotates=True)
    return {
        name: (
            losses.get(name),
            [seconds / every for seconds, _ in of_name],
            sum(moved for _, moved in of_name) / (turns * every),
        )
        for name, of_name in found.items()
    }


def cells(one: Line) -> list[str]:
    return [
        one.name,
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.over_ddp is None else f"{one.over_ddp:.4f}",
        f"{one.step_ms:.1f}",
        "" if one.sent_bytes is None else f"{one.sent_bytes / 1e6:.2f}",
    ]


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each way for its loss.")] = 300,
    every: Annotated[int, typer.Option(min=1, help="Steps between synchronizations.")] = 10,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each way.")] = 10,
    json: Json = None,
) -> None:
    """Trains and times; see the head of this file."""
    found = dreamcomm.spawn(run_rank, WORLD, args=(steps, every, turns))[0]
    reference = found[DDP][0]
    assert reference is not None
    lines = [
        Line(
            name,
            loss,
            None if loss is None else loss / reference,
            1e3 * median(seconds),
            None if name == DDP_GLOO else moved,
        )
        for name, (loss, seconds, moved) in found.items()
    ]
    measurement = Measurement(json)
    measurement.table(
        f"GPT of 10 M parameters, {WORLD} ranks, {steps} steps, every {every}",
        ("", "held-out loss", "over DDP", "ms a step", "MB sent a step"),
        map(cells, lines),
    )
    settings = {"steps": steps, "every": every, "turns": turns}
    measurement.write(**settings, lines=[asdict(one) for one in lines])


if __name__ == "__main__":
    typer.run(main)
