"""Hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pool import Fresh
from spanning.hosts import Hosts
from spanning.network import Network, NoNetwork

MOST_HOSTS = 4


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(MOST_HOSTS) as made:
            yield made
    except NoNetwork as why:
        pytest.skip(str(why))


@pytest.fixture(params=["virtual hosts", "network namespaces"])
def hosts(request: pytest.FixtureRequest, fresh: Fresh, tmp_path: Path) -> Hosts:
    real = request.param == "network namespaces"
    return Hosts(fresh, tmp_path, request.getfixturevalue("network") if real else None)
