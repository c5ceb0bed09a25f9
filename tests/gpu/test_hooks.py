"""The communication hooks on an accelerator's gradients: bits, order, buffers, residuals."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from helpers import device_hooks

pytest.importorskip("dreamcomm_test_device", reason="built by `make build`")

Run = Callable[..., None]
NAMES = list(device_hooks.SIXTEEN_BITS)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Calls a function in a process in which autograd knows the accelerator."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, initializer=device_hooks.install) as executor:

        def call(function: Any, *args: Any) -> None:
            executor.submit(function, *args).result(timeout=120)

        yield call


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_float32_in_rank_order(run: Run, name: str, registered: bool) -> None:
    run(device_hooks.as_the_reference, name, 2, registered)


@pytest.mark.parametrize("name", ["bf16", "fp16_feedback"])
def test_three_ranks(run: Run, name: str) -> None:
    run(device_hooks.as_the_reference, name, 3, True)


@pytest.mark.parametrize("world", [2, 3])
def test_the_average_and_its_norm(run: Run, world: int) -> None:
    run(device_hooks.average, world)


@pytest.mark.parametrize("name", ["average", "bf16"])
def test_a_nan_of_one_rank_is_noticed_on_all(run: Run, name: str) -> None:
    run(device_hooks.a_nan_is_noticed, name)


def test_who_averages(run: Run) -> None:
    run(device_hooks.who_averages)


@pytest.mark.parametrize("name", ["bf16", "fp16_feedback"])
def test_each_rank_divides_first_where_another_engine_adds(run: Run, name: str) -> None:
    run(device_hooks.divided_first, name, 2)


@pytest.mark.parametrize("name", ["average", "bf16_feedback"])
def test_the_host_waits_for_nothing(run: Run, name: str) -> None:
    run(device_hooks.the_host_waits_for_nothing, name)


def test_buffers_are_taken_again(run: Run) -> None:
    run(device_hooks.buffers_are_taken_again)


def test_a_buffer_is_written_again_behind_what_reads_it(run: Run) -> None:
    run(device_hooks.buffer_order)


def test_a_graph_keeps_no_buffers(run: Run) -> None:
    run(device_hooks.captured)


def test_a_pass_after_one_that_failed(run: Run) -> None:
    run(device_hooks.a_pass_that_failed)


@pytest.mark.parametrize("name", ["average", "bf16"])
def test_no_norm_of_what_failed_on_the_device(run: Run, name: str) -> None:
    run(device_hooks.a_call_that_failed, name)


def test_a_checkpoint_between_devices(run: Run) -> None:
    run(device_hooks.a_checkpoint_between_devices)


def test_a_device_without_kernels_is_refused(run: Run) -> None:
    run(device_hooks.refused)
