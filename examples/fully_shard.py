"""Trains with one copy of the parameters on the host, of which each rank owns half of every one.

    torchrun --nproc-per-node 2 examples/fully_shard.py

It is ``fsdp2.py`` after one import has changed. No parameter is gathered.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dreamcomm.zero import FSDPModule, fully_shard


def main() -> None:
    """Runs on every rank."""
    dist.init_process_group("dreamcomm")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # its buffers lie in shared memory
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(128, 64)
    for step in range(10):
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    weight = model[0].weight
    kept, whole = tuple(weight.to_local().shape), tuple(weight.shape)
    print(f"rank {dist.get_rank()}: keeps {kept} of {whole}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
