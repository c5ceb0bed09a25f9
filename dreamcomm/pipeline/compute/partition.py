"""Splits a stage's autograd graph into the path to its inputs and the branches to parameters.

A node is *on the path* if a gradient of the stage's input flows through it. The other nodes form
branches. A *join* is a node on the path that also has a branch: for a linear layer the product,
whose branch leads to weight and bias::

    output -> gelu -> addmm -> gelu -> addmm -> entry        path
                        |                |
                     weight           weight                 branches

Joins whose branches meet form one *group* with all the parameters these branches lead to. If the
gradients that arrive at a group's joins are kept, the parameters' gradients can be computed later,
from the joins alone. Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2, splits
backward passes in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.autograd.graph import GradientEdge, Node

from dreamcomm.pipeline.compute.saved import SavedTensors, is_python_node

__all__ = ["LateGroup", "Partition", "partition"]

# Their backward passes cannot run in parts: a compiled function computes all its gradients at
# once, a reentrant checkpoint calls the engine itself.
_INDIVISIBLE = frozenset({"CompiledFunctionBackward", "CheckpointFunctionBackward"})


@dataclass(eq=False)
class LateGroup:
    """Parameters whose gradients are computed together.

    Attributes:
        joins: the nodes on the path from which branches lead to the parameters.
        roots: which of the given roots lie in these branches, by position.
        leaves: the parameters' ``AccumulateGrad`` nodes.
        branch: all nodes of the branches.
        early: if the gradients are computed together with those of the inputs.
    """

    joins: list[Node] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    leaves: list[Node] = field(default_factory=list)
    branch: list[Node] = field(default_factory=list)
    early: bool = False

    def take_over(self, other: LateGroup) -> None:
        """Moves everything from the other group here."""
        for mine, others in (
            (self.joins, other.joins),
            (self.roots, other.roots),
            (self.leaves, other.leaves),
            (self.branch, other.branch),
        ):
            mine.extend(others)  # type: ignore[arg-type]
            others.clear()


@dataclass
class Partition:
    """A graph in two parts.

    Attributes:
        nodes: all nodes that the roots reach.
        groups: the groups of parameters.
        reaches_entry: if a gradient can reach the entry.
        divisible: if no node has to be run in one piece with the whole graph.
    """

    nodes: list[Node]
    groups: list[LateGroup]
    reaches_entry: bool
    divisible: bool


def partition(roots: Sequence[GradientEdge], entry: Node | None, saved: SavedTensors) -> Partition:
    """Splits the graph between the roots and the entry.

    Args:
        roots: where gradients are given.
        entry: the node that the stage's inputs leave.
        saved: looks at what nodes have saved.

    Returns:
        The parts.
    """
    children = _walk([root.node for root in roots], entry)
    path = _path(children, entry)
    groups = _groups(roots, children, path) if path else []
    for group in groups:
        group.early = _must_be_early(group, children, path, saved)
    return Partition(
        nodes=list(children),
        groups=groups,
        reaches_entry=bool(path),
        divisible=not any(type(node).__name__ in _INDIVISIBLE for node in children),
    )


def _walk(roots: Sequence[Node], entry: Node | None) -> dict[Node, list[Node]]:
    """Finds the nodes under the roots, and their children. A child stands before its parents."""
    finished: dict[Node, list[Node]] = {}
    started: dict[Node, list[Node]] = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in started:
            stack.pop()
            finished.setdefault(node, started[node])
            continue
        below = () if node is entry else node.next_functions
        started[node] = [child for child, _ in below if child is not None]
        stack.extend(child for child in started[node] if child not in started)
    return finished


def _path(children: dict[Node, list[Node]], entry: Node | None) -> set[Node]:
    path: set[Node] = set()
    for node, below in children.items():
        if node is entry or not path.isdisjoint(below):
            path.add(node)
    return path


def _groups(
    roots: Sequence[GradientEdge], children: dict[Node, list[Node]], path: set[Node]
) -> list[LateGroup]:
    """Gathers joins, and roots outside the path, whose branches meet."""
    groups: list[LateGroup] = []
    owners: dict[Node, LateGroup] = {}
    for node in reversed(children):
        if node in path and not path.issuperset(children[node]):
            groups.append(LateGroup(joins=[node]))
            begun = [child for child in children[node] if child not in path]
            _gather(groups[-1], begun, children, owners)
    for index, root in enumerate(roots):
        if root.node not in path:
            groups.append(LateGroup(roots=[index]))
            _gather(groups[-1], [root.node], children, owners)
    return [group for group in groups if group.leaves]


def _gather(
    group: LateGroup,
    begun: list[Node],
    children: dict[Node, list[Node]],
    owners: dict[Node, LateGroup],
) -> None:
    """Adds the branches that begin at ``begun``. Becomes one with every group which they meet."""
    while begun:
        node = begun.pop()
        owner = owners.get(node)
        if owner is None:
            owners[node] = group
            group.branch.append(node)
            if type(node).__name__ == "AccumulateGrad":
                group.leaves.append(node)
            begun.extend(children[node])
        elif owner is not group:
            owners.update(dict.fromkeys(group.branch, owner))
            owner.take_over(group)
            group = owner


def _must_be_early(
    group: LateGroup, children: dict[Node, list[Node]], path: set[Node], saved: SavedTensors
) -> bool:
    """Says if the later computation would run something twice that it should not.

    That is a backward pass written in Python, which may communicate or change state; a tensor
    that a checkpoint recomputes when it is unpacked; and the path between two joins of the group,
    as autograd runs every node between what it is given and what it is asked for.
    """
    if any(is_python_node(node) for node in group.joins):
        return True
    if any(saved.have_hooks(node) for node in (*group.joins, *group.branch)):
        return True
    return len(group.joins) > 1 and _follow_each_other(group.joins, children, path)


def _follow_each_other(
    joins: Sequence[Node], children: dict[Node, list[Node]], path: set[Node]
) -> bool:
    """Says if one of the joins can be reached from another one."""
    targets, seen, stack = set(joins), set[Node](), list(joins)
    while stack:
        for child in children[stack.pop()]:
            if child in targets:
                return True
            if child in path and child not in seen:
                seen.add(child)
                stack.append(child)
    return False
