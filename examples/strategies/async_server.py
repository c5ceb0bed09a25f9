"""A model server that steps with each worker's gradients as they come, and waits for none.

A slow worker holds back nobody, and its gradients are of weights that others have updated since.
"""

import torch
import torch.distributed as dist
from torch import nn

from dreamcomm.server import ParameterServer, Worker
from strategy import LR, Job, Training


def prepare(model: nn.Module, job: Job) -> Training:
    """Rank 0 is the server, and has served when this returns. The others are workers.

    Each gradient counts as much as in an average, so as many gradients move the model as far.
    """
    workers = dist.get_world_size() - 1
    pushes = workers * job.steps  # of all workers together: fast ones make more of them
    if dist.get_rank() > 0:
        worker = Worker(model.named_parameters(), name=job.name)
        return Training(
            model,
            worker,
            sent=lambda: worker.report().pushed_bytes,
            is_done=lambda _step: worker.version >= pushes,
            close=worker.close,
            servers=1,
        )
    server = ParameterServer(
        model.named_parameters(),
        torch.optim.SGD,
        staleness=job.options.staleness,
        push_scale=1 / workers,
        name=job.name,
        lr=LR,
    )
    report = server.serve(on_update=lambda server: job.note(server.version / workers))
    sent = sum(worker.pulled_bytes for worker in report.workers.values())
    return Training(model, None, lambda: sent, servers=1)
