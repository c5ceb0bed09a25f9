"""Shared tensors: collectives read and write them in place, without a copy.

    python examples/shared_tensors.py

explain() shows what a call on shared tensors takes, and stats() counts them.
"""

import torch
import torch.distributed as dist

import dreamcomm


def work() -> tuple[float, int]:
    """Runs on every rank; what it returns is collected by spawn()."""
    # An ordinary CPU tensor, in memory that all ranks map.
    gradients = dreamcomm.zeros(1 << 18)
    gradients += dist.get_rank() + 1
    dist.all_reduce(gradients)

    # Moves parameters, buffers and gradients there.
    model = dreamcomm.share_(torch.nn.Linear(8, 8))
    assert dreamcomm.is_shared(model.weight)

    if dist.get_rank() == 0:
        print(dreamcomm.explain("all_reduce", gradients.nbytes, shared=True))
    return gradients[0].item(), dreamcomm.stats()["all_reduce"]["in_place"]


if __name__ == "__main__":
    for rank, (total, in_place) in enumerate(dreamcomm.spawn(work, 2)):
        print(f"rank {rank}: the sum is {total}; {in_place} call ran in place")
