"""Gradient hooks: bfloat16 between the ranks, with error feedback.

    torchrun --nproc-per-node 2 examples/hooks.py

The hook also finds the norm of all gradients, so that clipping needs no pass of its own.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dreamcomm


def main() -> None:
    """Runs on every rank."""
    dist.init_process_group("dreamcomm")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64), gradient_as_bucket_view=True)
    state = dreamcomm.hooks.State(norm=True)
    model.register_comm_hook(state, dreamcomm.hooks.bf16_feedback)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(128, 64)
    for step in range(10):
        loss = nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        norm = state.norm()  # of the averaged gradients: equal on all ranks
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        if state.finite():
            optimizer.step()
        if step % 5 == 4:
            print(f"rank {dist.get_rank()}, step {step + 1}: norm {norm.item():.6f}")

    # Error feedback: each rank's own residuals belong in its checkpoint.
    residuals = state.state_dict()["residuals"]
    print(f"rank {dist.get_rank()}: {len(residuals)} residuals to save")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
