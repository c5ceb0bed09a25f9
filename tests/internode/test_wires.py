"""Links that are slow, lossy or far, and hosts whose clocks differ."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.pool import Fresh
from helpers.processes import replies
from internode.hosts import Hosts
from internode.network import Network, NoNetwork
from internode.test_collectives import SOME, TWO_OF_TWO, all_collectives
from lifecycle.groups import error_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

DAY = 86_400  # seconds


@pytest.mark.parametrize(
    ("delay", "loss"),
    [
        pytest.param(1e-3, 0.0, id="a far host", marks=pytest.mark.long),
        pytest.param(1e-4, 0.005, id="a lossy link"),
    ],
)
def test_a_poor_link_changes_no_bit(
    fresh: Fresh, tmp_path: Path, delay: float, loss: float
) -> None:
    try:
        with Network(2, rate="1gbit", delay=delay, loss=loss) as poor:
            found = Hosts(fresh, tmp_path, poor).run(
                TWO_OF_TWO, all_collectives, TWO_OF_TWO, SOME, seconds=120.0, timeout=240.0
            )
    except NoNetwork as why:
        pytest.skip(str(why))
    assert all(done > 60 * len(SOME) for done in found)


def wait_for_a_slow_link() -> tuple[str, float]:
    """4 MB in 3 s, where 2 Mbit/s carry 0.75 MB."""
    dist.barrier()
    begin = time.monotonic()
    return error_of(lambda: dist.all_reduce(torch.ones(1_000_000))), time.monotonic() - begin


def test_a_link_too_slow_for_the_timeout_is_told(
    fresh: Fresh, tmp_path: Path, slack: float
) -> None:
    try:
        with Network(2, rate="2mbit") as slow:
            ranks = Hosts(fresh, tmp_path, slow).start(
                TWO_OF_TWO, wait_for_a_slow_link, seconds=3.0
            )
            found = [reply.value for reply in replies(ranks, 60)]
    except NoNetwork as why:
        pytest.skip(str(why))
    for rank, (text, seconds) in enumerate(found):
        assert "all_reduce(SUM, 1000000 x float32)" in text, text
        assert 2.9 <= seconds <= 4.5 + slack, (rank, seconds)
        assert "timeout" in text, text
    # Those that wait for a host say so, whichever of them is the first; the others pass it on.
    told = " ".join(text for text, _ in found)
    assert re.search(r"waits for rank \d of host \S+ \(ranks \d, \d\)", told), told


CLOCKS = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "dreamcomm", store=dist.FileStore(store, 4), rank=rank, world_size=4,
    timeout=timedelta(seconds=2),
)
for count in (3, 100_000, 1_000_000):
    tensor = torch.full((count,), float(rank))
    dist.all_reduce(tensor)
    assert bool((tensor == 6.0).all())
print("CLOCK", time.monotonic(), time.time(), flush=True)
if rank == 3:
    time.sleep(4)
    sys.exit()
begin = time.monotonic()
try:
    dist.all_reduce(torch.ones(10))
except dist.DistBackendError as error:
    print("TOLD", time.monotonic() - begin, str(error).splitlines()[0], flush=True)
"""


def since_boot(_: Path) -> list[str]:
    """What a command follows whose process finds a day more since the machine has started."""
    shifted = ["unshare", "--time", "--monotonic", str(DAY)]
    if subprocess.run([*shifted, "true"], capture_output=True).returncode != 0:
        pytest.skip("this kernel gives processes no clocks of their own")
    return shifted


def of_the_wall(folder: Path) -> list[str]:
    """The same, for the time of day."""
    library = folder / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.cc")
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    return ["env", f"LD_PRELOAD={library}", f"WALL_CLOCK_SHIFT={DAY}"]


@pytest.mark.parametrize("clock", [since_boot, pytest.param(of_the_wall, marks=pytest.mark.long)])
def test_hosts_whose_clocks_differ_by_a_day(
    tmp_path: Path, clock: Callable[[Path], list[str]]
) -> None:
    """Deadlines are kept by the clock of each host alone."""
    shifted = clock(tmp_path)
    script = tmp_path / "clocks.py"
    script.write_text(CLOCKS)
    try:
        with Network(2) as network:
            ranks = []
            for rank in range(4):
                command = ["ip", "netns", "exec", network.hosts[rank // 2]]
                command += shifted if rank >= 2 else []
                command += [sys.executable, str(script), str(rank), str(tmp_path / "store")]
                ranks.append(
                    subprocess.Popen(
                        ["env", "GLOO_SOCKET_IFNAME=net0", *command],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    except NoNetwork as why:
        pytest.skip(str(why))
    which = 0 if clock is since_boot else 1
    clocks = [float(output.split("CLOCK ")[1].split()[which]) for output in outputs]
    assert clocks[2] - clocks[0] > DAY - 60
    for output in outputs[:3]:
        _, told = output.split("TOLD ")
        assert 1.9 <= float(told.split()[0]) <= 3.0, output
        assert "rank 3" in told, output
