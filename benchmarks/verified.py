"""Whether training has the weights that it should: equal on all ranks, and near a reference's."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

CHECKED_STEPS = 3


def check_equal(name: str, weights: list[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Raises RuntimeError if a bit of the weights differs on some rank. Collective."""
    found = hashlib.sha256()
    for weight in weights:
        found.update(weight.contiguous().numpy().tobytes())
    digests: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, found.hexdigest(), group=group)
    if len(set(digests)) != 1:
        raise RuntimeError(f"the ranks' weights differ after training over {name}")


def check_close(weights: list[Tensor], gloo: list[Tensor]) -> float:
    """The largest difference from Gloo's weights. Raises RuntimeError if it is beyond rounding."""
    pairs = list(zip(gloo, weights, strict=True))
    difference = max((one - other).abs().max().item() for one, other in pairs)
    if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs):
        raise RuntimeError(
            f"after {CHECKED_STEPS} steps the weights differ from Gloo's by up to {difference:.3g}"
        )
    return difference


def check_near(name: str, weights: list[Tensor], plain: list[Tensor], tolerance: float) -> float:
    """The largest difference of a weight from plain DDP's, over the largest weight.

    Raises RuntimeError if it is more than the tolerance.
    """
    difference = max(
        ((one - other).abs().max() / other.abs().max()).item()
        for one, other in zip(weights, plain, strict=True)
    )
    if difference > tolerance:
        raise RuntimeError(f"{name}: weights differ from plain DDP's by {difference:.2g}")
    return difference
