"""Which ranks add up which parts of a bucket that is sent as int8."""

from __future__ import annotations

import pytest

from dreamcomm.ddp.int8_blocks import BLOCK
from dreamcomm.ddp.int8_parts import Parts

HOSTS = {
    "unknown": (3, []),
    "one": (4, [[0, 1, 2, 3]]),
    "alone": (3, [[0], [1], [2]]),
    "uneven": (3, [[0, 1], [2]]),
    "two of two": (4, [[0, 1], [2, 3]]),
    "in turn": (6, [[0, 2, 4], [1, 3, 5]]),
    "crossed": (4, [[0, 3], [1, 2]]),
    "three of two": (6, [[0, 1], [2, 3], [4, 5]]),
}


@pytest.mark.parametrize("numel", [0, 1, BLOCK, 5 * BLOCK + 1, 48 * BLOCK])
@pytest.mark.parametrize("name", HOSTS)
def test_each_element_is_averaged_by_one_rank(name: str, numel: int) -> None:
    world, hosts = HOSTS[name]
    parts = Parts(numel, world, hosts)
    found = [parts.averaged_by(rank) for rank in range(world)]
    assert sorted(element for one in found for element in one) == list(range(numel))
    for one in found:
        assert one.start % BLOCK == 0 or len(one) == 0
        assert len(one) <= parts.blocks * BLOCK
    if numel == 48 * BLOCK:  # which all numbers of ranks here divide
        assert {len(one) for one in found} == {numel // world}


@pytest.mark.parametrize("name", HOSTS)
def test_what_ranks_send_is_what_they_await(name: str) -> None:
    """All values reach the rank that averages them: each rank's once, or in one sum."""
    world, hosts = HOSTS[name]
    numel = 23 * BLOCK + 7
    parts = Parts(numel, world, hosts)
    counts = [[1] * numel for _ in range(world)]  # of ranks' values that a rank has in its sum
    elements = [range(numel)] * world
    for number in range(len(parts.stages(0))):
        stages = [parts.stages(rank)[number] for rank in range(world)]
        got = [[0] * numel for _ in range(world)]
        for rank, stage in enumerate(stages):
            assert list(stage.ranks) == sorted(stage.ranks)
            for index, to in enumerate(stage.ranks):
                assert (stages[to], elements[to]) == (stage, elements[rank])
                for element in stage.part(elements[rank], index):
                    got[to][element] += counts[rank][element]
        counts = got
        elements = [
            stage.part(elements[rank], stage.ranks.index(rank)) for rank, stage in enumerate(stages)
        ]
    for rank in range(world):
        assert elements[rank] == parts.averaged_by(rank)
        assert all(counts[rank][element] == world for element in elements[rank])


def test_hosts_exchange_what_their_ranks_have_added_up() -> None:
    stages = Parts(8 * BLOCK, 4, [[0, 1], [2, 3]]).stages(2)
    assert [(list(stage.ranks), stage.blocks) for stage in stages] == [([2, 3], 4), ([0, 2], 2)]
    for hosts in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], []):
        (stage,) = Parts(8 * BLOCK, 4, hosts).stages(2)
        assert (list(stage.ranks), stage.blocks) == ([0, 1, 2, 3], 2)
