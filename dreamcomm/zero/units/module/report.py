"""Says how a tree is sharded, and what it takes of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["described"]


def described(tree: Tree) -> str:
    """A text of a few lines."""
    records, world = tree.records(), dist.get_world_size(tree.shards)
    whole = sum(one.whole.nbytes for one in records)
    own = sum(one.local.nbytes for one in records)
    numel = sum(one.whole.numel() for one in records)
    copies = (
        "had the same values on all ranks"
        if tree.copies_were_equal
        else "had other values on each rank, and are now each rank's own rows of them"
    )
    count = 1 if tree.replicas is None else dist.get_world_size(tree.replicas)
    replicas = f", with {count} replicas" if count > 1 else ""
    where = "in all" if tree.form.gathers else "on the host"
    state = "open: ranks read" if tree.window.is_open else "closed: owners write"
    return "\n".join(
        [
            f"{tree.window.name}: fully sharded over {world} ranks{replicas}, "
            f"{tree.form.described()}",
            f"parameters        {len(records)}, {numel:,d} elements, {whole:,d} bytes {where}",
            f"rows of this rank {own:,d} bytes",
            f"units             {len(tree.units())}",
            f"window            {state}; {tree.window.barriers} meetings of the ranks",
            f"when wrapped, parameters {copies}",
        ]
    )
