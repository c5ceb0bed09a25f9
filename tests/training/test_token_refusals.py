"""reduce="tokens": a missing count, a second one, and uncleared gradients are errors everywhere."""

from __future__ import annotations

import pytest

from helpers.pool import Pool
from training.token_refusals import FAULTS, at_fault

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")

NAMES = ["ddp", "replicate", "zero1", "zero2", "ddp-zero1", "sharded", "gathered", "hybrid"]
WORDS = {
    "missing": "ran a backward pass without count(n)",
    "twice": "called count(n) several times",
    "missing under no_sync()": "ran a backward pass without count(n)",
    "uncleared": "adds to gradients of an earlier reduction",
}


def check(pool: Pool, name: str, fault: str, world: int, **how: object) -> None:
    for text in pool.run(at_fault, name, fault, world=world, **how):
        assert f"rank {world - 1} {WORDS[fault]}" in text


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_one_host(pool: Pool, name: str, fault: str) -> None:
    check(pool, name, fault, 4 if name == "hybrid" else 3)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_a_gloo_group(pool: Pool, name: str, world: int, fault: str) -> None:
    check(pool, name, fault, world, gloo=True)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_two_hosts(pool: Pool, name: str, fault: str) -> None:
    check(pool, name, fault, 4, env={"DREAMCOMM_HOSTS": "a,a,b,b"})
