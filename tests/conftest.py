"""Options and fixtures of all Python tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# For `helpers` and the modules beside the tests. The repository's root stays off the
# path: it holds the package's source without the compiled module.
sys.path.insert(0, str(Path(__file__).parent))

# A shell that runs the tests in the background has them, and all they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So has nohup, with the end of the terminal.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same choices on every machine, and nothing written into the user's cache.
os.environ.setdefault("DREAMCOMM_COSTS", "fixed")

# torch's TCPStore looks up the name of each address, 127.0.0.1's too, on both ends of a connection.
# A nameserver that drops some of many requests would hold ranks up for 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from faults.table import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown
from helpers.nursery import Nursery
from helpers.pool import Fresh, Pool
from helpers.times import Times

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown"]  # hooks

DEFAULT_BACKEND = "dreamcomm"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default=os.environ.get("DREAMCOMM_TEST_BACKEND", DEFAULT_BACKEND),
        help="backend under test; 'gloo' checks the tests themselves",
    )
    parser.addoption(
        "--soak", action="store_true", help="run all tests, and the random ones for many examples"
    )
    parser.addoption(
        "--keep-times",
        action="store_true",
        help="write the tests that take long to tests/times.tsv, by which files are ordered",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Four processes test at a time: threads of theirs would spin for one another.
    torch.set_num_threads(1)
    config.pluginmanager.register(Times(config.getoption("--keep-times")), "times")
    config.addinivalue_line("markers", "beyond_gloo(why): the stand-in backend gloo cannot do this")
    config.addinivalue_line(
        "markers", "long: for the long form alone, as others show nearly the same"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gloo = config.getoption("--backend") != DEFAULT_BACKEND
    for item in items:
        mark = item.get_closest_marker("beyond_gloo")
        if gloo and mark:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
        if item.get_closest_marker("long") and not config.getoption("--soak"):
            item.add_marker(pytest.mark.skip(reason="only with --soak"))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--backend"))


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def slack(soak: bool) -> float:
    """Seconds beyond what is promised, for a machine that is busy with something else: what a
    rank then hears by its timeout, or never, is told from that still. None in the long form."""
    return 0.0 if soak else 2.0


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts the processes of ranks."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool(
    backend: str, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    """Kept processes: for everything that leaves them alive."""
    kept = Pool(backend, tmp_path_factory.mktemp("pool"), nursery)
    yield kept
    kept.close()


@pytest.fixture
def fresh(backend: str, nursery: Nursery, tmp_path: Path) -> Iterator[Fresh]:
    """New processes: for tests that kill or end them, or count what they leave behind."""
    processes = Fresh(backend, tmp_path, nursery)
    yield processes
    processes.close()
