"""SyncBatchNorm layers of stages normalise over the pipelines side by side, not over stages."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from dreamcomm._torch.groups import given_group
from dreamcomm.pipeline.layout import Layout
from dreamcomm.sync_batch_norm.convert import sync_layers

__all__ = ["check_sync_layers"]


def check_sync_layers(units: Iterable[tuple[str, nn.Module]], layout: Layout) -> None:
    """Raises for a layer that would wait for a rank with another stage.

    Args:
        units: of this rank's stages, with their names.
        layout: of the pipeline.

    Raises:
        ValueError: a layer's group has another rank of this pipeline.
    """
    everyone = dist.get_process_group_ranks(layout.group)
    pipeline = {everyone[one] for one in layout.peers} - {dist.get_rank()}
    for unit, module in units:
        for name, layer in sync_layers(module).items():
            shown = ".".join(filter(None, (unit, name)))
            if not layer.name:
                layer.set_name(shown)
            others = pipeline & set(dist.get_process_group_ranks(given_group(layer.process_group)))
            if others:
                raise ValueError(
                    f"Pipeline: layer {shown!r} is a SyncBatchNorm over a group with rank "
                    f"{min(others)}, which runs another stage: give it the process group of the "
                    "mesh's other dimensions, as dreamcomm.convert_sync_batchnorm(module, "
                    'mesh["data"].get_group())'
                )
