"""Collects what came of each test: passed, failed or skipped, and why."""

from __future__ import annotations

import re
import time
import unittest
from typing import Any, TypedDict


class Outcome(TypedDict):
    result: str  # passed, failed, skipped
    seconds: float
    why: str  # one line


class Outcomes(unittest.TestResult):
    def __init__(self, verbose: bool, show_errors: bool) -> None:
        super().__init__()
        self.verbose = verbose
        self.show_errors = show_errors
        self.by_name: dict[str, Outcome] = {}
        self._started = time.monotonic()

    def count(self, result: str) -> int:
        return sum(outcome["result"] == result for outcome in self.by_name.values())

    def closing_line(self) -> str:
        return ", ".join(f"{self.count(x)} {x}" for x in ("passed", "failed", "skipped"))

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "failed", self._trace(err, test))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "failed", self._trace(err, test))

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "passed", "failed as the suite expects")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "failed", "the suite expects this test to fail")

    def _trace(self, err: Any, test: unittest.TestCase) -> str:
        return str(self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def _note(self, test: unittest.TestCase, result: str, why: str = "") -> None:
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self._started, 2)
        line = telling_line(why)
        self.by_name[name] = {"result": result, "seconds": seconds, "why": line}
        if self.verbose:
            print(f"{result:8s}{seconds:7.2f} s  {name}  {line}", flush=True)
        if self.show_errors and result == "failed":
            print(why, flush=True)


def telling_line(why: str) -> str:
    """The line of a traceback that says most, cut to a readable length."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    if len(lines) < 2:
        return (lines or [""])[0][:300]
    errors = [x for x in lines if re.match(r"^[\w.]*(Error|Exception|Warning)\b", x)]
    # The parent's own "exited with error code" hides what the rank said.
    telling = [x for x in errors if "exited with error code" not in x] or errors or lines
    return telling[-1][:300]
