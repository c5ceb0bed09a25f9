"""The result of a check of the doctor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

__all__ = ["GLOO_INSTEAD", "Finding", "Severity"]

GLOO_INSTEAD = "ranks cannot share memory: groups go to torch's Gloo, which is slower"


class Severity(Enum):
    """How much a finding matters."""

    FINE = "fine"
    NOTE = "note"  # works; good to know
    FALLS_BACK = "falls back"  # something slower serves instead
    BROKEN = "broken"  # dreamcomm does not work here


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        about: the subject, in a word or two.
        state: how much it matters.
        found: the observation.
        meaning: the consequence and what to do; empty if all is fine.
    """

    about: str
    state: Severity
    found: str
    meaning: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self) | {"state": self.state.value}
