"""Cuts a traced forward at block boundaries.

A node runs in the stage of the block call before it, what precedes the first block with that one.
Values that later stages need are passed along by the stages between::

    graph     tokens  mask  block0  block1  block2  head
    stages   |- 0 -----------------|- 1 ---|- 2 ---------|
    sent                        h1, t     h2, t              t is a length: each makes its own mask

A keyword argument is taken from each rank's own, except one that forward changes in place. What
depends on no argument, or on sizes alone, is computed anew in each stage that uses it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from dreamcomm.pipeline.split.arguments import Given
from dreamcomm.pipeline.split.nodes import NodeKinds

__all__ = ["Segment", "block_calls", "cut_graph"]


@dataclass
class Segment:
    """What one stage runs.

    Attributes:
        nodes: in the order of the trace; the last stage's end with the output.
        inputs: values that the stage before sends, in this order; empty in stage 0.
        outputs: values that it sends.
        arguments: placeholders that the stage takes from the user itself.
        names: of forward's arguments that the stage uses, wherever they come from.
        devices: nodes that stand for the device of this stage.
        dead: after each node, the values that are used no more.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    arguments: dict[fx.Node, Given] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    devices: list[fx.Node] = field(default_factory=list)
    dead: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def block_calls(graph: fx.Graph, lists: Sequence[str]) -> list[tuple[str, fx.Node]]:
    """The first node of each call of a block, with the block's name.

    Args:
        graph: of the whole forward.
        lists: names of the lists whose children are the blocks.

    Returns:
        In order. Calls of several modules inside one child are one block until another child, or
        the same module again, is called.
    """
    calls: list[tuple[str, fx.Node]] = []
    seen: set[str] = set()
    for node in graph.nodes:
        block = _block_of(str(node.target), lists) if node.op == "call_module" else None
        if block is None:
            continue
        if not calls or calls[-1][0] != block or node.target in seen:
            calls.append((block, node))
            seen = set()
        seen.add(str(node.target))
    return calls


def _block_of(target: str, lists: Sequence[str]) -> str | None:
    for name in lists:
        prefix = f"{name}." if name else ""
        if target.startswith(prefix):
            return prefix + target[len(prefix) :].split(".")[0]
    return None


def cut_graph(
    graph: fx.Graph,
    calls: Sequence[fx.Node],
    cuts: Sequence[int],
    placeholders: dict[fx.Node, Given],
) -> list[Segment]:
    """Divides the nodes of a graph among stages.

    Args:
        graph: of the whole forward.
        calls: the first node of each block.
        cuts: indices of the blocks at which stages 1.. begin.
        placeholders: the argument that each placeholder stands for.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    starts = [order[calls[cut]] for cut in cuts]
    kinds = NodeKinds(graph)
    stage = {node: bisect_right(starts, order[node]) for node in graph.nodes}
    stage |= dict.fromkeys(placeholders, 0)
    segments, needs = [], []
    for number in range(len(cuts) + 1):
        own = [n for n in graph.nodes if stage[n] == number and n.op != "placeholder"]
        segment, needed = _segment(own, number, stage, kinds, placeholders)
        segment.nodes.sort(key=order.__getitem__)
        segments.append(segment)
        needs.append(needed)
    for number, segment in enumerate(segments[:-1]):
        later = set().union(*needs[number + 1 :])
        sent = sorted((n for n in later if stage[n] <= number), key=order.__getitem__)
        segment.outputs = segments[number + 1].inputs = sent
        if number == 0:
            segment.arguments |= {n: placeholders[n] for n in sent if n in placeholders}
    for segment in segments:
        segment.dead = _dead(segment)
    return segments


def _segment(
    own: Iterable[fx.Node],
    number: int,
    stage: dict[fx.Node, int],
    kinds: NodeKinds,
    placeholders: dict[fx.Node, Given],
) -> tuple[Segment, set[fx.Node]]:
    """A stage's nodes, and which values it needs from earlier stages."""
    nodes = [node for node in own if not kinds.is_repeatable(node)]
    segment = Segment(nodes)
    needed: set[fx.Node] = set()
    seen = set(nodes)
    waiting = [one for node in nodes for one in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        given = placeholders.get(node)
        if given is not None:
            segment.names.add(given.name)
        if given is not None and (number == 0 or (given.keyword and not kinds.is_changed(node))):
            segment.arguments[node] = given
        elif kinds.is_repeatable(node):
            segment.nodes.append(node)
            waiting.extend(node.all_input_nodes)
        elif number and kinds.is_device(node):
            segment.devices.append(node)
        elif stage[node] < number:
            needed.add(node)
    return segment, needed


def _dead(segment: Segment) -> dict[fx.Node, list[fx.Node]]:
    kept = set(segment.outputs)
    last: dict[fx.Node, fx.Node] = {}
    for node in segment.nodes:
        last[node] = node
        for one in node.all_input_nodes:
            last[one] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value not in kept:
            dead.setdefault(node, []).append(value)
    return dead
