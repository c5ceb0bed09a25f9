"""How long tests take: kept in files, and what to begin with."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
KEPT = HERE / "times.tsv"  # in the repository: the tests that take long
LAST_RUN = HERE.parent / "build" / "test-times.tsv"  # every test of the last run
SHORT = 0.5  # seconds; below it a test is not kept


class Times:
    """A plugin. Files that take longest come first, so that no worker is left with one at the end.

    Writes the seconds of each test, slowest first, to build/test-times.tsv; with --keep-times
    those that take long to tests/times.tsv, too, by which the files are ordered.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        of_file = seconds_of_files()
        items.sort(key=lambda item: -of_file.get(file_of(item.nodeid), 0.0))  # stable

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput") or not self.seconds:
            return  # the process that started the workers hears all of them
        slowest = sorted(self.seconds.items(), key=lambda test: -test[1])
        LAST_RUN.parent.mkdir(exist_ok=True)
        write(LAST_RUN, slowest)
        if self.keep and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            write(KEPT, [test for test in slowest if test[1] >= SHORT])


def file_of(test: str) -> str:
    return test.split("::")[0]


def seconds_of_files() -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    if KEPT.exists():
        for line in KEPT.read_text().splitlines():
            taken, test = line.split("\t")
            seconds[file_of(test)] += float(taken)
    return seconds


def write(path: Path, times: list[tuple[str, float]]) -> None:
    path.write_text("".join(f"{seconds:.1f}\t{test}\n" for test, seconds in times))
