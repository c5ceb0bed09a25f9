"""A torchft group over dreamcomm: it is made anew for every quorum, in the same processes."""

import os
import sys

import torch
import torch.distributed as dist
import torchft.process_group as ft
from model import make_batches, make_model, report
from outside import make_group
from torch.distributed.distributed_c10d import AllreduceOptions


class ProcessGroupDreamcomm(ft.ProcessGroupWrapper):
    def _create_pg(self, store, rank, size):
        return make_group(store, rank, size, self._timeout)

    def getBackendName(self):
        return "torchft-dreamcomm"


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
group = ProcessGroupDreamcomm() if sys.argv[1] == "dreamcomm" else ft.ProcessGroupGloo()
found = []
for quorum in range(2):
    group.configure(f"{address}/quorum-{quorum}", f"replica-{rank}", rank, size)
    model = make_model()
    for rows, labels in make_batches(rank):
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        for weight in model.parameters():
            group.allreduce([weight.grad], AllreduceOptions()).wait()
    found += [weight.grad for weight in model.parameters()]
name = group.getBackendName().removeprefix("torchft-")
group.shutdown()
assert not dist.is_initialized()
report(name, found)
