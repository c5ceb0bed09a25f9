"""Runs a stage's backward pass, whole or in two parts.

A zero-bubble schedule sends the gradients of a stage's inputs as early as it can and fills its
waiting times with the gradients of parameters (Qi et al., "Zero Bubble Pipeline Parallelism",
2023). :func:`backward_input` computes the first, :meth:`Pending.backward_weight` the second. Both
together add what ``torch.autograd.backward`` adds, through the same ``AccumulateGrad`` nodes: the
object in ``.grad`` is kept, and hooks on parameters run once for each micro-batch.

Some gradients of parameters are computed in the first part, because the second one could not
compute them without running something twice (see :mod:`.partition`): those of a weight that is
used again on its own output, such as ``x @ w @ w``; of a parameter used in a
``torch.autograd.Function`` written in Python; and of what a checkpoint recomputes. A stage with
compiled functions or reentrant checkpoints computes everything in the first part. A stage that has
no input gradients computes everything in the second.

Between the parts are kept: what the joins and the branches have saved (of a linear layer its input
and weight) and the gradients that arrived at the joins. Everything else that nodes have saved is
freed. Memory that a ``torch.autograd.Function`` holds without ``save_for_backward`` stays until
the second part, and so does what other hooks on saved tensors have packed.

A hook that was registered on an activation (not on a parameter) runs again in the second part if
the activation leaves a join; what it returns then is ignored. ``retain_grad()`` on such an
activation adds its gradient twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from dreamcomm.pipeline.compute.entry import StageEntry
from dreamcomm.pipeline.compute.partition import LateGroup, partition
from dreamcomm.pipeline.compute.saved import SavedTensors

__all__ = ["Pending", "backward_input", "full_backward"]


class _Join:
    """A node on the path to the inputs, with the gradients that arrived there."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.gradients: tuple[Tensor | None, ...] = ()

    def capture(self, arriving: Sequence[Tensor | None]) -> None:
        self.gradients = tuple(arriving)

    def clamp(self, _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return self.gradients


class _Part:
    """A backward pass to run later.

    Args:
        roots: where it starts besides the joins, and the gradients there.
        joins: nodes to start from whose gradients are captured before.
        leaves: what to accumulate into; None for all that the roots reach.
    """

    def __init__(
        self,
        roots: Sequence[tuple[GradientEdge, Tensor]],
        joins: Sequence[_Join] = (),
        leaves: Sequence[Node] | None = None,
    ) -> None:
        self.roots = list(roots)
        self.joins = joins
        self.leaves = leaves

    def run(self) -> None:
        for join in self.joins:
            for slot, gradient in enumerate(join.gradients):
                if gradient is not None:
                    self.roots.append((GradientEdge(join.node, slot, None), gradient))
        # A hook on the activation has run already: give the node what the hook made of it.
        handles = [join.node.register_prehook(join.clamp) for join in self.joins]
        try:
            _run(self.roots, self.leaves)
        finally:
            for handle in handles:
                handle.remove()


class Pending:
    """The rest of a micro-batch's backward pass: gradients of parameters."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = list(parts)

    @property
    def is_empty(self) -> bool:
        """True if :meth:`backward_weight` has nothing to do."""
        return not self._parts

    def backward_weight(self) -> None:
        """Adds the gradients of the parameters, and frees what was kept for it step by step.

        Each group of parameters is one run of autograd's engine, which looks at the whole graph
        below the group's joins: a stage of hundreds of small operators pays for that.
        A second call does nothing. If one raises, the groups after it are not computed by a
        second call either.
        """
        parts, self._parts = self._parts, []
        parts.reverse()
        while parts:
            parts.pop().run()


def full_backward(
    roots: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None], entry: StageEntry
) -> list[Tensor | None]:
    """Runs the whole backward pass and adds to ``.grad`` of the parameters.

    Args:
        roots: the edges of the stage's outputs (``torch.autograd.graph.get_gradient_edge``); None
            for an output without a gradient. The outputs themselves may be gone.
        gradients: the gradient of each; where it is None, the output is left out. A loss is given
            a one.
        entry: where the micro-batch entered.

    Returns:
        The gradients of the entered tensors; None where there is none.

    Raises:
        ValueError: if the two lists differ in length.
    """
    _run(_given(roots, gradients), None)
    return entry.take()


def backward_input(
    roots: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None], entry: StageEntry
) -> tuple[list[Tensor | None], Pending]:
    """Runs the part of the backward pass that computes the gradients of the inputs.

    The parameters are found in the graph. Afterwards the graph serves only for
    :meth:`Pending.backward_weight`.

    Args:
        roots: as for :func:`full_backward`.
        gradients: as for :func:`full_backward`.
        entry: where the micro-batch entered.

    Returns:
        The gradients of the entered tensors, and the other part.

    Raises:
        ValueError: if the two lists differ in length.
    """
    given = _given(roots, gradients)
    saved = SavedTensors()
    parts = partition([root for root, _ in given], entry.node, saved)
    if not parts.reaches_entry:
        return entry.take(), Pending([_Part(given)] if given else [])
    late = [group for group in parts.groups if not group.early] if parts.divisible else []
    if not late:
        _run(given, None)
        return entry.take(), Pending([])
    early = [leaf for group in parts.groups if group.early for leaf in group.leaves]
    pending = _run_and_capture(given, entry, early, late)
    keep = {node for group in late for node in (*group.joins, *group.branch)}
    for node in parts.nodes:
        if node not in keep:
            saved.free(node)
    return entry.take(), Pending(pending)


def _run_and_capture(
    given: Sequence[tuple[GradientEdge, Tensor]],
    entry: StageEntry,
    early: Sequence[Node],
    late: Sequence[LateGroup],
) -> list[_Part]:
    """Runs to the entry and the early parameters; keeps the gradients at the late groups' joins."""
    pending = [
        _Part(
            [given[index] for index in group.roots],
            [_Join(node) for node in group.joins],
            group.leaves,
        )
        for group in late
    ]
    joins = [join for part in pending for join in part.joins]
    handles = [join.node.register_prehook(join.capture) for join in joins]
    assert entry.node is not None
    try:
        _run(given, [entry.node, *early], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return pending


def _given(
    roots: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]
) -> list[tuple[GradientEdge, Tensor]]:
    return [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]


def _run(
    roots: Sequence[tuple[GradientEdge, Tensor]],
    ends: Sequence[Node] | None,
    retain_graph: bool = False,
) -> None:
    """Runs autograd's engine up to the given nodes, which it runs too."""
    if roots:
        torch.autograd.backward(
            [root for root, _ in roots],
            [gradient for _, gradient in roots],
            retain_graph=retain_graph,
            inputs=None if ends is None else [GradientEdge(end, 0, None) for end in ends],
        )
