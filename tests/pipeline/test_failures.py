"""One rank's error reaches all ranks with its place; the next step works."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

import dreamcomm
from dreamcomm.pipeline import Pipeline, PipelineError
from helpers.pool import Fresh, Pool
from pipeline.pipe_models import MODELS, make

pytestmark = pytest.mark.beyond_gloo("checks what only dreamcomm does")

SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "zb-h1"]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Bad) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.block.fails == "backward":
            raise ArithmeticError("the backward pass of this block fails")
        return gradient, None


class Bad(nn.Module):
    """Fails at a micro-batch's forward or backward pass, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails, self.calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails == "forward" and self.calls == 2:
            raise KeyError("a block fails")
        out: Tensor = self.linear(x)
        return Failing.apply(out, self)  # type: ignore[no-any-return]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Bad() for _ in range(6)))


def loss(output: Tensor, target: Tensor, fails: bool = False) -> Tensor:
    if fails:
        raise ValueError("the loss fails")
    return F.mse_loss(output, target)


def raised(call: Any) -> tuple[str, float, PipelineError]:
    begin = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        call()
    return str(caught.value), time.monotonic() - begin, caught.value


def failing(schedule: str, where: str, block: int) -> list[Any]:
    """The error, and the gradients of the step after it."""
    pipe = Pipeline(module := blocks(), 4, schedule=schedule, loss_fn=loss)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    pipe.step(x, target=x)
    for one in pipe.parameters():
        one.grad = None
    bad = module[block]
    assert isinstance(bad, Bad)
    bad.calls, bad.fails = 0, where
    options = {"loss_kwargs": {"fails": True}} if where == "loss" else {}
    text, seconds, error = raised(lambda: pipe.step(x, target=x, **options))
    left = [one.grad for one in pipe.parameters() if one.grad is not None]
    bad.fails = ""
    pipe.step(x, target=x)
    gradients = {n: one.grad for n, one in pipe.named_parameters()}
    return [text, seconds, (error.rank, error.stage, error.action), len(left), gradients]


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_reaches_all_and_the_next_step_works(
    pool: Pool, schedule: str, where: str, slack: float
) -> None:
    block = {"forward": 2, "backward": 0, "loss": 5}[where]
    world = 2 if schedule == "interleaved1f1b" else 3
    ranks = pool.run(failing, schedule, where, block, world=world)
    module = blocks()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for part in x.chunk(4):
        (F.mse_loss(module(part), part) / 4).backward()
    expected = {n: one.grad for n, one in module.named_parameters()}
    kind = {"forward": "KeyError", "backward": "ArithmeticError", "loss": "ValueError"}[where]
    for text, seconds, place, left, gradients in ranks:
        assert text == ranks[0][0]
        assert place == ranks[0][2]
        assert kind in text
        assert f"stage {place[1]}, micro-batch " in text
        assert seconds < 1.0 + slack
        assert left == 0, "gradients of the failed step are gone"
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name])


def accumulated_before(schedule: str) -> tuple[bool, bool]:
    """Whether a failed step leaves what an earlier one has accumulated."""
    pipe = Pipeline(module := blocks(), 4, schedule=schedule, loss_fn=loss)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    pipe.step(x, target=x)
    before = [one.grad for one in pipe.parameters()]
    values = [one.grad.clone() for one in pipe.parameters()]  # type: ignore[union-attr]
    bad = module[2]
    assert isinstance(bad, Bad)
    bad.calls, bad.fails = 0, "forward"
    raised(lambda: pipe.step(x, target=x))
    after = [one.grad for one in pipe.parameters()]
    same = all(a is b for a, b in zip(before, after, strict=True))
    equal = all(torch.equal(a, b) for a, b in zip(values, after, strict=True))  # type: ignore[arg-type]
    return same, equal


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_failed_step_leaves_earlier_gradients(pool: Pool, schedule: str) -> None:
    assert pool.run(accumulated_before, schedule, world=3) == [(True, True)] * 3


