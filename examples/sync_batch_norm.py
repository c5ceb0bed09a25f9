"""Trains a small CNN whose batch norm counts the rows of all ranks, in 16 bits with a loss scale.

    torchrun --nproc-per-node 2 examples/sync_batch_norm.py

Rank 0 has 24 of a batch's 32 images and rank 1 the others; losses are divided by all 32. The last
column is one process with nn.BatchNorm on the whole batch. `python examples/sync_batch_norm.py`
starts two ranks itself, by dreamcomm.spawn.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dreamcomm

STEPS, IMAGES, CLASSES = 12, 32, 4


def network() -> nn.Module:
    """With batch norm, and equal weights on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES)),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Noise in which one quarter of the image is brighter: which one is the class."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    images = torch.randn(IMAGES, 1, 12, 12, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = 6 * (label // 2), 6 * (label % 2)
        image[:, top : top + 6, left : left + 6] += 1.0
    return images, labels


def own_part(data: Tensor) -> Tensor:
    """Rank 0 has three quarters, and the others share the rest."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return data
    first = 3 * len(data) // 4
    return data[:first] if rank == 0 else data[first:].tensor_split(world - 1)[rank - 1]


def train() -> None:
    """Trains on all ranks, and in each process alone."""
    alone = network()
    model = dreamcomm.DistributedDataParallel(
        dreamcomm.convert_sync_batchnorm(network()), reduce="sum"
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, alone)]
    scaler = dreamcomm.GradScaler(init_scale=1024.0)
    for step in range(STEPS):
        images, labels = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.cross_entropy(alone(images), labels)
        expected.backward()
        optimizers[1].step()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(own_part(images))
        loss = F.cross_entropy(outputs.float(), own_part(labels), reduction="sum") / IMAGES
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {float(whole):.4f}, one process {expected.item():.4f}")


def main() -> None:
    """Trains on the ranks of torchrun, or on two of its own."""
    if "RANK" in os.environ:
        dist.init_process_group("dreamcomm")
        train()
        dist.destroy_process_group()
    else:
        dreamcomm.spawn(train, 2)


if __name__ == "__main__":
    main()
