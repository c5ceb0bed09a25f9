"""Keras's guide "Multi-GPU distributed training with PyTorch", on CPUs. KERAS_BACKEND is torch."""

import sys

import keras
import torch
import torch.distributed as dist
from model import CLASSES, WIDTH, make_batches, report, train

dist.init_process_group(sys.argv[1])
keras.utils.set_random_seed(1)
keras_model = keras.Sequential(
    [keras.Input((WIDTH,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(CLASSES)]
)
model = torch.nn.parallel.DistributedDataParallel(keras_model)
train(model, make_batches(dist.get_rank()))
report(dist.get_backend(), model.parameters())
dist.destroy_process_group()
