"""The memory of a rank in some training steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from models import make_task
from training_variants import Trainer, make_groups, make_trainer

STEPS = 5


def growth_of(
    model: str,
    wrapper: str,
    variant: str,
    memory: Callable[[], int],
    warm_up: Callable[[], None] = lambda: None,
) -> tuple[list[int], Trainer]:
    """By how much ``memory()`` has grown since before the model was made, and what has trained.

    It is read before and after the optimizer in each step, while no rank computes.
    """
    torch.set_num_threads(1)
    groups = make_groups()
    warm_up()
    dist.barrier()
    before = memory()
    trainer = make_trainer(make_task(model, dist.get_rank()), wrapper, variant, groups)
    found: list[int] = []

    def look(*_: object) -> None:
        dist.barrier()
        found.append(memory() - before)
        dist.barrier()

    trainer.optimizer.register_step_pre_hook(look)
    trainer.optimizer.register_step_post_hook(look)
    for _ in range(STEPS):
        trainer.step()
    return found, trainer
