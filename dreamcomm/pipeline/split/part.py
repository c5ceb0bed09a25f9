"""What a pipeline runs on one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["StagePart"]


@dataclass
class StagePart:
    """One of the parts that a module was split into. It calls the module's own submodules.

    Attributes:
        number: 0 for the part that gets the user's arguments.
        units: modules that are never cut, by their names in the whole module, in order of use. A
            module that is used under two names is there twice.
        tensors: parameters and buffers that the part uses outside its units, by their names in the
            whole module.
        forward: what ``run`` calls.
        accepts: what ``takes`` calls.
    """

    number: int
    units: dict[str, nn.Module]
    forward: Callable[[Any, dict[str, Any]], Any] = field(repr=False)
    accepts: Callable[[str], bool] = field(repr=False)
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def run(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the part.

        Args:
            inputs: for part 0 the tuple of the user's positional arguments, for another one exactly
                what the part before returned.
            kwargs: the user's keyword arguments; those that ``takes`` denies may not be in it.

        Returns:
            What the next part takes, or the whole module's output. A value that a part only passes
            on is the same object as in its inputs.
        """
        return self.forward(inputs, kwargs)

    def takes(self, name: str) -> bool:
        """Whether ``run`` uses the user's keyword argument of this name."""
        return self.accepts(name)
