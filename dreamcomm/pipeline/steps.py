"""One call of a pipeline: from a batch to reduced gradients, or to an error on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dreamcomm.messages.codec import described
from dreamcomm.pipeline.counting import GivenCount, step_count
from dreamcomm.pipeline.errors import Failure, PipelineError
from dreamcomm.pipeline.gradients import StepGradients
from dreamcomm.pipeline.layout import Layout
from dreamcomm.pipeline.local import LocalStages
from dreamcomm.pipeline.messages.agreement import Part, Verdict, agree, leave, lost
from dreamcomm.pipeline.messages.channel import Channel, PeerFailed
from dreamcomm.pipeline.outside import given_leaves
from dreamcomm.pipeline.plan import PipelinePlan
from dreamcomm.pipeline.report import Report
from dreamcomm.pipeline.runner import Batch, Outcome, Runner
from dreamcomm.pipeline.split import merge_outputs, split_batch, split_targets
from dreamcomm.pipeline.values import Number, own_versions
from dreamcomm.ranks.agree import text_of
from dreamcomm.ranks.errors import RankLost

__all__ = ["EVAL", "STEP", "StepCall", "Steps"]

EVAL, STEP = 0, 1  # as channel.MODES


@dataclass(frozen=True)
class StepCall:
    """The arguments of a call; see :meth:`Pipeline.step`."""

    mode: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    losses: list[Tensor] | None
    return_outputs: bool
    loss_kwargs: dict[str, Any] | None


@dataclass
class _Attempt:
    """What a call has made on this rank so far."""

    part: Part
    outcome: Outcome = field(default_factory=Outcome)
    output: Any = None
    gradients: StepGradients | None = None
    error: BaseException | None = None


class Steps:
    """Runs calls on this rank.

    Attributes:
        done: how many steps have trained. Random states depend on it.
        reduces: whether steps reduce gradients over pipelines side by side.
        latest: the report of the latest call.
    """

    def __init__(
        self, plan: PipelinePlan, layout: Layout, local: LocalStages, channel: Channel
    ) -> None:
        self.done, self.reduces = 0, True
        self.latest: Report | None = None
        self._plan, self._layout, self._local, self._channel = plan, layout, local, channel
        self._settings = local.settings
        self._given = GivenCount()
        self._calls = 0
        self._lost: RankLost | None = None
        self._runner = Runner(
            plan.schedule,
            layout.place,
            local.runs,
            lambda stage, name: plan.parts[stage].takes(name),
            channel,
            layout.peers,
        )

    def share_weights(self) -> None:
        """Gives all copies of shared parameters equal values. Collective."""
        self._begin(STEP)
        self._local.tied.copy_weights(self._calls)
        self._channel.end()

    def count(self, number: object) -> None:
        """Notes what the losses of the next step are sums over; see :meth:`Pipeline.count`."""
        who = f"Pipeline.count() on rank {self._channel.rank}"
        if not self._settings.counted:
            scale = self._settings.scale_grads
            raise RuntimeError(f'{who}: it is for reduce="tokens", got scale_grads={scale!r}')
        self._given.add(number, who)

    def run(self, call: StepCall) -> Any:
        """Runs a call. Collective.

        Raises:
            PipelineError: a rank has failed, or is lost. On all ranks.
        """
        self._check_whole()
        self._begin(call.mode)
        trains = call.mode == STEP and self._settings.loss_fn is not None
        attempt = _Attempt(Part(pipe=self._layout.pipe))
        try:
            self._run_stages(call, trains, attempt)
        except PeerFailed as heard:
            attempt.part.failure = heard.reason
        except RankLost as ended:
            self._lose(ended)
        except Exception as raised:
            self._fail(attempt, raised)
        except BaseException as raised:  # Ctrl-C: the others stop, this rank does not wait for them
            self._fail(attempt, raised)
            leave(self._channel, self._calls, attempt.part)
            self._undo(attempt.gradients)
            raise
        verdict = self._agree(attempt.part)
        if verdict.failure is not None:
            self._undo(attempt.gradients)
            text = f"the pipeline's step failed on {verdict.failure}"
            raise PipelineError(text, verdict.failure) from attempt.error
        self._finish(attempt, verdict)
        self._fill(call.losses, attempt.outcome, verdict)
        return attempt.output

    def _run_stages(self, call: StepCall, trains: bool, attempt: _Attempt) -> None:
        """What may fail on this rank alone."""
        _check_list(call.losses)
        given_count = self._given.take() if trains else None
        self._local.follow_changes()
        if trains:
            given = given_leaves(call.args, call.kwargs, call.target, call.loss_kwargs)
            attempt.gradients = self._local.step_gradients(given)
        with self._around(attempt.gradients, trains):
            attempt.outcome = self._runner.run(self._calls, self._batch(call, trains))
        if attempt.gradients is not None:
            attempt.gradients.check_passing()
        attempt.part = self._part(attempt.outcome)
        if attempt.gradients is not None and self._settings.counted:
            attempt.part.held = attempt.gradients.held
            attempt.part.count = self._count(attempt.outcome, given_count)
        attempt.output = self._output(attempt.outcome, call.return_outputs)

    def _fail(self, attempt: _Attempt, error: BaseException) -> None:
        """Notes this rank's error, and tells the others."""
        attempt.error = error
        attempt.part.failure = self._failure(error)
        self._tell(attempt.part.failure)

    def _begin(self, mode: int) -> None:
        self._calls += 1
        self._channel.begin(self._calls, mode)

    @contextmanager
    def _around(self, gradients: StepGradients | None, trains: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if gradients is not None:
                stack.enter_context(gradients.accumulating())
            stack.enter_context(self._local.running())
            stack.enter_context(torch.set_grad_enabled(trains))
            yield

    def _finish(self, attempt: _Attempt, verdict: Verdict) -> None:
        """After a call that went well on all ranks."""
        self._local.batch_norm.commit()
        if attempt.gradients is not None:
            attempt.gradients.finish(self._calls, verdict.count, verdict.held, reduces=self.reduces)
            self.done += 1
        self._channel.end()
        self.latest = Report.of(
            self._plan.schedule, attempt.outcome, self._local, self._channel, self._layout
        )

    def _batch(self, call: StepCall, trains: bool) -> Batch:
        """Cuts what this rank's stages read."""
        settings, count = self._settings, self._plan.schedule.microbatches
        for name in call.kwargs:
            if not any(part.takes(name) for part in self._plan.parts):
                raise TypeError(f"no stage takes the keyword argument {name!r}")
        pairs = split_batch(
            call.args if 0 in self._local.runs else (),
            call.kwargs,
            count,
            settings.args_chunk_spec,
            settings.kwargs_chunk_spec,
        )
        scaled, scaler = settings.scale_grads is True, settings.scaler
        factor = scaler.factor() if trains and scaler is not None else 1.0
        return Batch(
            [tuple(map(own_versions, args)) for args, _ in pairs],
            [{k: own_versions(v) for k, v in kwargs.items()} for _, kwargs in pairs],
            self._targets(call, trains, count),
            trains,
            factor / (count * settings.accumulate) if scaled else factor,
            self.done,
            call.return_outputs,
        )

    def _targets(
        self, call: StepCall, trains: bool, count: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
        """What the loss function gets after the output, for each micro-batch; None: no losses."""
        wanted = trains or call.target is not None or call.losses is not None
        is_last = self._plan.schedule.stages - 1 in self._local.runs
        if not (wanted and is_last and self._settings.loss_fn is not None):
            return None
        options = call.loss_kwargs or {}
        if call.target is None:
            return [((), options)] * count
        return [((one,), options) for one in split_targets(call.target, count)]

    def _part(self, outcome: Outcome) -> Part:
        """What this rank reports at the end of a call."""
        found = [outcome.results[m] for m in sorted(outcome.results)]
        losses = None
        if self._settings.loss == "all" and found and found[0].loss is not None:
            losses = [(float(one.loss), one.loss.dtype) for one in found if one.loss is not None]
        return Part(losses=losses, pipe=self._layout.pipe)

    def _count(self, outcome: Outcome, given: Number | None) -> Number | None:
        """What this rank's losses are sums over; None: they are another rank's."""
        if self._plan.schedule.stages - 1 not in self._local.runs:
            return None
        return step_count(given, [outcome.results[m].count for m in sorted(outcome.results)])

    def _fill(self, losses: list[Tensor] | None, outcome: Outcome, verdict: Verdict) -> None:
        if losses is None:
            return
        losses.clear()
        own = [outcome.results[m].loss for m in sorted(outcome.results)]
        if own:
            losses.extend(one.detach() for one in own if one is not None)
        elif self._settings.loss == "all":
            found = verdict.losses.get(self._layout.pipe, [])
            losses.extend(torch.tensor(value, dtype=dtype, device="cpu") for value, dtype in found)

    def _output(self, outcome: Outcome, wanted: bool) -> Any:
        if not wanted or not outcome.results:
            return None
        values = [outcome.results[m].value for m in sorted(outcome.results)]
        return merge_outputs(values, self._settings.output_merge_spec)

    # Failures.

    def _failure(self, error: BaseException) -> Failure:
        at, rank = self._runner.at, self._channel.rank
        if at is None:
            return Failure(rank, type(error).__name__, text_of(error))
        text, m = text_of(error), -1 if at.microbatch is None else at.microbatch
        if self._runner.given is not None:
            text += f" (stage {at.stage - 1} gave {described(self._runner.given)})"
        return Failure(rank, type(error).__name__, text, str(at), at.stage, m)

    def _tell(self, failure: Failure) -> None:
        """Tells the other ranks. Where the group itself has failed, they learn it from that."""
        with suppress(RuntimeError, RankLost):
            self._channel.tell_failure(failure)

    def _agree(self, part: Part) -> Verdict:
        try:
            return agree(self._channel, self._calls, part)
        except RankLost as ended:
            self._lose(ended)
            raise
        except RuntimeError as error:  # the timeout is over, or the group is ended
            return Verdict(part.failure or self._failure(error))

    def _lose(self, error: RankLost) -> None:
        """A rank has ended. Raises on this rank; the others notice it themselves."""
        self._lost = error.with_traceback(None)
        self._runner.forget()
        self._check_whole()

    def _check_whole(self) -> None:
        if self._lost is not None:
            failure = lost(self._lost)
            raise PipelineError(f"the pipeline has ended: {failure}", failure)

    def _undo(self, gradients: StepGradients | None) -> None:
        self._runner.forget()
        self._local.batch_norm.discard()
        if gradients is not None:
            gradients.undo()
        with suppress(RuntimeError, RankLost):  # of a group that has failed
            self._channel.end()


def _check_list(losses: Any) -> None:
    if losses is not None and not isinstance(losses, list):
        raise TypeError(f"expected losses to be a list to fill, got {type(losses).__name__}")
