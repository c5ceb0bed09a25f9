"""From a parameter, whole or sharded, to its tree."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from dreamcomm.zero.units.parameters.record import UnitParameter

if TYPE_CHECKING:
    from dreamcomm.zero.units.tree.tree import Tree

__all__ = ["found_in_tree", "link", "link_form", "tree_of"]

ATTRIBUTE = "_fully_sharded_tree"


class _Link:
    """Leads to a tree. A parameter's attributes go with it: a copy or a file has an empty set,
    which torch.load takes with weights_only."""

    def __init__(self, tree: Tree) -> None:
        self.tree = weakref.ref(tree)

    def __reduce__(self) -> Any:
        return set, ()


def link(one: UnitParameter, tree: Tree) -> None:
    """Has both forms of a parameter lead to its tree."""
    one.whole.__dict__[ATTRIBUTE] = one.sharded.__dict__[ATTRIBUTE] = _Link(tree)


def link_form(form: nn.Parameter, tree: Tree) -> None:
    """Has one form lead to a tree that takes it in later."""
    form.__dict__[ATTRIBUTE] = _Link(tree)


def tree_of(form: nn.Parameter) -> Tree | None:
    """The tree to which a parameter leads, or None."""
    leads = form.__dict__.get(ATTRIBUTE)
    return leads.tree() if isinstance(leads, _Link) else None


def found_in_tree(form: nn.Parameter) -> tuple[Tree, UnitParameter] | None:
    """The tree of a whole or sharded parameter, and all of its forms."""
    tree = tree_of(form)
    for one in () if tree is None else tree.records():
        if tree is not None and (form is one.whole or form is one.sharded):
            return tree, one
    return None
