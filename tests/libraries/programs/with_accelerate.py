import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from model import ROWS, make_dataset, make_model, report

dist.init_process_group(sys.argv[1])  # accelerate itself makes groups of gloo only
accelerator = Accelerator(cpu=True)
model = make_model()
model, optimizer, batches = accelerator.prepare(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    torch.utils.data.DataLoader(make_dataset(2), ROWS),
)
for rows, labels in batches:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(rows), labels))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
report(dist.get_backend(), model.parameters())
dist.destroy_process_group()
