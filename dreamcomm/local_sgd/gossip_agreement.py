"""What ranks have to have in common before they gossip."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dreamcomm.local_sgd.gossip_weights import given_topology
from dreamcomm.local_sgd.model import BUFFERS, check_count
from dreamcomm.local_sgd.topology import Topology

__all__ = ["Asked", "agree"]

WHAT = "Gossip"
# Tags of gossip are drawn from here on; those of pipelines lie below, and users' are small numbers.
TAGS = 1 << 26
TAG_RANGES = 1 << 24  # each of four tags


@dataclass(frozen=True)
class Asked:
    """What the user asks for; see :class:`Gossip`."""

    model: nn.Module
    optimizer: Optimizer
    topology: str
    weights: Any
    bound: int
    seed: int | None
    buffers: str


def agree(asked: Asked, group: dist.ProcessGroup) -> tuple[Topology, int]:
    """The topology, and a tag of messages that no other group of messages has. Collective.

    Raises:
        ValueError: on all ranks where ranks ask for different things, or one for something that
            does not exist.
        TypeError: on the rank whose argument is of the wrong kind.
    """
    made: list[Topology] = []
    error: Exception | None = None
    settings: dict[str, Any] = {}
    try:
        made.append(_checked(asked, dist.get_world_size(group)))
        settings = _settings(asked, made[0])
    except (TypeError, ValueError) as raised:
        error = raised
    tag = TAGS + 4 * secrets.randbelow(TAG_RANGES)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (error and str(error), settings, tag), group=group)
    if error is not None:
        raise error
    for rank, (text, _, _) in enumerate(everyone):
        if text is not None:
            raise ValueError(f"{WHAT}: rank {rank} has failed to make it: {text}")
    _check_equal([theirs for _, theirs, _ in everyone])
    return made[0], int(everyone[0][2])


def _check_equal(everyone: list[dict[str, Any]]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in [*first, *theirs]:
            ours, other = (repr(one.get(name, "nothing")) for one in (first, theirs))
            if ours != other:
                raise ValueError(
                    f"{WHAT}: rank {rank} has {name}={other}, and rank 0 has {name}={ours}; give "
                    "all ranks the same"
                )


def _checked(asked: Asked, ranks: int) -> Topology:
    if not isinstance(asked.model, nn.Module):
        raise TypeError(f"{WHAT}: expected a module, got {type(asked.model).__name__}")
    if not isinstance(asked.optimizer, Optimizer):
        raise TypeError(
            f"{WHAT}: expected an optimizer of torch, got {type(asked.optimizer).__name__}"
        )
    check_count(WHAT, "bound", asked.bound, 0)
    seed = asked.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"{WHAT}: expected seed to be an int or None, got {seed!r}")
    if asked.buffers not in BUFFERS:
        raise ValueError(f"{WHAT}: expected buffers to be one of {BUFFERS}, got {asked.buffers!r}")
    if asked.weights is not None and asked.topology != "ring":
        raise ValueError(f"{WHAT}: give either topology={asked.topology!r} or weights")
    try:
        return given_topology(asked.topology, asked.weights, ranks)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{WHAT}: {error}") from None


def _settings(asked: Asked, topology: Topology) -> dict[str, Any]:
    """What has to be equal. Matrices are compared row by row, so that an error is short."""
    settings: dict[str, Any] = {
        "topology": asked.topology if asked.weights is None else "weights",
        "bound": asked.bound,
        "seed": asked.seed,
        "buffers": asked.buffers,
        "optimizer.parameters": _names(asked),
        "len(weights)": topology.period,
    }
    if asked.weights is not None:
        for number, matrix in enumerate(topology.matrices):
            for rank, row in enumerate(matrix):
                settings[f"weights[{number}][{rank}]"] = list(row)
    if asked.buffers == "average":
        for name, one in asked.model.named_buffers():
            if one.is_floating_point():
                settings[f"buffer {name}"] = (tuple(one.shape), str(one.dtype), one.stride())
    return settings


def _names(asked: Asked) -> list[str]:
    """The optimizer's parameters."""
    given = {id(one) for group in asked.optimizer.param_groups for one in group["params"]}
    return [name for name, one in asked.model.named_parameters() if id(one) in given]
