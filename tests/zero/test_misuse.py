"""What ZeroOptimizer refuses, on all ranks, before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dreamcomm
from ddp.models import batch, make, rows_of
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")


def build(case: str) -> Any:
    module = make("mlp")
    parameters: Any = list(module.parameters())
    kind: Any = torch.optim.AdamW
    options: dict[str, Any] = {}
    if case == "stage 3":
        options["stage"] = 3
    elif case == "stage 0":
        options["stage"] = 0
    elif case == "overlap":
        options["overlap_with_ddp"] = True
    elif case == "not reducing stage 2":
        options |= {"stage": 2, "reduce": False}
    elif case == "master":
        options["master_dtype"] = torch.bfloat16
    elif case == "not a class":
        kind = torch.optim.AdamW(parameters)
    elif case == "lbfgs":
        kind = torch.optim.LBFGS
    elif case == "own class":
        kind = type("Own", (torch.optim.SGD,), {})
    elif case == "none":
        parameters = []
    elif case == "frozen":
        module.requires_grad_(False)
    elif case == "twice":
        parameters = [{"params": parameters}, {"params": parameters[:1]}]
    elif case == "integers":
        parameters.append(nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False))
    elif case == "ranks differ":
        parameters.append(nn.Parameter(torch.ones(3 + dist.get_rank())))
    elif case == "a part of a wrapper":
        wrapper = dreamcomm.DistributedDataParallel(module)
        return ZeroOptimizer(list(wrapper.parameters())[:2], kind)
    elif case == "under torch's wrapper":
        theirs = nn.parallel.DistributedDataParallel(module)
        return ZeroOptimizer(theirs.parameters(), kind)
    return ZeroOptimizer(parameters, kind, **options)


def refused(case: str) -> tuple[str, str]:
    try:
        build(case)
    except Exception as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("stage 3", "ValueError", "call dreamcomm.zero.fully_shard on the module first"),
        ("stage 0", "ValueError", "stage 0 is the optimizer itself"),
        ("overlap", "NotImplementedError", "overlap_with_ddp is not supported"),
        ("not reducing stage 2", "ValueError", "use stage=1"),
        ("master", "ValueError", "got torch.bfloat16"),
        ("not a class", "TypeError", "expected optimizer_class to be a class"),
        ("lbfgs", "ValueError", "LBFGS is not known to step each element by itself"),
        ("own class", "ValueError", "Pass per_element=True if it does"),
        ("none", "ValueError", "empty parameter list"),
        ("frozen", "ValueError", "none of 6 parameters requires a gradient"),
        ("twice", "ValueError", "more than one parameter group"),
        ("integers", "ValueError", "expected parameters of floating-point types"),
        ("ranks differ", "ValueError", "the ranks' modules differ"),
        ("a part of a wrapper", "ValueError", "a DistributedDataParallel reduces 6"),
        ("under torch's wrapper", "ValueError", "pass reduce=False"),
    ],
)
def test_it_is_refused_on_all_ranks(pool: Pool, case: str, kind: str, words: str) -> None:
    for got, text in pool.run(refused, case):
        assert got == kind
        assert words in text


def moved(stage: int) -> str:
    module = make("mlp")
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage=stage)
    x, y = (rows_of(one, dist.get_rank(), 2) for one in batch(0))
    nn.functional.mse_loss(module(x), y).backward()
    weight = module.layers[0].weight
    weight.data = weight.data.clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_got_other_memory_are_named(pool: Pool, stage: int) -> None:
    for text in pool.run(moved, stage):
        assert "'parameter 0' has got other memory" in text


def looked_at() -> list[str]:
    """What can be done with a gradient that was reduced into shards."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model[0].weight.grad
    said = [repr(gradient)]
    for look in (lambda: gradient.sum(), lambda: gradient * 2, lambda: gradient.mul_(2)):
        try:
            look()
        except RuntimeError as error:
            said.append(str(error))
    optimizer.zero_grad(set_to_none=False)
    return said


def test_a_gradient_in_shards_says_so(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(looked_at)):
        assert said[0] == "ShardedGradient('0.weight', shape (2, 3), over 2 ranks)"
        assert len(said) == 4
        for text in said[1:]:
            assert text.startswith(f"rank {rank}: ")
            assert "the gradient of '0.weight', which was reduced into shards over 2 ranks" in text


