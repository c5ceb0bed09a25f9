"""What one rank of offload_memory.py does: makes a model, trains it, saves or resumes."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dreamcomm import zero
from dreamcomm.tools.demo.model import GPT, Block, Shape, next_token_loss
from host_memory import peak_file
from zero_memory import warm_up

STEPS, SAVED, KILLED = 8, 3, 5  # steps in all; the save comes after 3, the kill after 5
FIRST = 2  # steps that do not count: they make the state, and learn the order of units
LAYERS, WIDTH, ROWS = 12, 2048, 8  # of the MLP: 201 million parameters
SHAPE, GPT_ROWS = Shape(layers=14, heads=16, width=1024, context=64), 2  # 177 million


@dataclass(frozen=True)
class Job:
    """What ranks do.

    Attributes:
        folder: of files; None: all is in memory.
        group: the control group that they join.
        saves: the checkpoint's folder.
        begins, ends: steps. It resumes if it does not begin at 0.
        is_killed: by itself, after the last step.
    """

    model: str
    folder: str | None
    group: str
    saves: str
    begins: int = 0
    ends: int = STEPS
    is_killed: bool = False


@dataclass(frozen=True)
class Ended:
    """What a rank has found.

    Attributes:
        digest: of its rows in the end.
        seconds: of each step that counts.
        read, written: bytes of the disk in these steps.
        peak: bytes of the group in these steps; 0 where the system keeps no such peak.
        peak_before: and before these, where it does.
    """

    losses: list[float]
    digest: str
    seconds: list[float]
    read: int
    written: int
    peak: int
    peak_before: int
    elements: int
    report: str


def mlp() -> nn.Module:
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * (LAYERS // 2)
    return nn.Sequential(*(part for size in sizes for part in (nn.Linear(*size), nn.ReLU())))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "gpt": lambda: GPT(SHAPE)}


def loss_of(name: str, module: nn.Module, step: int) -> Tensor:
    """Of a batch of the rank's own."""
    rows = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if name == "mlp":
        x, y = torch.randn(2, ROWS, WIDTH, generator=rows)
        return F.mse_loss(module(x), y)
    tokens = torch.randint(SHAPE.vocabulary, (GPT_ROWS, SHAPE.context + 1), generator=rows)
    return next_token_loss(module(tokens[:, :-1]), tokens[:, 1:])


def sharded(name: str, folder: str | None) -> Any:
    """A model that is in memory nowhere before it is sharded."""
    with torch.device("meta"):
        module = MODELS[name]()
    for part in module.modules():
        if isinstance(part, Block if name == "gpt" else nn.Linear):
            zero.fully_shard(part, offload_folder=folder)
    zero.fully_shard(module, offload_folder=folder)
    module.to_empty(device="cpu")
    zero.initialize(module)
    return module


def disk_bytes() -> tuple[int, int]:
    """That this process has read and written so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def digest_of(module: nn.Module) -> str:
    """Of this rank's rows."""
    found = hashlib.sha256()
    for one in module.parameters():
        assert isinstance(one, DTensor)
        found.update(one.to_local().detach().numpy().tobytes())
    return found.hexdigest()


def run_rank(job: Job) -> Ended:
    torch.set_num_threads(1)
    warm_up()
    (Path(job.group) / "cgroup.procs").write_text(str(os.getpid()))
    dist.barrier()
    module = sharded(job.model, job.folder)
    optimizer = zero.ZeroOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(module, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    if job.begins > 0:
        loaded = state()
        zero.load(loaded, job.saves)
        parts = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(module, optimizer, **parts)
        del loaded, parts
    steps = Steps(job, module, optimizer)
    for step in range(job.begins, job.ends):
        steps.take(step)
        if job.is_killed and step + 1 == SAVED:
            zero.save(state(), job.saves)
    if job.is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    return steps.ended()


class Steps:
    """Takes a rank's steps, and measures them."""

    def __init__(self, job: Job, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.job, self.module, self.optimizer = job, module, optimizer
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.before = disk_bytes()
        self.peak_before = 0

    def take(self, step: int) -> None:
        begun = time.monotonic()
        loss = loss_of(self.job.model, self.module, step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.monotonic() - begun)
        self.losses.append(float(loss.detach()))
        if step + 1 == self.job.begins + FIRST:
            self.before = disk_bytes()
            dist.barrier()
            self.peak_before = reset_peak(Path(self.job.group))
            dist.barrier()

    def ended(self) -> Ended:
        read, written = (now - then for now, then in zip(disk_bytes(), self.before, strict=True))
        peak = int(peak_file(Path(self.job.group)).read_text()) if self.peak_before else 0
        dist.barrier()
        return Ended(
            self.losses,
            digest_of(self.module),
            self.seconds[FIRST:],
            read,
            written,
            peak,
            self.peak_before,
            sum(one.numel() for one in self.module.parameters()),
            self.module.report(),
        )


def reset_peak(group: Path) -> int:
    """Has the group's peak begin anew, which version 1 can; gives the one before, else 0."""
    peak = peak_file(group)
    if peak.name == "memory.peak":
        return 0
    before = int(peak.read_text())
    dist.barrier()
    peak.write_text("0")
    return before
