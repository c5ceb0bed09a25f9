"""The two small calls that a layer makes in a step, and what finds ranks in different ones.

INVARIANT (all ranks raise, or none): every rank sends its row whatever it has found wrong, and
reads what all have sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HEADER", "Kind", "LayerCalls"]

HEADER = 2  # numbers before a rank's statistics: the layer and the kind
SMALL = 1 << 20  # a layer's number in the backward call: sums of squares stay exact


class Kind(IntEnum):
    """What a rank's row says besides statistics.

    Attributes:
        PLAIN: the input needs no gradient, so there is no backward call.
        WITH_BACKWARD: there will be one.
        FAILED: the rank raises an error.
        NO_STEP: the rank has joined before its first step.
    """

    PLAIN = 1
    WITH_BACKWARD = 2
    FAILED = 3
    NO_STEP = 4


@dataclass(frozen=True)
class LayerCalls:
    """The calls of one layer.

    Attributes:
        name: of the layer; "" is none.
        who: the layer in errors.
        channels: of the layer.
        group: of its ranks; None: this rank alone, without calls.
    """

    name: str
    who: str
    channels: int
    group: dist.ProcessGroup | None

    @cached_property
    def number(self) -> int:
        """The layer's, from its name; 0 without one."""
        return zlib.crc32(self.name.encode()) if self.name else 0

    @cached_property
    def ranks(self) -> int:
        """How many send rows."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(
        self, kind: Kind, count: int, mean: Tensor | None = None, variance: Tensor | None = None
    ) -> Tensor:
        """The statistics of each rank's rows, by rank. Collective.

        Args:
            kind: of this rank's row.
            count: how many rows it has.
            mean: of each channel, float32 or float64 [channels]; None without rows.
            variance: the sum of squares over the number of rows, likewise.

        Returns:
            For :func:`dreamcomm._C.join_statistics`.

        Raises:
            RuntimeError: ranks are in different layers, or do not agree on the backward call; a
                rank has failed. On all ranks, except for one that has failed.
        """
        from dreamcomm import _C

        row = _C.statistics_row([self.number, kind], count, self.channels, mean, variance)
        if self.group is None:
            return row.unsqueeze(0)
        rows = self.gather_rows(row)
        heads = rows[:, :HEADER].tolist()
        if heads.count([self.number, kind]) < self.ranks and kind is not Kind.FAILED:
            self._check(heads)
        return rows

    def gather_rows(self, row: Tensor) -> Tensor:
        """All ranks' rows [ranks, numbers]: the forward call. Collective."""
        assert self.group is not None
        rows = row.new_empty(self.ranks * len(row))
        try:  # torch's functions around these two take longer than the calls
            self.group._allgather_base(rows, row).wait()
        except dist.DistBackendError as error:
            raise self._named(error, "forward") from error
        return rows.view(self.ranks, -1)

    def add_up(self, numbers: Tensor) -> None:
        """Adds all ranks' numbers up, in place: the backward call. Collective."""
        assert self.group is not None
        try:
            self.group.allreduce([numbers]).wait()
        except dist.DistBackendError as error:
            raise self._named(error, "backward") from error

    def _named(self, error: dist.DistBackendError, direction: str) -> dist.DistBackendError:
        return dist.DistBackendError(f"{self.who}, {direction} call: {error}")

    def add(self, sums: Tensor) -> Tensor:
        """The sums of all ranks. Collective.

        Args:
            sums: float64 [2 x channels].

        Raises:
            RuntimeError: ranks are in different layers. On all ranks.
        """
        if self.group is None:
            return sums
        number = self.number % SMALL
        sent = torch.cat([sums, sums.new_tensor([number, number * number])])
        self.add_up(sent)
        total, squares = map(int, sent[-2:].tolist())
        # Numbers whose variance is 0 are all equal.
        if self.ranks * squares != total * total:
            raise RuntimeError(
                f"{self.who}: this rank's backward pass is here, and another rank's in another "
                "layer: run the same layers in the same order on all ranks"
            )
        return sent[: sums.numel()]

    def _check(self, heads: Sequence[Sequence[float]]) -> None:
        kinds = [Kind(int(kind)) for _, kind in heads]
        for rank, kind in enumerate(kinds):
            if kind is Kind.FAILED:
                raise RuntimeError(f"{self.who}: rank {rank} has failed here; see its error")
            if kind is Kind.NO_STEP:
                raise RuntimeError(
                    f"{self.who}: rank {rank} has joined before its first step, and repeats the "
                    "calls of its last one: give each rank one batch at least"
                )
        others = [rank for rank, head in enumerate(heads) if head[0] != self.number]
        if others or any(head[0] != heads[0][0] for head in heads):
            raise RuntimeError(
                f"{self.who}: {_ranks(others)} in another layer: run the same layers in the same "
                "order on all ranks (under join(), a rank without data repeats its last step)"
            )
        with_backward = [rank for rank, kind in enumerate(kinds) if kind is Kind.WITH_BACKWARD]
        if with_backward and len(with_backward) < len(kinds):
            without = [rank for rank, kind in enumerate(kinds) if kind is Kind.PLAIN]
            raise RuntimeError(
                f"{self.who}: its input needs a gradient on {_ranks(with_backward, verb=False)}, "
                f"and none on {_ranks(without, verb=False)}: freeze the same parameters before it "
                "on all ranks, and use torch.no_grad() on all or none"
            )


def _ranks(ranks: Sequence[int], *, verb: bool = True) -> str:
    text = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
    return f"{text} {'are' if len(ranks) != 1 else 'is'}" if verb else text
