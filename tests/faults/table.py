"""Prints the matrix's table when the tests are over. Hooks, for the conftest of all tests: where
several processes run them the first one, which prints, runs none."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from faults.report import Report

REPORT = pytest.StashKey[Report]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each of several processes tells the first what it has found."""
    found = session.config.stash.get(REPORT, None)
    if found and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["faults"] = pickle.dumps(found.lines)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    lines = getattr(node, "workeroutput", {}).get("faults")
    if lines:
        node.config.stash.setdefault(REPORT, Report()).lines.extend(pickle.loads(lines))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = terminalreporter.config.stash.get(REPORT, None)
    if found and found.lines:
        terminalreporter.write_line(str(found))
