"""Parts of a module whose forward calls a list of blocks among other things."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import fx, nn

from dreamcomm.pipeline.split.arguments import Given, Variant, bind, likely_variants
from dreamcomm.pipeline.split.blocks import block_lists, entered_modules, named_lists
from dreamcomm.pipeline.split.part import StagePart
from dreamcomm.pipeline.split.programs import SegmentProgram
from dreamcomm.pipeline.split.segments import block_calls, cut_graph
from dreamcomm.pipeline.split.trace_error import TraceError, trace_error
from dreamcomm.pipeline.split.tracing import ForwardTracer

__all__ = ["TracedModule"]

_Modes = tuple[bool, ...]
_Graph = tuple[fx.Graph, dict[fx.Node, Given], list[tuple[str, fx.Node]]]


class TracedModule:
    """Traces a module, and divides it into parts.

    Args:
        module: the whole.
        blocks: name or names of the lists of blocks; None finds the longest.

    Attributes:
        blocks: names of the blocks, once for each call, in the order of the calls.

    Raises:
        ValueError: there is no list of blocks, or forward cannot be traced.
    """

    def __init__(self, module: nn.Module, blocks: str | Sequence[str] | None = None) -> None:
        self.module = module
        self.signature = inspect.signature(module.forward)
        candidates = block_lists(module) if blocks is None else [named_lists(module, blocks)]
        self.reference, self._lists, graph = self._first_trace(candidates)
        self.blocks = [name for name, _ in graph[2]]
        entered = entered_modules(module, self._lists)
        self._entered = [one for one in module.modules() if id(one) in entered]
        self._graphs: dict[tuple[Variant, _Modes], _Graph] = {(self.reference, self.modes()): graph}

    def _first_trace(
        self, candidates: list[tuple[str, ...]]
    ) -> tuple[Variant, tuple[str, ...], _Graph]:
        """The first way of calling forward that can be traced, and the first lists it calls."""
        error: TraceError | None = None
        for lists in candidates:
            for self.fix_numbers in (False, True):
                for variant in self.likely_variants():
                    try:
                        graph = self._trace(variant, lists)
                    except TraceError as raised:
                        error = error or raised
                        continue
                    if graph[2]:
                        return variant, lists, graph
        if error is not None:
            raise error
        name = type(self.module).__name__
        raise ValueError(
            f"cannot split {name}: found no list of blocks in it, that is an nn.ModuleList or "
            "nn.Sequential with two or more children that forward calls. Name the list with "
            "blocks=..., or give the stages as a list of modules"
        )

    def likely_variants(self) -> list[Variant]:
        """Variants to try before the first call is known, the most likely first."""
        return likely_variants(self.signature, fix_numbers=self.fix_numbers)

    def bind(self, args: Any, kwargs: dict[str, Any]) -> tuple[Variant, dict[Given, Any]]:
        """The variant of a call, and the values of its open arguments."""
        return bind(self.signature, args, kwargs, fix_numbers=self.fix_numbers)

    def modes(self) -> _Modes:
        """The ``training`` flags that a trace may depend on.

        They are those of the modules whose forward is followed, and of their children.
        """
        known = [(one, *one.children()) for one in self._entered]
        return tuple(one.training for group in known for one in group)

    @contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        """Puts all modules into a mode for a while."""
        before = [(one, one.training) for one in self.module.modules()]
        try:
            for one, _ in before:
                one.training = training
            yield
        finally:
            for one, mode in before:
                one.training = mode

    def _trace(self, variant: Variant, lists: tuple[str, ...]) -> _Graph:
        tracer = ForwardTracer(variant, entered_modules(self.module, lists))
        try:
            graph = tracer.graph_of(self.module)
        except Exception as error:
            raise trace_error(self.module, error) from error
        return graph, tracer.placeholders, block_calls(graph, lists)

    def graph(self, variant: Variant) -> _Graph:
        """The trace of a variant in the present modes, training or evaluation.

        Raises:
            ValueError: it cannot be traced, or calls another number of blocks.
        """
        key = (variant, self.modes())
        if key not in self._graphs:
            graph = self._trace(variant, self._lists)
            if len(graph[2]) != len(self.blocks):
                raise ValueError(
                    f"{type(self.module).__name__} calls {len(graph[2])} blocks for these "
                    f"arguments, and called {len(self.blocks)} when it was split"
                )
            self._graphs[key] = graph
        return self._graphs[key]

    def parts(self, cuts: Sequence[int]) -> list[StagePart]:
        """Divides the module.

        Args:
            cuts: indices of the blocks at which parts 1.. begin.
        """
        return _Parts(self, list(cuts)).make()


class _Parts:
    """The parts of a module for one choice of cuts, with their programs for each variant."""

    def __init__(self, traced: TracedModule, cuts: list[int]) -> None:
        self.traced = traced
        self.cuts = cuts
        self._programs: dict[tuple[Variant, _Modes], list[SegmentProgram]] = {}

    def make(self) -> list[StagePart]:
        known = [self.programs(self.traced.reference), *self._likely_programs()]
        for training in (True, False):  # a head may be used in one mode alone
            with self.traced.in_mode(training):
                known += self._likely_programs()
        return [self._part(*one) for one in enumerate(zip(*known, strict=True))]

    def _likely_programs(self) -> list[list[SegmentProgram]]:
        found = []
        for variant in dict.fromkeys((self.traced.reference, *self.traced.likely_variants())):
            try:
                found.append(self.programs(variant))
            except ValueError:
                continue  # said when it is called so
        return found

    def programs(self, variant: Variant) -> list[SegmentProgram]:
        key = (variant, self.traced.modes())
        if key not in self._programs:
            graph, placeholders, calls = self.traced.graph(variant)
            segments = cut_graph(graph, [node for _, node in calls], self.cuts, placeholders)
            self._programs[key] = [SegmentProgram(self.traced.module, one) for one in segments]
        return self._programs[key]

    def _part(self, number: int, programs: Sequence[SegmentProgram]) -> StagePart:
        units: dict[str, nn.Module] = {}
        tensors: dict[str, Any] = {}
        names: set[str] = set()
        for program in programs:
            units |= {name: one for name, one in program.units.items() if name not in units}
            tensors |= program.tensors
            names |= program.segment.names
        if number == 0:
            return StagePart(0, units, self._run_first, self._is_argument, tensors)
        run = partial(self._run_later, number)
        return StagePart(number, units, run, partial(self._uses, names), tensors)

    def _uses(self, names: set[str], name: str) -> bool:
        """Whether a later stage uses an argument; all may use what ``**kwargs`` collects."""
        collected = name not in self.traced.signature.parameters and self._is_argument(name)
        return name in names or collected

    def _is_argument(self, name: str) -> bool:
        try:
            self.traced.signature.bind_partial(**{name: None})
        except TypeError:
            return False
        return True

    def _run_first(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        variant, given = self.traced.bind(inputs, kwargs)
        program = self.programs(variant)[0]
        values = {node: given[one] for node, one in program.segment.arguments.items()}
        outputs = program.run((), values)
        if variant == self.traced.reference or not self.cuts:
            return outputs
        return (variant, *outputs)

    def _run_later(self, number: int, inputs: Any, kwargs: dict[str, Any]) -> Any:
        variant = self.traced.reference
        if inputs and isinstance(inputs[0], Variant):
            variant, *inputs = inputs
        program = self.programs(variant)[number]
        values = {}
        for node, one in program.segment.arguments.items():
            if one.name not in kwargs:
                raise ValueError(
                    f"stage {number} uses the keyword argument {one.name!r}, which only stage 0 "
                    "was given: pass it on this rank too, or as a positional argument"
                )
            values[node] = kwargs[one.name]
        outputs = program.run(tuple(inputs), values)
        if variant == self.traced.reference or number == len(self.cuts):
            return outputs
        return (variant, *outputs)
