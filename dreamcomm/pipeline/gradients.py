"""What becomes of gradients after a step's backward passes: scaled, added, reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.buckets.found import engines_of
from dreamcomm.buckets.protocol import is_sharded
from dreamcomm.pipeline.compute.fresh import FreshGradients
from dreamcomm.pipeline.tied import TiedWeights

__all__ = ["StepGradients"]


class StepGradients:
    """The gradients of one step on this rank.

    Gradients add up over steps until zero_grad(), as over backward passes. A step's own part is
    kept apart from what was there before, and added at the end: a step that fails then leaves
    nothing, and what is done to it (adding the copies of shared parameters, dividing by a count)
    is done to it alone.

    Args:
        parameters: of this rank's stages, those that are trained.
        tied: its copies of shared parameters.
        fresh: notes those that have no gradient when the step begins.
        pipes: how many pipelines stand side by side.
        counted: whether gradients are divided by a count at the end.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tied: TiedWeights,
        *,
        fresh: FreshGradients,
        pipes: int,
        counted: bool,
    ) -> None:
        self._fresh = fresh
        self._parameters, self._tied = list(parameters), tied
        self._counted = counted
        self.engines, left = engines_of(self._parameters)
        self._check_engines(pipes)
        if pipes > 1 and left:
            raise RuntimeError(
                f"nothing averages the gradients of {len(left)} of this rank's "
                f"{len(self._parameters)} parameters over the mesh's {pipes} pipelines: before the "
                "first step, wrap the pipeline's module in dreamcomm.DistributedDataParallel("
                'pipe.module, process_group=mesh["data"].get_group()), and keep the wrapper, or '
                "make a dreamcomm.zero.ZeroOptimizer of pipe.parameters() with that group; or give "
                'the Pipeline mesh["pipe"] alone, and average yourself'
            )
        found = [(one, one.grad) for one in self._parameters if one.grad is not None]
        self._sharded = [one for one, gradient in found if is_sharded(gradient)]
        self._before = [(one, g) for one, g in found if not is_sharded(g)]
        self._without = [one for one in self._parameters if one.grad is None]
        self._check_sharded()

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
            self._fresh.begin(self._parameters)
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
        scaled: set[int] = set()
        for engine in self.engines:
            _scale([one.parameter for one in engine.trained], engine.averaged_over / count)
            scaled |= {id(one.parameter) for one in engine.trained}
        _scale([one for one in self._parameters if id(one) not in scaled], 1.0 / count)


def _scale(parameters: Sequence[nn.Parameter], factor: float) -> None:
    gradients = [one.grad for one in parameters if one.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _added(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """The sum, in the memory of the gradient that was there before."""
    if before is None or now is None:
        return now if before is None else before
    return before.add_(now)
