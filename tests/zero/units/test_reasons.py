"""Why torch's own function shards a module, as report() says, and what ZeroOptimizer says to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dreamcomm import zero
from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.pool import Pool
from zero.units.sharding import made

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

REASONS = {
    "two dimensions": "the mesh has 2 dimensions",
    "cast": "the policy casts: MixedPrecisionPolicy(param_dtype=torch.bfloat16, ",
    "offload": "the policy is CPUOffloadPolicy",
    "gloo": "the group does not use the backend dreamcomm",
    "below": "modules below are sharded by torch's function",
}


def options(reason: str) -> dict[str, Any]:
    """Those of fully_shard."""
    if reason == "two dimensions":
        shape = (dist.get_world_size(), 1)
        return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))}
    if reason == "offload":
        return {"offload_policy": zero.CPUOffloadPolicy(pin_memory=False)}
    if reason == "gloo":
        return {"mesh": DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")}
    return {"mp_policy": zero.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def report_of(reason: str) -> tuple[str, str]:
    """Of the root, and the error of a ZeroOptimizer on it."""
    module: Any = made("mlp")
    given = options(reason)
    fully_shard(module.layers[0], **given)
    fully_shard(module, **({} if reason == "below" else given))
    with pytest.raises(ValueError, match="is a DTensor") as raised:
        ZeroOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1)
    return module.report(), str(raised.value)


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_a_root_says_why_torch_shards_it(pool: Pool, reason: str) -> None:
    for report, error in pool.run(report_of, reason, world=2):
        assert report.startswith(f"torch's FSDP2 runs FSDPMlp: {REASONS[reason]}")
        assert error == (
            "ZeroOptimizer: 'layers.0.weight' is a DTensor, whose optimizer state is sharded with "
            "it: give these parameters to the optimizer's own class"
        )
