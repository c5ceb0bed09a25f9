"""Local SGD: ranks step alone, and average their parameters every so many steps."""

import torch
from torch import nn

from dreamcomm.local_sgd import LocalSGD
from strategy import LR, Job, Training


def prepare(model: nn.Module, job: Job) -> Training:
    """Averages at the end of a round, within step()."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    local = LocalSGD(model, optimizer, every=job.options.period)
    return Training(model, local, close=local.average_now)
