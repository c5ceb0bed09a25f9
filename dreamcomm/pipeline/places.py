"""Notices that a module which a pipeline runs was replaced."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["Places"]


class Places:
    """Where a rank's units were when the pipeline was made.

    A pipeline goes on to run, or to list the parameters of, a unit that was replaced there. Modules
    inside of units may be replaced, as units are called as they are.

    Args:
        roots: modules that have the units under their names.
        names: of the units.
    """

    def __init__(self, roots: Iterable[nn.Module], names: Iterable[str]) -> None:
        known = list(names)
        self._places: dict[tuple[int, str], tuple[nn.Module, str, nn.Module | None]] = {}
        for root in roots:
            for name in known:
                self._add(root, name)

    def _add(self, root: nn.Module, name: str) -> None:
        """Notes the modules on the path from a root to a unit."""
        here = root
        for step in name.split("."):
            child = here._modules[step]
            self._places[id(here), step] = here, name, child
            assert child is not None
            here = child

    def check(self) -> None:
        """Raises RuntimeError where another module is in the place of one."""
        for (_, step), (parent, name, child) in self._places.items():
            if parent._modules.get(step) is not child:
                raise RuntimeError(
                    f"the module {name!r}, or one that it is in, was replaced after the Pipeline "
                    "was made, which runs the one before: make a new Pipeline. Modules inside of "
                    f"{name!r} may be replaced"
                )
