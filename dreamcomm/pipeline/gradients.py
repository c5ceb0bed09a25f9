"""Gradients after a step's backward passes are added up, divided by counts, and reduced."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from dreamcomm.buckets.averages import MOST
from dreamcomm.buckets.engine import BucketEngine
from dreamcomm.buckets.found import engines_of
from dreamcomm.buckets.protocol import is_sharded
from dreamcomm.pipeline.compute.fresh import FreshGradients
from dreamcomm.pipeline.compute.reached import Reached
from dreamcomm.pipeline.counting import TokenWindow
from dreamcomm.pipeline.outside import Outside
from dreamcomm.pipeline.tied import TiedWeights
from dreamcomm.pipeline.values import Number

__all__ = ["StepGradients"]


class StepGradients:
    """The gradients of one step on this rank.

    Gradients add up over steps until zero_grad(), as over backward passes. A step's own part is
    kept apart from what was there before, and added at the end: a step that fails then leaves
    nothing, and what is done to it (adding the copies of shared parameters, dividing by a count)
    is done to it alone.

    Args:
        named: the trained parameters of this rank's stages and loss function, with their names.
        given: other tensors whose gradients are the step's, and that nothing averages.
        tied: its copies of shared parameters.
        fresh: notes those that have no gradient when the step begins.
        reached: finds those that get a gradient and are not known here.
        outside: says which of these the step may take in.
        pipes: how many pipelines stand side by side.
        window: the steps whose gradients are divided together by their counts; None: gradients are
            scaled already.

    Attributes:
        held: whether gradients of earlier steps, which have counts, are there; None: they have left
            none here.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        given: Sequence[Tensor],
        tied: TiedWeights,
        *,
        fresh: FreshGradients,
        reached: Reached,
        outside: Outside,
        pipes: int,
        window: TokenWindow | None,
    ) -> None:
        self._fresh, self._reached, self._outside = fresh, reached, outside
        self._tied, self._window, self._pipes = tied, window, pipes
        self._passing: list[TensorWeakRef] = []
        parameters = {id(one): one for _, one in named}
        self.engines, left = engines_of(parameters.values())
        self._check_engines(pipes)
        if pipes > 1 and left:
            names = {id(one): name for name, one in named}
            raise RuntimeError(_not_averaged([names[id(one)] for one in left], len(names), pipes))
        self._shards_hold = window is not None and _shards_hold(self.engines)
        self.held = None if window is None else window.holds(self._shards_hold)
        self._check_counts()
        self._leaves = list({**parameters, **{id(one): one for one in given}}.values())
        self._without: list[Tensor] = []
        self._sharded: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        for one in self._leaves:
            self._note(one)
        self._check_sharded()

    def _note(self, one: Tensor) -> None:
        """Sorts a leaf by the gradient that it has before the step."""
        if one.grad is None:
            self._without.append(one)
        elif is_sharded(one.grad) and self._window is not None and not self._shards_hold:
            one.grad = None  # it is cleared
            self._without.append(one)
        elif is_sharded(one.grad):
            self._sharded.append(one)
        else:
            self._before.append((one, one.grad))

    def _take_in(self, leaf: Tensor) -> None:
        """Makes the gradient of a leaf, which has none of this step yet, one of the step's."""
        self._outside.check(leaf)
        if self._pipes > 1:  # it may be a forward's own, and be gone with its graph
            self._passing.append(TensorWeakRef(leaf))
            return
        self._leaves.append(leaf)
        self._note(leaf)
        self._check_sharded()
        if not is_sharded(leaf.grad):
            leaf.grad = None
        self._begin_fresh()

    def check_passing(self) -> None:
        """After the backward passes: raises RuntimeError for a leaf that nothing averages."""
        if any(one() is not None for one in self._passing):
            gc.collect()
        for one in self._passing:
            leaf = one()
            if leaf is not None and leaf.grad is not None:
                leaf.grad = None
                raise self._outside.not_averaged(leaf)

    def _begin_fresh(self) -> None:
        self._fresh.begin(self._leaves)

    def _check_engines(self, pipes: int) -> None:
        for engine in self.engines:
            size = dist.get_world_size(engine.group)
            if size != pipes:
                raise RuntimeError(
                    f"what reduces the gradients of this rank's stages does so over {size} ranks, "
                    f"and {pipes} pipelines stand side by side: give it the process group of the "
                    'mesh\'s other dimensions, as mesh["data"].get_group()'
                )

    def _check_counts(self) -> None:
        window, counted = self._window, [one for one in self.engines if one.averages.counted]
        if window is None and counted:
            raise RuntimeError(
                f"{counted[0].sharded_by or 'the wrapper'} of this rank's stages divides gradients "
                'by counts, with reduce="tokens", and the pipeline has none: make it with '
                'Pipeline(..., reduce="tokens")'
            )
        if window is None or not (window.is_divided and self.held):
            return
        if counted or not window.adds_means:
            raise RuntimeError(
                "the gradients of earlier steps are divided by their counts already, and this step "
                "has to add to them: run the earlier steps under the pipeline's no_sync(), or call "
                "zero_grad() before this one"
            )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add to this rank's own gradients, and reduce none."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.no_sync())
            for one, _ in self._before:
                one.grad = None
            self._begin_fresh()
            self._reached.begin(self._leaves, self._take_in)
            yield

    def undo(self) -> None:
        """After a step that failed: gradients are as they were before.

        Those that an earlier step has sharded are dropped: this step's part cannot be told apart.
        """
        for one in (*self._without, *self._sharded):
            one.grad = None
        for one, before in self._before:
            one.grad = before

    def finish(self, step: int, count: Number | None, held: bool | None, *, reduces: bool) -> None:
        """Adds, divides and reduces. Collective.

        Args:
            step: the channel's.
            count: what the losses of all ranks are sums over; None: gradients are scaled already.
            held: as the attribute, on any rank.
            reduces: False keeps gradients this rank's own, and sums.
        """
        with torch.no_grad():
            self._tied.add_gradients(step)
            if self._window is None:
                self._add_up()
            else:
                assert count is not None
                self._window.begin_step(held)
                self._take_counted(self._window, count, reduces)
        for engine in self.engines:
            engine.note_own_changes()
            if reduces:
                engine.reduce_gradients()
        if self._window is not None:
            self._window.mark(self._leaves)

    def _add_up(self) -> None:
        for one, before in self._before:
            one.grad = _added(before, one.grad)

    def _take_counted(self, window: TokenWindow, count: Number, reduces: bool) -> None:
        """Divides all sums of the window once, or leaves them to a later step."""
        alone = window.is_divided or (reduces and window.is_empty)
        if alone:
            self._divide(self._leaves, count)
        self._add_up()
        if not window.is_divided:
            window.add(count, self._leaves)
        for engine in self.engines:
            if engine.averages.counted:
                is_first = dist.get_rank(engine.group) == 0
                engine.replace_count(_countable(window.total) if is_first else 0)
        if reduces:
            if not alone:
                self._divide(window.leaves(), window.total)
            window.end()

    def _check_sharded(self) -> None:
        shared = {id(one) for one in self._tied.parameters}
        counted = self._window is not None
        if any(counted or id(one) in shared for one in self._sharded):
            raise RuntimeError(
                "a gradient of an earlier step is sharded already, and this step has to add to it "
                "apart (shared weights, or losses with counts): run the earlier steps under the "
                "pipeline's no_sync(), or call zero_grad(set_to_none=True) before this one"
            )

    def _divide(self, leaves: Sequence[Tensor], count: Number) -> None:
        """Leaves means over a count once they are reduced; those that engines divide stay sums."""
        left = {id(one): one for one in leaves}
        for engine in self.engines:
            averaged = [left.pop(id(one.parameter), None) for one in engine.trained]
            if not engine.averages.counted:
                _scale([one for one in averaged if one is not None], engine.averaged_over, count)
        _scale(list(left.values()), 1.0, count)