def beside(rank: int) -> list[Any]:
    """One of two pipelines side by side fails; the other one has nothing to wait for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
    module = blocks()
    pipe = Pipeline(module, 4, loss_fn=loss, mesh=mesh)
    keep = dreamcomm.DistributedDataParallel(pipe.module, process_group=mesh["data"].get_group())
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    if dist.get_rank() == rank:
        for one in module:
            assert isinstance(one, Bad)
            one.fails = "forward"
    text, seconds, _ = raised(lambda: pipe.step(x, target=x))
    for one in module:
        assert isinstance(one, Bad)
        one.fails = ""
    pipe.step(x, target=x)
    del keep
    return [text, seconds]


@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_stops_the_pipelines_beside(pool: Pool, rank: int, slack: float) -> None:
    ranks = pool.run(beside, rank, world=4)
    for text, seconds in ranks:
        assert f"rank {rank}, stage {rank // 2}, " in text
        assert text == ranks[0][0]
        assert seconds < 1.0 + slack


# Bad input.


def different_calls() -> list[str]:
    pipe = Pipeline(make("mlp"), 4, loss_fn=MODELS["mlp"][1])
    x, y = MODELS["mlp"][2](0, 8, torch.float32)
    texts = []
    for evaluates in range(dist.get_world_size()):
        call = pipe.eval if dist.get_rank() == evaluates else pipe.step
        texts.append(raised(lambda call=call: call(x, target=y))[0])
    pipe.step(x, target=y)
    return texts


@pytest.mark.parametrize("world", [2, 3])
def test_step_on_one_rank_and_eval_on_another(pool: Pool, world: int) -> None:
    ranks = pool.run(different_calls, world=world)
    for texts in ranks:
        assert texts == ranks[0]
        for text in texts:
            assert "it has called" in text
            assert "all ranks have to call the same" in text


def bad_steps() -> list[str]:
    pipe = Pipeline(make("mlp"), 4, loss_fn=MODELS["mlp"][1])
    x, y = MODELS["mlp"][2](0, 8, torch.float32)
    bad: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x[:3],), {"target": y}),
        ((x,), {"target": y[:2]}),
        ((x,), {"target": y[:, :2]}),
        ((x[:, :7],), {"target": y}),
        ((), {"target": y}),
        ((x, x), {"target": y}),
        ((x,), {"target": y, "mask": x}),
        ((x,), {}),
    ]
    texts = [raised(lambda a=a, k=k: pipe.step(*a, **k))[0] for a, k in bad]
    pipe.step(x, target=y)
    return texts


def test_bad_arguments_of_a_step(pool: Pool) -> None:
    ranks = pool.run(bad_steps)
    assert ranks[0] == ranks[1]
    wanted = [
        "3 rows do not make 4 micro-batches",
        "2 rows do not make 4 micro-batches",
        "must match the size",
        "stage 0, micro-batch 0",
        "argument",
        "argument",
        "mask",
        "target",
    ]
    for text, words in zip(ranks[0], wanted, strict=True):
        assert words in text, (words, text)


def unfit_stages() -> str:
    torch.manual_seed(0)
    pipe = Pipeline([nn.Linear(4, 5), nn.Linear(6, 4)], 2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    return raised(lambda: pipe.step(x, target=x))[0]


def test_a_stage_that_does_not_take_what_it_gets(pool: Pool) -> None:
    for text in pool.run(unfit_stages):
        assert "rank 1, stage 1, micro-batch 0 (action 1F0)" in text
        assert "stage 0 gave float32 [2, 5]" in text


def refused(options: dict[str, Any], own: dict[int, dict[str, Any]]) -> str:
    """The error of making a pipeline with options, some of them of one rank alone."""
    options = options | own.get(dist.get_rank(), {})
    micro = options.pop("micro", 4)
    module = options.pop("module", None) or make("mlp")
    with pytest.raises((ValueError, PipelineError)) as caught:
        Pipeline(module, micro, loss_fn=F.mse_loss, **options)
    dist.barrier()  # the group is whole
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "own", "words"),
    [
        ({"schedule": "2f2b"}, {}, "1F1B"),
        ({"stages": 3}, {}, "3 stages"),
        ({"split": [3, 2], "schedule": "interleaved1f1b"}, {}, "3 stages"),
        ({"split": [9]}, {}, "1 to 7"),
        ({"micro": 0}, {}, "n_microbatches"),
        ({"stages": 16, "schedule": "interleaved1f1b"}, {}, "16 stages"),
        ({"scale_grads": "sum"}, {}, "scale_grads"),
        ({"scale_grads": 1}, {}, "scale_grads"),
        ({"accumulate": 2, "scale_grads": False}, {}, "accumulate=2"),
        ({"loss": "none"}, {}, '"last" or "all"'),
        ({"accumulate": 0}, {}, "accumulate"),
        ({"blocks": "nothing"}, {}, "nothing"),
        ({}, {1: {"micro": 5}}, "ask for different"),
        ({}, {1: {"schedule": "gpipe"}}, "ask for different"),
        ({}, {1: {"split": [9]}}, "1 to 7"),
        ({}, {0: {"stages": 5}}, "5 stages"),
        ({}, {1: {"module": nn.Sequential(nn.Linear(2, 2))}}, "2 stages"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value)) or "none",
)
def test_bad_pipelines(
    pool: Pool, options: dict[str, Any], own: dict[int, dict[str, Any]], words: str
) -> None:
    for text in pool.run(refused, options, own):
        assert words in text


# A rank that ends.


def dying(rank: int, when: str) -> Any:
    import os
    import signal

    pipe = Pipeline(blocks(), 4, loss_fn=loss)
    x = torch.randn(8, 4)
    pipe.step(x, target=x)
    if dist.get_rank() == rank:
        if when == "inside":
            module = next(iter(pipe.module.children()))
            module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            pipe.step(x, target=x)
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds, _ = raised(lambda: pipe.step(x, target=x))
    again, at_once, _ = raised(lambda: pipe.step(x, target=x))
    return text, seconds, again, at_once


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_ends_is_reported(fresh: Fresh, rank: int, when: str, slack: float) -> None:
    ranks = fresh.start(dying, rank, when, world=3)
    for number, one in enumerate(ranks):
        if number == rank:
            continue
        reply = one.reply()
        assert reply.error is None, reply.error
        text, seconds, again, at_once = reply.value
        assert f"rank {rank}" in text
        assert "ended" in text
        assert seconds < 1.0 + slack
        assert "ended" in again
        assert at_once < 0.2 + slack


# After the last action.


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"numbers": x.sum().item(), "rows": x}


def odd_ends() -> list[str]:
    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(nn.Linear(4, 4), Odd()),
        2,
        loss_fn=lambda output: output["rows"].mean(),
        output_merge_spec=(TensorChunkSpec(0),) * 3,
    )
    x = torch.ones(4, 4)
    texts = [raised(lambda: pipe.step(x))[0]]
    own: Any = () if dist.get_rank() == 1 else []
    texts.append(raised(lambda: pipe.step(x, losses=own, return_outputs=False))[0])
    pipe.step(x, return_outputs=False)
    return texts


def test_an_error_after_the_last_action_reaches_all(pool: Pool) -> None:
    first, second = pool.run(odd_ends)
    assert first == second
    assert "expected losses to be a list" in first[1]


def late() -> tuple[str, list[bool]]:
    """Rank 0 is late by three times the group's timeout; the others' gradients stay."""
    pipe = Pipeline(blocks(), 2, loss_fn=loss)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    pipe.step(x, target=x)
    before = [one.grad for one in pipe.parameters()]
    if dist.get_rank() == 0:
        time.sleep(6.2)
    text = raised(lambda: pipe.step(x, target=x))[0]
    return text, [a is one.grad for a, one in zip(before, pipe.parameters(), strict=True)]


def test_a_late_rank_is_an_error_of_the_pipeline(pool: Pool) -> None:
    for text, kept in pool.run(late, group_timeout=2.0):
        assert "has waited" in text
        assert all(kept)
