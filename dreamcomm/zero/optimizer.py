"""An optimizer whose state, and at stage 2 gradients, are sharded over the ranks of a group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dreamcomm._torch.ddp import broadcast_tensors
from dreamcomm._torch.groups import given_group, ours
from dreamcomm.buckets.clip import clip_
from dreamcomm.buckets.layout import gather_rows
from dreamcomm.buckets.protocol import ClipPart, GradientPart
from dreamcomm.buckets.scaling import unscale_
from dreamcomm.ranks.agree import gather_objects
from dreamcomm.ranks.parameters import (
    TrainedParameter,
    check_equal_models,
    check_group,
    named_parameters,
)
from dreamcomm.zero.agreement import Agreement, check_facts
from dreamcomm.zero.checks import (
    check_arguments,
    check_groups,
    check_held,
    check_invariant,
    check_memory,
    check_parameters,
    check_sharded,
    refuse_own_gradients,
)
from dreamcomm.zero.engine import (
    BUCKET_BYTES,
    WHAT,
    engine_of,
    found_engine,
    shard_engine,
)
from dreamcomm.zero.estimate import estimate
from dreamcomm.zero.gradient_rows import gradient_parts, rows_of_gradients
from dreamcomm.zero.inner import make_inner, step_rows, sync_options
from dreamcomm.zero.kernel_step import KernelStep
from dreamcomm.zero.loading import load_state
from dreamcomm.zero.memory import MemoryReport, measured
from dreamcomm.zero.rows import adopt_state
from dreamcomm.zero.rules import has_kernel
from dreamcomm.zero.shards import (
    ShardedGroups,
    make_shards,
    masters_of,
    refresh_masters,
    settle_parameters,
)
from dreamcomm.zero.state import RowsState, WholeState, packed_state, whole_state
from dreamcomm.zero.units.stepping.optimizer import UnitSteps, shards_of, tree_of_all
from dreamcomm.zero.units.stepping.reporting import plan_of, reported
from dreamcomm.zero.units.tree.tree import Tree
from dreamcomm.zero.warning import warn_of_changed

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(Optimizer):
    """Steps a part of each parameter on each rank (Rajbhandari et al. 2020, "ZeRO").

    The arguments are those of :class:`torch.distributed.optim.ZeroRedundancyOptimizer`. It is used
    on the parameters of a bare module, whose gradients it averages itself; on those of a
    :class:`dreamcomm.DistributedDataParallel`, which then leaves that to it; or, with
    ``reduce=False``, under a wrapper that averages gradients. A rank steps the rows of each
    parameter that torch.chunk gives it, and all ranks get all rows.

    - Stage 1 shards the optimizer's state. Gradients stay this rank's own until :meth:`step`, which
      averages, steps and hands out in one pass where the ranks share memory.
    - Stage 2 also shards gradients: a backward pass reduces each bucket into shards and frees it.
      ``grad`` is then a tensor without memory.

    On CPUs parameters move into memory that the ranks share, where they are, and Adam, AdamW and
    SGD take the steps of torch's single-tensor forms bit for bit. With ``fused=True`` Adam's square
    roots are correctly rounded instead of MKL's, which takes half of the time; the bits are then
    the same on all machines, and neither those of torch's fused form nor of its single-tensor one.

    Args:
        params: as of any optimizer: parameters, pairs of names and parameters, or groups of either.
        optimizer_class: one whose step of an element depends on that element alone, such as
            torch.optim.AdamW.
        process_group: its ranks share the work; None is the default group.
        parameters_as_bucket_view: accepted; parameters are never copied for communication.
        overlap_with_ddp: not supported.
        stage: 1 or 2. Parameters of a module after :func:`fully_shard` are at stage 3 in any case.
        master_dtype: such as torch.float32, for parameters of 16 bits: the optimizer steps copies
            in this type, averages are computed in it, and parameters are these copies rounded.
        reduce: what gradients become here: True and "mean" average them over the ranks, "sum" adds
            them, "tokens" divides their sum by what :meth:`count` was given; False leaves them to
            a wrapper. Under a DistributedDataParallel of this library its own ``reduce`` counts.
        per_element: vouches for an ``optimizer_class`` that is not known.
        defaults: of the optimizer class.

    Raises:
        ValueError: a stage that does not exist; no parameters, or one twice, or on several devices;
            ranks with different ones; parameters of which a DistributedDataParallel holds a part.
        TypeError: ``optimizer_class`` is no class of optimizers.
        NotImplementedError: ``overlap_with_ddp``.
    """

    _step_supports_amp_scaling = True
    steps_rows = True  # with the same bits in any place of a rank's rows

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        stage: int = 1,
        master_dtype: torch.dtype | None = None,
        reduce: bool | str | float = True,
        per_element: bool = False,
        **defaults: Any,
    ) -> None:
        self._averages = check_arguments(
            optimizer_class, stage, overlap_with_ddp, master_dtype, reduce, per_element
        )
        self.process_group = given_group(process_group)
        self.stage, self.master_dtype = stage, master_dtype
        self._reduce, self._reduces = reduce, self._averages is not None
        self._class, self._options = optimizer_class, dict(defaults)
        self._held = False  # by a DistributedDataParallel
        self._units: UnitSteps | None = None  # the parameters are those of fully_shard
        self._ready = self._unscaled_everywhere = False
        self._agreement = Agreement()
        self._consolidated: WholeState | None = None
        self._state: Any = None
        super().__init__(params, dict(defaults))
        self._set_up(first=True)

    # Construction.

    def _set_up(self, *, first: bool) -> None:
        """Shards the parameters of all groups. Collective."""
        named = named_parameters(self.param_groups)
        parameters = [parameter for _, parameter in named]
        tree = tree_of_all(parameters, WHAT)
        if tree is not None:
            self._set_up_units(tree, named)
            return
        if self.stage == 3:
            raise ValueError(
                f"{WHAT}: stage 3 shards the parameters, too: call dreamcomm.zero.fully_shard on "
                "the module first"
            )
        ties = check_parameters(named, self.master_dtype)
        engine = found_engine(parameters) if self._reduces and (first or self._held) else None
        if first:
            self._held = engine is not None
            if engine is not None:
                check_held(engine, self._averages, self._reduce)
        if engine is not None and len(engine.trained) == len(named):
            names = {id(one.parameter): one.name for one in engine.trained}
            named = [(names.get(id(parameter), name), parameter) for name, parameter in named]
        trained = [TrainedParameter(name, parameter) for name, parameter in named]
        check_group(self.process_group, trained, WHAT)
        check_equal_models(self.process_group, trained, WHAT)
        self._in_heaps = self._share(named, ties)
        if not self._held:
            broadcast_tensors(parameters, self.process_group)
        world, rank = self._ranks()
        shards = make_shards(named, world, rank, self.master_dtype)
        self._shards = {id(one.parameter): one for one in shards}
        self._inner = make_inner(self._class, self._options, self.param_groups, self._shards)
        self.defaults = {**self._inner.defaults, **self.defaults}
        self._state = RowsState(self._shards, self._inner)
        self._given = [list(group["params"]) for group in self.param_groups]
        self._agreement.compare(self._inner.defaults, ties)
        if engine is None:
            engine = engine_of(named, self.process_group, self._averages)
        self._engine = engine
        engine.on_made(self._shard_engine)
        engine.take_over(self, f"{WHAT}(stage={self.stage})")
        if first or not self._held:
            self._release = weakref.finalize(self, engine.unshard)
        self._shard_engine()
        self._ready = True

    def _set_up_units(self, tree: Tree, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        """Steps the DTensors of fully_shard: all is sharded already."""
        check_sharded(self.master_dtype, self._reduce)
        self.stage, self.process_group = 3, tree.shards
        self._ordered = shards_of(tree, named)
        self._shards = {id(one.parameter): one for one in self._ordered}
        self._inner = make_inner(self._class, self._options, self.param_groups, self._shards)
        self.defaults = {**self._inner.defaults, **self.defaults}
        self._state = RowsState(self._shards, self._inner)
        self._given = [list(group["params"]) for group in self.param_groups]
        self._agreement.compare(self._inner.defaults, [])
        self._units = UnitSteps(tree, self._ordered, self._inner, self.param_groups)
        self._ready = True

    def _ranks(self) -> tuple[int, int]:
        return dist.get_world_size(self.process_group), dist.get_rank(self.process_group)

    def _share(self, named: list[tuple[str, torch.nn.Parameter]], ties: list[list[int]]) -> bool:
        """Whether parameters lie in memory that all ranks map, on all of them. Collective."""
        device = named[0][1].device
        backend = ours(self.process_group, device) if device.type == "cpu" else None
        shared = backend is not None and backend.shares_heaps
        with torch.no_grad():
            all_there = settle_parameters(named, ties, shared=shared)
        if not shared:
            return False
        return all(gather_objects(self.process_group, all_there))

    def _shard_engine(self) -> None:
        self._ordered = shard_engine(
            self._engine, self._shards, stage=self.stage, in_heaps=self._in_heaps
        )
        assert self._engine.shards is not None
        self._gradients = self._engine.shards
        ranks = dist.get_process_group_ranks(self.process_group)
        self._kernel_step = KernelStep(self._ordered, self._inner, self.param_groups, ranks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. Collective, after the optimizer was made."""
        if not getattr(self, "_ready", False):
            super().add_param_group(param_group)
            return
        if self._held:
            raise ValueError(
                f"{WHAT}: the parameters are those of a DistributedDataParallel, which has no "
                "others: wrap the larger module, and make a new optimizer"
            )
        if any(one.grad is not None for group in self.param_groups for one in group["params"]):
            raise RuntimeError(f"{WHAT}: call zero_grad() before add_param_group()")
        check_groups(self.param_groups, self._given)
        self._consolidated = None
        shards, kept = self._shards, self._inner.state
        super().add_param_group(param_group)
        if self._units is None:
            self._release()  # it would keep the engine, and its shards
            self._engine.detach()
        self._set_up(first=False)
        for key, before in shards.items():
            now = self._shards[key]
            if now.has_master:
                now.tensor.copy_(before.tensor)
            if before.tensor in kept:
                self._inner.state[now.tensor] = kept[before.tensor]

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages what is not averaged yet, steps, and gives all ranks the result. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._recover()
        with torch.no_grad():
            if self._is_skipped():
                return loss
            check_memory(self._ordered)
            check_groups(self.param_groups, self._given)
            self._check_shards()
            if self._units is not None:
                self._step_units(self._units)
                return loss
            averaged = self._agreed()
            self._consolidated = None
            refresh_masters(self._ordered)
            sync_options(self.param_groups, self._inner)
            if self._reduces and self.stage == 1:
                warn_of_changed(self._engine, self._ordered)
            if self._in_heaps and self._reduces and has_kernel(self._inner):
                self._step_by_kernels(averaged)
            else:
                self._step_by_torch(averaged)
        return loss

    def _is_skipped(self) -> bool:
        """Whether a GradScaler has found an infinity or NaN, on any rank."""
        given = getattr(self, "found_inf", None)
        if given is None:
            return False
        everywhere, self._unscaled_everywhere = self._unscaled_everywhere, False
        if not everywhere and self._has_own_gradients():
            refuse_own_gradients(self.process_group)
        found = float(given) > 0
        scale = getattr(self, "grad_scale", None)
        if scale is not None and not found:
            local = [one.parameter.grad for one in self._ordered]
            unscale_(self._shard_gradients() if self._reduces else local, scale)
        return found

    def _check_shards(self) -> None:
        """Raises where shards of the step are missing, or are stepped by kernels of slices."""
        if self._units is not None:
            return
        self._engine.check_shards(f"{WHAT}.step() was called")
        if self._engine.averages.shards:
            check_invariant(self._inner, self._in_heaps)

    def _has_own_gradients(self) -> bool:
        """Whether gradients are not averaged yet. Collective at stage 2."""
        if not self._reduces or self._ranks()[0] == 1 or self._units is not None:
            return False
        return self.stage == 1 or not self._gradients.agree()

    def _agreed(self) -> bool:
        """Whether all is averaged, on all ranks. Raises where their options differ. Collective."""
        digest = self._agreement.digest(self.param_groups)
        averaged = self._gradients.agree(digest)
        if averaged is None:
            check_facts(self.process_group, self._agreement.facts(self.param_groups))
        return bool(averaged)

    def _step_units(self, units: UnitSteps) -> None:
        """Ranks compare their options when they meet next, before they read what was stepped."""
        units.tree.before_step()  # a closure may have run passes since the hook
        units.tree.note_options(self._agreement.digest(self.param_groups))
        self._consolidated = None
        sync_options(self.param_groups, self._inner)
        units.step(self.param_groups)

    def _step_by_kernels(self, averaged: bool) -> None:
        reads = self.stage == 1 and not averaged
        if self.stage == 2 and not averaged:
            self._engine.backward.reduce_now()
        self._kernel_step.run(self._engine, self.param_groups, reads)

    def _step_by_torch(self, averaged: bool) -> None:
        ranks = dist.get_process_group_ranks(self.process_group)
        for one in self._ordered:
            adopt_state(self._inner, one, ranks)
        if self._reduces and not averaged:
            self._engine.backward.reduce_now()
        widens = self._engine.averages.shards > 0
        gradients = self._own_gradients()
        stepped = step_rows(self._inner, self._ordered, gradients, widens=widens)
        self._kernel_step.forget()
        if self._in_heaps:
            no_states: list[list[Tensor]] = [[] for _ in self._ordered]
            self._engine.optimizer_pass(masters_of(self._ordered), no_states).step([], [], False)
            return
        for one in stepped:
            one.write_back()
        gather_rows([one.parameter for one in stepped], self.process_group)

    def _shard_gradients(self) -> list[Tensor | None]:
        """This rank's elements of the averages, flat, in the engine's order. Collective."""
        self.reduce_gradients()
        return self._own_gradients()

    def _own_gradients(self) -> list[Tensor | None]:
        """The same, once they are averaged."""
        if self._units is not None:
            return self._units.gradients()
        if not self._reduces:
            return rows_of_gradients(self._ordered)
        return self._gradients.reduced()

    # Gradients.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to this rank's own gradients; a later one, or
        :meth:`reduce_gradients`, reduces the sum."""
        with (self._engine if self._units is None else self._units.tree).no_sync():
            yield

    def count(self, number: float | Tensor) -> None:
        """As :meth:`dreamcomm.DistributedDataParallel.count`, with ``reduce="tokens"``."""
        if self._units is not None:
            self._units.tree.count(number)
        else:
            self._engine.count(number, WHAT)

    def reduce_gradients(self) -> None:
        """Averages what has accumulated into this rank's shards. Collective.

        Nothing is done where all is averaged already.
        """
        if self._units is not None:
            self._units.tree.reduce_gradients()
            return
        self._recover()
        if self._reduces and not self._gradients.agree():
            self._engine.backward.reduce_now()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``. Collective.

        The 2-norm has the bits of that of a :class:`dreamcomm.DistributedDataParallel`. At stage 1
        ``grad`` stays as it is, and :meth:`step` uses the clipped averages.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: raise where the norm is infinite or NaN, and change nothing.

        Returns:
            The norm before, a float32 tensor of no dimension on the gradients' device.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        """
        if not self._reduces:
            parameters = [one.parameter for one in self._ordered]
            return torch.nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type, error_if_nonfinite
            )
        (part,) = self.clip_parts()
        return clip_(part, max_norm, norm_type, error_if_nonfinite)

    def clip_parts(self) -> list[ClipPart]:
        """What the norm of all gradients consists of: each rank's rows of every parameter."""
        if self._units is None:
            self._engine.check_shards("gradients are clipped")
        parameters = [one.parameter for one in self._ordered]
        return [ClipPart(parameters, self.process_group, self._gradient_parts)]

    def _gradient_parts(self) -> list[GradientPart]:
        return gradient_parts(self._ordered, self._shard_gradients(), self._ranks()[0])

    def report(self, *, since: int | None = None) -> MemoryReport:
        """What the parameters take of memory on this rank, as :func:`memory_report`.

        Args:
            since: :func:`process_memory` before the model was made.
        """
        world, rank = self._ranks()
        how: dict[str, Any] = {"master_dtype": self.master_dtype}
        if self._units is not None:
            how = plan_of(self._units)
            everyone = self._units.tree.group
            world, rank = dist.get_world_size(everyone), dist.get_rank(everyone)
        planned = estimate(
            [one.parameter for one in self._shards.values()],
            world,
            self.stage,
            optimizer=self._inner,
            bucket_bytes=BUCKET_BYTES if self._units else self._engine.caps.bucket,
            rank=rank,
            **how,
        )
        if self._units is not None:
            return reported(self._units, planned, self._sharded(), since)
        parts = [self._gradients.memory(place) for place in range(len(self._ordered))]
        return measured(planned, self._sharded(), parts, since)

    def before_unscale(self) -> None:
        """For :class:`dreamcomm.GradScaler`: what it divides is reduced. Collective."""
        if self.stage >= 2 or self.divides_averages:
            self.reduce_gradients()

    @property
    def divides_averages(self) -> bool:
        """For :class:`dreamcomm.GradScaler`: whether it leaves gradients as they are."""
        if self.master_dtype != torch.float32 or not self._reduces:
            return False
        return any(one.parameter.dtype == torch.float16 for one in self._ordered)

    def note_unscaled(self, inverse: Tensor) -> None:
        """For :class:`dreamcomm.GradScaler`: it has looked on all ranks, and divided gradients.

        Averages that were made before are divided here.
        """
        self._unscaled_everywhere = True
        if self._units is not None:
            return
        if (self.stage == 1 and self._reduces) or self.divides_averages:
            averages = [one for one in self._gradients.reduced() if one is not None]
            if averages:
                torch._foreach_mul_(averages, inverse)
        self._gradients.note_seen()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{WHAT} can be neither copied nor pickled, as it belongs to a process group: save its "
            "state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and frees them with ``set_to_none``; shards keep their memory."""
        self._recover()
        super().zero_grad(set_to_none)
        if self._units is not None:
            self._units.clear_sums(set_to_none)

    def _recover(self) -> None:
        """Forgets a backward pass that an error ended."""
        if self._units is None and torch._C._current_graph_task_id() == -1:  # else within one
            self._engine.recover()

    # RowsState.

    @property
    def state(self) -> Any:
        """What is kept of each parameter: this rank's rows, by the parameters.

        Another mapping that is put in its place is copied: with an empty one all begin anew. Whole
        tensors in it are cut to this rank's rows in the next step.
        """
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if isinstance(self._state, RowsState):
            self._state.replace(value)

    def _sharded(self) -> ShardedGroups:
        return ShardedGroups(self.param_groups, self._shards, self._inner, self.process_group)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state on one rank: its :meth:`state_dict` has whole tensors. Collective.

        They are copies on the CPU, as they are now. They load into any number of ranks, and into
        the optimizer class itself. The other ranks' state_dict() raises. The next step or load
        drops the copies, and state_dict() is as before.

        Args:
            to: a rank of the optimizer's group.

        Raises:
            ValueError: there is no such rank.
        """
        world, rank = self._ranks()
        if not 0 <= to < world:
            raise ValueError(f"{WHAT}: expected a rank from 0 to {world - 1} as to, got {to}")
        check_groups(self.param_groups, self._given)
        self._consolidated = whole_state(self._sharded(), to, keep=rank == to)

    def state_dict(self) -> dict[str, Any]:
        """The state as DTensors that are sharded on dimension 0, by numbers of parameters.

        They have the rows of this rank, for this rank. ``torch.distributed.checkpoint`` saves and
        loads them, through ``get_optimizer_state_dict`` by names; so it goes into another world
        size, another stage, or one process. Nothing is communicated. For whole tensors call
        :meth:`consolidate_state_dict` before.

        Raises:
            RuntimeError: ``param_groups`` has other parameters by now; the state was consolidated
                on another rank.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        check_groups(self.param_groups, self._given)
        packed = packed_state(self._sharded())
        if self._consolidated is not None:
            packed["state"] = self._consolidated.entries(dist.get_rank())
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state, of DTensors or of whole tensors. All ranks load, or the next step raises.

        Raises:
            ValueError: it is of other parameters, or lacks a part, or has the rows of another rank.
                Nothing has changed then.
            RuntimeError: ``param_groups`` has other parameters by now.
        """
        check_groups(self.param_groups, self._given)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        load_state(self._sharded(), state_dict)
        sync_options(self.param_groups, self._inner)
        (self._kernel_step if self._units is None else self._units).forget()
        self._agreement.note_load()
        self._consolidated = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
