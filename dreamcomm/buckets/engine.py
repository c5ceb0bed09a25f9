"""The bucket engine: reduces the gradients of a list of parameters in backward passes.

The compiled part has a class for each of its tasks. A ``BucketSet`` has the parameters and how they
are reduced, a ``BackwardPass`` reduces them, and ``PassHooks`` have autograd call it. For a sharded
optimizer ``ShardedGradients`` have this rank's rows, and an ``OptimizerPass`` steps them. A stage's
moves are read off its row in ``csrc/c10d/buckets/table.h``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from dreamcomm.buckets.averages import AVERAGE, Averages, count_of, given_count
from dreamcomm.buckets.group_memory import group_memory
from dreamcomm.buckets.plan import ParameterInfo, Plan, agreed_order, plan_buckets
from dreamcomm.buckets.protocol import ClipPart, ReducesGradients
from dreamcomm.buckets.shard_steps import ShardSteps
from dreamcomm.ranks.parameters import TrainedParameter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dreamcomm._C import (
        BackwardPass,
        BucketSet,
        DreamBackend,
        OptimizerPass,
        PassHooks,
        ShardedGradients,
    )

__all__ = ["BucketEngine", "Caps", "thawed"]


@dataclass(frozen=True)
class Caps:
    """Sizes in bytes at which buckets are closed; see :func:`plan_buckets`."""

    bucket: int
    first: int
    each: tuple[int, ...] = ()


class BucketEngine(ShardSteps):
    """Plans buckets of gradients, and has the compiled reducer reduce them.

    Args:
        parameters: all that may get a gradient, also those that are frozen now.
        group: reduces them.
        caps: of the buckets.
        averages: what the gradients become.
        static_graph: the set of used parameters is that of the first pass.
        finds_unused: ranks tell each other after each pass which gradients they have. Else each has
            to have all in each pass that reduces.
        hooked: backward passes reduce, and make large gradients where they are reduced. Else they
            go on as if there were no engine.
        holds_frozen: parameters that are frozen now take part as soon as they get a gradient. Else
            the owner calls :meth:`remake_if_thawed` before each backward pass.
        counted_over: a larger group, over which the owner divides sums by the ranks' counts.
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
        hooked: bool = True,
        holds_frozen: bool = False,
        counted_over: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.caps = caps
        self.averages = averages
        self._static = static_graph
        self._finds_unused = finds_unused
        self._hooked, self._holds_frozen = hooked, holds_frozen
        self._all = list(parameters)
        self._rebuilt = False
        self._sync = True
        self._counted_over = counted_over
        self._made: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._taken_by: tuple[weakref.ref[ReducesGradients], str] | None = None
        self._make()

    def _make(self) -> None:
        """Makes the compiled reducer of those parameters that are trained now."""
        takes_part = [self._holds_frozen or one.parameter.requires_grad for one in self._all]
        self.trained = list(compress(self._all, takes_part))
        self.frozen = list(compress(self._all, (not takes for takes in takes_part)))
        self.infos = tuple(
            ParameterInfo(
                one.name,
                one.parameter.numel(),
                one.grad_dtype or one.parameter.dtype,
                one.parameter.device,
                one.sparse,
                one.factor,
            )
            for one in self.trained
        )
        self.plan = self._planned()
        with thawed([one.parameter for one in self.trained]):
            self._compile()
        self.backward.owner = weakref.ref(self)
        self.backward.sync = self._sync
        if self._static:
            self.buckets.set_static_graph()
        for one in self._made:
            made = one()
            if made is not None:
                made()

    def _compile(self) -> None:
        from dreamcomm import _C

        memory = group_memory(self.group, self.trained[0].parameter.device)
        me = weakref.ref(self)  # the compiled pass holds the functions, and is held by this

        def replan(orders: list[list[int]]) -> list[list[int]]:
            engine = me()
            return [] if engine is None else engine._replanned(orders)

        def mixed() -> None:
            engine = me()
            if engine is not None:
                engine._on_mixed()

        def unchecked() -> None:
            engine = me()
            if engine is not None:
                engine._on_unchecked()

        before: BucketSet | None = getattr(self, "buckets", None)
        self.buckets = _C.BucketSet(
            [one.parameter for one in self.trained],
            [one.name for one in self.trained],
            [one.sparse for one in self.trained],
            self.plan.members(),
            self.group,
            memory.averages,
            self.averages.factor,
            memory.own_bytes,
            self._finds_unused,
        )
        if self.averages.shards:
            shards = self.averages.shards
            self.buckets.set_shards(shards, shards // dist.get_world_size(self.group))
        if self.averages.counted:
            self.buckets.set_counted(self._counted_over)
            if before is not None:
                self.buckets.adopt_counting(before)
        self.backward = _C.BackwardPass(
            self.buckets, replan, mixed, unchecked, self._finished(), self._starting()
        )
        self.hooks = _hooks_of(self.backward) if self._hooked else None
        self.shards: ShardedGradients | None = None

    def on_made(self, made: Callable[[], None]) -> None:
        """Calls a method after each change of the trained parameters, while its object lives."""
        self._made.append(weakref.WeakMethod(made))

    def take_over(self, optimizer: ReducesGradients, name: str) -> None:
        """Notes that a sharded optimizer reduces the gradients, as long as it lives."""
        self._taken_by = weakref.ref(optimizer), name

    @property
    def all(self) -> list[TrainedParameter]:
        """The parameters that are trained or frozen."""
        return self._all

    @property
    def sharded_by(self) -> str:
        """The name of the sharded optimizer that reduces the gradients; empty: none does."""
        return self._taken_by[1] if self._taken_by and self._sharded_optimizer() else ""

    def remake_if_thawed(self) -> None:
        """Takes in parameters that were frozen, and require a gradient now."""
        if any(one.parameter.requires_grad for one in self.frozen):
            self.check_shards("a parameter was thawed")
            if self.shards is not None and self.shards.hold_gradients():
                raise RuntimeError(
                    f"rank {dist.get_rank(self.group)}: a parameter that was frozen requires a "
                    f"gradient now, while {self.sharded_by} has accumulated others: call "
                    "zero_grad() first"
                )
            self.unshard()
            self.detach()
            self._make()

    def detach(self) -> None:
        """Ends all hooks: backward passes go on as if there were no engine."""
        if self.hooks is not None:
            self.hooks.detach()

    def recover(self) -> None:
        """Forgets a backward pass that an error ended."""
        self.backward.recover()

    # Sharded optimizers.

    def shard(
        self,
        stage: int,
        sum_dtypes: Sequence[torch.dtype],
        stand_ins: Sequence[Tensor | None],
        heaps: DreamBackend | None,
    ) -> None:
        """Has each rank keep its rows of the gradients alone, as the stage's row says.

        Args:
            stage: 1 or 2.
            sum_dtypes: in which averages are computed and kept, of each trained parameter.
            stand_ins: what ``grad`` becomes when it is reduced; None: it stays.
            heaps: the backend whose ranks map each other's parameters and gradients, or None.
        """
        from dreamcomm import _C

        self.shards = _C.ShardedGradients(self.buckets, stage, sum_dtypes, stand_ins, heaps)

    def unshard(self) -> None:
        """Reduces gradients as before :meth:`shard`."""
        if self.shards is not None:
            self.shards.end()
            self.shards = None

    def optimizer_pass(
        self, masters: Sequence[Tensor | None], states: Sequence[Sequence[Tensor]]
    ) -> OptimizerPass:
        """The compiled steps of this rank's rows, where the ranks map each other's heaps.

        Args:
            masters: copies of more bits, or None, of each trained parameter's rows.
            states: what the optimizer keeps of them.
        """
        from dreamcomm import _C

        return _C.OptimizerPass(self.buckets, masters, states)

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

    def _finished(self) -> Callable[[bool], None] | None:
        """What is called after each pass, with whether it has reduced."""
        return None

    def _starting(self) -> Callable[[], None] | None:
        """What is called before a pass adds to its first gradient, unless it was entered before."""
        return None

    def _on_mixed(self) -> None:
        """Called when a pass that did not reduce has added to gradients that were reduced."""

    def _on_unchecked(self) -> None:
        """Called when a pass that reduces begins, and no one has looked for changes before."""

    @property
    def sync(self) -> bool:
        """Whether backward passes reduce."""
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._sync = self.backward.sync = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to this rank's gradients alone."""
        self.refuse_accumulation("no_sync()")
        before = self.sync
        self.sync = False
        try:
            yield
        finally:
            self.sync = before

    def reduce_gradients(self) -> None:
        """Reduces what has accumulated; by the sharded optimizer, if there is one. Collective."""
        optimizer = self._sharded_optimizer()
        if optimizer is None:
            self.reduce_now()
        else:
            optimizer.reduce_gradients()

    def note_own_changes(self) -> None:
        """Gradients have been changed on purpose, before they are reduced: no warning is due."""
        if self.shards is not None and self._sharded_optimizer() is not None:
            self.shards.note_seen()

    def clip_parts(self) -> list[ClipPart]:
        """What a norm of all gradients consists of here."""
        self.check_shards("gradients are clipped")
        optimizer = self._sharded_optimizer()
        if optimizer is not None:
            return optimizer.clip_parts()
        return [ClipPart([one.parameter for one in self.trained], self.group)]

    def _sharded_optimizer(self) -> ReducesGradients | None:
        return self._taken_by[0]() if self._taken_by else None

    @property
    def averaged_over(self) -> float:
        """A gradient is the ranks' sum divided by this, where it is not divided by counts."""
        return self.averages.divisor(dist.get_world_size(self.group))

    def count(self, number: Any, what: str) -> None:
        """Notes what the next backward pass's losses are sums over; ``what`` is for errors.

        Raises:
            RuntimeError: gradients are not divided by counts.
            TypeError, ValueError: see :func:`dreamcomm.buckets.averages.count_of`.
        """
        self.buckets.count(*given_count(self.averages, number, what, self.group))

    def replace_count(self, number: float) -> None:
        """Has the next reduction take this in place of what the backward passes were given."""
        self.buckets.replace_count(*count_of(number, "a count of several passes"))

    @property
    def passes(self) -> int:
        """How many passes have reduced."""
        return int(self.backward.report()["passes"])

    def report(self) -> dict[str, Any]:
        return self.backward.report()

    def reduce_now(self) -> None:
        """Reduces what has accumulated, outside of a backward pass. Collective."""
        self.backward.reduce_now()


@contextmanager
def thawed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Has all require a gradient for a moment: autograd then makes the node that hooks are on."""
    frozen = [one for one in parameters if not one.requires_grad]
    for one in frozen:
        one.requires_grad_(True)
    try:
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)


def _hooks_of(backward: BackwardPass) -> PassHooks:
    """Another engine of the same parameters may be garbage that still lives, with its hooks."""
    from dreamcomm import _C

    try:
        return _C.PassHooks(backward)
    except ValueError:
        gc.collect()
        return _C.PassHooks(backward)
