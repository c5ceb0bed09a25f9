"""The doctor's check of the ways to train on several cores: words, errors, and torch afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamcomm import _C, launch
from dreamcomm.launch import RankError
from dreamcomm.launch.rank_process import Failure
from dreamcomm.tools.doctor import Severity, parallelism
from dreamcomm.tools.doctor.parallelism import ONE_THREAD, RANKS, REPLICAS, THREADS

SECONDS = {
    "a model": {ONE_THREAD: 0.028, THREADS: 0.020, REPLICAS: 0.035, RANKS: 0.0205},
    "another": {ONE_THREAD: 0.010, THREADS: 0.012, REPLICAS: 0.020, RANKS: 0.0125},
}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_C, "usable_cpus", lambda: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def fail(error: Exception) -> Any:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


def test_each_model_has_its_speeds_and_its_best_ways() -> None:
    assert parallelism.describe(SECONDS, 2) == (
        "training with 2 cores measured, as multiples of the speed of one thread: "
        "a model: intra-op threads 1.4 x, DataParallel 0.8 x, ranks 1.4 x, "
        "best intra-op threads and ranks; "
        "another: intra-op threads 0.8 x, DataParallel 0.5 x, ranks 0.8 x, best one thread; "
        "ranks were measured in processes of their own, after the others"
    )


@pytest.mark.usefixtures("two_cores")
def test_what_is_measured_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelism, "measure", lambda _: SECONDS)
    monkeypatch.setattr(parallelism, "seconds_of_others", lambda: 0.0)
    found = parallelism.parallelism()
    assert (found.about, found.state) == ("parallelism", Severity.FINE)
    assert found.found == "2 cores, torch uses 2 threads"
    assert found.meaning == parallelism.describe(SECONDS, 2)


def test_ways_have_at_most_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "usable_cpus", lambda: 64)
    monkeypatch.setattr(parallelism, "measure", lambda cores: {f"on {cores}": SECONDS["a model"]})
    found = parallelism.parallelism()
    assert ": on 4: " in found.meaning
    assert found.found.startswith("64 cores")
    assert found.meaning.startswith("training with 4 cores measured")


@pytest.mark.usefixtures("two_cores")
def test_other_load_makes_the_numbers_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5.0, 1e6])
    monkeypatch.setattr(parallelism, "seconds_of_others", lambda: next(used))
    monkeypatch.setattr(parallelism, "measure", lambda _: SECONDS)
    found = parallelism.parallelism()
    assert found.meaning.startswith(parallelism.describe(SECONDS, 2) + "; meanwhile other")
    assert "these numbers are doubtful" in found.meaning


def test_the_load_of_this_process_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "cpu 9 9 9 9 9 9 9 9\ncpu0 100 0 200 7 7 0 0 300\ncpu1 400 0 0 7 7 0 0 0\nintr 1\n"
    monkeypatch.setattr(Path, "read_text", lambda _: stat)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(os, "times", lambda: (1.0, 0.5, 1.0, 0.5, 99.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert parallelism.seconds_of_others() == 3.0
    monkeypatch.setattr(Path, "read_text", fail(PermissionError("hidden")))
    assert parallelism.seconds_of_others() == 0.0


def test_with_one_core_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "usable_cpus", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(parallelism, "measure", fail(AssertionError("measured")))
    found = parallelism.parallelism()
    assert found.state is Severity.FINE
    assert found.found == "1 core, torch uses 1 thread"
    assert found.meaning.startswith("nothing was measured")


def test_more_threads_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "usable_cpus", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(parallelism, "measure", lambda _: SECONDS)
    found = parallelism.parallelism()
    assert found.state is Severity.NOTE
    assert found.found == "2 cores, torch uses 8 threads"
    assert "OMP_NUM_THREADS=2 or call torch.set_num_threads(2); training with" in found.meaning


@pytest.mark.usefixtures("two_cores")
def test_an_error_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelism, "in_this_process", fail(MemoryError("no more")))
    found = parallelism.parallelism()
    assert found.state is Severity.NOTE
    assert found.meaning.endswith("not measured: MemoryError: no more")


@pytest.mark.usefixtures("two_cores")
def test_a_rank_that_fails_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'Traceback (most recent call last):\n  File "a", line 1\n    a()\nValueError: two\n'
    monkeypatch.setattr(parallelism, "in_this_process", lambda *_: {})
    monkeypatch.setattr(launch, "spawn", fail(RankError(Failure(1, 0.0, traceback=text))))
    found = parallelism.parallelism()
    assert found.state is Severity.NOTE
    assert found.meaning.endswith("not measured: rank 1 raised ValueError: two")


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("failing", [False, True])
def test_torch_is_as_before(monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    monkeypatch.setattr(parallelism, "TURNS", 1)
    monkeypatch.setattr(parallelism, "RANK_TURNS", 1)
    monkeypatch.setattr(parallelism, "in_ranks", lambda _: dict.fromkeys(parallelism.MODELS, 1.0))
    if failing:
        monkeypatch.setattr(parallelism, "median", fail(ArithmeticError("no middle")))
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    with torch.no_grad():
        found = parallelism.parallelism()
        assert not torch.is_grad_enabled()
    assert ("not measured: ArithmeticError" in found.meaning) == failing
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), numbers)


def test_ranks_train_both_models() -> None:
    times = parallelism.in_ranks(2)
    assert list(times) == list(parallelism.MODELS)
    assert min(times.values()) > 0
