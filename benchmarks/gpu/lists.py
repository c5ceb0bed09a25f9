"""The lists of parameters whose gradients are packed, and how DDP cuts them into buckets. Pure."""

from __future__ import annotations

BUCKET = 25 << 20  # bytes of float32


def transformer_layer() -> list[int]:
    """Parameters of one layer of a 7 B model: hidden 4096, intermediate 11008, gated."""
    hidden, wide = 4096, 11008
    return [hidden * hidden] * 4 + [hidden * wide] * 3 + [hidden] * 2


def resnet50() -> list[int]:
    sizes = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = 4 * width
            for weight, features in (
                (channels * width, width),
                (width * width * 9, width),
                (width * out, out),
            ):
                sizes += [weight, features, features]
            if block == 0:
                sizes += [channels * out, out, out]
            channels = out
    return [*sizes, 2048 * 1000, 1000]


def tiny() -> list[int]:
    return [100] * 10_000


def buckets(sizes: list[int]) -> list[list[int]]:
    """Buckets as DDP makes them: filled up to 25 MiB."""
    found: list[list[int]] = [[]]
    for size in sizes:
        if found[-1] and 4 * (sum(found[-1]) + size) > BUCKET:
            found.append([])
        found[-1].append(size)
    return found
