"""One copy of the parameters on each host, of which its ranks own a part.

    hosts a, b of two ranks each     rows 0 1 | 2 3
    closed      rank 0 steps row 0, 1 row 1, 2 row 2, 3 row 3      each in its host's copy
    opening     0 and 2 swap rows 0 and 2; 1 and 3 rows 1 and 3    each into its host's copy
    open        all ranks read all rows of their host's copy

INVARIANT: one rank writes a row of another host. It does so after all ranks have entered an
opening, when none reads. All ranks wait for each other once more before any reads.

So a host gets each row of the others once an opening, whatever its number of ranks and of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dreamcomm._torch.groups import group_like
from dreamcomm.zero.units.forms.memory import DIRECT_BYTES, bytes_each, is_gathered
from dreamcomm.zero.units.forms.shared import Shared
from dreamcomm.zero.units.parameters.placed import Placed, Source
from dreamcomm.zero.units.parameters.record import UnitParameter
from dreamcomm.zero.units.parameters.region import any_on_ranks, place
from dreamcomm.zero.units.window import WindowError

if TYPE_CHECKING:
    from dreamcomm._C import Region, UnitGather
    from dreamcomm.zero.units.unit import Unit

__all__ = ["Hosts", "even_hosts"]


def even_hosts(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether several hosts have the same number of ranks, more than one: they can fill a copy."""
    counts = {len(one) for one in hosts}
    return len(hosts) > 1 and len(counts) == 1 and counts != {1}


class Hosts(Shared):
    """The ranks are processes of several hosts, as many on each.

    Args:
        group: all ranks.
        hosts: the ranks of each host, in order.
    """

    fills = True

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> None:
        super().__init__(group, "the ranks are on several hosts")
        self.copies = len(hosts)
        self._hosts = [sorted(one) for one in hosts]
        rank = group.rank()
        (mine,) = (one for one in self._hosts if rank in one)
        self._across = [one[mine.index(rank)] for one in self._hosts]  # that this rank swaps with
        self._group: dist.ProcessGroup | None = None
        self._records: list[UnitParameter] = []
        self._gathers: list[tuple[UnitGather, Tensor, list[Tensor]]] = []

    def place(self, sources: Sequence[Source]) -> list[Placed]:
        return place(sources, self.group, self._hosts)

    def described(self) -> str:
        return f"one copy of the parameters on each of {len(self._hosts)} hosts"

    def lay_out(self, units: Sequence[Unit], records: Sequence[UnitParameter]) -> None:
        super().lay_out(units, records)
        self._records = [one for one in records if is_gathered(one)]
        self._gathers = []

    @torch.inference_mode(False)  # whose tensors are of no use later
    @torch.no_grad()
    def fill(self) -> None:
        if not self._gathers and self._records:
            self._make_gathers()
        try:
            for gather, block, rows in self._gathers:
                gather.start(block, rows, 0)
            for gather, _, _ in self._gathers:
                gather.wait()
        except RuntimeError as error:
            raise WindowError(
                f"fully_shard: rank {self.group.rank()} of {self.group.size()}: rows of other "
                f"hosts could not be brought in: {error}"
            ) from error
        any_on_ranks(self.group, False)  # all rows are there

    def reset(self) -> None:
        for gather, _, _ in self._gathers:
            gather.drop()
        self._gathers, self._group = [], None

    def _make_gathers(self) -> None:
        """One for each region; made by the first opening of all ranks, as groups are."""
        if self._group is None:
            self._group = group_like(self.group, self._across, desc="hosts of fully_shard")
        regions: dict[int, tuple[Region, list[UnitParameter]]] = {}
        for one in self._records:
            assert one.region is not None
            regions.setdefault(id(one.region), (one.region, []))[1].append(one)
        for region, records in regions.values():
            self._gathers.append(self._gather_of(region, records))

    def _gather_of(
        self, region: Region, records: Sequence[UnitParameter]
    ) -> tuple[UnitGather, Tensor, list[Tensor]]:
        from dreamcomm import _C

        assert self._group is not None
        world = self.group.size()
        block = region.tensor(0, [region.bytes], [1], torch.uint8, True)
        begin = region.tensor(0, [region.bytes], [1], torch.uint8, False).data_ptr()
        places = []
        for one in records:
            whole = one.whole.detach()
            each = bytes_each(tuple(whole.shape), world, whole.dtype.itemsize)
            is_even = each * world == whole.nbytes  # else the last owner's place would end later
            direct = is_even and each >= DIRECT_BYTES
            places.append((whole.data_ptr() - begin, whole.nbytes, each, direct))
        gather = _C.UnitGather(self._group, 0, places, self._across)
        return gather, block, [one.sent for one in records]
