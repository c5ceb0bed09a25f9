"""From a parameter, whole or sharded, to its tree."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from dreamcomm.zero.units.record import UnitParameter

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree import Tree

__all__ = ["found_in_tree", "link", "tree_of"]

ATTRIBUTE = "_fully_sharded_tree"


class _Link:
    """Leads to a tree, and to nothing in a copy or a file: a parameter's attributes go with it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = weakref.ref(tree)

    def __reduce__(self) -> Any:
        return type(None), ()


def link(one: UnitParameter, tree: Tree) -> None:
    """Has both forms of a parameter lead to its tree."""
    one.whole.__dict__[ATTRIBUTE] = one.sharded.__dict__[ATTRIBUTE] = _Link(tree)


def tree_of(sharded: nn.Parameter) -> Tree | None:
    """The tree that a DTensor belongs to now, or None."""
    found = found_in_tree(sharded)
    return None if found is None or found[1].sharded is not sharded else found[0]


def found_in_tree(form: nn.Parameter) -> tuple[Tree, UnitParameter] | None:
    """The tree of a whole or sharded parameter, and all of its forms."""
    leads = form.__dict__.get(ATTRIBUTE)
    tree = leads.tree() if isinstance(leads, _Link) else None
    for one in () if tree is None else tree.records():
        if tree is not None and (form is one.whole or form is one.sharded):
            return tree, one
    return None
