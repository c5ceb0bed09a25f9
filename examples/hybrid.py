"""Trains in bfloat16 on a mesh of replicas and shards, two ranks each.

    torchrun --nproc-per-node 4 examples/hybrid.py

Ranks of a row of the mesh have one copy of the parameters together, and rows have equal copies. On
several machines a row is best the ranks of one: gradients are summed within a machine first, and
each rank sends its rows of the sum to the others. An optimizer steps rows of float32.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dreamcomm.zero import MixedPrecisionPolicy, ZeroOptimizer, fully_shard


def main() -> None:
    """Runs on every rank."""
    dist.init_process_group("dreamcomm")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    torch.manual_seed(rank)
    inputs = torch.randn(128, 64)
    for step in range(10):
        optimizer.zero_grad()
        for number, part in enumerate(inputs.chunk(2)):
            # The first half's sum stays within the row of the mesh.
            model.set_requires_all_reduce(number == 1)
            loss = nn.functional.mse_loss(model(part), part) / 2
            loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {2 * loss.item():.4f}, norm {norm.item():.3f}")
    if rank == 0:
        print(model.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
