"""reduce="tokens": the sum of all gradients over the sum of all counts, in all ways of training."""

from __future__ import annotations

import pytest
import torch

from helpers.pool import Pool
from training.token_means import WAYS, beside_one_process

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

CASES = ["uneven", "idle", "none", "weights", "large"]
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def check(pool: Pool, name: str, case: str, dtype: torch.dtype, world: int, **how: object) -> None:
    for (norms, weights), (expected, theirs) in pool.run(
        beside_one_process, name, case, dtype, world=world, **how
    ):
        assert norms == pytest.approx(expected, rel=max(1e-6, CLOSE[dtype]))  # they are float32
        for ours, one in zip(weights, theirs, strict=True):
            torch.testing.assert_close(ours, one, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", [one for one in WAYS if not one.startswith("hybrid")])
def test_uneven_counts_give_the_gradients_of_one_process(pool: Pool, name: str, world: int) -> None:
    check(pool, name, "uneven", torch.float64, world)


@pytest.mark.parametrize("case", CASES[1:])
@pytest.mark.parametrize("name", list(WAYS))
def test_any_counts_give_the_gradients_of_one_process(pool: Pool, name: str, case: str) -> None:
    check(pool, name, case, torch.float64, 4 if name.startswith("hybrid") else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(WAYS))
def test_narrower_types_are_close(pool: Pool, name: str, dtype: torch.dtype) -> None:
    check(pool, name, "weights", dtype, 4 if name.startswith("hybrid") else 2)


@pytest.mark.parametrize("name", list(WAYS))
def test_two_hosts(pool: Pool, name: str) -> None:
    check(pool, name, "uneven", torch.float64, 4, env={"DREAMCOMM_HOSTS": "a,a,b,b"})
