"""What is checked of gossip's arguments, and what ranks agree on before they gossip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.averaging.model import check_count
from dreamcomm.gossip.topology import Topology
from dreamcomm.gossip.weights import given_topology
from dreamcomm.ranks import tags

__all__ = ["Asked", "common_tag"]

WHAT = "Gossip"


@dataclass(frozen=True)
class Asked:
    """What the user asks for; see :class:`Gossip`."""

    model: nn.Module
    topology: str
    weights: Any
    bound: int
    seed: int | None
    buffers: str
    group: dist.ProcessGroup

    def check(self) -> Topology:
        """The topology.

        Raises:
            ValueError, TypeError: an argument is wrong.
        """
        _check_carrier(self.group)
        check_count(WHAT, "bound", self.bound, 0)
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"{WHAT}: expected seed to be an int or None, got {seed!r}")
        if self.weights is not None and self.topology != "ring":
            raise ValueError(f"{WHAT}: give either topology={self.topology!r} or weights")
        try:
            return given_topology(self.topology, self.weights, dist.get_world_size(self.group))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{WHAT}: {error}") from None

    def described(self, topology: Topology) -> dict[str, Any]:
        """What has to be equal on all ranks. Matrices go row by row, so that an error is short."""
        settings: dict[str, Any] = {
            "topology": repr(self.topology) if self.weights is None else "made of weights",
            "bound": self.bound,
            "seed": self.seed,
            "len(weights)": topology.period,
        }
        if self.weights is not None:
            for number, matrix in enumerate(topology.matrices):
                for rank, row in enumerate(matrix):
                    settings[f"weights[{number}][{rank}]"] = list(row)
        if self.buffers == "average":
            for name, one in self.model.named_buffers():
                settings[f"stride of buffer {name!r}"] = one.stride()
        return settings


def _check_carrier(group: dist.ProcessGroup) -> None:
    if "cpu" not in {device.type for device in group._device_types}:
        raise ValueError(
            f"{WHAT}: its messages travel in the host's memory, and the group has a backend for "
            f"{', '.join(device.type for device in group._device_types)} only; make one for the "
            'CPU too, as init_process_group("dreamcomm") does'
        )


def common_tag(group: dist.ProcessGroup, device: torch.device) -> int:
    """A tag of messages that no others have, drawn by rank 0. Collective."""
    drawn = torch.tensor([tags.GOSSIP.drawn()], dtype=torch.int64, device=device)
    dist.broadcast(drawn, group=group, group_src=0)
    return int(drawn)
