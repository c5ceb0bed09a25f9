"""Trains with DistributedDataParallel, and ends with equal weights on both ranks.

    torchrun --nproc-per-node 2 examples/ddp.py

torchrun needs no import of dreamcomm. The gradients' buckets lie in shared memory by
default.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Runs on every rank."""
    dist.init_process_group("dreamcomm")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)),
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    torch.manual_seed(rank)  # each rank has its own part of the data
    inputs = torch.randn(256, 32)
    targets = inputs.sum(dim=1, keepdim=True)
    for step in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over the ranks
        optimizer.step()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    print(f"rank {rank}: weights equal rank 0's: {torch.equal(weights, of_rank_0)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
