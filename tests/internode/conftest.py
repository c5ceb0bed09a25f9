"""Hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pool import Fresh
from internode.hosts import Hosts
from internode.network import Network, NoNetwork

MOST_HOSTS = 4

# Runs on both kinds of hosts also in short runs.
ALWAYS = "test_every_collective_has_the_documented_bits"


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(MOST_HOSTS) as made:
            yield made
    except NoNetwork as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def has_namespaces() -> bool:
    try:
        with Network(1):
            return True
    except NoNetwork:
        return False


@pytest.fixture(params=["virtual hosts", "network namespaces"])
def hosts(
    request: pytest.FixtureRequest, fresh: Fresh, tmp_path: Path, soak: bool, has_namespaces: bool
) -> Hosts:
    if request.param == "network namespaces":
        return Hosts(fresh, tmp_path, request.getfixturevalue("network"))
    if has_namespaces and not soak and request.node.originalname != ALWAYS:
        pytest.skip("only with --soak; network namespaces serve here")
    return Hosts(fresh, tmp_path, None)
