"""The choices of a multi-node group, and the effect of its options on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from dreamcomm._torch.groups import backend_of
from internode.hosts import Hosts
from internode.network import Network
from internode.test_collectives import TWO_OF_TWO, data_of

pytestmark = pytest.mark.beyond_gloo("gloo knows no hosts")

COUNT = 900_001


def add_halves(wire: str) -> tuple[bool, int]:
    """Whether the sum has the documented bits, and the bytes that this rank sent to hosts."""
    options = dreamcomm.Options(internode_dtype=wire, costs="fixed")
    group = dist.new_group(pg_options=options)
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [data_of(r, COUNT, torch.bfloat16) for r in range(size)]
    got = parts[rank].clone()
    dist.all_reduce(got, group=group)
    if wire == "16bit":
        want = (parts[0] + parts[1]) + (parts[2] + parts[3])
    else:
        wide = [part.float() for part in parts]
        want = ((wide[0] + wide[1]) + (wide[2] + wide[3])).bfloat16()
    sent = dreamcomm.stats(group)["all_reduce"]["sent_between_hosts"]
    return torch.equal(got, want), sent


@pytest.mark.parametrize(("wire", "there", "back"), [("float32", 4, 2), ("16bit", 2, 2)])
def test_halves_cross_the_wire_as_the_option_says(
    hosts: Hosts, wire: str, there: int, back: int
) -> None:
    found = hosts.run(TWO_OF_TWO, add_halves, wire)
    assert [same for same, _ in found] == [True] * 4
    # Each carrier of two sends half of its shard of half, and has added up the other.
    want = COUNT / 4 * (there + back)
    for _, sent in found:
        assert abs(sent - want) < 0.01 * want, (sent, want)


def choose() -> tuple[object, list[str]]:
    """The costs that this rank chooses by, and what it says of some calls."""
    texts = [dreamcomm.explain("all_reduce", 1 << power) for power in range(6, 28, 3)]
    return backend_of(None)._level_costs, [text.split("\n  (")[0] for text in texts]


def test_all_ranks_choose_alike(hosts: Hosts) -> None:
    found = hosts.run([[0, 2], [1]], choose)
    assert found[0] == found[1] == found[2]
    costs, texts = found[0]
    assert all(number >= 0 for number in costs[1])
    assert [text.count("\n  * ") for text in texts] == [1] * len(texts)
    assert "one leader per host exchanges it" in texts[0]
    assert "one leader per host" not in texts[-1]
    assert (
        "one rank of each host carries it between hosts" in texts[-1].split("* ")[1].split("\n")[0]
    )


def explain_all() -> dict[str, str]:
    return {op: dreamcomm.explain(op, 1 << 20) for op in ("send", "all_gather", "gather")}


def test_what_is_said_of_other_operations_is_true(hosts: Hosts) -> None:
    (said, *_) = hosts.run(TWO_OF_TWO, explain_all)
    assert "shared memory within a host; between nodes a header" in said["send"]
    assert "each rank sends its block to one rank of every other host" in said["all_gather"]
    assert "straight from rank to rank" in said["gather"]


@pytest.mark.long
def test_the_doctor_maps_a_job_on_two_hosts(network: Network, tmp_path: Path) -> None:
    jobs = []
    for host in (0, 1):
        command = ["ip", "netns", "exec", network.hosts[host]]
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=doctor"]
        command += ["--rdzv-endpoint=10.77.0.1:29400", f"--rdzv-conf=is_host={int(host == 0)}"]
        command += [f"--local-addr=10.77.0.{host + 1}", "--no-python"]
        command += [str(Path(sys.executable).with_name("dreamcomm")), "doctor", "--json"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net0"}
        jobs.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True, cwd=tmp_path)
        )
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    found = {one["about"]: one for one in json.loads(outputs[0][: outputs[0].rindex("]") + 1])}
    assert found["hosts"]["found"].startswith("2 hosts: ")
    assert "(ranks 0, 1)" in found["hosts"]["found"]
    assert "between hosts latency" in found["hosts"]["meaning"]
    assert "build" in found
    assert '"hosts"' not in outputs[1]
