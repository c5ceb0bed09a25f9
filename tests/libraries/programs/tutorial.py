"""torch's tutorial "Getting Started with Distributed Data Parallel"."""

import sys

import torch.distributed as dist
from model import make_batches, make_model, report, train
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(sys.argv[1])
model = DDP(make_model())
train(model, make_batches(dist.get_rank()))
report(dist.get_backend(), model.parameters())
dist.destroy_process_group()
