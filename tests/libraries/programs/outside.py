"""A group that torch's world does not hold, made by hand as libraries like torchft make theirs."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from model import make_batches, make_model, report, train
from torch._C._distributed_c10d import _DistributedBackendOptions

import dreamcomm.backend


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """May be called again in the same processes, with a store or prefix of its own each time."""
    asked = _DistributedBackendOptions()
    asked.store, asked.timeout = store, timeout
    asked.group_rank, asked.group_size = rank, size
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dreamcomm.backend.create(asked))
    return group


def train_over_gloo() -> None:
    """In torch's world, and to the end of the process without dropping the group.

    torch joins Gloo's threads with the GIL held. A thread needs it to release what it kept of a
    backward pass, so a rank that drops its group soon after one hangs or aborts.
    """
    dist.init_process_group("gloo")
    found = []
    for _generation in range(2):
        model = torch.nn.parallel.DistributedDataParallel(make_model())
        train(model, make_batches(dist.get_rank()))
        found += model.parameters()
    report("gloo", found)
    os._exit(0)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    found = []
    for generation in range(2):
        store = dist.PrefixStore(f"generation-{generation}", server)
        group = make_group(store, rank, size, timedelta(seconds=60))
        model = torch.nn.parallel.DistributedDataParallel(make_model(), process_group=group)
        train(model, make_batches(rank))
        found += model.parameters()
        name = group._get_backend(torch.device("cpu")).name()
        group.shutdown()
    assert not dist.is_initialized()
    report(name, found)


if __name__ == "__main__":
    main() if sys.argv[1] == "dreamcomm" else train_over_gloo()
