"""Runs the micro-batches of one stage, and keeps what their backward passes need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from dreamcomm.pipeline.compute.backward import Pending, backward_input, full_backward
from dreamcomm.pipeline.compute.entry import StageEntry, enter
from dreamcomm.pipeline.compute.fresh import FreshGradients
from dreamcomm.pipeline.compute.reached import Reached
from dreamcomm.pipeline.compute.skip import Skip
from dreamcomm.pipeline.values import Number, check_values, number_of

__all__ = ["Result", "StageRun", "detached", "handed_over", "needs_gradient"]

Run = Callable[[Any, dict[str, Any]], Any]


@dataclass
class Kept:
    """What a micro-batch's backward pass needs. No tensor that was sent is in it.

    Attributes:
        entry: where the stage's graph begins.
        roots: where it ends: a loss, or each output that needs a gradient.
    """

    entry: StageEntry
    roots: list[GradientEdge]


@dataclass
class Result:
    """What a stage made of a micro-batch.

    Attributes:
        value: for the next stage; of the last one, the module's output.
        loss: of the last stage; None without a loss function.
        count: what the loss is a sum over, if the loss function says it.
    """

    value: Any
    loss: Tensor | None = None
    count: Number | None = None


@dataclass
class StageRun:
    """One stage on this rank.

    Attributes:
        number: of the stage.
        run: calls the stage's part of the module on inputs and keyword arguments.
        is_last: what it returns is the module's output.
        travels: whether values that jump over blocks travel beside those between stages.
        skips: what blocks of this stage put such values into, or take them from, by name.
        loss_fn: of the last stage; None for others, and without a loss.
        counted: whether the loss function may return a sum and what it goes over.
        around: a context for each run of a micro-batch, by step, micro-batch and whether the run
            repeats an earlier one.
        checkpointed: keep a micro-batch's inputs alone, and run it again for its backward pass.
        fresh: the rank's parameters without a gradient in this step.
        reached: the tensors that get gradients in this step.
    """

    number: int
    run: Run
    is_last: bool
    travels: bool = False
    skips: dict[str, Skip] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    counted: bool = False
    around: Callable[[int, int, bool], AbstractContextManager[Any]] = lambda *_: nullcontext()
    checkpointed: bool = False
    fresh: FreshGradients = field(default_factory=FreshGradients)
    reached: Reached = field(default_factory=Reached)
    live_peak: int = 0
    _kept: dict[int, Kept] = field(default_factory=dict)
    _pending: dict[int, Pending] = field(default_factory=dict)

    def forward(
        self,
        step: int,
        microbatch: int,
        inputs: Any,
        kwargs: dict[str, Any],
        loss_args: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        *,
        trains: bool,
    ) -> Result:
        """Runs a micro-batch.

        Args:
            step, microbatch: the random state depends on them.
            inputs: for stage 0 the user's positional arguments; else what the stage before sent,
                in which tensors whose gradient is wanted require one.
            kwargs: that the stage takes.
            loss_args: of the last stage: what the loss function gets after the output.
            trains: a backward pass follows.
        """
        leaves, spec = ([inputs], None) if isinstance(inputs, Tensor) else _flat(inputs)
        entry = self._enter(leaves, trains)
        value = self._call(step, microbatch, leaves, spec, kwargs)
        result = Result(value)
        ends: list[Tensor] = [one for one in _leaves(value) if _needs_gradient(one)]
        if not self.is_last:
            check_values(value)
        if self.loss_fn is not None and loss_args is not None:
            result = self._with_loss(value, loss_args)
            loss = result.loss
            ends = [loss] if loss is not None and loss.requires_grad else []
            if trains and not ends and any(entry.wanted):
                raise RuntimeError("the loss needs no gradient, though what it is made of does")
        if trains:
            roots = [get_gradient_edge(one) for one in ends]
            self.reached.look(self.number, roots)
            self._kept[microbatch] = Kept(entry, roots)
            self.live_peak = max(self.live_peak, len(self._kept))
        return result

    def _enter(self, leaves: list[Any], trains: bool) -> StageEntry:
        """Puts the tensors that came in at the beginning of the stage's graph."""
        if self.number == 0:
            return StageEntry()
        where = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[n] for n in where]
        entered, entry = enter(
            [one.detach() for one in given], [trains and one.requires_grad for one in given]
        )
        for n, one in zip(where, entered, strict=True):
            leaves[n] = one
        return entry

    def _call(
        self, step: int, microbatch: int, leaves: list[Any], spec: Any, kwargs: dict[str, Any]
    ) -> Any:
        def run_once(repeats: bool, *given: Any, named: dict[str, Any] = kwargs) -> Any:
            inputs = given[0] if spec is None else pytree.tree_unflatten(list(given), spec)
            with self.around(step, microbatch, repeats):
                return self._run_with_skips(inputs, named)

        if not self.checkpointed or not torch.is_grad_enabled():
            return run_once(False, *leaves)
        runs = [0]

        def run_again(*given: Any) -> Any:
            runs[0] += 1
            # The first operation may work in place, and the second run needs what the first got.
            own = [one.clone() if isinstance(one, Tensor) else one for one in given]
            named = pytree.tree_map_only(Tensor, Tensor.clone, kwargs)
            return run_once(runs[0] > 1, *own, named=named)

        return checkpoint(run_again, *leaves, use_reentrant=False)

    def _run_with_skips(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the part. Values that jump over blocks travel beside the stage's value."""
        if not self.travels:
            return self.run(inputs, kwargs)
        travelling: dict[str, Any] = {}
        if self.number > 0:
            inputs, travelling = inputs[0], dict(inputs[1])
        try:
            for name in self.skips.keys() & travelling.keys():
                self.skips[name].give(travelling.pop(name))
            value = self.run(inputs, kwargs)
            for name, skip in self.skips.items():
                if skip.holds:
                    travelling[name] = skip.take()
        finally:
            for skip in self.skips.values():
                skip.clear()
        return value if self.is_last else (value, travelling)

    def _with_loss(self, value: Any, loss_args: tuple[tuple[Any, ...], dict[str, Any]]) -> Result:
        assert self.loss_fn is not None
        found = self.loss_fn(value, *loss_args[0], **loss_args[1])
        is_pair = isinstance(found, tuple) and len(found) == 2
        if is_pair and not self.counted:
            raise TypeError(
                "expected the loss function to return one loss, got tuple; with "
                'reduce="tokens" it returns (sum of losses, count), else a tensor'
            )
        loss, count = found if is_pair else (found, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(
                f"expected the loss function to return a tensor of one element, got {what}"
            )
        if count is None:
            return Result(value, loss)
        return Result(value, loss, number_of(count, "the loss function's count"))

    # Backward.

    def backward(self, microbatch: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The whole backward pass; ``gradients``: of what the forward pass gave, or of the loss.

        Returns:
            Gradients of the tensors that came in, those that require one.
        """
        kept = self._kept.pop(microbatch)
        found = full_backward(kept.roots, gradients, kept.entry)
        self.fresh.set_apart()
        return _wanted(kept.entry, found)

    def backward_input(
        self, microbatch: int, gradients: list[Tensor | None]
    ) -> list[Tensor | None]:
        """The backward pass to the inputs alone; see :meth:`backward`."""
        kept = self._kept.pop(microbatch)
        found, pending = backward_input(kept.roots, gradients, kept.entry)
        self._pending[microbatch] = pending
        self.fresh.set_apart()
        return _wanted(kept.entry, found)

    def backward_weight(self, microbatch: int) -> None:
        """The rest of the backward pass."""
        self._pending.pop(microbatch).backward_weight()
        self.fresh.set_apart()

    def forget(self) -> None:
        """Drops what is kept, after a step that failed."""
        self._kept.clear()
        self._pending.clear()


def _flat(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value)


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _wanted(entry: StageEntry, gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [g for g, one in zip(gradients, entry.wanted, strict=True) if one]


def detached(value: Any) -> Any:
    """A value without its graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return pytree.tree_map_only(Tensor, Tensor.detach, value)


def needs_gradient(value: Any) -> bool:
    """Whether any tensor of a value requires a gradient."""
    return any(map(_needs_gradient, _leaves(value)))


def handed_over(value: Any, *, copies: bool = False) -> Any:
    """A value as the next stage on the same rank gets it: cut off from this stage's graph.

    Args:
        value: that the stage gave.
        copies: the stage may write to its memory again, before the next one has read it.
    """

    def cut(one: Tensor) -> Tensor:
        plain = one.detach().clone() if copies else one.detach()
        return plain.requires_grad_(one.requires_grad)

    return pytree.tree_map_only(Tensor, cut, value)
