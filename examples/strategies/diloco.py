"""DiLoCo: ranks step alone, and an outer optimizer steps with the average change of a round."""

import torch
from torch import nn

from dreamcomm.local_sgd import DiLoCo
from strategy import LR, Job, Training


def prepare(model: nn.Module, job: Job) -> Training:
    """The outer optimizer is the paper's; its momentum is over rounds."""
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return Training(model, DiLoCo(model, inner, outer, every=job.options.period))
