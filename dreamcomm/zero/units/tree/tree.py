"""A tree of units: one window, one engine, and the passes that read its parameters.

    closed --outermost forward, unshard(), a backward pass enters--> open
    open   --end of the outermost backward, of a forward without gradients, a step, a load--> closed

A pass that is nested in another, such as a checkpoint's, opens and closes nothing. So a step takes
two meetings of the ranks, however many units and micro-batches it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from dreamcomm.buckets.averages import given_count
from dreamcomm.zero.units import gradients
from dreamcomm.zero.units.engine import Reductions, UnitEngine
from dreamcomm.zero.units.forms.form import Form
from dreamcomm.zero.units.parameters.record import Place
from dreamcomm.zero.units.tree.follow import differs
from dreamcomm.zero.units.tree.link import link
from dreamcomm.zero.units.tree.loops import loop_over
from dreamcomm.zero.units.tree.refusals import refuse_changes
from dreamcomm.zero.units.tree.steps import watch_steps
from dreamcomm.zero.units.tree.tree_window import TreeWindow
from dreamcomm.zero.units.unit import Unit, Use

if TYPE_CHECKING:
    from dreamcomm._C import BucketSet

__all__ = ["Tree"]


class Tree(TreeWindow):
    """Units that are wrapped together, on one rank. Collective to make.

    Args:
        mesh: of one dimension, or replicas and shards.
        form: where parameters lie.
        root: the unit that holds all others.
        units: all of them, the root last.
    """

    def __init__(self, mesh: DeviceMesh, form: Form, root: Unit, units: Iterable[Unit]) -> None:
        super().__init__(mesh, form, root, units)
        for unit in self.units():
            unit.tree = self
        self.is_last_backward = True
        self.copies_were_equal = True
        self._counts: list[tuple[int, float]] = []  # for the next backward pass
        self._forwards = 0  # under way, one in the other
        self._in_backward = False
        self._reduced: bool | None = None  # by the pass that has just ended
        self._creates_graph = False  # the pass that runs now
        self._engine: UnitEngine | None = None
        self._counted_before: BucketSet | None = None  # of an engine that was forgotten
        self._watch = watch_steps(self)
        self.loop = loop_over(self) if self.averages.shards else None
        self.link()
        self.look_again()

    # What it is made of.

    @property
    def engine(self) -> UnitEngine | None:
        """Reduces the gradients; made anew where parameters have changed. None: there are none.

        Collective, where it is made and ranks gather.
        """
        if self._engine is None and self.records():
            self._engine = self.form.engine = gradients.make_engine(
                self.records(),
                self.form.reductions(),
                self.enter_at_gradient,
                self.after_pass,
                Reductions(
                    self.averages,
                    over=None if self.replicas is None else self.group,
                    in_heaps=not self.form.gathers,
                ),
            )
            if self._counted_before is not None:
                self._engine.buckets.adopt_counting(self._counted_before)
                self._counted_before = None
        return self._engine

    @property
    def known_engine(self) -> UnitEngine | None:
        """The engine, if one was made."""
        return self._engine

    def link(self) -> None:
        """Has the parameters lead here."""
        for one in self.records():
            link(one, self)

    def forget(self) -> None:
        """Has units, parameters and hooks looked at anew before the next pass."""
        if self._engine is not None:
            self._engine.detach()
            if self.averages.counted:
                self._counted_before = self._engine.buckets
        self._engine = self.form.engine = None
        self.look_again()

    def shard_new(self, places: Iterable[tuple[Place, nn.Parameter]]) -> None:
        """Registers DTensors for parameters that a script has put there, outside of passes."""
        if self.rewrites is None and self._forwards == 0 and not self._is_in_backward():
            self.pending.shard(self, places)

    def unshard(self) -> None:
        """As :meth:`open`, for passes that go through no unit."""
        self.open()
        engine = self.engine
        if engine is not None and self.rewrites is None and not self._is_in_backward():
            engine.sync = self.reduces()
            gradients.before_pass(engine)

    def count(self, number: float | Tensor) -> None:
        """Notes what the next backward pass's losses are sums over."""
        self._counts.append(given_count(self.averages, number, "fully_shard", self.group))

    def _note_counts(self, engine: UnitEngine) -> None:
        counts, self._counts = self._counts, []
        for whole, weight in counts:
            engine.buckets.count(whole, weight)
        if self.averages.counted:
            engine.buckets.set_finishes(self.finishes())

    # Shards of a step; see ShardedPasses in dreamcomm/invariant/loop.py.

    def begin_shards(self) -> None:
        self.follow()
        engine = self.engine
        if engine is None:
            raise RuntimeError(
                f"fully_shard: {self.name} has no parameters, so there are no shards"
            )
        gradients.before_pass(engine)
        engine.begin_shards()

    def begin_shard(self, *, is_last: bool) -> None:
        assert self._engine is not None
        for unit in self.units():
            unit.reduces = is_last
        self._engine.begin_shard(is_last=is_last)

    def end_shard(self) -> None:
        assert self._engine is not None
        self._engine.end_shard()

    def leave_shards(self) -> None:
        for unit in self.units():
            unit.reduces = True
        self._counts = []  # of a shard that an error has ended
        if self._engine is not None:
            self._engine.leave_shards()

    # Forward passes.

    def enter_forward(self, unit: Unit) -> None:
        if self._forwards == 0 and not self._is_in_backward():
            self.open()
            self.form.begin_forward()
            if torch.is_grad_enabled() and self.rewrites is None:
                _ = self.engine  # whose hooks see each pass begin
        if self.rewrites is None:
            self.form.enter(unit)
        self._forwards += 1

    def leave_forward(self, unit: Unit) -> None:
        self._forwards = max(0, self._forwards - 1)
        self.form.leave(unit)
        if self._forwards or self._is_in_backward() or torch.is_grad_enabled():
            return
        if unit.reshard_after_forward is not False:
            self.close()

    # Backward passes.

    def _is_in_backward(self) -> bool:
        """An error that ends a backward pass is told to nobody: then no pass runs any more."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._in_backward = False
            if self._engine is not None:
                self._engine.recover()
            gradients.drop_unfinished(self.records())
            self.form.end_backward(self.units())
            self.form.poke()
        return self._in_backward

    def enter_at_gradient(self) -> None:
        """Before autograd adds to a gradient, where the pass has come through no output of a unit.

        The hook that runs is one of those that would be made anew where parameters have changed.
        """
        if not (self.window.is_open or self._is_in_backward()) and differs(self.units()):
            refuse_changes(self.group, self.window.name)
        self.enter_backward()

    def enter_backward(self) -> None:
        """Before autograd goes through an output of a unit, or adds to a gradient."""
        if self._is_in_backward():
            return
        if not self.window.is_open:
            self.open()
        self._reduced = None
        self._creates_graph = torch.is_grad_enabled()
        self.form.begin_backward()
        engine = self.engine
        if engine is not None:
            engine.sync = self.reduces()
            self._note_counts(engine)
            gradients.before_pass(engine)
            engine.backward.enter()
        # After the engine's own, which ends the pass.
        Variable._execution_engine.queue_callback(self._leave_backward)
        self._in_backward = True

    def enter_backward_of(self, unit: Unit, use: Use) -> None:
        """Before autograd goes through an output of one forward pass of the unit."""
        self.enter_backward()
        if self.rewrites is None:
            self.form.enter_backward(unit, use)

    def leave_backward_of(self, unit: Unit, use: Use) -> None:
        """After autograd has made the gradients of all inputs of that pass."""
        if self._in_backward and not self._creates_graph:  # such a graph reads parameters later
            self.form.leave_backward(unit, use)

    def after_pass(self, reduced: bool) -> None:
        """The engine has ended a backward pass."""
        self._reduced = reduced
        if not self._in_backward:  # it did not come through an output of a unit
            self._leave_backward()

    def _leave_backward(self) -> None:
        self._in_backward = False
        reduced, self._reduced = self._reduced, None
        for unit in self.units():
            if self._forwards == 0 and unit.reshard_after_backward:
                unit.show_sharded()
        if not self._creates_graph:
            self.form.end_backward(self.units())
        # A graph of the pass itself reads on.
        reads_on = self._forwards > 0 or self._creates_graph or not self.is_last_backward
        if not reads_on and self.reduces():
            self.close()
        if reduced is not None and self.engine is not None:
            gradients.after_pass(self.engine, reduced, self.finishing())

    def reduce_gradients(self) -> None:
        """Reduces what backward passes have left to each rank. Collective."""
        if self._is_in_backward():
            raise RuntimeError(
                f"fully_shard: rank {dist.get_rank(self.group)}: reduce_gradients() was called "
                "within a backward pass; call it after backward()"
            )
        self.check_shards("gradients were asked for")
        self.close()
        engine, any_own = self.engine, self._unreduced
        finishing = self.finishing()
        has_partial = finishing is not None and finishing.has_partial(self.records())
        if engine is None or not (any_own or has_partial):
            return
        self._unreduced = False
        gradients.before_pass(engine)
        engine.buckets.set_finishes(True)
        if any_own:
            engine.backward.reduce_now()
        elif self.averages.counted:
            engine.buckets.exchange_counts()
        gradients.after_pass(engine, reduced=True, finishing=finishing, ends=True)

    def before_step(self) -> None:
        """Before an optimizer steps any of the DTensors. Collective, unless closed."""
        self.reduce_gradients()
        self._stepped = True

    def reset(self) -> None:
        """Forgets passes that an error has ended, and their gradients. Collective."""
        self._forwards, self._in_backward, self._reduced = 0, False, None
        if self._engine is not None:
            self._engine.recover()
        gradients.drop_unfinished(self.records())
        for unit in self.units():
            unit.show_sharded()
        self.form.poke()
        self.window.reset()
        self.form.reset()
        if self.form.gathers:
            self.forget()
        self._unreduced, self._stepped = False, True
