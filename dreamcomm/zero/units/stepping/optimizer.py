"""The steps of a ZeroOptimizer on parameters of fully_shard: each rank steps its rows in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dreamcomm.buckets.layout import shard_layout
from dreamcomm.ranks.agree import Failed, exchange
from dreamcomm.ranks.pieces import in_memory_order
from dreamcomm.zero.inner import step_rows
from dreamcomm.zero.kernel_step import KernelStep, RowsStep
from dreamcomm.zero.rows import adopt_state
from dreamcomm.zero.rules import has_kernel, state_names
from dreamcomm.zero.shards import ParameterShard
from dreamcomm.zero.units.parameters.own_files import OwnFiles, padded
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.stepping.file_steps import FileRowsPass
from dreamcomm.zero.units.tree.link import tree_of
from dreamcomm.zero.units.tree.tree import Tree
from dreamcomm.zero.units.window import WindowError

__all__ = ["UnitSteps", "shards_of", "tree_of_all"]


def tree_of_all(parameters: Sequence[nn.Parameter], what: str) -> Tree | None:
    """The tree whose DTensors the parameters are; None: they are none of fully_shard.

    Raises:
        ValueError: they are of several trees, or some are of none, or are whole ones.
    """
    trees = {id(tree): tree for one in parameters if (tree := tree_of(one)) is not None}
    if not trees:
        return None
    for tree in trees.values():
        tree.follow()
    records = [one for tree in trees.values() for one in tree.records()]
    wholes = {id(one.whole): one.name for one in records}
    whole = next((name for one in parameters if (name := wholes.get(id(one)))), None)
    if whole is not None:
        raise ValueError(
            f"{what}: got the whole parameter {whole!r} of a module after fully_shard, which has "
            "it until a pass has ended: make the optimizer before a forward pass, after backward, "
            "or after module.reshard()"
        )
    sharded = {id(one.sharded) for one in records}
    if len(trees) > 1 or any(id(one) not in sharded for one in parameters):
        raise ValueError(
            f"{what}: expected parameters of one module after fully_shard, got some of "
            f"{len(trees)} modules{' and others' if len(trees) == 1 else ''}: make an optimizer "
            "for each"
        )
    (tree,) = trees.values()
    return tree


@dataclass(eq=False)
class UnitShard(ParameterShard):
    """This rank's rows of a DTensor.

    Attributes:
        files: the state lies in them; None: in ordinary memory.
    """

    files: OwnFiles | None = None

    def has_moved(self) -> bool:
        return self.parameter._local_tensor is not self.tensor  # type: ignore[attr-defined]

    def new_state(self) -> Tensor:
        return super().new_state() if self.files is None else self.files.zeros_like(self.tensor)

    def state_of(self, value: Tensor) -> Tensor:
        if self.files is None:
            return super().state_of(value)
        return self.files.copy_of(value, self.tensor)

    def holds_state(self, value: Tensor) -> bool:
        return self.files is None or self.files.holds(value)


def shards_of(tree: Tree, named: Sequence[tuple[str, nn.Parameter]]) -> list[ParameterShard]:
    """The rows of DTensors, which are stepped where they lie."""
    world, rank = dist.get_world_size(tree.shards), dist.get_rank(tree.shards)
    records = {id(one.sharded): one for one in tree.records()}
    folder = tree.form.folder
    files = None if folder is None else OwnFiles(folder)
    found: list[ParameterShard] = []
    for name, parameter in named:
        one = records[id(parameter)]
        shape = tuple(parameter.shape)
        (piece,) = shard_layout([shape], world, rank)
        found.append(
            UnitShard(
                one.name or name,
                parameter,
                one.local,
                piece.begin,
                piece.offset,
                one.local.numel(),
                one.is_replicated,
                has_master=False,
                address=0,
                shape=parameter.shape,
                strides=tuple(one.whole.stride()),
                files=None if one.is_replicated else files,
            )
        )
    return found


class UnitSteps:
    """Steps the rows of one tree's parameters. Nothing is communicated."""

    def __init__(
        self,
        tree: Tree,
        shards: Sequence[ParameterShard],
        inner: Optimizer,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self.tree = tree
        self._shards, self._inner = list(shards), inner
        self._ranks = dist.get_process_group_ranks(tree.shards)
        self._kernels = KernelStep(self._shards, inner, groups, self._ranks)
        found = (one.files for one in self._shards if isinstance(one, UnitShard))
        self._files = next((one for one in found if one is not None), None)
        if self._files is not None:
            self._reserve(self._files, groups)

    def _reserve(self, files: OwnFiles, groups: Sequence[dict[str, Any]]) -> None:
        """Makes the file of the state, so that a full disk is an error here. Collective.

        Raises:
            WindowError: a rank cannot; on all ranks.
        """
        named = {id(one): group for group in groups for one in group["params"]}
        nbytes = sum(
            padded(one.tensor.nbytes) * len(state_names(named[id(one.parameter)]))
            for one in self._shards
            if has_kernel(self._inner) and one.parameter.requires_grad and not one.replicated
        )
        exchange(self.tree.group, lambda: files.reserve(nbytes), _no_file)

    def forget(self) -> None:
        """Looks at the inner optimizer's state anew before the next step."""
        self._kernels.forget()

    def records(self) -> list[UnitParameter]:
        """The records of the optimizer's parameters."""
        mine = {id(one.parameter) for one in self._shards}
        return [one for one in self.tree.records() if id(one.sharded) in mine]

    def clear_sums(self, set_to_none: bool) -> None:
        """Clears what gradients do not show: sums that wait for the other replicas.

        With ``set_to_none`` the next pass clears the sums of this rank; else they are zeroed.
        """
        with torch.no_grad():
            for one in self.records():
                one.is_partial = False
                if not set_to_none and one.whole.grad is not None:
                    one.whole.grad.zero_()

    def held(self) -> list[Tensor | None]:
        """All memory of gradients on this rank: of sums, and whole ones that are held back."""
        engine, records = self.tree.known_engine, self.tree.records()
        mine = {id(one.parameter) for one in self._shards}
        found: list[Tensor | None] = []
        for place, one in enumerate(records):
            if id(one.sharded) not in mine:
                continue
            if engine is not None and engine.shards is not None:
                found.append(engine.shards.memory(place))
            gradient = one.sharded.grad
            if gradient is not None and gradient is not one.shown:
                found.append(getattr(gradient, "_local_tensor", gradient))
        return found

    def gradients(self) -> list[Tensor | None]:
        """This rank's elements of the gradients, flat, as they are."""
        found: list[Tensor | None] = []
        for one in self._shards:
            gradient = one.parameter.grad
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            found.append(None if local is None else _as_rows(local, one.tensor))
        return found

    def step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Steps what has a gradient, by the kernels or torch. The window is closed."""
        gradients = self.gradients()
        if has_kernel(self._inner):
            self._kernels.run(lambda states: self._pass_of(gradients, states), groups)
            return
        self._adopt()
        widens = self.tree.averages.shards > 0
        stepped = step_rows(self._inner, self._shards, gradients, widens=widens)
        self._kernels.forget()
        if self._files is not None:
            self._adopt()  # what the step has made
            for one in stepped:
                state = self._inner.state.get(one.tensor, {}).values()
                parts = [part for part in state if isinstance(part, Tensor)]
                self._files.wrote([one.tensor, *parts])

    def _adopt(self) -> None:
        for one in self._shards:
            adopt_state(self._inner, one, self._ranks)

    def _pass_of(
        self, gradients: Sequence[Tensor | None], states: Sequence[Sequence[Tensor]]
    ) -> RowsStep:
        rows = [one.tensor for one in self._shards]
        if self._files is None:
            return _RowsPass(rows, gradients, states)
        return FileRowsPass(rows, gradients, states, self._files)


def _no_file(failed: Failed) -> Exception:
    return WindowError(
        f"ZeroOptimizer: rank {failed.rank} cannot make the file of its optimizer's state: "
        f"{failed.kind}: {failed.text}"
    )


def _as_rows(local: Tensor, rows: Tensor) -> Tensor:
    """A gradient's elements in the order in which the rows lie in memory."""
    if local.stride() != rows.stride() and local.numel() > 0:
        local = torch.empty_like(rows).copy_(local)
    return in_memory_order(local)


class _RowsPass:
    """Steps rows by the compiled kernels."""

    def __init__(
        self,
        rows: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[Sequence[Tensor]],
    ) -> None:
        self._rows = rows
        self._gradients, self._states = gradients, states

    def step(self, rules: Sequence[Any], rule_of_each: Sequence[int]) -> list[bool]:
        from dreamcomm import _C

        _C.step_rows(rules, rule_of_each, self._rows, self._gradients, self._states)
        return [one is not None for one in self._gradients]
