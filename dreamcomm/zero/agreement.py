"""What has to be equal on all ranks in a step, as they step rows of the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dreamcomm.ranks.agree import first_difference, gather_objects
from dreamcomm.zero.engine import WHAT

__all__ = ["Agreement", "check_facts"]


class Agreement:
    """This rank's options, and what else ranks compare: facts by their names.

    Ranks compare a digest. It is made anew only where a fact has changed.

    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ties: list[list[int]] = []
        self._loads = 0
        self._seen: list[Any] = []
        self._digest = 0

    def compare(self, names: Iterable[str], ties: Iterable[Sequence[int]]) -> None:
        """Says what is compared from now on.

        Args:
            names: of the options that the optimizer's class has.
            ties: the numbers of parameters that have one memory.
        """
        self._names = tuple(names)
        self._ties = [list(numbers) for numbers in ties if len(numbers) > 1]
        self._seen = []

    def note_load(self) -> None:
        """A state was loaded."""
        self._loads += 1

    def digest(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """64 bits of all facts.

        Raises:
            ValueError: a group lacks an option.
        """
        seen = [[_stamp(group.get(name)) for name in self._names] for group in groups]
        seen.append([self._loads])
        if seen != self._seen:
            text = repr(self.facts(groups)).encode()
            self._digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
            self._seen = seen
        return self._digest

    def facts(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Values by the names that errors use."""
        found = {}
        for number, group in enumerate(groups):
            size = len(group["params"])
            found[f"the number of parameters of group {number}"] = str(size)
            for name in self._names:
                if name not in group:
                    raise ValueError(
                        f"{WHAT}: parameter group {number} has no option {name!r}: set it in "
                        f"param_groups[{number}]"
                    )
                found[f"option {name!r} of parameter group {number}"] = _text(group[name])
        found["the number of states loaded"] = str(self._loads)
        found["the list of parameters that share memory"] = str(self._ties)
        return found


def check_facts(group: dist.ProcessGroup, mine: Mapping[str, str]) -> None:
    """Raises on every rank, with the first fact that differs. Collective."""
    found = first_difference(gather_objects(group, mine))
    if found is not None:
        raise RuntimeError(
            f"rank {dist.get_rank(group)}: {WHAT}.step(): {found}. All ranks step rows of the same "
            "parameters: set options and load states on all of them alike, as by a loss that is "
            "averaged over the ranks. Nothing was stepped"
        )


def _stamp(value: Any) -> Any:
    """Equal where a value has not changed, without waiting for a GPU."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else (value.data_ptr(), value._version)
    return tuple(value) if isinstance(value, list) else value


def _text(value: Any) -> str:
    """Equal for equal values: 1 and 1.0, a list and a tuple."""
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()}, {value.dtype})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, (int, float)):
        return repr(float(value))
    return type(value).__name__  # an object has another address on each rank
