"""The loop over shards of a tree."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from dreamcomm.invariant.loop import ShardLoop

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["loop_over"]


def loop_over(tree: Tree) -> ShardLoop:
    """A loop over the shards of the tree's root, which it does not keep alive."""
    me = weakref.ref(tree)

    def passes() -> Tree:
        found = me()
        assert found is not None  # its module calls the loop
        return found

    def module() -> nn.Module:
        root = passes().root
        found = None if root is None else root.module
        assert found is not None
        return found

    seed = 0 if tree.root is None else tree.root.seed
    return ShardLoop(passes, module, tree.group, tree.averages.shards, seed, "fully_shard")
