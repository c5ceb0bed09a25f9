"""What becomes of gradients after a step's backward passes: scaled, added, reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from dreamcomm.buckets.found import engines_of
from dreamcomm.pipeline.tied import TiedWeights

__all__ = ["StepGradients"]


class StepGradients:
    """The gradients of one step on this rank.

    Gradients add up over steps until zero_grad(), as over backward passes. A step's own part is
    kept apart where it is changed: of shared parameters, whose copies are added, and of all where
    they are divided by a count that is known at the end.

    Args:
        parameters: of this rank's stages, those that are trained.
        tied: its copies of shared parameters.
        pipes: how many pipelines stand side by side.
        counted: whether gradients are divided by a count at the end.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        tied: TiedWeights,
        *,
        pipes: int,
        counted: bool,
    ) -> None:
        self._parameters, self._tied = list(parameters), tied
        self._counted = counted
        self.engines, left = engines_of(self._parameters)
        if pipes > 1 and left:
            raise RuntimeError(
                f"nothing averages the gradients of {len(left)} of this rank's "
                f"{len(self._parameters)} parameters over the mesh's {pipes} pipelines: before the "
                "first step, wrap the pipeline's module in dreamcomm.DistributedDataParallel("
                'pipe.module, process_group=mesh["data"].get_group()), or make a '
                "dreamcomm.zero.ZeroOptimizer of pipe.parameters() with that group; or give the "
                'Pipeline mesh["pipe"] alone, and average yourself'
            )
        apart = self._parameters if counted else tied.parameters
        self._before = [(one, one.grad) for one in apart if one.grad is not None]
        self._without = [one for one in self._parameters if one.grad is None]
        _check_whole(self._before)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add to this rank's own gradients, and reduce none."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.no_sync())
            for one, _ in self._before:
                one.grad = None
            yield

    def undo(self) -> None:
        """After a step that failed: gradients that were there before are, the others are not."""
        for one in self._without:
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
        if reduces:
            for engine in self.engines:
                engine.reduce_gradients()

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


def _check_whole(gradients: Sequence[tuple[nn.Parameter, Tensor | None]]) -> None:
    for _, gradient in gradients:
        if gradient is not None and gradient.numel() and gradient.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                "a gradient of an earlier step is sharded already, and this step has to add to it "
                "apart (shared weights, or losses with counts): run the earlier steps under the "
                "pipeline's no_sync(), or call zero_grad() before this one"
            )
