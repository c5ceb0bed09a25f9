"""The work of every rank: train the model under DistributedDataParallel and time its steps."""

from __future__ import annotations

import hashlib
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dreamcomm.tools.demo.model import GPT, Shape, next_token_loss, parameter_count
from dreamcomm.tools.demo.progress import StepBar
from dreamcomm.tools.demo.text import Corpus, load_corpus, sample_batch


@dataclass(frozen=True)
class Settings:
    """One run of the demo; equal settings mean equal data in equal order."""

    steps: int = 1200
    batch: int = 4
    shape: Shape = field(default_factory=Shape)
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    timed_pairs: int = 40
    seed: int = 1


@dataclass(frozen=True)
class RankResult:
    """One rank's measurements; times in seconds, losses in nats per byte."""

    losses: list[float]
    step_times: list[float]
    synced_times: list[float]
    unsynced_times: list[float]
    validation_loss: float
    weights_digest: str
    parameters: int


def train_rank(settings: Settings, label: str) -> RankResult:
    """Trains in this rank of the default process group. ``label`` names the progress bar."""
    # Set on every machine: a matrix product adds in an order that depends on the threads.
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    torch.use_deterministic_algorithms(True)
    corpus = load_corpus()
    rank = dist.get_rank()
    trainer = Trainer(settings, corpus, rank)
    losses, times = [], []
    with StepBar(label, settings.steps, show=rank == 0) as bar:
        for _ in range(settings.steps):
            loss, seconds = trainer.step()
            losses.append(loss)
            times.append(seconds)
            bar.advance(loss, seconds)
    validation_loss, digest = trainer.validation_loss(), trainer.weights_digest()
    synced, unsynced = trainer.time_pairs()
    return RankResult(
        losses,
        times,
        synced,
        unsynced,
        validation_loss,
        digest,
        parameter_count(trainer.model),
    )


class Trainer:
    """The model, its optimizer and this rank's stream of batches."""

    def __init__(self, settings: Settings, corpus: Corpus, rank: int) -> None:
        self.settings = settings
        self.corpus = corpus
        self.model: nn.Module = GPT(settings.shape)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.batches = torch.Generator().manual_seed(1000 * settings.seed + rank)

    def rate(self, step: int) -> float:
        """The share of the learning rate: a linear rise, then half a cosine down to a tenth."""
        rise = min(1.0, (step + 1) / self.settings.warmup_steps)
        fall = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.settings.steps))
        return rise * fall

    def next_batch(self) -> tuple[Tensor, Tensor]:
        size, context = self.settings.batch, self.settings.shape.context
        return sample_batch(self.corpus.train, size, context, self.batches)

    def step(self) -> tuple[float, float]:
        """One training step. Returns this rank's loss before it, and the step's seconds."""
        tokens, targets = self.next_batch()
        start = time.perf_counter()
        loss = self.forward_backward(tokens, targets)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.schedule.step()
        return loss, seconds

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=False)  # DDP reduces into these gradients' memory.
        loss = next_token_loss(self.parallel(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def time_pairs(self) -> tuple[list[float], list[float]]:
        """Seconds of forward, backward and optimizer with and without the gradient exchange.

        The two alternate, so that other load of the machine affects both alike. This runs after
        training, when the weights no longer matter. All ranks start each step together.
        """
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.settings.timed_pairs):
            for exchange, kept in zip((True, False), times, strict=True):
                tokens, targets = self.next_batch()
                dist.barrier()
                start = time.perf_counter()
                with nullcontext() if exchange else self.parallel.no_sync():
                    self.forward_backward(tokens, targets)
                self.optimizer.step()
                kept.append(time.perf_counter() - start)
        return times

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The loss on a fixed sample of text that was not trained on."""
        generator = torch.Generator().manual_seed(0)
        context = self.settings.shape.context
        tokens, targets = sample_batch(self.corpus.validation, 128, context, generator)
        return next_token_loss(self.model(tokens), targets).item()

    def weights_digest(self) -> str:
        """A hash of all weights' bits."""
        digest = hashlib.sha256()
        for weight in self.model.parameters():
            digest.update(weight.detach().numpy().tobytes())
        return digest.hexdigest()
