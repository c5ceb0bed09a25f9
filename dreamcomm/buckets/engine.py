"""The bucket engine: reduces the gradients of a list of parameters in backward passes."""

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

from dreamcomm.buckets.group_memory import GroupMemory, group_memory
from dreamcomm.buckets.plan import ParameterInfo, Plan, agreed_order, plan_buckets
from dreamcomm.buckets.protocol import ClipPart, ReducesGradients
from dreamcomm.ranks.parameters import TrainedParameter

if TYPE_CHECKING:
    from dreamcomm._C import GradientReducer

__all__ = ["BucketEngine", "Caps", "thawed"]


@dataclass(frozen=True)
class Caps:
    """Sizes in bytes at which buckets are closed; see :func:`plan_buckets`."""

    bucket: int
    first: int
    each: tuple[int, ...] = ()


class BucketEngine:
    """Plans buckets of gradients, and has the compiled reducer reduce them.

    Args:
        parameters: all that may get a gradient, also those that are frozen now.
        group: reduces them.
        caps: of the buckets.
        factor: the gradient is so many times the ranks' sum; 0: their average.
        static_graph: the set of used parameters is that of the first pass.
        finds_unused: ranks tell each other after each pass which gradients they have. Else each has
            to have all in each pass that reduces.
        hooked: backward passes reduce, and make large gradients where they are reduced. Else they
            go on as if there were no engine.
        holds_frozen: parameters that are frozen now take part as soon as they get a gradient. Else
            the owner calls :meth:`remake_if_thawed` before each backward pass.
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
        hooked: bool = True,
        holds_frozen: bool = False,
    ) -> None:
        self.group = group
        self.caps = caps
        self.factor = factor
        self._static = static_graph
        self._finds_unused = finds_unused
        self._hooked, self._holds_frozen = hooked, holds_frozen
        self._all = list(parameters)
        self._rebuilt = False
        self._sync = True
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
            engine = me()
            return [] if engine is None else engine._replanned(orders)

        def mixed() -> None:
            engine = me()
            if engine is not None:
                engine._on_mixed()

        with thawed([one.parameter for one in self.trained]):
            self.compiled = self._compiled(memory, replan, mixed)
        self.compiled.owner = me
        self.compiled.sync = self._sync
        self.compiled.set_static_graph(self._static)
        for one in self._made:
            made = one()
            if made is not None:
                made()

    def _compiled(self, memory: GroupMemory, replan: Any, mixed: Any) -> GradientReducer:
        return _alone(
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
            self._hooked,
        )

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
            if self.compiled.holds_shards():
                raise RuntimeError(
                    f"rank {dist.get_rank(self.group)}: a parameter that was frozen requires a "
                    f"gradient now, while {self.sharded_by} has accumulated others: call "
                    "zero_grad() first"
                )
            self.compiled.unshard()
            self.compiled.detach()
            self._make()

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

    def _on_mixed(self) -> None:
        """Called when a pass that did not reduce has added to gradients that were reduced."""

    @property
    def sync(self) -> bool:
        """Whether backward passes reduce."""
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        self._sync = self.compiled.sync = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to this rank's gradients alone."""
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
        if self._sharded_optimizer() is not None:
            self.compiled.note_seen()

    def clip_parts(self) -> list[ClipPart]:
        """What a norm of all gradients consists of here."""
        optimizer = self._sharded_optimizer()
        if optimizer is not None:
            return optimizer.clip_parts()
        return [ClipPart([one.parameter for one in self.trained], self.group)]

    def _sharded_optimizer(self) -> ReducesGradients | None:
        return self._taken_by[0]() if self._taken_by else None

    @property
    def averaged_over(self) -> float:
        """A gradient is the ranks' sum divided by this."""
        return 1.0 / self.factor if self.factor else float(dist.get_world_size(self.group))

    @property
    def passes(self) -> int:
        """How many passes have reduced."""
        return int(self.compiled.report()["passes"])

    def report(self) -> dict[str, Any]:
        return self.compiled.report()

    def reduce_now(self) -> None:
        """Reduces what has accumulated, outside of a backward pass. Collective."""
        self.compiled.reduce_now()


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


def _alone(*arguments: Any) -> GradientReducer:
    """The compiled reducer. Another one of the same parameters may be garbage that still lives."""
    from dreamcomm import _C

    try:
        return _C.GradientReducer(*arguments)
    except ValueError:
        gc.collect()
        return _C.GradientReducer(*arguments)
