"""Prints the matrix's table when the tests are over."""

from __future__ import annotations

from typing import Any

import pytest

from faults.report import Report

REPORT = pytest.StashKey[Report]()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return pytestconfig.stash.setdefault(REPORT, Report())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = terminalreporter.config.stash.get(REPORT, None)
    if found and found.lines:
        terminalreporter.write_line(str(found))
