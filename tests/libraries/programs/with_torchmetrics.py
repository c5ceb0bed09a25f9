import sys

import torch.distributed as dist
from model import CLASSES, make_batches, make_model, report
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

dist.init_process_group(sys.argv[1])
model = make_model()
metrics = [MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES), MeanMetric()]
for rows, labels in make_batches(dist.get_rank()):
    scores = model(rows).detach()
    for metric in metrics[:2]:
        metric.update(scores, labels)
    metrics[2].update(scores)
report(dist.get_backend(), [metric.compute() for metric in metrics])
dist.destroy_process_group()
