"""DistributedDataParallel: in every step all ranks wait for each other and average gradients."""

import torch
from torch import nn

import dreamcomm
from strategy import LR, Job, Training


def prepare(model: nn.Module, job: Job) -> Training:
    """Wraps the model. Gradients are averaged in backward()."""
    wrapped = dreamcomm.DistributedDataParallel(model)
    return Training(wrapped, torch.optim.SGD(wrapped.parameters(), lr=LR))
