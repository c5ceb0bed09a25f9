"""Gradients of what is no stage's parameter: a loss function's, an argument's, a captured one's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dreamcomm
from dreamcomm.pipeline import MicroBatches, Pipeline, PipelineError
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

MICRO, ROWS = 2, 4


class Loss(nn.Module):
    """It has a temperature of its own."""

    def __init__(self, counted: bool, *, fails: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.counted, self.fails, self.calls = counted, fails, 0

    def forward(self, output: Tensor, target: Tensor) -> Any:
        self.calls += 1
        if self.fails and self.calls % MICRO == 0:
            raise ValueError("the loss fails")
        total = (self.scale * output - target).square().sum()
        return (total, output.numel()) if self.counted else total / output.numel()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def batch(number: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, rows, 4, generator=generator)
    return x, y


def expected(number: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the loss's scale, and of the batch, in one process."""
    loss, (x, y) = Loss(counted=False), batch(number, rows)
    loss(layers()(x.requires_grad_()), y.requires_grad_()).backward()
    assert loss.scale.grad is not None
    assert x.grad is not None
    assert y.grad is not None
    return loss.scale.grad, x.grad, y.grad


def functions(loss: Loss) -> dict[str, Any]:
    return {
        "module": loss,
        "method": loss.forward,
        "partial": partial(loss),
        "captured": lambda output, target: loss(output, target),
    }


def scaled(schedule: str, counted: bool) -> dict[str, Tensor | None]:
    """By kind of the function the scale's gradient, after a step that adds to one before."""
    found: dict[str, Tensor | None] = {}
    for name in functions(Loss(counted)):
        loss = Loss(counted)
        pipe = Pipeline(
            layers(),
            MICRO,
            schedule=schedule,
            loss_fn=functions(loss)[name],
            scale_grads="count" if counted else True,
        )
        loss.scale.grad = torch.tensor(10.0)
        x, y = batch()
        pipe.step(x, target=y)
        found[name] = loss.scale.grad - 10.0
    return found