def _not_averaged(names: Sequence[str], of: int, pipes: int) -> str:
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    text = (
        f"nothing averages the gradients of {len(names)} of this rank's {of} parameters ({shown}) "
        f"over the mesh's {pipes} pipelines: before the first step, wrap the pipeline's module in "
        "dreamcomm.DistributedDataParallel(pipe.module, "
        'process_group=mesh["data"].get_group()), and keep the wrapper, or make a '
        "dreamcomm.zero.ZeroOptimizer of pipe.parameters() with that group; or give the Pipeline "
        'mesh["pipe"] alone, and average yourself'
    )
    if any(name.startswith("loss_fn.") for name in names):
        text += ". The parameters of a loss function need it too: wrap that module as well"
    return text


def _shards_hold(engines: Sequence[BucketEngine]) -> bool:
    """Whether shards that stand for gradients hold anything."""
    return any(one.shards is not None and one.shards.hold_gradients() for one in engines)


def _countable(total: Number) -> Number:
    return total if total < MOST else float(total)


def _scale(leaves: Sequence[Tensor], factor: float, count: Number) -> None:
    """Multiplies gradients by the factor over the count. Sums over nothing become zeros."""
    gradients = [one.grad for one in leaves if one.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor / count if count else 0.0)


def _added(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """The sum, in the memory of the gradient that was there before."""
    if before is None or now is None:
        return now if before is None else before
    return before.add_(now)
