"""In which form a module is sharded, and why, as report() says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dreamcomm import zero
from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.pool import Pool
from zero.units.sharding import made

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

GATHERED = {
    "gather": "gather=True was given",
    "gloo": "the group does not use the backend dreamcomm",
    "hosts": "the hosts have one rank each, or different numbers of ranks",
}


def options(reason: str) -> dict[str, Any]:
    """Those of fully_shard."""
    if reason == "gloo":
        return {"mesh": DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")}
    if reason == "cast":
        return {"mp_policy": zero.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if reason == "offload":
        return {"offload_policy": zero.CPUOffloadPolicy(pin_memory=False)}
    return {"gather": True} if reason == "gather" else {}


def report_of(reason: str) -> str:
    module: Any = made("mlp")
    fully_shard(module.layers[0], **options(reason))
    given = options(reason) if reason != "gloo" else {"mesh": module.layers[0]._unit.tree.mesh}
    fully_shard(module, **given)
    return str(module.report())


@pytest.mark.parametrize("reason", sorted(GATHERED))
def test_a_root_says_why_parameters_are_gathered(pool: Pool, reason: str) -> None:
    env = {"DREAMCOMM_HOSTS": "a,b"} if reason == "hosts" else None
    for report in pool.run(report_of, reason, world=2, env=env):
        assert f"parameters are gathered by units: {GATHERED[reason]}; " in report


@pytest.mark.parametrize("reason", ["cast", "offload"])
def test_policies_leave_one_copy_a_host(pool: Pool, reason: str) -> None:
    """Memory of a CPU is where an offload policy moves parameters: they are there."""
    for report in pool.run(report_of, reason, world=2):
        assert "one copy of the parameters on this host" in report


@dataclass
class Policy(zero.OffloadPolicy):
    """One that this library does not know."""


def torchs(below: bool) -> tuple[str, str]:
    """Of the root, and the error of a ZeroOptimizer on it."""
    module: Any = made("mlp")
    policy = Policy()
    fully_shard(module.layers[0], offload_policy=policy)
    fully_shard(module, **({} if below else {"offload_policy": policy}))
    with pytest.raises(ValueError, match="is a DTensor") as raised:
        ZeroOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1)
    return module.report(), str(raised.value)


@pytest.mark.parametrize("below", [False, True])
def test_a_root_says_why_torch_shards_it(pool: Pool, below: bool) -> None:
    why = "modules below are sharded by torch's function" if below else "the policy is Policy"
    for report, error in pool.run(torchs, below, world=2):
        assert report.startswith(f"torch's FSDP2 runs FSDPMlp: {why}")
        assert error == (
            "ZeroOptimizer: 'layers.0.weight' is a DTensor, whose optimizer state is sharded with "
            "it: give these parameters to the optimizer's own class"
        )


def mixed_forms() -> str:
    module: Any = made("mlp")
    fully_shard(module.layers[0], gather=True)
    with pytest.raises(ValueError, match="one form for all units") as raised:
        fully_shard(module, gather=False)
    return str(raised.value)


def test_units_of_a_root_have_one_form(pool: Pool) -> None:
    for error in pool.run(mixed_forms, world=2):
        assert "got gather=False, and parameters are gathered by units" in error


def refused() -> str:
    with pytest.raises(ValueError, match="gather=False") as raised:
        fully_shard(made("mlp"), gather=False)
    return str(raised.value)


def test_one_copy_needs_one_host(pool: Pool) -> None:
    for error in pool.run(refused, world=2, env={"DREAMCOMM_HOSTS": "a,b"}):
        assert error == (
            "fully_shard: got gather=False, but the hosts have one rank each, or different numbers "
            "of ranks: leave it out"
        )
