"""The backward pass of replicas: each one's graph runs in its own thread, below one node.

torch runs the backward pass of CPU operators in the thread that calls it. So a replica's forward
pass makes a graph of its own, from its own parameters and its own alias of its rows, and the
graph that the caller sees has a single node for all of them. When gradients reach that node, each
thread runs its own graph; then the gradients of each parameter are added in replica order, so that
the result does not depend on which thread was first.

::

    rows 0   parameters   rows 1                the caller's graph
        \\         |          /
         +--- Replicas ---+          <- backward: thread 0 and thread 1 run the graphs below it,
           |              |             and the node returns sums for the parameters
       output 0       output 1

    entered rows 0, own parameters 0  ->  module  ->  output 0         thread 0's graph
    entered rows 1, own parameters 1  ->  module  ->  output 1         thread 1's graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Generator, Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dreamcomm import _C
from dreamcomm._torch.leaves import is_leaf, leaves_of, nodes_below
from dreamcomm.one_process.workers import Workers

__all__ = ["ReplicaGraph", "connect"]

T = TypeVar("T")
Gradient = Tensor | None
functorch = cast(Any, torch)._C._functorch
keeps_graph = cast(Any, torch)._C._autograd._get_current_graph_task_keep_graph


class Entrance:
    """True while a graph's backward pass comes from its outputs; others would lose gradients."""

    def __init__(self) -> None:
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def check(self, _: Tensor) -> None:
        """A hook of the tensors where the graph ends."""
        if not self._is_open:
            raise RuntimeError(
                "DataParallel: a backward pass reaches a replica from a tensor that its forward "
                "did not return, so a gradient would be lost: return the tensor from forward"
            )


