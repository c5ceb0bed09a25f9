"""Means of pseudo-gradients that are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Flight"]


@dataclass
class Flight:
    """A fragment's mean pseudo-gradient, on its way.

    Attributes:
        fragment: its number.
        due: the step after which it is applied.
        flats: by dtype.
        works: of the collectives; empty: they are over.
    """

    fragment: int
    due: int
    flats: list[Tensor]
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def saved(self) -> dict[str, Any]:
        """What a state_dict has of it, when it is here."""
        self.wait()
        means = [one.clone() for one in self.flats]
        return {"fragment": self.fragment, "due": self.due, "means": means}
