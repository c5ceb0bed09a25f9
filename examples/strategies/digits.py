"""scikit-learn's handwritten digits, 1,797 images of 8 x 8 pixels, and a small model for them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

COUNT, TESTED, BATCH = 1797, 360, 16  # images, those of them for the test, those of a worker's step


def load() -> tuple[Tensor, Tensor]:
    """All images, with values from -1 to 1, and their digits. Collective."""
    images, digits = torch.empty(COUNT, 64), torch.empty(COUNT, dtype=torch.int64)
    if dist.get_rank() == 0:
        from sklearn.datasets import load_digits  # takes seconds: on one rank only

        found = load_digits()
        images.copy_(torch.from_numpy(found.data) / 8 - 1)
        digits.copy_(torch.from_numpy(found.target))
    dist.broadcast(images, 0)
    dist.broadcast(digits, 0)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    return images[order], digits[order]


def make_model(seed: int) -> nn.Module:
    """The same weights on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Batches:
    """The rows of each step. An epoch's rows are shared out among the workers anew.

    Args:
        seed: of the order.
        worker, workers: this one's number, and how many there are.
    """

    def __init__(self, seed: int, worker: int, workers: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.worker, self.workers = worker, workers
        self.rows: list[Tensor] = []

    def __next__(self) -> Tensor:
        if not self.rows:
            order = TESTED + torch.randperm(COUNT - TESTED, generator=self.generator)
            mine = order[self.worker :: self.workers]
            self.rows = [rows for rows in mine.split(BATCH) if len(rows) == BATCH]
        return self.rows.pop()


@torch.no_grad()
def score(model: nn.Module, images: Tensor, digits: Tensor) -> tuple[float, float]:
    """Accuracy and loss on the rows for the test."""
    logits, wanted = model(images[:TESTED]), digits[:TESTED]
    loss = nn.functional.cross_entropy(logits, wanted).item()
    return (logits.argmax(1) == wanted).float().mean().item(), loss