class ReplicaGraph:
    """What one replica's forward pass reads and makes.

    Args:
        leaves: its own tensors, each with the source that it stands for, which replicas share.
    """

    def __init__(
        self, leaves: Sequence[tuple[Tensor, Tensor]], entrance: Entrance | None = None
    ) -> None:
        self.leaves = list(leaves)
        self.rows: list[Tensor] = []  # of the caller's graph, read by this replica alone
        self.outputs: list[Tensor] = []  # those with a graph
        self.nodes: list[Node] = []
        self._entries: list[_C.EntryNode] = []
        self._edges: list[GradientEdge] = []
        self._entrance = entrance or Entrance()
        if entrance is None:
            for leaf, _ in self.leaves:
                cast(Any, leaf).register_post_accumulate_grad_hook(self._entrance.check)

    def enter(self, rows: Tensor) -> Tensor:
        """An alias of rows without their history."""
        (alias,), entry = _C.enter([rows])
        cast(Any, alias).register_hook(self._entrance.check)
        self.rows.append(rows)
        self._entries.append(entry)
        self._edges.append(get_gradient_edge(alias))
        return alias

    def end(self) -> None:
        """Ends the forward pass: finds the nodes, and leaves that are not the replica's.

        These are tensors that a closure or a list has.

        Raises:
            RuntimeError: one of them has hooks, which would run twice.
        """
        self.nodes = nodes_below(get_gradient_edge(one).node for one in self.outputs)
        known = {id(leaf) for leaf, _ in self.leaves}
        for leaf in leaves_of(self.nodes):
            if id(leaf) in known:
                continue
            if leaf._backward_hooks:
                raise RuntimeError(
                    f"DataParallel: forward reads a tensor of shape {list(leaf.shape)} that is no "
                    "parameter or buffer of the module, and has hooks, which each replica would "
                    "run: register it as a parameter or buffer, or remove its hooks"
                )
            self.leaves.append((leaf, leaf))

    def owns_gradients(self) -> bool:
        """True if the leaves have no hooks besides ours, which could have kept their ``grad``."""
        return all(len(cast(Any, leaf)._post_accumulate_grad_hooks) == 1 for leaf, _ in self.leaves)

    def accumulate(self, gradients: Sequence[Gradient], retain: bool) -> list[Gradient]:
        """Runs the graph once: the gradients of leaves, then those of rows.

        It adds to ``grad`` of the replica's own leaves: reentrant checkpoints allow no other form.
        """
        outputs, given = self._roots(gradients)
        try:
            if outputs:
                with self._entrance.open():
                    torch.autograd.backward(outputs, given, retain_graph=retain)
        finally:  # what a pass that fails has added is not for the next one
            found = [leaf.grad for leaf, _ in self.leaves]
            for leaf, _ in self.leaves:
                leaf.grad = None
            found += [entry.take()[0] for entry in self._entries]
        return found

    def differentiate(
        self, gradients: Sequence[Gradient], retain: bool, create: bool
    ) -> list[Gradient]:
        """The same gradients, without a change of any ``grad``.

        With `create` they have graphs of their own.
        """
        outputs, given = self._roots(gradients)
        inputs: list[Any] = [*(leaf for leaf, _ in self.leaves), *self._edges]
        if not outputs or not inputs:
            return [None] * len(inputs)
        with self._entrance.open():
            found = torch.autograd.grad(
                outputs, inputs, given, retain_graph=retain, create_graph=create, allow_unused=True
            )
        return list(found)

    def derive(self, gradients: Sequence[Gradient]) -> tuple[ReplicaGraph, list[Gradient]]:
        """The graph of what will be computed from these gradients, and its aliases of them."""
        graph = ReplicaGraph(self.leaves, self._entrance)
        graph.rows, graph._entries, graph._edges = [*self.rows], [*self._entries], [*self._edges]
        needs = [one is not None and one.requires_grad for one in gradients]
        return graph, [
            graph.enter(cast(Tensor, one)) if need else one
            for one, need in zip(gradients, needs, strict=True)
        ]

    def _roots(self, gradients: Sequence[Gradient]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs that have a gradient, and these."""
        pairs = [(o, g) for o, g in zip(self.outputs, gradients, strict=True) if g is not None]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def connect(
    graphs: Sequence[ReplicaGraph],
    workers: Workers,
    generators: Sequence[Generator],
    keep: bool = False,
) -> list[list[Tensor]]:
    """The outputs of replicas as results of one node of the caller's graph, for each replica.

    Args:
        graphs: one for each replica.
        workers: the threads that run them.
        generators: those of their random numbers, for segments that are computed again.
        keep: whether they are read by several nodes, so that none of these frees them.

    Raises:
        RuntimeError: graphs have a node in common, which two threads would run.
    """
    if not any(graph.outputs for graph in graphs):
        return [[] for _ in graphs]
    _check_apart(graphs)
    sources = {id(source): source for graph in graphs for _, source in graph.leaves}
    rows = [row for graph in graphs for row in graph.rows]
    call = _Call(graphs, workers, generators, list(sources), keep)
    made = iter(cast(Any, _Replicas).apply(call, *sources.values(), *rows))
    return [[next(made) for _ in graph.outputs] for graph in graphs]


def _check_apart(graphs: Sequence[ReplicaGraph]) -> None:
    """Raises RuntimeError if graphs have a node in common; then lets go of the nodes."""
    seen: set[Node] = set()
    for graph in graphs:
        inner = {node for node in graph.nodes if not is_leaf(node)}
        graph.nodes = []
        if not seen.isdisjoint(inner):
            raise RuntimeError(
                "DataParallel: forward reads a tensor with a history that is no argument of it, "
                "so that each replica runs that history: pass it as an argument, or detach it"
            )
        seen |= inner


class _Replicas(torch.autograd.Function):
    """The node of one call: its inputs are the sources, then the rows of each replica."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(one.detach() for graph in call.graphs for one in graph.outputs)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Gradient) -> tuple[Gradient, ...]:
        call: _Call = ctx.call
        return (None, *call.gradients(of_outputs, retain=keeps_graph()))


class _Call:
    """The graphs of one call, and their gradients.

    Args:
        graphs: one for each replica.
        workers: their threads.
        generators: those of their random numbers.
        sources: the ids of the tensors that leaves stand for, in the order of the node's inputs.
        keep: whether other nodes read the graphs, too.
    """

    def __init__(
        self,
        graphs: Sequence[ReplicaGraph],
        workers: Workers,
        generators: Sequence[Generator],
        sources: Sequence[int],
        keep: bool,
    ) -> None:
        self.graphs, self._sources, self._keep = graphs, sources, keep
        self._workers, self._generators = workers, generators
        self._leaves = [[id(source) for _, source in graph.leaves] for graph in graphs]

    def gradients(self, of_outputs: Sequence[Gradient], retain: bool) -> list[Gradient]:
        """The gradients of the node's inputs; with graphs of their own where grad mode is on.

        Raises:
            RuntimeError: an earlier backward pass has freed the graphs.
        """
        if any(map(_is_batched, of_outputs)):
            raise RuntimeError("DataParallel: gradients in batches (vmap) do not reach threads")
        if not self.graphs:
            raise RuntimeError(
                "DataParallel: an earlier backward pass has freed the graphs of the replicas; give "
                "that pass retain_graph=True"
            )
        if torch.is_grad_enabled():
            return self._add(self._create(of_outputs), own=False)
        retain = retain or self._keep
        graphs = self.graphs if retain else self._let_go()
        alone = all(leaf is not source for graph in graphs for leaf, source in graph.leaves)
        own = alone and all(graph.owns_gradients() for graph in graphs)
        return self._add(
            self._run(
                partial(graph.accumulate, grads, retain)
                if alone
                else partial(graph.differentiate, grads, retain, False)
                for graph, grads in self._split(graphs, of_outputs)
            ),
            own,
        )

    def _create(self, of_outputs: Sequence[Gradient]) -> list[list[Gradient]]:
        """Gradients with graphs, below a node of their own."""
        derived = [graph.derive(grads) for graph, grads in self._split(self.graphs, of_outputs)]
        found = self._run(
            partial(graph.differentiate, grads, True, True)
            for graph, (_, grads) in zip(self.graphs, derived, strict=True)
        )
        graphs = [graph for graph, _ in derived]
        for graph, grads in zip(graphs, found, strict=True):
            graph.outputs = [one for one in grads if one is not None and one.requires_grad]
        made = map(iter, connect(graphs, self._workers, self._generators, keep=True))
        return [
            [next(ours) if one is not None and one.requires_grad else one for one in grads]
            for ours, grads in zip(made, found, strict=True)
        ]

    def _add(self, found: Sequence[list[Gradient]], own: bool) -> list[Gradient]:
        """Adds the gradients of sources in replica order; those of rows follow."""
        terms: dict[int, list[Tensor]] = {source: [] for source in self._sources}
        rows: list[Gradient] = []
        for leaves, grads in zip(self._leaves, found, strict=True):
            for source, grad in zip(leaves, grads, strict=False):
                if grad is not None:
                    terms[source].append(grad)
            rows += grads[len(leaves) :]
            grads.clear()
        if torch.is_grad_enabled():
            return [*(_C.add_in_order(ones, False) for ones in terms.values()), *rows]
        sums = self._run(partial(_add_each, share, own) for share in _shares(terms, len(found)))
        joined = {source: one for share in sums for source, one in share.items()}
        return [*(joined[source] for source in self._sources), *rows]

    def _let_go(self) -> Sequence[ReplicaGraph]:
        """The graphs, which are freed after this use."""
        graphs, self.graphs = self.graphs, ()
        return graphs

    def _run(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        return self._workers.run("in its backward pass", list(calls), self._generators)

    @staticmethod
    def _split(
        graphs: Sequence[ReplicaGraph], of_outputs: Sequence[Gradient]
    ) -> Iterator[tuple[ReplicaGraph, Sequence[Gradient]]]:
        """Each graph, with the gradients of its outputs."""
        start = 0
        for graph in graphs:
            end = start + len(graph.outputs)
            yield graph, of_outputs[start:end]
            start = end


def _is_batched(gradient: Gradient) -> bool:
    kinds = (functorch.is_batchedtensor, functorch.is_legacy_batchedtensor)
    return gradient is not None and any(kind(gradient) for kind in kinds)


def _add_each(terms: dict[int, list[Tensor]], own: bool) -> dict[int, Gradient]:
    return {source: _C.add_in_order(ones, own) for source, ones in terms.items()}


def _shares(terms: dict[int, list[Tensor]], count: int) -> list[dict[int, list[Tensor]]]:
    """The sums for each of `count` threads, with about as many elements in each."""
    shares: list[dict[int, list[Tensor]]] = [{} for _ in range(count)]
    sizes = [0] * count
    for source, ones in sorted(terms.items(), key=lambda item: -sum(map(Tensor.numel, item[1]))):
        least = sizes.index(min(sizes))
        shares[least][source] = ones
        sizes[least] += sum(map(Tensor.numel, ones))
    return shares
