"""torchrun on two hosts, one of which is lost: the other goes on alone and ends the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from internode.network import Network
from training.models import STEPS, Mlp, adam, train_alone
from training.test_torchrun import WORKER, kill_tree

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")


def launch(network: Network, host: int, folder: Path) -> subprocess.Popen[str]:
    """Two ranks there; the first host keeps the rendezvous."""
    address = f"10.77.0.{host + 1}"
    command = ["ip", "netns", "exec", network.hosts[host]]
    command += [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
    command += ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=lost-host"]
    command += ["--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"]
    command[-1] += f",is_host={int(host == 0)}"  # its own addresses are not what it is named by
    command += [f"--local-addr={address}"]
    command += [str(WORKER), "dreamcomm", str(folder), "3", "waits"]
    with (folder / f"host-{host}.log").open("w") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-6000:] for path in sorted(folder.glob("host-*.log")))


def wait_for(path: Path, folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} within {seconds} s:\n{logs(folder)}"
        time.sleep(0.02)


@pytest.mark.long
def test_a_lost_host_is_done_without(network: Network, tmp_path: Path) -> None:
    launchers = [launch(network, host, tmp_path) for host in (0, 1)]
    try:
        wait_for(tmp_path / "waits", tmp_path, 90)
        kill_tree(launchers[1].pid)
        wait_for(tmp_path / "result.json", tmp_path, 120)
        assert launchers[0].wait(60) == 0, logs(tmp_path)
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                kill_tree(launcher.pid)
            launcher.wait()
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["resumed_at"] == 3
    model = Mlp()
    alone = train_alone(model, adam(model.parameters()))
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(alone, rel=1e-5)
