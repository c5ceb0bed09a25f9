"""Steps by the compiled kernels, in one pass over memory that the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from dreamcomm.buckets.engine import BucketEngine
from dreamcomm.zero.rows import adopt_state
from dreamcomm.zero.rules import rule_of, state_names
from dreamcomm.zero.shards import ParameterShard, masters_of

if TYPE_CHECKING:
    from dreamcomm._C import AdamRule, OptimizerPass, SgdRule

__all__ = ["KernelStep", "RowsStep"]


class RowsStep(Protocol):
    """Steps this rank's rows by rules; tells which ones."""

    def step(
        self, rules: Sequence[AdamRule | SgdRule], rule_of_each: Sequence[int]
    ) -> Sequence[bool]: ...


class KernelStep:
    """The steps of one engine's parameters.

    The state is kept where torch keeps it, in the inner optimizer, so that torch's own step can
    take the next turn.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        inner: Optimizer,
        groups: Sequence[dict[str, Any]],
        ranks: Sequence[int],
    ) -> None:
        self._shards, self._inner, self._groups, self._ranks = shards, inner, groups, ranks
        numbers = {id(one): k for k, group in enumerate(groups) for one in group["params"]}
        self._group_of = [numbers[id(one.parameter)] for one in shards]
        self._memory: list[list[Tensor]] | None = None
        self._pass: OptimizerPass | None = None
        self._made_for: list[tuple[str, ...]] = []
        self._stepped: set[int] = set()  # ids of shards whose state was given to the optimizer

    def forget(self) -> None:
        """Looks at the inner optimizer's state anew before the next step."""
        self._memory = None

    def run(
        self,
        engine: BucketEngine | Callable[[Sequence[Sequence[Tensor]]], RowsStep],
        groups: Sequence[dict[str, Any]],
        reduces: bool = False,
    ) -> None:
        """Averages if it ``reduces``, steps, and writes all ranks' parameters. Collective.

        Args:
            engine: its ranks map each other's parameters; or what makes the step of rows that all
                ranks read in place, of the states. That communicates nothing.
            groups: the same parameters as before, with their options now.
        """
        self._groups = groups
        # Frozen parameters have no state until they get a gradient.
        names = [
            state_names(self._groups[k])
            if one.parameter.requires_grad or one.parameter.grad is not None
            else ()
            for one, k in zip(self._shards, self._group_of, strict=True)
        ]
        if names != self._made_for or not self._is_current():
            self._made_for = names
            self._stepped.clear()
            for one in self._shards:
                adopt_state(self._inner, one, self._ranks)
            self._memory = [
                [self._state(one, name) for name in of_one]
                for one, of_one in zip(self._shards, names, strict=True)
            ]
            self._pass = None
        assert self._memory is not None
        rules, rule_of_each = self._rules()
        if not isinstance(engine, BucketEngine):
            self._note(engine(self._memory).step(rules, rule_of_each))
            return
        if self._pass is None:
            self._pass = engine.optimizer_pass(masters_of(self._shards), self._memory)
        self._note(self._pass.step(rules, rule_of_each, reduces))

    def _is_current(self) -> bool:
        """Whether the optimizer's state is what the kernels know: a user may have replaced it."""
        if self._memory is None:
            return False
        for one, names, memory in zip(self._shards, self._made_for, self._memory, strict=True):
            state = self._inner.state.get(one.tensor)
            if not state:
                if names and id(one) in self._stepped:
                    return False
            elif any(state.get(name) is not kept for name, kept in zip(names, memory, strict=True)):
                return False
        return True

    def _state(self, one: ParameterShard, name: str) -> Tensor:
        """What is kept under that name: the optimizer's own, or zeros that it gets later."""
        kept = self._inner.state.get(one.tensor, {}).get(name)
        return one.new_state() if kept is None else kept

    def _rules(self) -> tuple[list[AdamRule | SgdRule], list[int]]:
        """A rule for each group and number of a step, and which one each parameter has."""
        numbers: dict[tuple[int, int], int] = {}
        rules: list[AdamRule | SgdRule] = []
        which = []
        for one, k in zip(self._shards, self._group_of, strict=True):
            key = k, self._next_step(one, self._groups[k])
            if key not in numbers:
                numbers[key] = len(rules)
                rules.append(rule_of(self._groups[k], key[1]))
            which.append(numbers[key])
        return rules, which

    def _next_step(self, one: ParameterShard, group: dict[str, Any]) -> int:
        state = self._inner.state.get(one.tensor, {})
        if "betas" in group:
            return 1 + int(state["step"].item()) if "step" in state else 1
        return 1 if state.get("momentum_buffer") is None else 2

    def _note(self, touched: Sequence[bool]) -> None:
        """Gives the inner optimizer the state of parameters that were stepped."""
        assert self._memory is not None
        steps = []
        for one, k, names, memory, is_touched in zip(
            self._shards, self._group_of, self._made_for, self._memory, touched, strict=True
        ):
            if not is_touched:
                continue
            state = self._inner.state[one.tensor]
            self._stepped.add(id(one))
            if "betas" in self._groups[k]:
                if "step" not in state:
                    state["step"] = torch.tensor(0.0, device="cpu")
                steps.append(state["step"])
            for name, kept in zip(names, memory, strict=True):
                state[name] = kept
        if steps:
            torch._foreach_add_(steps, 1)
