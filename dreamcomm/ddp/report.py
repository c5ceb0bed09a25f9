"""What a wrapped module says of its buckets and of its latest step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dreamcomm.buckets.plan import Plan

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """``str(report)`` is for people.

    Attributes:
        plan: the buckets.
        passes: backward passes that have reduced.
        backward_seconds: of the latest: from the pass's begin to its last gradient.
        exposed_seconds: what it then waited for collectives: communication that is not hidden.
        nbytes: bytes of gradients that a rank reduces in a step.
        copied_nbytes: of those, bytes that were copied into a bucket before; the others were
            reduced where autograd had made them.
    """

    plan: Plan
    passes: int
    backward_seconds: float
    exposed_seconds: float
    nbytes: int
    copied_nbytes: int

    @classmethod
    def of(cls, plan: Plan, found: Mapping[str, Any]) -> Report:
        return cls(
            plan,
            found["passes"],
            found["backward_seconds"],
            found["exposed_seconds"],
            found["bytes"],
            found["copied"],
        )

    def __str__(self) -> str:
        if self.passes == 0:
            return f"{self.plan}\nno backward pass has reduced yet"
        return (
            f"{self.plan}\n"
            f"{self.passes} backward pass{'es have' if self.passes > 1 else ' has'} reduced; the "
            "latest took "
            f"{1e3 * self.backward_seconds:.1f} ms, and {1e3 * self.exposed_seconds:.1f} ms more "
            "until all gradients were reduced (exposed communication).\n"
            f"A rank reduces {self.nbytes:,d} bytes a step; {self.copied_nbytes:,d} of them are "
            "copied into buckets, the others are reduced where autograd makes them."
        )
