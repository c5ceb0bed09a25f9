"""The face of torch's Reducer on dreamcomm's: what DistributedDataParallel and its clients call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from dreamcomm._torch.ddp import broadcast_tensors, unseen_by_dynamo
from dreamcomm.buckets.averages import AVERAGE, Averages
from dreamcomm.buckets.engine import BucketEngine, Caps
from dreamcomm.buckets.group_memory import group_memory
from dreamcomm.ddp.checks import check_module
from dreamcomm.ddp.mixed_gradients import refuse_steps
from dreamcomm.ddp.watch import ModuleWatch
from dreamcomm.ranks.parameters import TrainedParameter, check_equal_models, check_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torch.utils.hooks import RemovableHandle


__all__ = ["Reducer"]


# The hooks of these modules call one collective for each bucket. Those of others may call several,
# the later ones when the first are done: two buckets' calls could then change places on some ranks.
ONE_CALL_EACH = (
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "dreamcomm.ddp.hooks",
)


class Reducer(BucketEngine):
    """Reduces the gradients of a module; has the methods of ``torch.distributed.Reducer``.

    Its arguments are those of :class:`BucketEngine`.
    """

    def __init__(
        self,
        parameters: Sequence[TrainedParameter],
        group: dist.ProcessGroup,
        caps: Caps,
        *,
        averages: Averages = AVERAGE,
        static_graph: bool = False,
        finds_unused: bool = True,
    ) -> None:
        self._hook: tuple[object, Callable[..., Any]] | None = None
        self._refusal: RemovableHandle | None = None
        self._root: Callable[[], nn.Module | None] = lambda: None
        self._outdated = False  # a change was seen, and not taken in yet
        super().__init__(
            parameters,
            group,
            caps,
            averages=averages,
            static_graph=static_graph,
            finds_unused=finds_unused,
        )

    # Changes of the module.

    def follow(
        self,
        root: nn.Module,
        find: Callable[[], tuple[nn.Module, list[TrainedParameter]]],
        what: str,
        *,
        checks: bool,
    ) -> None:
        """Has later forward passes take in parameters that a module gets, or that change.

        Args:
            root: the module, and what may hold others; only its life is not prolonged.
            find: gives the module that is trained now, and its parameters.
            what: trains it, for errors.
            checks: ranks compare the parameters, and take rank 0's values of those that are new.
        """
        self._root, self._find, self._what, self._checks = weakref.ref(root), find, what, checks
        self.watch = ModuleWatch(root)

    def _follow_changes(self) -> None:
        """Takes in what has changed on all ranks. Collective then.

        A rank that changes its module alone makes calls that the others do not: an error.

        Raises:
            RuntimeError: a sharded optimizer has the parameters as they were.
            ValueError: the ranks' modules differ now.
        """
        if not self._is_outdated():
            return
        module, parameters = self._find()
        if _keys(parameters) != _keys(self._all) or not self.backward.check_planned():
            self._take_in(module, parameters)
        self._outdated = False

    def _is_outdated(self) -> bool:
        root = self._root()
        if root is None:
            return False
        self._outdated = self.watch.has_changed(root) or self._outdated
        return not self.backward.check_planned() or self._outdated

    def _on_unchecked(self) -> None:
        """At the begin of a pass whose forward pass did not go through the wrapper."""
        thawed = [one.name for one in self.frozen if one.parameter.requires_grad]
        if thawed or self._is_outdated():
            what = f"parameter {thawed[0]!r}, which was frozen," if thawed else "a parameter"
            raise RuntimeError(
                f"rank {dist.get_rank(self.group)}: {what} has changed since the module was "
                "wrapped, and its gradient would not be reduced: run the forward pass through the "
                "wrapper, which takes changes in, not through .module"
            )

    def begin_shards(self) -> None:
        self.prepare_for_forward()  # not all forward passes look for changes
        super().begin_shards()

    def _take_in(self, module: nn.Module, parameters: list[TrainedParameter]) -> None:
        self.check_shards("the module got other parameters")
        if self.sharded_by:
            raise RuntimeError(
                f"{self._what} on rank {dist.get_rank(self.group)}: the module has got other "
                f"parameters, or parameters of another dtype or shape, since {self.sharded_by} was "
                "made, which steps the ones before; make the optimizer anew, after the last change"
            )
        check_module(module, parameters, self._what)
        check_group(self.group, parameters, self._what)
        if self._checks:
            check_equal_models(self.group, parameters, self._what)
            known = {id(one.parameter) for one in self._all}
            new = [one.parameter for one in parameters if id(one.parameter) not in known]
            broadcast_tensors(new, self.group)
        self.recover()
        self.detach()
        self._all = parameters
        self._make()

    def _make(self) -> None:
        super()._make()
        if self._hook is not None:
            self.register_hook(*self._hook)

    def _on_mixed(self) -> None:
        self._refuse_steps()

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
        return {id(one): names[id(one)] for one in self.buckets.mixed()}

    # What dreamcomm's modules use.

    def register_hook(self, state: object, hook: Callable[..., Any]) -> None:
        if self.sharded_by:
            raise ValueError(
                f"{self.sharded_by} reduces the gradients: a communication hook would not be called"
            )
        if self.averages != AVERAGE:
            raise ValueError(
                "a communication hook decides itself what gradients become: leave reduce= and "
                "invariant_shards= out, or have the hook multiply them"
            )
        self._hook = state, hook
        in_turn = getattr(hook, "__module__", "") not in ONE_CALL_EACH
        self.buckets.set_hook(state, hook, in_turn)

    def reduce_zeros(self, *, divides_by_active: bool) -> None:
        """Takes part in a pass of the others, without gradients."""
        self.buckets.set_divisor(1 if divides_by_active else 0)
        self.backward.reduce_zeros()

    # What torch's Reducer has, and torch's own code calls.

    @unseen_by_dynamo
    def prepare_for_forward(self) -> None:
        self.buckets.set_divisor(0)
        if torch._C._current_graph_task_id() == -1:  # else this is inside of a backward pass
            self.recover()
            if self._refusal is not None and not self._mixed():
                self._refusal.remove()
                self._refusal = None
            self._follow_changes()
            self.remake_if_thawed()

    def reduce_now(self) -> None:
        self._follow_changes()
        self.remake_if_thawed()
        super().reduce_now()

    @unseen_by_dynamo
    def prepare_for_backward(self, outputs: Sequence[Tensor] | Tensor) -> None:
        assert self.hooks is not None
        self.hooks.await_backward([outputs] if isinstance(outputs, Tensor) else list(outputs))

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
        self.buckets.set_divisor(int(work.result()[0].item()))

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Tensor]:
        """The sum of the bucket's gradients, as torch's Reducer has it: not divided."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        assert work is not None
        future: Future[Tensor] = work.get_future().then(_first)
        return future

    def _set_static_graph(self) -> None:
        self._static = True
        self.buckets.set_static_graph()

    def _delay_all_reduce(self) -> None:
        """Does nothing: the first pass is reduced at its end anyway."""

    def _check_reducer_finalized(self) -> None:
        """Does nothing: each pass that reduces ends with its gradients reduced, or an error."""

    def _set_optimizer_in_backward(self) -> None:
        """Does nothing: a hook may set gradients to None."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Does nothing: times are taken in every pass."""

    def _remove_autograd_hooks(self) -> None:
        self.detach()

    def _reset_state(self) -> None:
        self.recover()
        self.backward.relearn()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        memory = group_memory(group, self.trained[0].parameter.device)
        self.buckets.set_group(group, memory.averages, memory.own_bytes)
        self.backward.relearn()


def _keys(parameters: Sequence[TrainedParameter]) -> list[tuple[str, int, bool]]:
    return [(one.name, id(one.parameter), one.sparse) for one in parameters]


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
