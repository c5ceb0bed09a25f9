"""The face of torch's Reducer on dreamcomm's: what DistributedDataParallel and its clients call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from dreamcomm._torch.ddp import unseen_by_dynamo
from dreamcomm.buckets.group_memory import group_memory
from dreamcomm.buckets.plan import ParameterInfo, Plan, agreed_order, plan_buckets
from dreamcomm.ddp.mixed_gradients import refuse_steps

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.utils.hooks import RemovableHandle

    from dreamcomm._C import GradientReducer

__all__ = ["Caps", "Reducer", "TrainedParameter"]


# The hooks of these modules call one collective for each bucket. Those of others may call several,
# the later ones when the first are done: two buckets' calls could then change places on some ranks.
ONE_CALL_EACH = (
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "dreamcomm.ddp.hooks",
)


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter, with its name and whether its gradient is sparse."""

    name: str
    parameter: torch.nn.Parameter
    sparse: bool = False


@dataclass(frozen=True)
class Caps:
    """Sizes in bytes at which buckets are closed; see :func:`plan_buckets`."""

    bucket: int
    first: int
    each: tuple[int, ...] = ()


class Reducer:
    """Reduces the gradients of a module; has the methods of ``torch.distributed.Reducer``.

    Args:
        parameters: all that may get a gradient, also those that are frozen now.
        group: reduces them.
        caps: of the buckets.
        factor: the gradient is so many times the ranks' sum; 0: their average.
        static_graph: the set of used parameters is that of the first pass.
        finds_unused: ranks tell each other after each pass which gradients they have. Else each has
            to have all in each pass that reduces.
    """

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        group: dist.ProcessGroup,
        caps: Caps,
        *,
        factor: float = 0.0,
        static_graph: bool = False,
        finds_unused: bool = True,
    ) -> None:
        self.group = group
        self.caps = caps
        self.factor = factor
        self._static = static_graph
        self._finds_unused = finds_unused
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._all = list(parameters)
        self._rebuilt = False
        self._sync = True
        self._refusal: RemovableHandle | None = None
        self._make()

    def _make(self) -> None:
        """Makes the compiled reducer of those parameters that are trained now."""
        self.trained = [one for one in self._all if one.parameter.requires_grad]
        self.frozen = [one for one in self._all if not one.parameter.requires_grad]
        self.infos = tuple(
            ParameterInfo(
                one.name,
                one.parameter.numel(),
                one.parameter.dtype,
                one.parameter.device,
                one.sparse,
            )
            for one in self.trained
        )
        self.plan = self._planned()
        memory = group_memory(self.group, self.trained[0].parameter.device)
        me = weakref.ref(self)  # the compiled reducer holds the functions, and is held by this

        def replan(orders: list[list[int]]) -> list[list[int]]:
            reducer = me()
            return [] if reducer is None else reducer._replanned(orders)

        def mixed() -> None:
            reducer = me()
            if reducer is not None:
                reducer._refuse_steps()

        self._engine = _alone(
            [one.parameter for one in self.trained],
            [one.name for one in self.trained],
            [one.sparse for one in self.trained],
            self.plan.members(),
            self.group,
            memory.averages,
            self.factor,
            memory.own_bytes,
            self._finds_unused,
            replan,
            mixed,
        )
        self._engine.sync = self._sync
        self._engine.set_static_graph(self._static)
        if self._hook is not None:
            self.register_hook(*self._hook)

    def _planned(self, order: Sequence[int] | None = None, unseen: Sequence[int] = ()) -> Plan:
        caps = self.caps
        return plan_buckets(
            self.infos,
            order=order,
            unseen=unseen,
            cap_bytes=caps.bucket,
            first_bytes=caps.first,
            caps=caps.each,
        )

    def _replanned(self, orders: list[list[int]]) -> list[list[int]]:
        order, unseen = agreed_order(orders, len(self.infos))
        self.plan = self._planned(order, unseen)
        self._rebuilt = True
        return self.plan.members()

    def _refuse_steps(self) -> None:
        """Until the next forward pass at which no gradient is a mix any more."""
        if self._refusal is not None:
            return
        me = weakref.ref(self)

        def found() -> dict[int, str]:
            reducer = me()
            return {} if reducer is None else reducer._mixed()

        self._refusal = refuse_steps(found, dist.get_rank(self.group))
        weakref.finalize(self, self._refusal.remove)

    def _mixed(self) -> dict[int, str]:
        """The names of parameters whose gradients are reduced in part, by their ids."""
        names = {id(one.parameter): one.name for one in self.trained}
        return {id(one): names[id(one)] for one in self._engine.mixed()}

    # What dreamcomm's modules use.

    @property
    def sync(self) -> bool:
        """Whether backward passes reduce."""
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._sync = self._engine.sync = bool(value)

    @property
    def passes(self) -> int:
        """How many passes have reduced."""
        return int(self._engine.report()["passes"])

    def report(self) -> dict[str, Any]:
        return self._engine.report()

    def register_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if self.factor != 0.0:
            raise ValueError(
                "a communication hook decides itself what gradients become: leave reduce= out, or "
                "have the hook multiply them"
            )
        self._hook = state, hook
        in_turn = getattr(hook, "__module__", "") not in ONE_CALL_EACH
        self._engine.set_hook(state, hook, in_turn)

    def reduce_now(self) -> None:
        self._engine.reduce_now()

    def reduce_zeros(self, *, divides_by_active: bool) -> None:
        """Takes part in a pass of the others, without gradients."""
        self._engine.set_divisor(1 if divides_by_active else 0)
        self._engine.reduce_zeros()

    # What torch's Reducer has, and torch's own code calls.

    @unseen_by_dynamo
    def prepare_for_forward(self) -> None:
        self._engine.set_divisor(0)
        if torch._C._current_graph_task_id() == -1:  # else this is inside of a backward pass
            self._engine.recover()
            if self._refusal is not None and not self._mixed():
                self._refusal.remove()
                self._refusal = None
            if any(one.parameter.requires_grad for one in self.frozen):
                self._engine.detach()
                self._make()

    @unseen_by_dynamo
    def prepare_for_backward(self, outputs: Sequence[Tensor] | Tensor) -> None:
        self._engine.await_backward([outputs] if isinstance(outputs, Tensor) else list(outputs))

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        """What a hook for buffers has started; it is waited for here."""
        for future in futures:
            future.wait()

    def _rebuild_buckets(self) -> bool:
        rebuilt, self._rebuilt = self._rebuilt, False
        return rebuilt

    def _push_all_rebuilt_params(self) -> None:
        """Does nothing: the order of gradients is exchanged at the first pass's end."""

    @unseen_by_dynamo
    def _set_forward_pass_work_handle(
        self, work: dist.Work, divide_by_initial_world_size: bool
    ) -> None:
        """In a join: the sum of ones is the number of ranks that have data."""
        if divide_by_initial_world_size:
            return
        work.wait()
        self._engine.set_divisor(int(work.result()[0].item()))

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Tensor]:
        """The sum of the bucket's gradients, as torch's Reducer has it: not divided."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        assert work is not None
        future: Future[Tensor] = work.get_future().then(_first)
        return future

    def _set_static_graph(self) -> None:
        self._static = True
        self._engine.set_static_graph(True)

    def _delay_all_reduce(self) -> None:
        """Does nothing: the first pass is reduced at its end anyway."""

    def _check_reducer_finalized(self) -> None:
        """Does nothing: each pass that reduces ends with its gradients reduced, or an error."""

    def _set_optimizer_in_backward(self) -> None:
        """Does nothing: a hook may set gradients to None."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Does nothing: times are taken in every pass."""

    def _remove_autograd_hooks(self) -> None:
        self._engine.detach()

    def _reset_state(self) -> None:
        self._engine.recover()
        self._engine.relearn()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        memory = group_memory(group, self.trained[0].parameter.device)
        self._engine.set_group(group, memory.averages, memory.own_bytes)


def _alone(*arguments: Any) -> GradientReducer:
    """The compiled reducer. Another one of the same parameters may be garbage that still lives."""
    from dreamcomm import _C

    try:
        return _C.GradientReducer(*arguments)
    except ValueError:
        gc.collect()
        return _C.GradientReducer(*arguments)


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
