"""What may travel between stages, and enter a pipeline: any shapes, types, trees and keywords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

from dreamcomm.pipeline import MicroBatches, Pipeline, PipelineError, Skip
from helpers.pool import Pool
from pipeline.pipe_models import MODELS, OneProcess, make, next_token

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"]
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def state_of(pipe: Pipeline) -> dict[str, Tensor]:
    return {n: one.grad.clone() for n, one in pipe.named_parameters() if one.grad is not None}


def check(ranks: list[dict[str, Tensor]], module: nn.Module) -> None:
    found: dict[str, Tensor] = {}
    for one in ranks:
        found |= one
    expected = {n: one.grad for n, one in module.named_parameters() if one.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient, **CLOSE)


# Other lengths in each micro-batch and step; rows that the micro-batches do not divide.


def lengths(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randint(50, (2 + n, 4 + n + step), generator=generator) for n in range(4)]
    return [(one[:, :-1], one[:, 1:]) for one in drawn]


def varying(schedule: str) -> dict[str, Tensor]:
    pipe = Pipeline(make("gpt"), 4, schedule=schedule, loss_fn=next_token)
    for step in range(2):
        parts = lengths(step)
        pipe.step(MicroBatches([x for x, _ in parts]), target=MicroBatches([y for _, y in parts]))
    return state_of(pipe)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_has_another_shape(pool: Pool, schedule: str) -> None:
    module = make("gpt")
    for step in range(2):
        for x, y in lengths(step):
            (next_token(module(x), y) / 4).backward()
    check(pool.run(varying, schedule), module)


def few(name: str, schedule: str, rows: int, micro: int) -> tuple[dict[str, Tensor], Any]:
    pipe = Pipeline(make(name), micro, schedule=schedule, loss_fn=MODELS[name][1])
    x, y = MODELS[name][2](0, rows, torch.float32)
    output = pipe.step(x, target=y)
    return state_of(pipe), output


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rows", "micro"), [(7, 3), (5, 1), (5, 2)])
def test_any_rows_and_fewer_micro_batches_than_stages(
    pool: Pool, schedule: str, rows: int, micro: int
) -> None:
    reference = OneProcess("mlp")
    reference.gradients(0, rows, micro)
    ranks = pool.run(few, "mlp", schedule, rows, micro, world=3 if schedule != SCHEDULES[2] else 2)
    check([gradients for gradients, _ in ranks], reference.module)
    output = reference.module(reference.data(0, rows, torch.float32)[0])
    torch.testing.assert_close(ranks[-1][1], output.detach(), rtol=1e-5, atol=1e-6)
    assert all(one is None for _, one in ranks[:-1])


# Trees, other types, and what is no tensor; keyword arguments at any stage.


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: bool) -> Any:
        hidden = self.linear(x)
        return {"hidden": hidden, "ids": (x > 0), "half": hidden.half()}, "word", [None, flag, 2.5]


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tree: Any, word: str, rest: list[Any], *, scale: Tensor) -> Any:
        assert tree["half"].dtype == torch.float16
        assert tree["ids"].dtype == torch.bool
        assert word == "word"
        assert rest[1:] == [True, 2.5]
        hidden = self.linear(tree["hidden"]) * scale + tree["half"].float() * tree["ids"]
        return hidden.transpose(0, 1), hidden.double()


class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, flipped: Tensor, wide: Tensor) -> Tensor:
        assert flipped.stride() == (1, 4)
        out: Tensor = self.linear(flipped.t()) + wide.float()
        return out


def stages() -> list[nn.Module]:
    torch.manual_seed(3)
    return [First(), Second(), Third()]


def tree_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, scale, y = (torch.randn(6, 4, generator=generator) for _ in range(3))
    return x, scale, y


def trees(schedule: str, rank_alone: bool) -> dict[str, Tensor]:
    pipe = Pipeline(stages(), 3, schedule=schedule, loss_fn=F.mse_loss)
    x, scale, y = tree_inputs()
    rank = torch.distributed.get_rank()
    if rank_alone:  # each rank gives what its stage reads
        if rank == 0:
            pipe.step(x, True)
        elif rank == 1:
            pipe.step(scale=scale)
        else:
            pipe.step(target=y)
    else:
        pipe.step(x, True, target=y, scale=scale)
    return state_of(pipe)


@pytest.mark.parametrize("rank_alone", [False, True], ids=["all", "own"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_trees_and_keywords(pool: Pool, schedule: str, rank_alone: bool) -> None:
    first, second, third = modules = stages()
    for x, scale, y in zip(*(one.chunk(3) for one in tree_inputs()), strict=True):
        out = third(*second(*first(x, True), scale=scale))
        (F.mse_loss(out, y) / 3).backward()
    check(pool.run(trees, schedule, rank_alone, world=3), nn.Sequential(*modules))


# Values that jump over stages, by Skip.


class Down(nn.Module):
    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip, self.linear = skip, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.skip.stash({"value": x, "shape": tuple(x.shape)})
        return x.relu()


class Up(nn.Module):
    def __init__(self, skip: Skip) -> None:
        super().__init__()
        self.skip, self.linear = skip, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        held = self.skip.pop()
        assert held["shape"] == tuple(x.shape)
        out: Tensor = self.linear(x * held["value"].sigmoid())
        return out


def unet() -> nn.Sequential:
    torch.manual_seed(2)
    outer, inner = Skip(), Skip()
    middle = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
    return nn.Sequential(Down(outer), Down(inner), middle, nn.Linear(6, 6), Up(inner), Up(outer))


def skipping(schedule: str, checkpoint: bool) -> dict[str, Tensor]:
    pipe = Pipeline(unet(), 4, schedule=schedule, loss_fn=F.mse_loss, checkpoint=checkpoint)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    pipe.step(x, target=x.flip(0))
    pipe.eval(x, target=x)
    return state_of(pipe)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpoint"])
@pytest.mark.parametrize(("schedule", "world"), [("1f1b", 3), ("zb-h1", 4), ("interleaved1f1b", 2)])
def test_values_jump_over_stages(pool: Pool, schedule: str, world: int, checkpoint: bool) -> None:
    module = unet()
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    for xm, ym in zip(x.tensor_split(4), x.flip(0).tensor_split(4), strict=True):
        (F.mse_loss(module(xm), ym) / 4).backward()
    check(pool.run(skipping, schedule, checkpoint, world=world), module)


# Evaluation, chunk specs, frozen stages.


def evaluated() -> tuple[Any, list[float], bool, dict[str, Tensor]]:
    pipe = Pipeline(make("cnn"), 4, loss_fn=MODELS["cnn"][1], loss="all", schedule="zb-h1")
    x, y = MODELS["cnn"][2](0, 8, torch.float32)
    pipe.step(x, target=y)
    pipe.module.eval()
    losses: list[Tensor] = []
    output = pipe.eval(x, target=y, losses=losses)
    again = pipe.eval(x)
    same = output is None or torch.equal(output, again)
    state = {name: one.clone() for name, one in pipe.state_dict().items()}
    pipe.module.train()
    pipe.step(x, target=y)
    return output, [float(one) for one in losses], same, state


def test_evaluation_between_steps(pool: Pool) -> None:
    ranks = pool.run(evaluated)
    assert all(same for _, _, same, _ in ranks)
    assert ranks[0][1] == ranks[1][1]
    module = make("cnn")
    module.load_state_dict(ranks[0][3] | ranks[1][3])
    module.eval()
    x, y = MODELS["cnn"][2](0, 8, torch.float32)
    with torch.no_grad():
        output = module(x.clone())
    torch.testing.assert_close(ranks[1][0], output, rtol=1e-5, atol=1e-6)
    expected = [float(F.mse_loss(o, t)) for o, t in zip(output.chunk(4), y.chunk(4), strict=True)]
    assert ranks[0][1] == pytest.approx(expected, rel=1e-5)


def by_columns() -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    pipe = Pipeline(
        [Turn(), nn.Linear(4, 3)],
        2,
        loss_fn=lambda output: output.square().mean(),
        args_chunk_spec=(TensorChunkSpec(1),),
        output_merge_spec=TensorChunkSpec(0),
    )
    output = pipe.step(torch.arange(24.0).view(4, 6))
    return state_of(pipe), output


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.t())
        return out


def test_specs_and_a_loss_without_targets(pool: Pool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Turn(), nn.Linear(4, 3))
    x = torch.arange(24.0).view(4, 6)
    for part in x.chunk(2, dim=1):
        (module(part).square().mean() / 2).backward()
    ranks = pool.run(by_columns)
    check([gradients for gradients, _ in ranks], module)
    torch.testing.assert_close(ranks[1][1], module(x).detach())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("which", [slice(0, 2), slice(2, 5), slice(5, 8), slice(0, 5)])
def test_frozen_stages(pool: Pool, schedule: str, which: slice) -> None:
    module = make("mlp")
    for layer in list(module.children())[which]:
        layer.requires_grad_(False)
    x, y = MODELS["mlp"][2](0, 4, torch.float32)
    for xm, ym in zip(x.chunk(2), y.chunk(2), strict=True):
        (MODELS["mlp"][1](module(xm), ym) / 2).backward()
    check(pool.run(frozen_part, schedule, which.start, which.stop, world=3), module)


def frozen_part(schedule: str, begin: int, end: int) -> dict[str, Tensor]:
    module = make("mlp")
    for layer in list(module.children())[begin:end]:
        layer.requires_grad_(False)
    pipe = Pipeline(module, 2, schedule=schedule, loss_fn=MODELS["mlp"][1], split=[2, 5])
    x, y = MODELS["mlp"][2](0, 4, torch.float32)
    pipe.step(x, target=y)
    return state_of(pipe)


# Batch norm: running statistics are those of the whole batch.


def running(schedule: str) -> dict[str, Tensor]:
    pipe = Pipeline(make("cnn"), 4, schedule=schedule, loss_fn=MODELS["cnn"][1])
    x, y = MODELS["cnn"][2](0, 11, torch.float32)
    pipe.step(x, target=y)
    return {k: v.clone() for k, v in pipe.module.named_buffers()}


def test_running_statistics_are_of_the_whole_batch(pool: Pool) -> None:
    found: dict[str, Tensor] = {}
    for one in pool.run(running, "1f1b"):
        found |= one
    # The first layer's input does not depend on how micro-batches are normalised.
    module = make("cnn")
    module(MODELS["cnn"][2](0, 11, torch.float32)[0])
    expected = dict(module.named_buffers())
    assert found.keys() == expected.keys()
    for name in ("2.running_mean", "2.running_var", "2.num_batches_tracked"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    assert all(int(v) == 1 for k, v in found.items() if k.endswith("tracked"))


# What would lose a gradient, or change it, is refused or right.


@dataclass
class Unknown:
    x: Tensor


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return Unknown(self.linear(x))


class Finds(nn.Module):
    def forward(self, value: Any) -> Tensor:
        out: Tensor = value.x
        return out


def hiding(stages: int) -> str:
    torch.manual_seed(0)
    pipe = Pipeline(
        [Hides(), Finds()], 2, loss_fn=F.mse_loss, schedule="gpipe", stages=stages or None
    )
    with pytest.raises(PipelineError) as caught:
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return str(caught.value)


@pytest.mark.parametrize(("world", "stages"), [(2, 0), (1, 2)])
def test_tensors_in_unknown_classes_are_refused(pool: Pool, world: int, stages: int) -> None:
    for text in pool.run(hiding, stages, world=world):
        assert "holds a tensor" in text
        assert "register" in text


class Noisy(nn.Module):
    """Draws numbers that are no unit's in training, and begins in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu_()
        out: Tensor = self.linear(F.dropout(x, 0.5, training=True))
        return out


def noisy(checkpoint: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(Noisy(), Noisy())
    module.eval()  # units in evaluation mode are not seeded
    pipe = Pipeline(module, 2, loss_fn=F.mse_loss, checkpoint=checkpoint)
    torch.manual_seed(5)
    pipe.step(torch.linspace(-1, 1, 16).view(4, 4), target=torch.ones(4, 4))
    return state_of(pipe)


def test_recomputation_repeats_all_random_numbers(pool: Pool) -> None:
    kept, again = pool.run(noisy, False), pool.run(noisy, True)
    for first, second in zip(kept, again, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def cut_off() -> str:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipeline(module, 2, loss_fn=lambda output: output.detach().sum())
    with pytest.raises(PipelineError) as caught:
        pipe.step(torch.ones(4, 4))
    return str(caught.value)


def test_a_loss_without_gradient_is_an_error(pool: Pool) -> None:
    for text in pool.run(cut_off):
        assert "the loss needs no gradient" in text
