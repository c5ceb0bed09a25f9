"""Accelerate over gloo with torch's DistributedDataParallel, or over dreamcomm with dreamcomm's."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from model import ROWS, make_dataset, make_model, report

import dreamcomm

BACKEND, FOLDER = sys.argv[1], Path(sys.argv[2])
HIDDEN = 1024  # a matrix of 32 by so many is reduced where it is


def prepare(accelerator):
    model = make_model(HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = torch.utils.data.DataLoader(make_dataset(2), ROWS)
    if BACKEND != "dreamcomm":
        return accelerator.prepare(model, optimizer, batches)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    model = dreamcomm.DistributedDataParallel(model)
    return model, *accelerator.prepare(optimizer, batches)


def epoch(accelerator, model, optimizer, batches):
    """Steps once for two batches, and counts the steps."""
    steps = 0
    for rows, labels in batches:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(rows), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
    assert steps == 2


def two_forwards_first(accelerator, model, optimizer, batches):
    """The passes under no_sync() make no gradient; one outside reduces those of both."""
    for rows, labels in batches:
        with accelerator.no_sync(model):
            losses = [
                torch.nn.functional.cross_entropy(model(part), wanted)
                for part, wanted in zip(rows.chunk(2), labels.chunk(2), strict=True)
            ]
            accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        optimizer.step()
        optimizer.zero_grad()


def train(**settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    prepared = prepare(accelerator)
    model = prepared[0]
    whole = accelerator.unwrap_model(model)
    assert whole is model.module
    assert set(accelerator.get_state_dict(model)) == set(whole.state_dict())
    epoch(accelerator, *prepared)
    accelerator.save_state(FOLDER / "saved")
    epoch(accelerator, *prepared)
    found = [weight.clone() for weight in whole.parameters()]
    accelerator.load_state(FOLDER / "saved")
    epoch(accelerator, *prepared)
    assert all(map(torch.equal, found, whole.parameters()))
    return found, accelerator, prepared


def main() -> None:
    dist.init_process_group(BACKEND)  # accelerate itself makes groups of gloo only
    found, accelerator, prepared = train()
    two_forwards_first(accelerator, *prepared)
    found += prepared[0].parameters()
    AcceleratorState._reset_state()  # else there is one precision for a process
    found += train(mixed_precision="bf16")[0]
    wrapper = type(prepared[0])
    assert (wrapper is dreamcomm.DistributedDataParallel) == (BACKEND == "dreamcomm"), wrapper
    report(dist.get_backend(), found)
    dist.destroy_process_group()


main()
