"""A model in stages over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.pipeline.clip import clip_whole_
from dreamcomm.pipeline.errors import Failure, PipelineError
from dreamcomm.pipeline.gradients import StepGradients
from dreamcomm.pipeline.layout import layout_of
from dreamcomm.pipeline.local import LocalStages
from dreamcomm.pipeline.messages.agreement import Part, Verdict, agree, leave, lost
from dreamcomm.pipeline.messages.channel import Channel, PeerFailed, RankLost
from dreamcomm.pipeline.messages.codec import described
from dreamcomm.pipeline.plan import Asked, agreed_plan
from dreamcomm.pipeline.report import Report
from dreamcomm.pipeline.runner import Batch, Outcome, Runner
from dreamcomm.pipeline.schedule import Schedule
from dreamcomm.pipeline.split import Splittable, merge_outputs, split_batch, split_targets

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Pipeline"]

EVAL, STEP = 0, 1


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
        loss_fn: called with a micro-batch's output and target; None: no backward passes.
        mesh: a DeviceMesh; its dimension "pipe" (or "pp") has the stages, and along the others
            stand pipelines side by side. None: all ranks are one pipeline.
        split: "cost" makes the most expensive stage as cheap as possible; a list has the indices of
            the first units of stages 1, 2, ...
        costs: of each unit, as :func:`dreamcomm.pipeline.measure_costs` finds them; None counts
            parameters. Rank 0's count.
        stages: how many; None is one a rank, and two for "interleaved1f1b".
        blocks: the name of the module's list of blocks; None: the longest.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as of torch's schedules.
        scale_grads: True divides by the number of micro-batches, for losses that are means. False:
            gradients are the losses' sum's. "count": the loss function returns a sum and what it
            goes over, such as tokens that are not ignored, and gradients are divided by the count
            of all micro-batches and pipelines together.
        accumulate: after how many steps the optimizer steps; True divides by these, too.
        loss: "last": ``losses`` is filled on the last stage; "all": on all ranks.
        checkpoint: keep each micro-batch's inputs of a stage alone, and run it twice.
        seed: of the random states that blocks run under; None: torch.initial_seed() of rank 0.

    Raises:
        ValueError: stages, schedule, ranks or names do not fit together, or ranks ask for different
            things. On all ranks.
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
        scale_grads: bool | str = True,
        accumulate: int = 1,
        loss: str = "last",
        checkpoint: bool = False,
        seed: int | None = None,
    ) -> None:
        self._layout = layout = layout_of(mesh)
        options = (scale_grads, accumulate, loss, checkpoint)
        asked = Asked(
            module_or_stages, n_microbatches, schedule, stages, split, costs, blocks, seed, options
        )
        plan = agreed_plan(asked, layout)
        _check_options(scale_grads, accumulate, loss)
        self.schedule, self._parts = plan.schedule, plan.parts
        self.n_microbatches = n_microbatches
        self.steps = 0
        self._specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self._loss_fn, self._scales, self._accumulate = loss_fn, scale_grads, accumulate
        self._losses_everywhere = loss == "all"
        self._channel = Channel(layout.group, plan.tag)
        self._calls, self._reduces, self._lost = 0, True, -1
        self._local = LocalStages(
            module_or_stages,
            plan,
            layout,
            self._channel,
            loss_fn=loss_fn,
            counted=scale_grads == "count",
            checkpointed=checkpoint,
        )
        self._runner = Runner(
            plan.schedule,
            layout.place,
            self._local.runs,
            lambda stage, name: plan.parts[stage].takes(name),
            self._channel,
            layout.peers,
        )
        self._report: Report | None = None
        self._local.copy_tied(self._next_call(STEP))

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
        return self._run(STEP, args, kwargs, target, losses, return_outputs, loss_kwargs)

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
        return self._run(EVAL, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def _run(
        self,
        mode: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Tensor] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        self._check_whole()
        call = self._next_call(mode)
        trains = mode == STEP and self._loss_fn is not None
        part, error = Part(pipe=self._layout.pipe), None
        gradients: StepGradients | None = None
        outcome = Outcome()
        try:
            if trains:
                gradients = self._local.step_gradients()
            scored = trains or target is not None or losses is not None
            loss_args = (target, loss_kwargs or {}) if scored else None
            batch = self._batch(args, kwargs, loss_args, trains, return_outputs)
            with self._around(gradients, trains):
                outcome = self._runner.run(call, batch)
            part = self._part(outcome)
        except PeerFailed as heard:
            part.failure = heard.reason
        except RankLost as ended:
            self._lose(ended.rank)
        except Exception as raised:
            error = raised
            part.failure = self._failure(raised)
            self._channel.tell_failure(part.failure)
        except BaseException as raised:  # Ctrl-C: the others stop, this rank does not wait for them
            part.failure = self._failure(raised)
            self._channel.tell_failure(part.failure)
            leave(self._channel, call, part)
            self._undo(gradients)
            raise
        verdict = self._agree(call, part)
        if verdict.failure is not None:
            self._undo(gradients)
            raise PipelineError(
                f"the pipeline's step failed on {verdict.failure}", verdict.failure
            ) from error
        self._local.batch_norm.commit()
        if gradients is not None:
            gradients.finish(call, verdict.count, reduces=self._reduces)
            self._channel.drain()
            self.steps += 1
        self._channel.end()
        self._report = Report.of(self.schedule, outcome, self._local, self._channel, self._layout)
        self._fill(losses, outcome, verdict)
        return self._output(outcome, return_outputs)

    @contextmanager
    def _around(self, gradients: StepGradients | None, trains: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if gradients is not None:
                stack.enter_context(gradients.accumulating())
            stack.enter_context(self._local.batch_norm.step())
            stack.enter_context(torch.set_grad_enabled(trains))
            yield

    def _next_call(self, mode: int) -> int:
        self._calls += 1
        self._channel.begin(self._calls, mode)
        return self._calls

    def _batch(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_args: tuple[Any, dict[str, Any]] | None,
        trains: bool,
        keeps_outputs: bool,
    ) -> Batch:
        """Cuts what this rank's stages read."""
        count = self.n_microbatches
        for name in kwargs:
            if not any(part.takes(name) for part in self._parts):
                raise TypeError(f"no stage takes the keyword argument {name!r}")
        first, last = 0 in self._local.runs, self.schedule.stages - 1 in self._local.runs
        pairs = split_batch(args if first else (), kwargs, count, *self._specs[:2])
        targets = None
        if last and self._loss_fn is not None and loss_args is not None:
            target, options = loss_args
            cut = [()] * count if target is None else [(t,) for t in split_targets(target, count)]
            targets = [(one, options) for one in cut]
        weight = 1.0 / (count * self._accumulate) if self._scales is True else 1.0
        return Batch(
            [one for one, _ in pairs],
            [one for _, one in pairs],
            targets,
            trains,
            weight,
            self.steps,
            keeps_outputs,
        )

    def _part(self, outcome: Outcome) -> Part:
        """What this rank reports at the end of a step."""
        found = [outcome.results[m] for m in sorted(outcome.results)]
        counts = [one.count for one in found if one.count is not None]
        losses = None
        if self._losses_everywhere and found and found[0].loss is not None:
            losses = [(float(one.loss), one.loss.dtype) for one in found if one.loss is not None]
        return Part(None, sum(counts) if counts else None, losses, self._layout.pipe)

    def _fill(self, losses: list[Tensor] | None, outcome: Outcome, verdict: Verdict) -> None:
        if losses is None:
            return
        losses.clear()
        own = [outcome.results[m].loss for m in sorted(outcome.results)]
        if own:
            losses.extend(one.detach() for one in own if one is not None)
        elif self._losses_everywhere:
            found = verdict.losses.get(self._layout.pipe, [])
            losses.extend(torch.tensor(value, dtype=dtype, device="cpu") for value, dtype in found)

    def _output(self, outcome: Outcome, wanted: bool) -> Any:
        if not wanted or not outcome.results:
            return None
        values = [outcome.results[m].value for m in sorted(outcome.results)]
        return merge_outputs(values, self._specs[2])

    # Failures.

    def _failure(self, error: BaseException) -> Failure:
        at, rank = self._runner.at, self._channel.rank
        if at is None:
            return Failure(rank, type(error).__name__, str(error))
        text, m = str(error), -1 if at.microbatch is None else at.microbatch
        if self._runner.given is not None:
            text += f" (stage {at.stage - 1} gave {described(self._runner.given)})"
        return Failure(rank, type(error).__name__, text, str(at), at.stage, m)

    def _agree(self, call: int, part: Part) -> Verdict:
        try:
            return agree(self._channel, call, part)
        except RankLost as ended:
            self._lose(ended.rank)
            raise AssertionError("unreachable") from ended

    def _lose(self, rank: int) -> None:
        """A rank has ended. Raises on this rank; the others notice it themselves."""
        self._lost = rank
        self._runner.forget()
        self._check_whole()

    def _check_whole(self) -> None:
        if self._lost >= 0:
            failure = lost(self._lost)
            raise PipelineError(f"the pipeline has ended: {failure}", failure)

    def _undo(self, gradients: StepGradients | None) -> None:
        self._runner.forget()
        self._local.batch_norm.discard()
        if gradients is not None:
            gradients.undo()
        self._channel.end()

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
        """Steps inside add to this rank's own gradients; the first one outside reduces the sum."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def report(self) -> Report:
        """Times, activations and messages of the latest step on this rank.

        Raises:
            RuntimeError: there was no step yet.
        """
        if self._report is None:
            raise RuntimeError("Pipeline.report(): no step was run yet")
        return self._report

    def __repr__(self) -> str:
        rank = dist.get_rank(self._layout.group)
        stages = ", ".join(map(str, self._local.runs))
        return (
            f"Pipeline({self.schedule.name}, {self.schedule.stages} stages, "
            f"{self.n_microbatches} micro-batches; rank {rank} has stage {stages})"
        )


def _check_options(scale_grads: bool | str, accumulate: int, loss: str) -> None:
    if scale_grads not in (True, False, "count"):
        raise ValueError(f'expected scale_grads True, False or "count", got {scale_grads!r}')
    if accumulate < 1:
        raise ValueError(f"expected accumulate of at least 1, got {accumulate}")
    if loss not in ("last", "all"):
        raise ValueError(f'expected loss "last" or "all", got {loss!r}')
