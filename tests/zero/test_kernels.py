"""The optimizers' kernels: torch's bits, of its single-tensor form on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dreamcomm import _C

pytestmark = [
    pytest.mark.beyond_gloo("the kernels are dreamcomm's"),
    # Torch fuses multiplications and additions only in its kernels for these.
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="needs torch's kernels for AVX2 or AVX-512",
    ),
]

SIZES = [1, 7, 8, 31, 1000, 4097]
STEPS = 20
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
Form = dict[str, Any]
Optimizer = type[torch.optim.Optimizer]

ADAMS: list[tuple[Optimizer, Form]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.01}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True, "betas": (0.8, 0.95)}),
    (torch.optim.Adam, {"betas": (0.5, 0.9)}),
    (torch.optim.Adam, {"amsgrad": True, "betas": (0.3, 0.9), "weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True, "eps": 1e-6, "lr": 3e-4}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "maximize": True}),
]
SGDS: list[tuple[Optimizer, Form]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.01, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
]
CASES = [
    pytest.param(kind, form, id="-".join([kind.__name__, *form])) for kind, form in ADAMS + SGDS
]


def adam_rule(group: Form, step: int) -> _C.AdamRule:
    """As _single_tensor_adam computes its numbers."""
    beta1, beta2 = group["betas"]
    decoupled = group["decoupled_weight_decay"] and group["weight_decay"] != 0
    return _C.AdamRule(
        decay=1 - group["lr"] * group["weight_decay"] if decoupled else 1.0,
        weight_decay=0.0 if decoupled else group["weight_decay"],
        lerp_weight=1 - beta1,
        beta2=beta2,
        square_weight=1 - beta2,
        bias_correction2_sqrt=(1 - beta2**step) ** 0.5,
        eps=group["eps"],
        step_size=group["lr"] / (1 - beta1**step),
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def sgd_rule(group: Form, step: int) -> _C.SgdRule:
    names = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
    return _C.SgdRule(**{name: group[name] for name in names}, first=step == 1)


def numbers(size: int, dtype: torch.dtype, skew: int, seed: int) -> Tensor:
    """Numbers of many magnitudes, in memory that begins `skew` elements after aligned memory."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=dtype)
    values *= 10.0 ** torch.randint(-6, 3, (size,), generator=generator)
    memory = torch.zeros(size + skew, dtype=dtype)
    memory[skew:] = values
    return memory[skew:]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


@pytest.mark.parametrize("skew", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_twenty_steps_give_torchs_bits(
    kind: Callable[..., torch.optim.Optimizer], form: Form, dtype: torch.dtype, skew: int
) -> None:
    is_sgd = kind is torch.optim.SGD
    for size in SIZES:
        theirs = torch.nn.Parameter(numbers(size, dtype, skew, 0))
        ours = numbers(size, dtype, skew, 0)
        state: list[Tensor] = [numbers(size, dtype, skew, 0).zero_() for _ in range(3)]
        optimizer = kind([theirs], **{"lr": 0.01, **form}, foreach=False, fused=False)
        group = optimizer.param_groups[0]
        for step in range(1, STEPS + 1):
            theirs.grad = numbers(size, dtype, skew, step)
            optimizer.step()
            rule = sgd_rule(group, step) if is_sgd else adam_rule(group, step)
            _C.optimizer_step(rule, ours, state, theirs.grad)
            assert same_bits(ours, theirs.detach()), (size, step)
        names = ["momentum_buffer"] if is_sgd else ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        for name, one in zip(names, state, strict=False):
            if optimizer.state[theirs].get(name) is not None:
                assert same_bits(one, optimizer.state[theirs][name]), (size, name)


def test_extreme_numbers_give_torchs_bits() -> None:
    edge = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 3e38, -3e38, float("inf"), -float("inf"), 1.0]
    values = torch.tensor(edge).repeat(7)
    theirs = torch.nn.Parameter(values.clone())
    theirs.grad = values.roll(1)
    optimizer = torch.optim.AdamW([theirs], foreach=False, fused=False)
    ours, state = values.clone(), [torch.zeros_like(values) for _ in range(2)]
    for step in range(1, 4):
        optimizer.step()
        rule = adam_rule(optimizer.param_groups[0], step)
        _C.optimizer_step(rule, ours, state, theirs.grad)
        same = ours.view(torch.int32) == theirs.detach().view(torch.int32)
        assert bool((same | (ours.isnan() & theirs.detach().isnan())).all())


def test_correctly_rounded_roots_are_near_to_torchs() -> None:
    start, gradient = numbers(4097, torch.float32, 0, 0), numbers(4097, torch.float32, 0, 1)
    found = []
    for torch_roots in (True, False):
        rule = _C.AdamRule(
            lerp_weight=0.1, beta2=0.9, square_weight=0.1, step_size=0.1, torch_roots=torch_roots
        )
        assert rule.torch_roots == (torch_roots and torch.backends.mkl.is_available())
        one = start.clone()
        _C.optimizer_step(rule, one, [torch.zeros(4097), torch.zeros(4097)], gradient)
        found.append(one)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_autograd_is_told_of_the_change() -> None:
    parameter = torch.ones(4, requires_grad=True)
    loss = (parameter * parameter).sum()
    _C.optimizer_step(_C.SgdRule(lr=0.5), parameter.detach(), [], torch.ones(4))
    assert parameter.tolist() == [0.5] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


ROW = torch.ones(4)


@pytest.mark.parametrize(
    ("parameter", "state", "gradient", "message"),
    [
        (ROW.half(), [], ROW, "'parameter' of type float32 or float64, got float16"),
        (ROW, [], ROW.double(), "'gradient' of type float32 like 'parameter', got float64"),
        (ROW, [], torch.ones(5), "'gradient' with 4 elements like 'parameter', got 5"),
        (torch.ones(4, 4).t()[:2], [], ROW, "'parameter' to be contiguous, got shape"),
        (ROW, [], ROW + 1, "expected 1 tensors in 'state', got 0"),
        (ROW, [None], ROW + 1, r"'state\[0\]' to be a tensor, got None"),
        (ROW, [torch.ones(3)], ROW + 1, r"'state\[0\]' with 4 elements"),
        (ROW, [ROW], ROW + 1, "expected tensors that share no memory"),
    ],
)
def test_other_tensors_are_errors(
    parameter: Tensor, state: list[Tensor | None], gradient: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=f"optimizer_step: .*{message}"):
        _C.optimizer_step(_C.SgdRule(momentum=0.9), parameter, state, gradient)
