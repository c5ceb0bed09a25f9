"""A model in stages over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.buckets.scaling import GradScaler
from dreamcomm.pipeline.clip import clip_whole_
from dreamcomm.pipeline.free import free_others_
from dreamcomm.pipeline.layout import layout_of
from dreamcomm.pipeline.local import LocalStages
from dreamcomm.pipeline.messages.channel import Channel
from dreamcomm.pipeline.options import check_options, check_types, described_scaler, scaling_of
from dreamcomm.pipeline.plan import Asked, agreed_plan
from dreamcomm.pipeline.report import Report
from dreamcomm.pipeline.schedule import Schedule
from dreamcomm.pipeline.settings import Settings
from dreamcomm.pipeline.split import Splittable
from dreamcomm.pipeline.steps import EVAL, STEP, StepCall, Steps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Pipeline"]


class Pipeline:
    """Trains a model whose stages are on different ranks (Huang et al. 2019, "GPipe").

    Every rank makes it from the same whole module, and runs the stages that the schedule gives it.
    All ranks then call the same methods, with the same or with fewer arguments: the first stage
    reads inputs, the last one targets, and others may leave them out. A step ends on all ranks, or
    raises :class:`PipelineError` on all; after an error of one rank the next step works.

    Between stages travel trees of tensors and other values, whose shapes and dtypes may differ in
    each micro-batch and step.

    Args:
        module_or_stages: a Sequential; a module whose forward calls a list of blocks; or a list of
            stages, of which each gets what the one before returned, a tuple as several arguments.
        n_microbatches: into which a batch is cut. It need not divide the rows.
        schedule: "gpipe", "1f1b", "interleaved1f1b" or "zb-h1", or a Schedule.
        loss_fn: called with a micro-batch's output and target; None: no backward passes. The last
            stage's rank trains its parameters, if it is a module that has some.
        mesh: a DeviceMesh; its dimension "pipe" (or "pp") has the stages, and along the others
            stand pipelines side by side. None: all ranks are one pipeline.
        split: "cost" makes the most expensive stage as cheap as possible; a list has the indices of
            the first units of stages 1, 2, ...
        costs: of each unit, as :func:`dreamcomm.pipeline.measure_costs` finds them; None counts
            parameters. Rank 0's count.
        stages: how many; None is one a rank, and two for "interleaved1f1b".
        blocks: the name of the module's list of blocks; None: the longest.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as of torch's schedules.
        reduce: "mean" divides by the number of micro-batches, for losses that are means; None is
            this. "sum": gradients are those of the losses' sum. "tokens": losses are sums over
            what they count, such as tokens that are not ignored, and gradients are divided by the
            counts of all micro-batches, pipelines, and steps that reduce together. The loss
            function returns (sum, count), or :meth:`count` is called before each step.
        scale_grads: True is reduce="mean", and False "sum". "count" is "tokens", where a step that
            adds to gradients which are divided already adds its own mean, and is no error.
        accumulate: after how many steps the optimizer steps; True divides by these, too.
        loss: "last": ``losses`` is filled on the last stage; "all": on all ranks.
        checkpoint: keep each micro-batch's inputs of a stage alone, and run it twice.
        seed: of the random states that blocks run under; None: torch.initial_seed() of rank 0.
        free_others: free the parameters and buffers of stages that other ranks run: the given
            modules then have tensors on the meta device in their places.
        scaler: scales the gradients of losses, on the last stage. Then on all ranks
            ``scaler.step(optimizer)`` for each optimizer and ``scaler.update()``: all skip a step
            in which any rank has an infinity. A rank without an optimizer calls update() alone.

    Raises:
        ValueError: stages, schedule, ranks or names do not fit together, or ranks ask for different
            things, or parameters on different ranks are tied by ``.data``. On all ranks.
    """

    def __init__(
        self,
        module_or_stages: Splittable,
        n_microbatches: int,
        *,
        schedule: str | Schedule = "1f1b",
        loss_fn: Callable[..., Any] | None = None,
        mesh: DeviceMesh | None = None,
        split: str | Sequence[int] = "cost",
        costs: Sequence[float] | None = None,
        stages: int | None = None,
        blocks: str | Sequence[str] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        reduce: str | None = None,
        scale_grads: bool | str | None = None,
        accumulate: int = 1,
        loss: str = "last",
        checkpoint: bool = False,
        seed: int | None = None,
        free_others: bool = False,
        scaler: GradScaler | None = None,
    ) -> None:
        self._layout = layout = layout_of(mesh)
        settings = Settings(
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scaling_of(reduce, scale_grads),
            reduce is None,
            accumulate,
            loss,
            checkpoint,
            scaler,
        )
        check_types(n_microbatches, loss_fn, accumulate, checkpoint, seed, scaler)
        options = {
            "reduce": repr(reduce),
            "scale_grads": repr(scale_grads),
            "accumulate": str(accumulate),
            "loss": repr(loss),
            "checkpoint": str(checkpoint),
            "scaler": described_scaler(scaler),
        }
        asked = Asked(
            module_or_stages, n_microbatches, schedule, stages, split, costs, blocks, seed, options
        )
        plan = agreed_plan(asked, layout)
        check_options(reduce, scale_grads, accumulate, loss)
        self.schedule, self.n_microbatches = plan.schedule, n_microbatches
        channel = Channel(layout.group, plan.tag)
        self._local = LocalStages(module_or_stages, plan, layout, channel, settings)
        self._steps = Steps(plan, layout, self._local, channel)
        self._steps.share_weights()
        if scaler is not None:
            scaler.decide_for(layout.group, self._local.scaled, "the Pipeline")
        if free_others:
            free_others_(module_or_stages, self.module)

    # Steps.

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a batch forward and backward. Collective.

        Gradients add to those that are there. Unless under :meth:`no_sync`, what reduces them over
        pipelines side by side (DistributedDataParallel, ZeroOptimizer) does so once.

        Args:
            args: of the model, for the whole batch; the first stage reads them.
            target: for the whole batch; the last stage reads it. None: the loss function gets the
                output alone.
            losses: is filled with each micro-batch's loss, where ``loss`` says.
            return_outputs: keep and return the last stage's outputs.
            loss_kwargs: of the loss function.
            kwargs: of the model; each stage that takes a keyword argument reads its rank's.

        Returns:
            The model's output on the last stage's rank, else None.

        Raises:
            PipelineError: a rank has failed, or is lost. On all ranks.
        """
        return self._steps.run(
            StepCall(STEP, args, kwargs, target, losses, return_outputs, loss_kwargs)
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a batch forward alone, without gradients; else as :meth:`step`.

        Losses are computed where there is a target, or a list for them. As in torch, modules stay
        in the mode that they are in: see ``pipe.module.eval()``.
        """
        return self._steps.run(
            StepCall(EVAL, args, kwargs, target, losses, return_outputs, loss_kwargs)
        )

    def count(self, number: float | Tensor) -> None:
        """Says what the losses of the next step are sums over; with ``reduce="tokens"``.

        Once before each step, where the loss function returns no count. Nothing is communicated
        here.

        Args:
            number: of tokens or samples in this pipeline's whole batch, an int; or their weight, a
                float; or a tensor of one element. It may be 0. Only the one on the last stage's
                rank counts: others may leave it out, or give the same.

        Raises:
            ValueError: the number is negative, infinite or NaN.
            TypeError: it is no number.
            RuntimeError: ``reduce`` is another.
        """
        self._steps.count(number)

    @property
    def steps(self) -> int:
        """How many steps have trained. Random states depend on it: set it when training resumes."""
        return self._steps.done

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps.done = value

    # Parameters.

    @property
    def module(self) -> nn.Module:
        """This rank's parts, under their names in the whole module."""
        return self._local.module

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, with their names in the whole module."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's parameters and buffers, by their names in the whole module."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this rank's entries of a state dict, which may be that of the whole module.

        Raises:
            RuntimeError: an entry is missing, or has another shape.
        """
        own = self.module.state_dict()
        self.module.load_state_dict({k: v for k, v in state_dict.items() if k in own})

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the whole model's gradients so that their norm is at most ``max_norm``.

        Collective.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: raise where the norm is infinite or NaN, and change nothing.

        Returns:
            The norm before, of all stages, a shared parameter counted once; the same on all ranks.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        """
        if self._local.settings.scaler is not None:
            self._local.settings.scaler.decide()  # as on ranks that have unscaled gradients
        return clip_whole_(
            self._local.trained,
            self._local.tied.counted_elsewhere,
            self._layout,
            max_norm,
            norm_type,
            error_if_nonfinite,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside add to this rank's own gradients; the first one outside reduces the sum.

        With ``reduce="tokens"`` that one divides by all their counts, too.
        """
        before, self._steps.reduces = self._steps.reduces, False
        try:
            yield
        finally:
            self._steps.reduces = before

    def report(self) -> Report:
        """Times, activations and messages of the latest step on this rank.

        Raises:
            RuntimeError: there was no step yet.
        """
        if self._steps.latest is None:
            raise RuntimeError("Pipeline.report(): no step was run yet")
        return self._steps.latest

    def __repr__(self) -> str:
        rank = dist.get_rank(self._layout.group)
        stages = ", ".join(map(str, self._local.runs))
        return (
            f"Pipeline({self.schedule.name}, {self.schedule.stages} stages, "
            f"{self.n_microbatches} micro-batches; rank {rank} has stage {stages})"
        )
