"""Our errors have one base class, and stay what they were besides."""

from __future__ import annotations

import pickle
from importlib import import_module

import pytest

import dreamcomm
from dreamcomm.ranks.errors import RankLost

PUBLIC = (
    "dreamcomm",
    "dreamcomm.gossip",
    "dreamcomm.local_sgd",
    "dreamcomm.pipeline",
    "dreamcomm.pipeline.schedule",
    "dreamcomm.server",
)
ERRORS = sorted(
    {
        named
        for module in map(import_module, PUBLIC)
        for named in (getattr(module, name) for name in module.__all__)
        if isinstance(named, type) and issubclass(named, Exception)
    },
    key=lambda error: error.__name__,
)


def test_all_public_errors_are_found() -> None:
    assert {"Error", "GossipError", "PipelineError", "RankError", "ServerError"} <= {
        error.__name__ for error in ERRORS
    }


@pytest.mark.parametrize("error", ERRORS)
def test_a_public_error_is_ours_and_one_that_python_has(error: type[Exception]) -> None:
    assert issubclass(error, dreamcomm.Error)
    if error is not dreamcomm.Error:
        assert issubclass(error, RuntimeError | ValueError)


def test_a_lost_rank_is_told_by_its_number() -> None:
    lost = pickle.loads(pickle.dumps(RankLost(3)))
    assert isinstance(lost, dreamcomm.Error)
    assert lost.rank == 3
    assert str(lost) == "rank 3 has ended, and the group with it"
