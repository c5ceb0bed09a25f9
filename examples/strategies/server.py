"""A model server: workers push gradients, and the server steps with their average.

The bits are those of DistributedDataParallel with as many workers. Only the server has the
optimizer and its state.
"""

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.server import ParameterServer, Worker
from strategy import LR, Job, Training


def prepare(model: nn.Module, job: Job) -> Training:
    """Rank 0 is the server, and has served when this returns. The others are workers."""
    if dist.get_rank() > 0:
        worker = Worker(model.named_parameters(), name=job.name)
        sent = lambda: worker.report().pushed_bytes  # noqa: E731
        return Training(model, worker, sent, close=worker.close, servers=1)
    server = ParameterServer(model.named_parameters(), torch.optim.SGD, lr=LR, name=job.name)
    report = server.serve(on_update=lambda server: job.note(server.version))
    sent = sum(worker.pulled_bytes for worker in report.workers.values())
    return Training(model, None, lambda: sent, servers=1)
