"""The stages of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeGuard

from torch import Tensor, nn

from dreamcomm.pipeline.compute.batch_norm import DeferredBatchNorm
from dreamcomm.pipeline.compute.fresh import FreshGradients
from dreamcomm.pipeline.compute.randomness import BlockRandomness
from dreamcomm.pipeline.compute.reached import Reached
from dreamcomm.pipeline.compute.skip import find_skips
from dreamcomm.pipeline.compute.stage import StageRun
from dreamcomm.pipeline.counting import TokenWindow
from dreamcomm.pipeline.gradients import StepGradients
from dreamcomm.pipeline.layout import Layout
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.named_module import NamedParts
from dreamcomm.pipeline.outside import Outside
from dreamcomm.pipeline.places import Places
from dreamcomm.pipeline.plan import PipelinePlan, stage_parameters
from dreamcomm.pipeline.settings import Settings
from dreamcomm.pipeline.split import Splittable, StagePart
from dreamcomm.pipeline.tied import TiedWeights, find_tied

__all__ = ["LocalStages"]


class LocalStages:
    """What a rank has of a pipeline: runs of its stages, and their parameters.

    Attributes:
        runs: by the number of the stage.
        module: all parameters and buffers, under their names in the whole module.
        tied: the shared parameters among them.
        batch_norm: defers the running statistics.
    """

    def __init__(
        self,
        whole: Splittable,
        plan: PipelinePlan,
        layout: Layout,
        channel: Channel,
        settings: Settings,
    ) -> None:
        self.settings = settings
        own = [plan.parts[stage] for stage in plan.schedule.stages_of(layout.place)]
        units = {name: unit for part in own for name, unit in part.units.items()}
        tensors = {name: tensor for part in own for name, tensor in part.tensors.items()}
        self.module = NamedParts(whole if _is_traced(whole) else None, units, tensors)
        roots = [self.module, *([whole] if isinstance(whole, nn.Module) else [])]
        self._places = Places(roots, units)
        self.batch_norm = DeferredBatchNorm(units.values())
        self._pipes = layout.pipes
        self._window = TokenWindow(adds_means=settings.adds_means) if settings.counted else None
        skips = find_skips({n: unit for part in plan.parts for n, unit in part.units.items()})
        tied = find_tied([stage_parameters(part) for part in plan.parts], plan.schedule.rank_of)
        self.tied = TiedWeights(tied, self.module, channel, layout.peers, layout.place)
        self.fresh, self._reached = FreshGradients(), Reached()
        seed = _seed(plan.seed, layout.pipe)
        self._randomness = [BlockRandomness(part.units, seed) for part in own]
        last = plan.schedule.stages - 1
        self.runs = {
            part.number: StageRun(
                part.number,
                part.run,
                part.number == last,
                travels=bool(skips),
                skips={name: skip for name, skip in skips.items() if _has(part, skip)},
                loss_fn=settings.loss_fn if part.number == last else None,
                counted=settings.counted,
                around=self._around(randomness),
                checkpointed=settings.checkpoint,
                fresh=self.fresh,
                reached=self._reached,
            )
            for part, randomness in zip(own, self._randomness, strict=True)
        }
        loss_fn = settings.loss_fn if last in self.runs else None
        self._outside = Outside(plan.parts, self.runs, loss_fn, layout.pipes)

    def _around(self, randomness: BlockRandomness) -> Callable[[int, int, bool], Any]:
        @contextmanager
        def around(step: int, microbatch: int, repeats: bool) -> Iterator[None]:
            collects = nullcontext() if repeats else self.batch_norm.at(microbatch)
            with randomness.at(step, microbatch), collects:
                yield

        return around

    @contextmanager
    def running(self) -> Iterator[None]:
        """A step: hooks are on the modules inside."""
        with ExitStack() as stack:
            stack.enter_context(self.batch_norm.step())
            for one in self._randomness:
                stack.enter_context(one.hooked())
            yield

    def follow_changes(self) -> None:
        """Takes the tensors that were replaced since the call before.

        Raises:
            RuntimeError: a unit was replaced.
        """
        self._places.check()
        self.module.put_back()

    @property
    def trained(self) -> list[nn.Parameter]:
        """This rank's parameters that are trained now."""
        return [one for _, one in self._named_trained()]

    def scaled(self) -> list[nn.Parameter]:
        """What gradients of losses reach on this rank: also the loss function's parameters."""
        return [*self.trained, *(one for _, one in self._outside.loss_parameters())]

    def _named_trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, one) for name, one in self.module.named_parameters() if one.requires_grad]

    def step_gradients(self, given: Sequence[Tensor]) -> StepGradients:
        """The gradients of a step that begins; ``given``: arguments that require gradients."""
        return StepGradients(
            [*self._named_trained(), *self._outside.loss_parameters()],
            given,
            self.tied,
            fresh=self.fresh,
            reached=self._reached,
            outside=self._outside,
            pipes=self._pipes,
            window=self._window,
        )


def _is_traced(whole: Splittable) -> TypeGuard[nn.Module]:
    return isinstance(whole, nn.Module) and not isinstance(whole, nn.Sequential | nn.ModuleList)


def _seed(seed: int, pipe: int) -> int:
    """Pipelines side by side draw different numbers."""
    return seed + pipe * 0x9E3779B97F4A7C15


def _has(part: StagePart, wanted: nn.Module) -> bool:
    return any(one is wanted for unit in part.units.values() for one in unit.modules())
