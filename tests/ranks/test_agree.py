"""An error of one rank is an error of all, and what differs between ranks is told by its name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dreamcomm.ranks.agree import (
    Failed,
    exchange,
    first_difference,
    gather_numbers,
    text_of,
)
from helpers.pool import Pool

CPU = torch.device("cpu")


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("none")


def told(one: Failed) -> Exception:
    return RuntimeError(f"rank {one.rank}: {one.kind}: {one.text}")


def exchanged(failing: set[int]) -> object:
    group, rank = dist.group.WORLD, dist.get_rank()

    def make() -> int:
        if rank in failing:
            raise Mute if rank == 2 else ValueError(f"no {rank}")
        return 10 * rank

    found: object
    try:
        found = exchange(group, make, told)
    except Exception as error:
        found = (type(error).__name__, text_of(error))
    assert gather_numbers(group, [rank, -rank], CPU) == [[0, 0], [1, -1], [2, -2]]
    return found


@pytest.mark.parametrize("failing", [(), (1,), (2,), (1, 2), (0, 1, 2)])
def test_what_one_rank_raises_all_raise(pool: Pool, failing: tuple[int, ...]) -> None:
    found = pool.run(exchanged, set(failing), world=3)
    own = {0: "no 0", 1: "no 1", 2: "(its text cannot be made: KeyError)"}
    kinds = {0: "ValueError", 1: "ValueError", 2: "Mute"}
    for rank, one in enumerate(found):
        if not failing:
            assert one == [0, 10, 20]
        elif rank in failing:
            assert one == (kinds[rank], own[rank])
        else:
            first = failing[0]
            assert one == ("RuntimeError", f"rank {first}: {kinds[first]}: {own[first]}")


def test_equal_facts_have_no_difference() -> None:
    assert first_difference([{"a": "1", "b": "2"}] * 3) is None


def test_a_difference_names_ranks_by_their_values() -> None:
    found = first_difference(
        [{"same": "1", "a": "2"}, {"same": "1", "a": "3"}, {"a": "2"} | {"same": "1"}]
    )
    assert str(found) == "a is 2 on ranks 0, 2, and 3 on rank 1"
    assert found is not None
    assert found.between_two() == "a is 3 on rank 1, and 2 on rank 0"
    assert not found.is_of_some


def test_a_fact_of_some_ranks_is_missing_on_others() -> None:
    found = first_difference([{}, {"a": "3"}, {}])
    assert found is not None
    assert str(found) == "a is missing on ranks 0, 2, and 3 on rank 1"
    assert found.is_of_some
