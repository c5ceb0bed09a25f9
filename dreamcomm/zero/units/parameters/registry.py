"""What the modules of a unit have registered: whole parameters in passes, DTensors outside.

Each pass looks at all modules, and swaps all parameters four times, in caches that its arithmetic
has filled: so compiled loops do it, on the modules' own dicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dreamcomm.zero.units.parameters.record import Place, UnitParameter

__all__ = ["Contents", "Registry"]

Dict = dict[str, nn.Parameter | None]


@dataclass(frozen=True)
class Contents:
    """What a module had when it was looked at.

    Attributes:
        module: a weak reference, as a module holds its unit.
        parameters: the module's own dict.
        length: of that.
        nones: names in it that have no parameter.
        children: addresses of the modules directly below.
    """

    module: weakref.ref[nn.Module]
    parameters: Dict
    length: int
    nones: tuple[str, ...]
    children: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Contents:
        own: Dict = module._parameters
        nones = tuple(name for name, one in own.items() if one is None)
        return cls(weakref.ref(module), own, len(own), nones, _addresses(module))

    def are_there(self) -> bool:
        """Whether the module has as many parameters, and the same modules below."""
        module = self.module()
        if module is None or module._parameters is not self.parameters:
            return False
        if len(self.parameters) != self.length or _addresses(module) != self.children:
            return False
        return not self.nones or all(self.parameters.get(name) is None for name in self.nones)


class Registry:
    """Where the modules of a unit have which parameters.

    Args:
        contents: of all modules.
        places: where they have parameters, with each one's forms.
    """

    def __init__(
        self, contents: Iterable[Contents], places: Sequence[tuple[Place, UnitParameter]]
    ) -> None:
        self._contents = list(contents)
        dicts = {id(one.module()): one.parameters for one in self._contents}
        self._owns: list[Dict] = []
        self._names: list[str] = []
        self._wholes: list[nn.Parameter] = []
        self._sharded: list[nn.Parameter] = []
        self._locals: list[Tensor] = []
        self._odd: list[tuple[Place, UnitParameter]] = []  # that no dict alone tells
        for place, one in places:
            module = place.module()
            own = None if module is None else dicts.get(id(module))
            if own is None or place.sets_itself():
                self._odd.append((place, one))
                continue
            self._owns.append(own)
            self._names.append(place.name)
            self._wholes.append(one.whole)
            self._sharded.append(one.sharded)
            self._locals.append(one.local)

    def is_current(self) -> bool:
        """Whether all modules have what they had."""
        from dreamcomm import _C

        if not _C.are_registered(
            self._owns, self._names, self._wholes, self._sharded, self._locals
        ):
            return False
        for place, one in self._odd:
            if not one.is_current(place.registered()):
                return False
        return all(known.are_there() for known in self._contents)

    def show_whole(self) -> None:
        """Registers whole parameters. What a script has put there instead of a DTensor stays."""
        self._show(self._sharded, self._wholes)
        for place, one in self._odd:
            _swap(place, one.sharded, one.whole)

    def show_sharded(self) -> None:
        """Registers the DTensors. What a script has put there instead of a parameter stays."""
        self._show(self._wholes, self._sharded)
        for place, one in self._odd:
            _swap(place, one.whole, one.sharded)

    def _show(self, before: list[nn.Parameter], after: list[nn.Parameter]) -> None:
        from dreamcomm import _C

        _C.register_instead(self._owns, self._names, before, after)


def _swap(place: Place, before: nn.Parameter, after: nn.Parameter) -> None:
    """Scripts freeze what is registered."""
    if place.swap(before, after) and before.requires_grad is not after.requires_grad:
        after.requires_grad_(before.requires_grad)


def _addresses(module: nn.Module) -> tuple[int, ...]:
    return tuple(map(id, module._modules.values())) if module._modules else ()
