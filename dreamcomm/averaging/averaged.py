"""The tensors of a model that ranks average, each memory once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from dreamcomm._torch.overlap import same_memory
from dreamcomm.ranks.parameters import described, stepped

__all__ = ["Averaged"]

PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # a subclass may have no address

Named = list[tuple[str, Tensor]]


class Averaged:
    """The parameters that an optimizer steps, and the floating buffers.

    Tensors may share their memory, as weights that are tied by ``.data``. They are averaged once.

    Args:
        module: has them.
        optimizer: steps some or all of the module's parameters.
        with_buffers: floating buffers are averaged too.
        what: is made, for errors.

    Attributes:
        parameters: one for each memory, in the module's order.
        names: of these.
        numbers: the place in ``parameters``, by the id of every parameter that is stepped.

    Raises:
        ValueError: the optimizer has a parameter that is not the module's, or tensors overlap in
            part.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, with_buffers: bool, what: str
    ) -> None:
        self._module, self._with_buffers, self._what = module, with_buffers, what
        wanted = set(map(id, stepped(optimizer)))
        self._stepped = [pair for pair in module.named_parameters() if id(pair[1]) in wanted]
        if len(self._stepped) != len(wanted):
            raise ValueError(
                f"{what}: the optimizer has {len(wanted)} parameters, and only "
                f"{len(self._stepped)} of them are the model's; give the model that it trains"
            )
        named = self._named(wanted)
        groups = same_memory(named, what)
        self._ties = _ties(groups, named)
        self._note_places()
        self._pointers = self._pointers_now()
        self._take([group for group in groups if group[0] < len(wanted)])
        # A buffer in the memory of a tensor before it changes with that one.
        self._tied_buffers = {
            named[number][0]
            for group in groups
            for number in group[1:]
            if number >= len(self._stepped)
        }

    def _take(self, groups: Sequence[Sequence[int]]) -> None:
        """Chooses a parameter of each memory: one that is trained, if there is one."""
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}
        for place, group in enumerate(groups):
            members = [self._stepped[number] for number in group if number < len(self._stepped)]
            name, chosen = next((one for one in members if one[1].requires_grad), members[0])
            self.parameters.append(chosen)
            self.names.append(name)
            self.numbers |= {id(one): place for _, one in members}

    def _named(self, wanted: Collection[int]) -> Named:
        """Stepped parameters and floating buffers that the module has now."""
        named: Named = [pair for pair in self._module.named_parameters() if id(pair[1]) in wanted]
        if self._with_buffers:
            named += [one for one in self._module.named_buffers() if one[1].is_floating_point()]
        return named

    def buffers(self) -> list[Tensor]:
        """The buffers that are averaged: those that the module has now."""
        if not self._with_buffers:
            return []
        return [
            one
            for name, one in self._module.named_buffers()
            if one.is_floating_point() and name not in self._tied_buffers
        ]

    def described(self) -> dict[str, str]:
        """What has to be equal on all ranks beside the parameters' shapes."""
        texts = {
            f"parameter {name!r}": "in the optimizer" if id(one) in self.numbers else "not stepped"
            for name, one in self._module.named_parameters()
        }
        for name, one in self._module.named_buffers():
            texts[f"buffer {name!r}"] = described(one)
        for names in self._ties:
            texts |= {f"the memory of {name!r}": f"that of {names[0]!r}" for name in names[1:]}
        return texts

    def check(self, call: str) -> None:
        """Raises where the module has other tensors now, before ranks average what it had.

        Raises:
            RuntimeError: a parameter was replaced, or tensors share memory in another way.
            ValueError: tensors have come to overlap in part.
        """
        if any(held.get(key) is not one for held, key, one in self._places):
            self._check_parameters(call)
            self._note_places()
        pointers = self._pointers_now()
        if pointers == self._pointers:
            return
        named = self._named(self.numbers)
        ties = _ties(same_memory(named, f"{self._what}.{call}"), named)
        if ties != self._ties:
            raise RuntimeError(
                f"{self._what}.{call}: expected tensors to share memory as when {self._what} was "
                f"made ({_shown(self._ties)}), got {_shown(ties)}; tie tensors before that"
            )
        self._pointers = pointers

    def _check_parameters(self, call: str) -> None:
        here = {id(one) for one in self._module.parameters()}
        for name, one in self._stepped:
            if id(one) not in here:
                raise RuntimeError(
                    f"{self._what}.{call}: the model has lost parameter {name!r} that the "
                    "optimizer steps, as load_state_dict(assign=True) replaces it, and ranks would "
                    f"average the old one; make the optimizer and {self._what} after that"
                )

    def _note_places(self) -> None:
        """Notes where modules hold what they have. To look there takes less than a walk."""
        parts = list(self._module.modules())
        self._places = [
            (held, key, one)
            for part in parts
            for held in cast(list[dict[str, Any]], [part._modules, part._parameters])
            for key, one in held.items()
        ]
        self._buffer_places = [
            (part._buffers, key)
            for part in parts
            for key, one in part._buffers.items()
            if self._with_buffers and one is not None and one.is_floating_point()
        ]

    def _pointers_now(self) -> list[int]:
        tensors: list[Any] = [one for _, one in self._stepped]
        tensors += [held[key] for held, key in self._buffer_places if key in held]
        return [one.data_ptr() if type(one) in PLAIN else 0 for one in tensors]


def _ties(groups: Sequence[Sequence[int]], named: Named) -> list[list[str]]:
    """The names of tensors that share memory."""
    return [[named[number][0] for number in group] for group in groups if len(group) > 1]


def _shown(ties: list[list[str]]) -> str:
    return ", ".join(" and ".join(map(repr, names)) for names in ties) or "none"
