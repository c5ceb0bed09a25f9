"""The window of a tree of units: open, ranks read whole parameters; closed, owners write rows.

Parameters lie in one memory that all ranks of the host map (``parameters/region.py``)::

    rank 0   | step: writes its rows |    | forward, backward: reads all rows |    | step ...
    rank 1        | step |                | forward, backward |                    | step ...
                                      open                                    close

INVARIANT: no element is written while another rank may read it, and each read sees all writes
before the last opening.

Proof. Opening and closing are each one all_reduce of all ranks, which no rank leaves before every
rank has entered it, and whose flags are released and acquired. Windows alternate on all ranks
alike, as each call carries its kind, and the tree: ranks that differ raise before either goes on.
Let a rank write an element between its closing number k and its opening number k + 1. Any other
rank reads after its opening j and before its closing j + 1. If j <= k - 1 the read comes before
that rank enters closing k, so before any rank leaves it, so before the write. If j >= k + 1 the
read comes after that rank has left opening k + 1, so after the writer has entered it, so after the
write, and sees it. There is no j between.

Within rewrite() one rank writes the rows of all, between two meetings of the closed window: the
first ends all writes of owners before, the second comes before all later ones.

Both carry bits. At an opening: the rank's rows have changed since the closing. Then versions of
all parameters count up on all ranks, and autograd refuses a graph that was kept across the change,
as in one process. Or: the rank cannot open, for modules have other parameters by now, or some that
cannot be read. Then no rank does. At a closing: a parameter was written while the window was open.
All ranks raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch.distributed as dist

from dreamcomm.ranks.agree import first_difference, gather_objects
from dreamcomm.ranks.errors import Error

__all__ = ["Opening", "Window", "WindowError"]

KEY_BITS = 32
MOST_BITS = 3 + 2 * KEY_BITS  # all meetings are calls of one size
RESET_TRIES = 10_000  # each one ends a call that another rank has made: there are fewer in a pass


class WindowError(Error, RuntimeError):
    """The ranks do not use the parameters of a fully sharded module together."""


class Kind(Enum):
    """What the ranks do together."""

    OPEN = 0
    CLOSE = 1
    RESET = 2
    REWRITE = 3


@dataclass(frozen=True)
class Opening:
    """What ranks tell each other before they read.

    Attributes:
        changed: rows have, since the closing.
        differs: modules have other parameters than before; they are taken in first.
        refuses: parameters cannot be read.
    """

    changed: bool
    differs: bool = False
    refuses: bool = False


class Window:
    """The window of one tree, on one rank.

    Args:
        group: its ranks map the parameters.
        key: of the tree, the same on all ranks.
        name: of the tree's root, for errors.
    """

    def __init__(self, group: dist.ProcessGroup, key: int, name: str) -> None:
        self.group, self.key, self.name = group, key, name
        self.rank = group.rank()  # for errors, also when the group is destroyed
        self.is_open = False
        self.barriers = 0  # meetings of the ranks
        self._flags = {kind: _with_complement((key << 2) | kind.value) for kind in Kind}

    def open(self, opening: Opening, options: int = 0) -> Opening:
        """Waits until no rank writes. Collective. Stays closed where any rank cannot open.

        Args:
            opening: of this rank.
            options: 32 bits of those with which it has stepped.

        Returns:
            The facts that hold on any rank.

        Raises:
            WindowError: ranks have stepped with different options.
        """
        bits = [bool((options >> k) & 1) for k in range(KEY_BITS)]
        sent = [opening.changed, opening.differs, opening.refuses]
        found = self._meet(Kind.OPEN, [*sent, *bits, *(not one for one in bits)])
        options_found = found[len(sent) :]
        if any(
            a == b for a, b in zip(options_found[:KEY_BITS], options_found[KEY_BITS:], strict=True)
        ):
            raise WindowError(
                f"rank {self.rank}: fully_shard: the ranks have stepped rows of "
                f"{self.name} with different options, such as learning rates, or after loading "
                "states on some ranks alone: load, and set options, on all ranks alike, as by a "
                "loss that is averaged over the ranks. The last step was made"
            )
        everywhere = Opening(*found[: len(sent)])
        self.is_open = not (everywhere.differs or everywhere.refuses)
        return everywhere

    def close(self, *bits: bool) -> list[bool]:
        """Waits until no rank reads. Collective. Returns each bit, set if it is on any rank."""
        found = self._meet(Kind.CLOSE, bits)
        self.is_open = False
        return found

    def before_rewrite(self) -> None:
        """Waits until no owner writes its rows. Collective; the window is closed."""
        self._meet(Kind.REWRITE, [])

    def reset(self) -> None:
        """Closes after an error, whatever the other ranks do until they reset, too. Collective.

        The first rank here gets errors from the calls of ranks whose pass still runs. They get the
        same errors, which end that pass, and then reset, too.
        """
        for _ in range(RESET_TRIES):
            try:
                self._meet(Kind.RESET, [])
            except (WindowError, dist.DistBackendError) as error:
                if not _is_of_different_calls(error):
                    raise
            else:
                break
        self.is_open = False

    def _meet(self, kind: Kind, bits: Sequence[bool]) -> list[bool]:
        from dreamcomm import _C

        flags = self._flags[kind]
        spare = [False] * (MOST_BITS - len(bits))
        try:
            found = _C.any_of(self.group, [*flags, *bits, *spare])
        except dist.DistBackendError as error:
            raise type(error)(f"{self._words(kind)}: {error}") from None
        self.barriers += 1
        width = len(flags) // 2
        # A bit and its complement are both set on some rank only where codes differ.
        if any(a == b for a, b in zip(found[:width], found[width : 2 * width], strict=True)):
            self._refuse(kind)
        return list(found[2 * width : 2 * width + len(bits)])

    def _words(self, kind: Kind) -> str:
        what = {
            Kind.OPEN: "before its parameters are read",
            Kind.CLOSE: "after its parameters were read",
            Kind.RESET: "in reset_iter_state()",
            Kind.REWRITE: "in rewrite()",
        }[kind]
        size = self.group.size()
        return f"fully_shard: rank {self.rank} of {size} waits for all ranks of {self.name}, {what}"

    def _refuse(self, kind: Kind) -> None:
        call = {
            Kind.OPEN: "a forward pass or unshard()",
            Kind.CLOSE: "the end of a pass or a step",
            Kind.RESET: "reset_iter_state()",
            Kind.REWRITE: "rewrite()",
        }
        mine = {"module": self.name, "call": call[kind]}
        mine["number of the module"] = str(self.key)
        found = first_difference(gather_objects(self.group, mine))
        raise WindowError(
            f"rank {self.rank}: fully_shard: the ranks made different calls: "
            f"{found}. All ranks run the same forward and backward passes, steps and loads. After "
            "this error call reset_iter_state() on all ranks"
        )


def _with_complement(code: int) -> list[bool]:
    flags = [bool((code >> k) & 1) for k in range(KEY_BITS + 2)]
    return [*flags, *(not one for one in flags)]


def _is_of_different_calls(error: Exception) -> bool:
    return isinstance(error, WindowError) or "made different calls" in str(error)
