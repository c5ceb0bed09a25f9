"""Communication hooks beside other threads, and with gradients that are one memory."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with classes.
import gc
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import dreamcomm
from helpers.pool import Pool


def averaged(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    found: Future[Tensor] = work.get_future().then(lambda f: f.value()[0].div_(2))
    return found


def drop_in_a_pass() -> str:
    """Drops a wrapper while another thread is in the hook of its backward pass."""
    model = dreamcomm.DistributedDataParallel(nn.Linear(4, 4))
    inside = threading.Event()
    calls = []

    def hook(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        calls.append(bucket.index())
        if len(calls) > 1:
            inside.set()
            time.sleep(0.3)  # the wrapper goes away meanwhile
        return averaged(state, bucket)

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    inside.wait()
    del model
    gc.collect()
    thread.join()
    return "ended"


def test_a_wrapper_may_go_while_another_thread_runs_its_pass(pool: Pool) -> None:
    assert pool.run(drop_in_a_pass) == ["ended"] * 2


def shared_gradients() -> tuple[float, float]:
    """Two large gradients that are one tensor on rank 0."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(2)]
    model = dreamcomm.DistributedDataParallel(nn.Sequential(*layers))
    model.register_comm_hook(None, averaged)
    first, second = model.parameters()
    if dist.get_rank() == 0:
        first.grad = second.grad = torch.full((256, 256), 1.0)
    else:
        first.grad, second.grad = torch.full((256, 256), 3.0), torch.full((256, 256), 5.0)
    model.reduce_gradients()
    assert first.grad is not None
    assert second.grad is not None
    return first.grad.max().item(), second.grad.max().item()


def test_large_gradients_of_one_memory_are_reduced_apart(pool: Pool) -> None:
    assert pool.run(shared_gradients) == [(2.0, 3.0)] * 2
