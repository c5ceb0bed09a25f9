"""Half a minute of random collectives, in ranks that are killed, stopped and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.plan import KINDS
from endurance.report import Figures
from endurance.supervisor import Supervisor

pytestmark = pytest.mark.beyond_gloo("gloo names no rank")

SECONDS = 20.0  # and some more, for the last episode and for processes to start and to end
LONG_SECONDS = 1200.0
SEED = 1
SPANNING = 0.2  # of the episodes


def test_everything_is_right_whatever_befalls_the_ranks(
    tmp_path: Path, soak: bool, slack: float
) -> None:
    figures = Figures()
    supervisor = Supervisor(SEED, tmp_path, figures, SPANNING, slack)
    supervisor.run(LONG_SECONDS if soak else SECONDS)
    for _ in range(20):  # where the machine is busy, until it has seen everything
        if has_seen_everything(figures) or not figures.is_clean:
            break
        supervisor.run(SECONDS / 2)
    print(figures)
    assert figures.is_clean, str(figures)
    assert has_seen_everything(figures), str(figures)


def has_seen_everything(figures: Figures) -> bool:
    return set(figures.calls) == set(KINDS) and figures.killed > 0 and figures.begun_anew > 0
