"""JAX's arrays: inputs without a copy, results of JAX, and never written."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from dreamcomm.arrays.communicator import Communicator
from helpers.pool import Pool

pytest.importorskip("jax")
pytestmark = pytest.mark.beyond_gloo("calls dreamcomm's communicator")


def each_verb() -> None:
    numbers: Any = importlib.import_module("jax.numpy")
    comm = Communicator.from_group()
    mine = numbers.arange(4.0) * (comm.rank + 1)
    before = np.array(mine)
    total = comm.all_reduce(mine)
    assert type(total) is type(mine)
    assert np.array_equal(total, np.arange(4.0) * 3)
    assert np.array_equal(comm.all_gather(mine)[:4], np.arange(4.0))
    assert np.array_equal(comm.broadcast(mine, 1), np.arange(4.0) * 2)
    assert np.array_equal(comm.reduce_scatter(mine), np.arange(4.0)[2 * comm.rank :][:2] * 3)
    with pytest.raises(ValueError, match="out: arrays of jaxlib never change"):
        comm.all_reduce(mine, out=mine)
    mean = comm.average({"w": mine, "b": [numbers.ones(2) * comm.rank, None]})
    assert np.array_equal(mean["w"], np.arange(4.0) * 1.5)
    assert np.array_equal(mean["b"][0], [0.5, 0.5])
    halves = numbers.arange(4, dtype=numbers.bfloat16)
    assert comm.all_reduce(halves).dtype == numbers.bfloat16
    assert np.array_equal(mine, before)


def unready() -> None:
    """JAX computes an array after its call has returned."""
    jax: Any = importlib.import_module("jax")
    comm = Communicator.from_group()

    def slow(matrix: Any) -> Any:
        return jax.lax.fori_loop(0, 20, lambda _, one: jax.numpy.tanh(one @ matrix), matrix)

    compiled = jax.jit(slow)
    given = [jax.numpy.full((300, 300), 0.001 * (rank + 1)) for rank in range(2)]
    total = comm.all_reduce(compiled(given[comm.rank]))
    assert np.array_equal(total, np.asarray(compiled(given[0])) + np.asarray(compiled(given[1])))


def test_each_verb(pool: Pool) -> None:
    pool.run(each_verb)


def test_an_array_that_is_not_computed_yet(pool: Pool) -> None:
    pool.run(unready)