def taken_over() -> list[str]:
    """What a wrapper refuses while an optimizer has its gradients, and takes afterwards."""
    module = dreamcomm.DistributedDataParallel(make("mlp"))
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.AdamW)
    said = []
    for call in (
        lambda: module.clip_grad_norm_(1.0),
        lambda: module.register_comm_hook(None, dreamcomm.hooks.fp16),
        lambda: ZeroOptimizer(module.parameters(), torch.optim.AdamW),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    del optimizer
    ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage=2)
    return said


def test_a_wrapper_whose_gradients_are_taken_over_says_so(pool: Pool) -> None:
    for clip, hook, second in pool.run(taken_over):
        assert "ZeroOptimizer(stage=1) reduces the gradients: call its clip_grad_norm_()" in clip
        assert "a communication hook would not be called" in hook
        assert "another ZeroOptimizer(stage=1) has these parameters already" in second


def sparse(wraps: bool) -> str:
    module: nn.Module = nn.Embedding(8, 2, sparse=True)
    if wraps:
        module = dreamcomm.DistributedDataParallel(module)
    try:
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD)
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wraps", [False, True])
def test_sparse_gradients_are_refused(pool: Pool, wraps: bool) -> None:
    for text in pool.run(sparse, wraps):
        assert "leave sparse=True out" in text


def halves(stage: int) -> bool:
    """Parameters of 16 bits without masters are stepped by torch, in 16 bits."""
    found = []
    for zero in (False, True):
        module: nn.Module = make("mlp").bfloat16()
        if zero:
            optimizer: Any = ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage=stage)
        else:
            module = dreamcomm.DistributedDataParallel(module)
            optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        for step in range(3):
            optimizer.zero_grad()
            x, y = (rows_of(one.bfloat16(), dist.get_rank(), 2) for one in batch(step))
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
        found.append([p.detach().clone() for p in module.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_of_16_bits_without_masters(pool: Pool, stage: int) -> None:
    assert pool.run(halves, stage) == [True, True]


def vouched() -> bool:
    kind = type("Own", (torch.optim.SGD,), {})
    module, other = make("mlp"), make("mlp")
    ours = ZeroOptimizer(module.parameters(), kind, per_element=True, lr=0.1)
    theirs = ZeroOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)
    for one, optimizer in ((module, ours), (other, theirs)):
        x, y = (rows_of(data, dist.get_rank(), 2) for data in batch(0))
        nn.functional.mse_loss(one(x), y).backward()
        optimizer.step()
    return all(map(torch.equal, module.parameters(), other.parameters()))


def test_other_classes_may_be_vouched_for(pool: Pool) -> None:
    assert pool.run(vouched) == [True, True]


def group_added() -> list[bool]:
    """A second group with other options, after some steps; and a closure."""
    found = []
    modules = [make("mlp"), make("mlp")]
    optimizers: list[torch.optim.Optimizer] = []
    for zero, module in zip((True, False), modules, strict=True):
        layers = list(module.parameters())
        if zero:
            optimizer: torch.optim.Optimizer = ZeroOptimizer(
                layers[:4], torch.optim.AdamW, lr=1e-3, stage=2
            )
        else:
            optimizer = torch.optim.AdamW(layers[:4], lr=1e-3, foreach=False)
        optimizers.append(optimizer)
    for step in range(4):
        for module, optimizer in zip(modules, optimizers, strict=True):
            if step == 2:
                optimizer.zero_grad()
                optimizer.add_param_group({"params": list(module.parameters())[4:], "lr": 1e-2})

            def closure(module: nn.Module = module, step: int = step) -> torch.Tensor:
                module.zero_grad()
                x, y = batch(step)  # the same on all ranks, so averages are exact
                loss = nn.functional.mse_loss(module(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        found.append(all(map(torch.equal, *(module.parameters() for module in modules))))
    return found


def test_parameters_can_be_added(pool: Pool) -> None:
    assert pool.run(group_added) == [[True] * 4] * 2


def first_weights() -> list[float]:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(200, 200), nn.Linear(3, 2))
    ZeroOptimizer(module.parameters(), torch.optim.SGD)
    return [float(p.double().sum()) for p in module.parameters()]


def test_the_first_weights_are_those_of_rank_0(pool: Pool) -> None:
    first, *others = pool.run(first_weights, world=3)
    assert others == [first, first]
