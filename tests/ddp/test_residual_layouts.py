"""Residuals have their parameters' shapes, however these lie in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("tests what is written for dreamcomm")


def model(last: bool) -> nn.Module:
    torch.manual_seed(2)
    module = nn.Conv2d(4, 6, 3)
    return module.to(memory_format=torch.channels_last) if last else module  # type: ignore[call-overload,no-any-return]


def sent(hook: str, last: bool, ours: bool) -> tuple[float, Tensor, Tensor]:
    """The error of the sum that ranks have sent, and what a model of the other layout sends later.

    Returns:
        The error, what the later step took from the residuals, and what it gave as gradients.
    """
    module, rank = model(last), dist.get_rank()
    cls: Any = dreamcomm.DistributedDataParallel if ours else nn.parallel.DistributedDataParallel
    wrapped = cls(module)
    state = dreamcomm.hooks.State()
    wrapped.register_comm_hook(state, getattr(dreamcomm.hooks, hook))
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(rank))
    alone = model(last)
    alone(x).square().sum().backward()
    own = alone.weight.grad
    assert own is not None
    wrapped(x).square().sum().backward()
    residual, average = state.residual(module.weight), module.weight.grad
    assert residual is not None
    assert average is not None
    total = own - residual
    dist.all_reduce(total)
    error = float((total - 2 * average).abs().max() / own.abs().max())

    # A model of the other layout goes on with them.
    other = cls(target := model(not last))
    resumed = dreamcomm.hooks.State()
    other.register_comm_hook(resumed, getattr(dreamcomm.hooks, hook))
    resumed.load_state_dict(state.state_dict())
    other(0 * x).sum().backward()  # seen, with gradients of 0 for the weights
    state_after, mean = resumed.residual(target.weight), target.weight.grad
    assert state_after is not None
    assert mean is not None
    missing = residual - state_after
    dist.all_reduce(missing)
    return error, missing, 2 * mean


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torchs"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
# With 16 bits the average is rounded once more, and what that takes is in no residual.
@pytest.mark.parametrize(("hook", "near"), [("bf16_feedback", 0.01), ("int8_feedback", 1e-6)])
def test_residuals_have_the_parameters_shape(
    pool: Pool, hook: str, near: float, last: bool, ours: bool
) -> None:
    for error, missing, sent_later in pool.run(sent, hook, last, ours):
        assert error < near
        # What was left in the residuals is what the next step has sent.
        assert missing.abs().max() > 0
        assert (missing - sent_later).abs().max() <= max(near, 1e-5) * missing.abs().max() + 1e-7
