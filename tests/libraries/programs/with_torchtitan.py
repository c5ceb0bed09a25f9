"""torchtitan's groups, mesh and gradient norm, below FSDP2. Its own models need a GPU."""

import sys

import torch
import torch._utils
import torch.distributed as dist
from model import make_batches, make_model, report
from torch.distributed.fsdp import fully_shard


def main(backend: str) -> None:
    dist.Backend.default_device_backend_map["cpu"] = backend
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes none for CUDA

    from torchtitan.config import CommConfig, ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_, init_distributed

    ranks = init_distributed(CommConfig())
    mesh = ParallelDims.from_config(ParallelismConfig(), ranks).get_mesh("dp_shard")
    model = fully_shard(make_model(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for rows, labels in make_batches(dist.get_rank()):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        norms.append(clip_grad_norm_([*model.parameters()], 1.0))
        optimizer.step()
    weights = [weight.full_tensor() for weight in model.parameters()]
    report(dist.get_backend(mesh.get_group()), weights + norms)
    dist.destroy_process_group()


main(sys.argv[1])
