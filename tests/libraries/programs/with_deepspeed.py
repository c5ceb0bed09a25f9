"""ZeRO stages 1, 2 and 3, one after the other."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from model import ROWS, make_batches, make_model, report

deepspeed.init_distributed(dist_backend=sys.argv[1])
weights = []
for stage in (1, 2, 3):
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    for rows, labels in make_batches(dist.get_rank()):
        engine.backward(torch.nn.functional.cross_entropy(engine(rows), labels))
        engine.step()
    with deepspeed.zero.GatheredParameters([*model.parameters()], enabled=stage == 3):
        weights += [weight.detach().float().clone() for weight in model.parameters()]
report(dist.get_backend(), weights)
dist.destroy_process_group()
