"""Situations in which other pipelines give wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, Gpt, OneProcess, make, next_token

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

IGNORED = -100
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in pipe.named_parameters() if one.grad is not None}


def expected_gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: one.grad for n, one in module.named_parameters() if one.grad is not None}


def check(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    found: dict[str, Tensor] = {}
    for one in ranks:
        for name, gradient in one.items():
            torch.testing.assert_close(gradient, expected[name], **CLOSE)
        found |= one
    assert found.keys() == expected.keys()


# Sum losses, and tokens that are ignored unevenly over micro-batches and pipelines.


def uneven_tokens() -> tuple[Tensor, Tensor]:
    x, y = MODELS["gpt"][2](0, 8, torch.float32)
    y = y.clone()
    for row in range(8):
        y[row, : row + 1] = IGNORED
    y[2] = IGNORED  # one micro-batch has few tokens
    y[3, :8] = IGNORED
    return x, y


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(
        output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return loss, (target != IGNORED).sum()


def token_weighted(schedule: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipe = Pipeline(
        make("gpt"), 2, schedule=schedule, loss_fn=summed, mesh=mesh, scale_grads="count"
    )
    keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=mesh["dp"].get_group())
    x, y = (one.chunk(2)[mesh.get_local_rank("dp")] for one in uneven_tokens())
    pipe.step(x, target=y)
    pipe.step(x, target=y)  # adds the same again
    for one in pipe.parameters():
        assert one.grad is not None
        one.grad.div_(2)
    del keep
    return gradients(pipe)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_are_divided_by_all_tokens(pool: Pool, schedule: str) -> None:
    module = make("gpt")
    x, y = uneven_tokens()
    loss, count = summed(module(x), y)
    (loss / count).backward()
    check(pool.run(token_weighted, schedule, world=4), expected_gradients(module))


# Two steps of the pipeline, then one of the optimizer.


def two_steps(accumulate: int, scale: bool) -> dict[str, Tensor]:
    pipe = Pipeline(
        make("mlp"), 4, loss_fn=MODELS["mlp"][1], accumulate=accumulate, scale_grads=scale
    )
    for step in range(2):
        x, y = MODELS["mlp"][2](step, 8, torch.float32)
        pipe.step(x, target=y)
    return gradients(pipe)


@pytest.mark.parametrize(
    ("accumulate", "scale", "divisor"), [(2, True, 8), (1, True, 4), (1, False, 1)]
)
def test_gradients_add_up_over_steps(
    pool: Pool, accumulate: int, scale: bool, divisor: int
) -> None:
    module = make("mlp")
    for step in range(2):
        x, y = MODELS["mlp"][2](step, 8, torch.float32)
        for xm, ym in zip(x.chunk(4), y.chunk(4), strict=True):
            (MODELS["mlp"][1](module(xm), ym) / divisor).backward()
    check(pool.run(two_steps, accumulate, scale), expected_gradients(module))


# Tied weights over two steps: what was added before is not added again.


def tied_twice() -> dict[str, Tensor]:
    pipe = Pipeline(make("gpt"), 2, loss_fn=next_token, accumulate=2)
    for step in range(2):
        x, y = MODELS["gpt"][2](step, 4, torch.float32)
        pipe.step(x, target=y)
    return gradients(pipe)


@pytest.mark.parametrize("world", [2, 3])
def test_tied_gradients_are_added_once(pool: Pool, world: int) -> None:
    module = make("gpt")
    for step in range(2):
        x, y = MODELS["gpt"][2](step, 4, torch.float32)
        for xm, ym in zip(x.chunk(2), y.chunk(2), strict=True):
            (next_token(module(xm), ym) / 4).backward()
    check(pool.run(tied_twice, world=world), expected_gradients(module))


# A shared weight and a chunk inside of a stage, under split backward.


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 12) / 3)
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ self.w @ self.w).chunk(2, dim=1)
        return torch.cat([a * b.sin(), b + self.frozen[:6]], dim=1)


def shared_in_a_stage(compiled: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    blocks = [Twice() for _ in range(4)]
    if compiled:
        blocks[3].compile(backend="aot_eager")
    pipe = Pipeline(nn.Sequential(*blocks), 4, schedule="zb-h1", loss_fn=F.mse_loss)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    pipe.step(x, target=x.flip(0))
    return gradients(pipe)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_split_backward_of_a_shared_weight(pool: Pool, compiled: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Twice() for _ in range(4)))
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    for xm, ym in zip(x.chunk(4), x.flip(0).chunk(4), strict=True):
        (F.mse_loss(module(xm), ym) / 4).backward()
    check(pool.run(shared_in_a_stage, compiled, timeout=120), expected_gradients(module))


# Norms for clipping.


def clipped(p: float) -> tuple[float, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    pipe = Pipeline(make("gpt"), 2, loss_fn=next_token, mesh=mesh)
    zero = ZeroOptimizer(pipe.parameters(), torch.optim.SGD, mesh["data"].get_group(), lr=1.0)
    x, y = (one.chunk(2)[mesh.get_local_rank("data")] for one in MODELS["gpt"][2](0, 8, 0))
    pipe.step(x, target=y)
    norm = float(pipe.clip_grad_norm_(0.1, p))
    zero.step()
    return norm, {k: v.clone() for k, v in pipe.state_dict().items()}


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_norms_are_of_the_whole_model(pool: Pool, p: float) -> None:
    reference = OneProcess("gpt")
    reference.gradients(0, 4, 2, shares=2)
    norm = float(torch.nn.utils.clip_grad_norm_(reference.module.parameters(), 0.1, p))
    torch.optim.SGD(reference.module.parameters(), lr=1.0).step()
    expected = dict(reference.module.named_parameters())
    for got, state in pool.run(clipped, p, world=4):
        assert got == pytest.approx(norm, rel=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-7)


# Dropout: masks depend neither on the number of stages nor on recomputation.


class Dropping(Gpt):
    def __init__(self) -> None:
        super().__init__(dropout=0.3, blocks=4)


def with_dropout(checkpoint: bool, schedule: str) -> tuple[list[float], dict[str, Tensor], Any]:
    torch.manual_seed(0)
    pipe = Pipeline(
        Dropping(), 4, schedule=schedule, loss_fn=next_token, loss="all", checkpoint=checkpoint
    )
    torch.manual_seed(7)
    losses: list[Tensor] = []
    for step in range(2):
        x, y = MODELS["gpt"][2](step, 8, torch.float32)
        pipe.step(x, target=y, losses=losses)
    return [float(one) for one in losses], gradients(pipe), torch.rand(3).tolist()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_masks_are_equal_for_all_numbers_of_stages(pool: Pool, schedule: str) -> None:
    (one,) = pool.run(with_dropout, False, schedule, world=1)
    torch.manual_seed(7)
    assert one[2] == torch.rand(3).tolist(), "the random state is as before"
    plain = make_losses_without_dropout()
    assert max(abs(a - b) for a, b in zip(one[0], plain, strict=True)) > 1e-3
    for checkpoint, world in ((False, 2), (True, 2), (True, 1), (False, 4)):
        ranks = pool.run(with_dropout, checkpoint, schedule, world=world)
        for losses, _, _ in ranks:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(one[0]), **CLOSE)
        check([of_rank for _, of_rank, _ in ranks], one[1])


def make_losses_without_dropout() -> list[float]:
    torch.manual_seed(0)
    module = Dropping().eval()
    x, y = MODELS["gpt"][2](1, 8, torch.float32)
    parts = zip(x.chunk(4), y.chunk(4), strict=True)
    return [float(next_token(module(xm), ym).detach()) for xm, ym in parts]


def test_recomputation_has_the_same_bits(pool: Pool) -> None:
    kept = pool.run(with_dropout, False, "1f1b")
    again = pool.run(with_dropout, True, "1f1b")
    for (losses, first, _), (repeated, second, _) in zip(kept, again, strict=True):
        assert losses == repeated
        assert all(torch.equal(first[name], second[name]) for name in first)
