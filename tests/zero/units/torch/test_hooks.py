"""Hooks after the accumulation of gradients, and optimizers in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.pool import Pool
from zero.units.sharding import my_batch
from zero.units.torch.beside import CLOSE, loss_of, mean, shard_all, stack, theirs

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def hooks_run() -> tuple[list[str], list[bool], list[bool]]:
    """Hooks on registered DTensors run once a pass that reduces, with the shard, when closed."""
    net = shard_all(stack())
    ran: list[str] = []
    facts: list[bool] = []
    names = {one: name for name, one in net.named_parameters()}

    def hook(one: Any) -> None:
        ran.append(names[one])
        facts.append(one.grad is not None and one.grad.to_local().shape == one.to_local().shape)
        facts.append(not net._unit.tree.window.is_open)

    for one in names:
        one.register_post_accumulate_grad_hook(hook)
    with net.no_sync():
        loss_of(net, *my_batch(0)).backward()
    unreduced = len(ran)
    loss_of(net, *my_batch(1)).backward()
    return sorted(ran), facts, [unreduced == 0, sorted(names.values()) == sorted(ran)]


def test_post_acc_grad_hook_runs(pool: Pool) -> None:
    for ran, facts, checks in pool.run(hooks_run):
        assert len(ran) == 14
        assert facts == [True] * 28
        assert checks == [True, True]


def optimizer_in_backward(kind: str) -> tuple[float, list[float], list[float]]:
    """Each parameter is stepped by its hook; FSDP2 on Gloo does the same."""
    found = []
    for net in (shard_all(stack()), theirs(stack())):
        steppers = {
            one: getattr(torch.optim, kind)([one], lr=0.01, foreach=False)
            for one in net.parameters()
        }

        def hook(one: Any, steppers: Any = steppers) -> None:
            steppers[one].step()
            steppers[one].zero_grad()

        for one in steppers:
            one.register_post_accumulate_grad_hook(hook)
        losses = []
        for step in range(5):
            loss = loss_of(net, *my_batch(step % 2))
            loss.backward()
            losses.append(mean(loss))
        found.append((losses, [one.full_tensor() for one in net.parameters()]))
    (ours, weights), (torchs, others) = found
    pairs = zip(weights, others, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), ours, torchs


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_post_acc_grad_hook_optim_parity(pool: Pool, kind: str) -> None:
    for worst, ours, torchs in pool.run(optimizer_in_backward, kind):
        assert worst < 1e-5
        assert ours == pytest.approx(torchs, abs=CLOSE, rel=0)
        assert ours[-2] < ours[0]
