"""Gossip: each rank averages its parameters with its neighbours' on a ring, in every step.

There is no server, and no call of all ranks before the end.
"""

import torch
from torch import nn

from dreamcomm.gossip import Gossip
from strategy import LR, Job, Training


def prepare(model: nn.Module, job: Job) -> Training:
    """With a bound, ranks need not wait for a neighbour that is late by no more steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    gossip = Gossip(model, optimizer, topology="ring", bound=job.options.bound, seed=None)
    return Training(
        model, gossip, sent=lambda: gossip.report().sent_bytes, close=gossip.average_now
    )
