"""Trains a small network in one process on two replicas, each in a thread.

    python examples/data_parallel.py

Each line has the loss of the replicas, and that of the same network called as it is. The last one
says what a step took in both ways; `dreamcomm doctor` tells which of them suits this machine.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dreamcomm

STEPS, ROWS, CLASSES = 12, 64, 4


def network() -> nn.Module:
    """Equal weights in every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES)),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Noise in which one quarter of the image is brighter: which one is the class."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    images = torch.randn(ROWS, 1, 12, 12, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = 6 * (label // 2), 6 * (label % 2)
        image[:, top : top + 6, left : left + 6] += 1.0
    return images, labels


class Trainer:
    """A model, its optimizer, and the seconds that its steps took."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seconds = model, 0.0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """The loss of a step."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.seconds += time.perf_counter() - begin
        return loss.item()


def main() -> None:
    """Trains both."""
    replicas, alone = Trainer(dreamcomm.DataParallel(network(), 2)), Trainer(network())
    for step in range(STEPS):
        losses = [one.step(*batch(step)) for one in (replicas, alone)]
        print(f"step {step:2} loss {losses[0]:.4f}, as it is {losses[1]:.4f}")
    ms = [1e3 * one.seconds / STEPS for one in (replicas, alone)]
    threads = torch.get_num_threads()
    print(f"a step on 2 replicas {ms[0]:.1f} ms, with torch's {threads} threads {ms[1]:.1f} ms")


if __name__ == "__main__":
    main()
