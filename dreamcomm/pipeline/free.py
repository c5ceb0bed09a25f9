"""Frees the memory of the stages that other ranks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dreamcomm.pipeline.split import Splittable

__all__ = ["free_others_"]


def free_others_(whole: Splittable, own: nn.Module) -> None:
    """Puts tensors without memory in the places of parameters and buffers that are not own.

    Args:
        whole: the module or stages that the pipeline was made of; changed in place.
        own: this rank's part, which keeps its tensors, also where other stages share them.
    """
    kept = {id(one) for one in (*own.parameters(), *own.buffers())}
    roots = [whole] if isinstance(whole, nn.Module) else list(whole)
    for module in {part for root in roots for part in root.modules()}:
        of_module: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in of_module:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in kept:
                    tensors[name] = _without_memory(tensor)


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
