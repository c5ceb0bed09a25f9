"""A tensor-parallel block with DTensor: its two ranks compute what one process would.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The first layer is cut by columns and the second by rows, so one all_reduce ends the block.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widens, bends, and narrows again."""
        return self.down(torch.relu(self.up(x)))


def main() -> None:
    """Runs on every rank."""
    dist.init_process_group("dreamcomm")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = Block()
    block = parallelize_module(
        copy.deepcopy(whole), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )

    x = torch.randn(8, 64)
    out, expected = block(x), whole(x)
    out.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(block.up.weight.grad.full_tensor(), whole.up.weight.grad)
    rows = block.up.weight.to_local().shape[0]
    print(f"rank {dist.get_rank()}: has {rows} of 256 rows; output and gradients agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
