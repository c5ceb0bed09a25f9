"""Which ranks exchange which parts of a bucket, and which rank averages what.

On one host, or on hosts of one rank, there is one stage: N ranks divide the bucket into N parts.
On H hosts of L ranks each there are two, so that a host sends each element to other hosts once, and
not once for each of its ranks (as the hierarchical quantized reduce of ZeRO++, Wang et al. 2023)::

    hosts {0, 1} and {2, 3}     a bucket of 4 parts: a b c d
    stage 1, within hosts       ranks 0 and 2 add up a b, ranks 1 and 3 add up c d
    stage 2, between hosts      rank 0 adds up a, rank 2 b, rank 1 c, rank 3 d
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dreamcomm.ddp.int8_blocks import BLOCK, blocks_in


@dataclass(frozen=True)
class Stage:
    """An exchange of a part that some ranks have in common.

    Attributes:
        ranks: in ascending order; the k-th adds up the k-th part of it.
        blocks: of each such part, of which the last ones may be cut or empty.
    """

    ranks: Sequence[int]
    blocks: int

    def part(self, elements: range, index: int) -> range:
        """The elements that the rank of that index adds up."""
        begin = elements.start + index * self.blocks * BLOCK
        return range(min(begin, elements.stop), min(begin + self.blocks * BLOCK, elements.stop))


class Parts:
    """The stages of a bucket's exchange.

    Args:
        numel: elements of the bucket.
        world: number of ranks.
        hosts: the ranks of each host, or nothing if they are unknown. Hosts with different numbers
            of ranks count as unknown.
    """

    def __init__(self, numel: int, world: int, hosts: Sequence[Sequence[int]]) -> None:
        sizes = {len(ranks) for ranks in hosts}
        if len(hosts) < 2 or len(sizes) > 1 or sizes == {1}:
            hosts = [range(world)]
        self._whole = range(numel)
        self._hosts = [sorted(ranks) for ranks in hosts]
        # The ranks that add up the same part of the bucket, each for its host.
        self._rails = [sorted(ranks) for ranks in zip(*self._hosts, strict=True)]
        self._within = -(-blocks_in(self._whole) // len(self._rails))
        self.blocks = -(-self._within // len(self._hosts))  # that a rank averages
        self._averaged_by = {
            rank: self._part(rail, index)
            for rail, ranks in enumerate(self._rails)
            for index, rank in enumerate(ranks)
        }

    def stages(self, rank: int) -> list[Stage]:
        host = next(ranks for ranks in self._hosts if rank in ranks)
        stages = [Stage(host, self._within)]
        if len(self._hosts) > 1:
            stages.append(Stage(self._rails[host.index(rank)], self.blocks))
        return stages

    def averaged_by(self, rank: int) -> range:
        """The elements that a rank averages and sends to all."""
        return self._averaged_by[rank]

    def _part(self, rail: int, index: int) -> range:
        within = Stage((), self._within).part(self._whole, rail)
        return Stage((), self.blocks).part(within, index)
