import sys

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import create_supervised_trainer
from model import make_batches, make_model, report

dist.init_process_group(sys.argv[1])  # idist.initialize() knows torch's own backends only
# idist.auto_model() would leave the model as it is, as for every backend it does not know.
model = torch.nn.parallel.DistributedDataParallel(make_model())
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.cross_entropy)
trainer.run(make_batches(idist.get_rank()), max_epochs=1)
total = idist.all_reduce(torch.ones(3) * idist.get_rank())
report(idist.backend(), [*model.parameters(), total])
dist.destroy_process_group()
