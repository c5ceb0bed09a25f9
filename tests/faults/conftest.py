"""What tests of the matrix find is kept for its table."""

from __future__ import annotations

import pytest

from faults.report import Report
from faults.table import REPORT


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return pytestconfig.stash.setdefault(REPORT, Report())
