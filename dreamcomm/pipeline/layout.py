"""Which ranks a pipeline runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dreamcomm._torch.groups import given_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Layout", "layout_of"]

NAMES = ("pipe", "pp")


@dataclass(frozen=True)
class Layout:
    """A rank's place.

    Attributes:
        group: of all ranks of the mesh; its rank numbers are used below.
        peers: the ranks of this rank's pipeline, by their place in it.
        place: of this rank in its pipeline.
        pipe: the number of its pipeline, among those side by side.
        pipes: how many there are.
    """

    group: dist.ProcessGroup
    peers: tuple[int, ...]
    place: int
    pipe: int
    pipes: int


def layout_of(mesh: DeviceMesh | None) -> Layout:
    """The layout that a mesh describes; without one all ranks are one pipeline. Collective.

    The mesh's dimension named "pipe" or "pp" has the stages, or its only dimension.

    Raises:
        ValueError: no such dimension; no default group; this rank is not in the mesh.
    """
    if mesh is None:
        group = given_group(None)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return Layout(group, tuple(range(size)), rank, 0, 1)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"Pipeline: rank {dist.get_rank()} is not in the mesh {mesh}")
    dim = _pipe_dim(mesh)
    everyone = sorted(int(one) for one in mesh.mesh.flatten())
    if everyone == list(range(dist.get_world_size())):
        group = given_group(None)
    else:
        made = dist.new_group(everyone, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        group = made
    index = tuple(slice(None) if d == dim else c for d, c in enumerate(coordinate))
    peers = tuple(dist.get_group_rank(group, int(one)) for one in mesh.mesh[index])
    others = [(c, mesh.size(d)) for d, c in enumerate(coordinate) if d != dim]
    pipe, pipes = 0, 1
    for place, size in others:
        pipe, pipes = pipe * size + place, pipes * size
    return Layout(group, peers, coordinate[dim], pipe, pipes)


def _pipe_dim(mesh: DeviceMesh) -> int:
    if mesh.ndim == 1:
        return 0
    names = mesh.mesh_dim_names or ()
    found = [d for d, name in enumerate(names) if name in NAMES]
    if len(found) != 1:
        raise ValueError(
            'Pipeline: expected a mesh with one dimension named "pipe" or "pp", got '
            f"{names or mesh}"
        )
    return found[0]
