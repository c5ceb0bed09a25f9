"""Hosts for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pool import Fresh
from internode.hosts import Hosts
from internode.network import Network, NoNetwork

MOST_HOSTS = 4

# The short form has hosts of both kinds here, and real ones where a link has to be cut. Elsewhere
# virtual ones stand for both. They start sooner, and their ranks bootstrap in the same way.
ON_BOTH = "test_every_collective_has_the_documented_bits"
ON_REAL_HOSTS = {
    "test_a_host_whose_link_is_down_is_named",
    "test_a_host_that_is_cut_off_is_named",
    "test_a_judge_that_falls_silent_is_not_waited_for_long",
}


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(MOST_HOSTS) as made:
            yield made
    except NoNetwork as why:
        pytest.skip(str(why))


@pytest.fixture(params=["virtual hosts", "network namespaces"])
def hosts(request: pytest.FixtureRequest, fresh: Fresh, tmp_path: Path, soak: bool) -> Hosts:
    name = request.node.originalname
    if request.param == "virtual hosts":
        if name in ON_REAL_HOSTS:
            pytest.skip("virtual hosts have no link of their own")
        return Hosts(fresh, tmp_path, None)
    if not soak and name != ON_BOTH and name not in ON_REAL_HOSTS:
        pytest.skip("only with --soak; virtual hosts serve here")
    return Hosts(fresh, tmp_path, request.getfixturevalue("network"))
