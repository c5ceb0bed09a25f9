"""A rank that waits long says so before it fails."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch
import torch.distributed as dist

from helpers.logs import Kept
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("Gloo does not warn")


def sleep_for(seconds: float) -> None:
    time.sleep(seconds)


def wait_for_rank_1(seconds: float) -> list[str]:
    kept = Kept()
    logging.getLogger("dreamcomm").addHandler(kept)
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        sleep_for(seconds)
    dist.broadcast(torch.ones(4), 1)
    logging.getLogger("dreamcomm").removeHandler(kept)
    return kept.texts


def test_a_late_rank_is_told_of_once_at_a_tenth_of_the_timeout(pool: Pool) -> None:
    waiting, late = pool.run(wait_for_rank_1, 3.5, group_timeout=30.0)
    assert late == []
    (text,) = waiting
    assert text.startswith("broadcast(4 x float32, root 1) on rank 0 of 2")
    assert "s of waiting for rank 1, which last called all_reduce as call" in text
    assert re.search(r"its main thread is at \S*test_warnings\.py:\d+ in sleep_for;", text), text
    assert text.endswith("its timeout is after 30.0 s")


def test_a_short_wait_is_not_worth_a_word(pool: Pool) -> None:
    assert pool.run(wait_for_rank_1, 0.4, group_timeout=5.0) == [[], []]
