"""What becomes of gradients after a step's backward passes: scaled, added, reduced."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from dreamcomm.buckets.found import engines_of
from dreamcomm.buckets.protocol import is_sharded
from dreamcomm.pipeline.compute.fresh import FreshGradients
from dreamcomm.pipeline.compute.reached import Reached
from dreamcomm.pipeline.outside import Outside
from dreamcomm.pipeline.tied import TiedWeights

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
        counted: whether gradients are divided by a count at the end.
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
        counted: bool,
    ) -> None:
        self._fresh, self._reached, self._outside = fresh, reached, outside
        self._tied, self._counted, self._pipes = tied, counted, pipes
        self._passing: list[TensorWeakRef] = []
        parameters = {id(one): one for _, one in named}
        self.engines, left = engines_of(parameters.values())
        self._check_engines(pipes)
        if pipes > 1 and left:
            names = {id(one): name for name, one in named}
            raise RuntimeError(_not_averaged([names[id(one)] for one in left], len(names), pipes))
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

    def finish(self, step: int, count: float | None, *, reduces: bool) -> None:
        """Scales, adds and reduces. Collective.

        Args:
            step: the channel's.
            count: what the losses of all ranks are sums over; None: gradients are scaled already.
            reduces: False keeps them this rank's own.
        """
        with torch.no_grad():
            if self._counted:
                self._divide(count)
            self._tied.add_gradients(step)
            for one, before in self._before:
                one.grad = _added(before, one.grad)
        for engine in self.engines:
            engine.note_own_changes()
            if reduces:
                engine.reduce_gradients()

    def _check_sharded(self) -> None:
        shared = {id(one) for one in self._tied.parameters}
        if any(self._counted or id(one) in shared for one in self._sharded):
            raise RuntimeError(
                "a gradient of an earlier step is sharded already, and this step has to add to it "
                "apart (shared weights, or losses with counts): run the earlier steps under the "
                "pipeline's no_sync(), or call zero_grad(set_to_none=True) before this one"
            )

    def _divide(self, count: float | None) -> None:
        assert count
        left = {id(one): one for one in self._leaves}
        for engine in self.engines:
            averaged = [left.pop(id(one.parameter), None) for one in engine.trained]
            _scale([one for one in averaged if one is not None], engine.averaged_over / count)
        _scale(list(left.values()), 1.0 / count)


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


def _scale(leaves: Sequence[Tensor], factor: float) -> None:
    gradients = [one.grad for one in leaves if one.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _added(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """The sum, in the memory of the gradient that was there before."""
    if before is None or now is None:
        return now if before is None else before
    return before.add_(now)