@pytest.mark.parametrize("counted", [False, True], ids=["mean", "count"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_parameters_of_a_loss_function(pool: Pool, schedule: str, counted: bool) -> None:
    _, last = pool.run(scaled, schedule, counted)
    for gradient in last.values():
        torch.testing.assert_close(gradient, expected()[0], rtol=1e-4, atol=1e-5)


def failed(kind: str) -> list[Any]:
    """After a failed step: the gradients that were there before, and those that were not."""
    loss = Loss(counted=False, fails=True)
    pipe = Pipeline(layers(), MICRO, loss_fn=functions(loss)[kind])
    x, y = batch()
    before = torch.tensor(10.0)
    alias, x = before, x.requires_grad_()
    left: list[Any] = []
    for given in (before, None):
        loss.scale.grad = given
        with pytest.raises(PipelineError, match="the loss fails"):
            pipe.step(x, target=y)
        left += [loss.scale.grad, x.grad]
    assert left[0] is None or left[0] is alias
    return left


@pytest.mark.parametrize("kind", ["module", "captured"])
def test_a_failed_step_leaves_their_gradients(pool: Pool, kind: str) -> None:
    for scale, of_x, no_scale, no_x in pool.run(failed, kind):
        assert scale == 10.0
        assert of_x is no_scale is no_x is None


def argument_gradients(in_pieces: bool) -> list[Tensor | None]:
    pipe = Pipeline(layers(), MICRO, loss_fn=Loss(counted=True), scale_grads="count")
    x, y = batch()
    if in_pieces:  # the first piece does not show that the second one is a leaf
        xs = [x[:2], x[2:].clone().requires_grad_()]
        pipe.step(MicroBatches(xs), target=y)
        return [xs[1].grad]
    pipe.step(x.requires_grad_(), target=y.requires_grad_())
    return [x.grad, y.grad]


def test_arguments_that_require_gradients(pool: Pool) -> None:
    (of_x, none), (also_none, of_y) = pool.run(argument_gradients, False)
    assert none is also_none is None
    torch.testing.assert_close(of_x, expected()[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(of_y, expected()[2], rtol=1e-4, atol=1e-6)
    ((of_piece,), _) = pool.run(argument_gradients, True)
    torch.testing.assert_close(of_piece, expected()[1][2:], rtol=1e-4, atol=1e-6)


def another_stages() -> str:
    module = layers()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + module[0].weight.square().sum()  # type: ignore[operator,union-attr]

    pipe = Pipeline(module, MICRO, loss_fn=loss)
    x, y = batch()
    with pytest.raises(PipelineError) as caught:
        pipe.step(x, target=y)
    return str(caught.value)


def test_another_ranks_parameter_is_refused_by_name(pool: Pool) -> None:
    for text in pool.run(another_stages):
        assert "rank 1, stage 1" in text
        assert "the parameter '0.weight' of stage 0, which another rank runs" in text


class OwnLeaf(nn.Module):
    """Its output's graph begins at a leaf of its own, as where embeddings are frozen."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_()


def captured(output: Tensor, target: Tensor) -> Tensor:
    return (output * CAPTURED[0] - target).square().mean()


CAPTURED = [torch.ones((), requires_grad=True)]  # no parameter


def leaves_side_by_side() -> tuple[str, Tensor | None, Any]:
    """The error of a captured tensor; gradients of a stage that makes a leaf of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    x, y = (one.chunk(2)[share] for one in batch(3, 2 * ROWS))
    keep, results = [], []
    for loss_fn in (captured, nn.functional.mse_loss):
        module = nn.Sequential(OwnLeaf(), *layers())
        pipe = Pipeline(module, MICRO, loss_fn=loss_fn, mesh=mesh, split=[2])
        keep.append(dreamcomm.DistributedDataParallel(pipe.module, process_group=group))
        try:
            pipe.step(x, target=y)
        except PipelineError as error:
            results.append(str(error))
    (parameter, *_) = pipe.parameters()
    (text,) = results
    return text, CAPTURED[0].grad, parameter.grad


def test_leaves_that_are_no_parameters_side_by_side(pool: Pool) -> None:
    module = layers()
    x, y = batch(3, 2 * ROWS)
    nn.functional.mse_loss(module(x), y).backward()
    for rank, (text, left, gradient) in enumerate(pool.run(leaves_side_by_side, world=4)):
        assert "a tensor of shape (), torch.float32 gets a gradient" in text
        assert left is None
        torch.testing.assert_close(gradient, module[rank // 2].weight.grad)  # type: ignore[union-attr]


def side_by_side(counted: bool) -> tuple[list[str], Tensor | None]:
    """The errors where nothing averages the loss's parameter, and its gradient where DDP does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    group, share = mesh["data"].get_group(), mesh.get_local_rank("data")
    x, y = (one.chunk(2)[share] for one in batch(3, 2 * ROWS))
    loss, errors = Loss(counted), []
    keep = []
    for kind in ("captured", "module"):
        pipe = Pipeline(
            layers(),
            MICRO,
            loss_fn=functions(loss)[kind],
            scale_grads="count" if counted else True,
            mesh=mesh,
        )
        keep.append(dreamcomm.DistributedDataParallel(pipe.module, process_group=group))
        with pytest.raises(PipelineError) as caught:
            pipe.step(x, target=y)
        errors.append(str(caught.value))
    assert loss.scale.grad is None
    keep.append(dreamcomm.DistributedDataParallel(loss, process_group=group))
    pipe.step(x, target=y)
    return errors, loss.scale.grad


@pytest.mark.parametrize("counted", [False, True], ids=["mean", "count"])
def test_pipelines_side_by_side(pool: Pool, counted: bool) -> None:
    ranks = pool.run(side_by_side, counted, world=4)
    for (captured, module), gradient in ranks:
        assert "the loss function's parameter 'loss.scale' of shape ()" in captured
        assert "nothing averages the gradients of 1 of" in module
        assert "('loss_fn.scale')" in module
        if gradient is not None:
            torch.testing.assert_close(gradient, expected(3, 2 * ROWS)[0], rtol=1e-4, atol=1e-5)
    assert [one is None for _, one in ranks] == [True, True, False, False]
