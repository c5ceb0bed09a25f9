"""A stage's backward pass in two parts: together bit for bit torch's."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dreamcomm.pipeline.compute.backward import backward_input, full_backward
from dreamcomm.pipeline.compute.entry import StageEntry, enter

WIDTH = 8
Outputs = list[Tensor | None]


class Stage(nn.Module):
    """Parameters ``a`` to ``d`` and a function of them."""

    def __init__(self, run: Callable[[Any, Tensor], Any], layers: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.run = run
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Product(torch.autograd.Function):
    """``x @ w``; counts its backward passes."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Product.runs += 1
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


def attend(s: Any, x: Tensor) -> Tensor:
    q, k, v = (one.unflatten(-1, (2, 4)).movedim(-2, 0) for one in s.layers(x).chunk(3, dim=-1))
    return F.scaled_dot_product_attention(q, k, v).movedim(0, -2).flatten(-2) @ s.a


def halves(s: Any, x: Tensor) -> Tensor:
    left, right = (x @ s.a).chunk(2, dim=-1)
    top, low = s.b.split([3, 5])
    return torch.cat([left.tanh() @ top[:, :4].T.new_ones(4, 8), right @ low[:4]]).tanh() + s.c


def cells(s: Any, x: Tensor) -> Tensor:
    hidden = x
    for _ in range(3):
        hidden = torch.tanh(F.linear(hidden, s.a, s.c)) + hidden @ s.b
    return hidden


def rare(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        picks = (x[:, 0] > 0).long()
    return F.embedding(picks, s.a) * x.sigmoid()


STAGES: dict[str, Callable[[], Stage]] = {
    "twice": lambda: Stage(lambda s, x: x @ s.a @ s.a),
    "twice between others": lambda: Stage(lambda s, x: F.gelu(x @ s.b @ s.a) @ s.a),
    "parallel uses": lambda: Stage(lambda s, x: (x @ s.a).sin() + (x.cos() @ s.a)),
    "chunk": lambda: Stage(lambda s, x: torch.mul(*(x @ torch.cat([s.a, s.b], 1)).chunk(2, 1))),
    "split and cat": lambda: Stage(halves),
    "cells": lambda: Stage(cells),
    "added": lambda: Stage(lambda s, x: x + s.c + s.d * s.c),
    "embedding": lambda: Stage(rare),
    "unused": lambda: Stage(lambda s, x: x * 2 + s.c),
    "nothing": lambda: Stage(lambda s, x: x.exp()),
    "passed through": lambda: Stage(lambda s, x: [x, x @ s.a, s.b, (s.b @ s.c).sum()]),
    "some without gradients": lambda: Stage(lambda s, x: [x @ s.a, None, x @ s.b, s.c * 2]),
    "in place": lambda: Stage(lambda s, x: x.relu_() @ s.a),
    "views": lambda: Stage(lambda s, x: (x.view(-1, 4) @ s.a.T[:4]).view(2, -1)[:, 1:] * s.c[0]),
    "function": lambda: Stage(lambda s, x: Product.apply(F.gelu(x @ s.b), s.a) * s.c),
    "two branches": lambda: Stage(lambda s, x: (x @ (s.a @ s.b).tanh()) @ s.b + s.c),
    "blocks": lambda: Stage(
        lambda s, x: s.layers(x),
        nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout())
                for _ in range(3)
            )
        ),
    ),
    "attention": lambda: Stage(attend, nn.Linear(WIDTH, 3 * WIDTH)),
    "transformer": lambda: Stage(
        lambda s, x: s.layers(x), nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    ),
    "convolution": lambda: Stage(
        lambda s, x: s.layers(x.view(4, 2, 2, 4)),
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(True), nn.Conv2d(3, 2, 1)),
    ),
    "recurrent": lambda: Stage(lambda s, x: s.layers(x)[0], nn.LSTM(WIDTH, WIDTH)),
    "weight norm": lambda: Stage(
        lambda s, x: s.layers(x), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))
    ),
    "checkpoint": lambda: Stage(
        lambda s, x: checkpoint(lambda y: F.gelu(y @ s.a) @ s.b, x, use_reentrant=False) @ s.a
    ),
    "reentrant checkpoint": lambda: Stage(
        lambda s, x: checkpoint(lambda y: F.gelu(y @ s.a) @ s.b, x, use_reentrant=True) @ s.a
    ),
}


def inputs() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))


def run(stage: nn.Module, x: Tensor) -> tuple[list[GradientEdge | None], Outputs]:
    """Runs the stage; drops its outputs."""
    torch.manual_seed(4)
    out = stage(x)
    outs = [out] if isinstance(out, Tensor) else out
    generator = torch.Generator().manual_seed(5)
    gradients: Outputs = []
    edges: list[GradientEdge | None] = []
    for one in outs:
        edges.append(None if one is None else get_gradient_edge(one))
        gradients.append(None if one is None else torch.randn(one.shape, generator=generator))
    if len(outs) == 4:
        gradients[2] = None
    return edges, gradients


def plain(stage: nn.Module) -> list[Tensor | None]:
    """The gradients of the input and all parameters, by torch's own backward pass."""
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    leaf = inputs().requires_grad_()
    edges, gradients = run(stage, leaf * 1)
    live = [
        (e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None
    ]
    torch.autograd.backward([e for e, _ in live], [g for _, g in live])
    return [leaf.grad, *(parameter.grad for parameter in stage.parameters())]


def start(stage: nn.Module) -> tuple[StageEntry, list[GradientEdge | None], Outputs]:
    (entered,), entry = enter([inputs()], [True])
    return entry, *run(stage, entered)


def same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("way", ["split", "full"])
def test_as_torch(name: str, way: str) -> None:
    stage = STAGES[name]()
    wanted = plain(copy.deepcopy(stage))
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffers = [parameter.grad for parameter in stage.parameters()]
    entry, edges, gradients = start(stage)
    if way == "full":
        found = full_backward(edges, gradients, entry)
    else:
        found, pending = backward_input(edges, gradients, entry)
        del edges, gradients
        pending.backward_weight()
        pending.backward_weight()
    now = [parameter.grad for parameter in stage.parameters()]
    same([*found, *now], wanted)
    assert all(one is other for one, other in zip(now, buffers, strict=True))


class Calls(TorchDispatchMode):
    """Counts operators that cost something."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if any(part in name for part in ("mm", "convolution", "backward")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted({*STAGES} - {"recurrent"}))
def test_computes_nothing_twice(name: str) -> None:
    stage = STAGES[name]()
    entry, edges, gradients = start(stage)
    with Calls() as whole:
        full_backward(edges, gradients, entry)
    entry, edges, gradients = start(stage)
    with Calls() as parts:
        backward_input(edges, gradients, entry)[1].backward_weight()
    # A layer norm, batch norm or convolution has one operator for both parts; it runs twice.
    both = [one for one in whole.counts if "norm" in one or "convolution" in one]
    assert {k: v for k, v in parts.counts.items() if k not in both} == {
        k: v for k, v in whole.counts.items() if k not in both
    }


def test_input_part_leaves_weights_for_later() -> None:
    stage = STAGES["blocks"]()
    entry, edges, gradients = start(stage)
    with Calls() as first:
        pending = backward_input(edges, gradients, entry)[1]
    assert first.counts["mm.default"] == 3
    assert all(parameter.grad is None for parameter in stage.parameters())
    with Calls() as second:
        pending.backward_weight()
    assert second.counts["mm.default"] == 3
    assert pending.is_empty


def test_functions_in_python_run_once() -> None:
    Product.runs = 0
    entry, edges, gradients = start(STAGES["function"]())
    pending = backward_input(edges, gradients, entry)[1]
    assert (Product.runs, pending.is_empty) == (1, False)
    pending.backward_weight()
    assert Product.runs == 1


def test_first_stage_waits_with_everything() -> None:
    stage = STAGES["blocks"]()
    wanted = plain(copy.deepcopy(stage))[1:]
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    (x, whole), entry = enter([inputs(), torch.arange(3)], [False, True])
    assert entry.edges == (None, None)
    assert not x.requires_grad
    assert torch.equal(whole, torch.arange(3))
    edges, gradients = run(stage, x)
    found, pending = backward_input(edges, gradients, entry)
    assert found == [None, None]
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in stage.parameters())
    pending.backward_weight()
    same([parameter.grad for parameter in stage.parameters()], wanted)


def test_frozen_and_none() -> None:
    stage = STAGES["blocks"]()
    frozen = [p for n, p in stage.named_parameters() if "layers.1" in n]
    for parameter in frozen:
        parameter.requires_grad_(False)
    entry, edges, gradients = start(stage)
    backward_input(edges, gradients, entry)[1].backward_weight()
    assert all(parameter.grad is None for parameter in (*frozen, stage.a, stage.d))
    other = [p for p in stage.layers.parameters() if p.requires_grad]  # type: ignore[union-attr]
    assert all(parameter.grad is not None for parameter in other)


def test_all_gradients_none() -> None:
    entry, edges, _ = start(STAGES["added"]())
    found, pending = backward_input(edges, [None], entry)
    assert (found, pending.is_empty) == ([None], True)
    pending.backward_weight()
    assert full_backward(edges, [None], entry) == [None]


@pytest.mark.parametrize("name", ["twice", "blocks", "parallel uses", "added"])
def test_hooks_of_parameters_run_as_in_a_normal_pass(name: str) -> None:
    seen: list[list[tuple[str, str]]] = []
    results = []
    original = STAGES[name]()
    for split in (False, True):
        stage = copy.deepcopy(original)
        calls: list[tuple[str, str]] = []
        for which, parameter in stage.named_parameters():
            parameter.register_hook(
                lambda g, which=which, calls=calls: (calls.append((which, "hook")), g * 2)[1]
            )
            parameter.register_post_accumulate_grad_hook(
                lambda _, which=which, calls=calls: calls.append((which, "after"))
            )
        entry, edges, gradients = start(stage)
        if split:
            backward_input(edges, gradients, entry)[1].backward_weight()
        else:
            full_backward(edges, gradients, entry)
        seen.append(sorted(calls))
        results.append([parameter.grad for parameter in stage.parameters()])
    assert seen[0] == seen[1] != []
    same(results[1], results[0])


def test_hook_of_an_activation_counts_once() -> None:
    def hooked(s: Any, x: Tensor) -> Tensor:
        hidden = x @ s.a
        hidden.register_hook(lambda g: g * 3)
        return hidden @ s.b

    stage = Stage(hooked)
    wanted = plain(copy.deepcopy(stage))
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    entry, edges, gradients = start(stage)
    found, pending = backward_input(edges, gradients, entry)
    pending.backward_weight()
    same([*found, *(parameter.grad for parameter in stage.parameters())], wanted)


@pytest.mark.parametrize("part", ["all", "half"])
def test_compiled(part: str) -> None:
    def half(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w)

    fast = torch.compile(half, backend="aot_eager")
    stage = Stage(lambda s, x: fast(x, s.a) if part == "all" else half(fast(x, s.a), s.b))
    wanted = plain(copy.deepcopy(stage))
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    entry, edges, gradients = start(stage)
    found, pending = backward_input(edges, gradients, entry)
    assert pending.is_empty
    pending.backward_weight()
    same([*found, *(parameter.grad for parameter in stage.parameters())], wanted)


def test_memory_between_the_parts() -> None:
    """Only the products' inputs are kept. Nothing waits for the garbage collector."""
    refs: dict[str, weakref.ref[Any]] = {}

    def remembering(s: Any, x: Tensor) -> Tensor:
        hidden = x @ s.a
        middle = F.gelu(hidden)
        low = middle @ s.b
        out = F.softmax(low, dim=0)
        for name, one in {
            "x": x,
            "hidden": hidden,
            "middle": middle,
            "low": low,
            "out": out,
        }.items():
            refs[name] = weakref.ref(one.untyped_storage())
        return out

    def alive() -> set[str]:
        return {name for name, ref in refs.items() if ref() is not None}

    gc.disable()
    try:
        entry, edges, gradients = start(Stage(remembering))
        assert alive() == {"x", "hidden", "middle", "out"}
        pending = backward_input(edges, gradients, entry)[1]
        assert alive() == {"x", "middle"}
        pending.backward_weight()
        assert alive() == set()
        entry, edges, gradients = start(Stage(remembering))
        full_backward(edges, gradients, entry)
        assert alive() == set()
        start(Stage(remembering))
        assert alive() == set()
    finally:
        gc.enable()


def test_a_freed_tensor_says_why() -> None:
    entry, edges, gradients = start(Stage(lambda s, x: F.gelu(x @ s.a)))
    backward_input(edges, gradients, entry)
    with pytest.raises(RuntimeError, match="freed by the input part"):
        full_backward(edges, gradients, entry)


def test_entered_tensors() -> None:
    """No copy, no leaf; a change in place is seen by a sender in this process."""
    sent = torch.randn(3, requires_grad=True).exp()
    (first, second), entry = enter([sent, torch.ones(2)], [True, True])
    assert first.data_ptr() == sent.data_ptr()
    assert not first.is_leaf
    assert entry.node is not None
    edges = [get_gradient_edge(first), get_gradient_edge(second)]
    gradient = torch.full((3,), 2.0)
    found = full_backward(edges, [gradient, None], entry)
    assert found[0] is not None
    assert torch.equal(found[0], gradient)
    assert found[1] is None
    assert entry.take() == [None, None]
    first.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sent.sum().backward()
    with torch.no_grad():
        assert enter([sent], [True])[1].edges == (None,)


def test_two_passes_add_up() -> None:
    (x,), entry = enter([torch.ones(2)], [True])
    for factor in (2.0, 3.0):
        torch.autograd.backward([get_gradient_edge(x * factor)], [torch.ones(2)])
    (found,) = entry.take()
    assert found is not None
    assert found.tolist() == [5.0, 5.0]
    assert entry.take() == [None]


def draw_graph(s: Any, x: Tensor, draw: random.Random) -> list[Tensor]:
    """Operations on what exists already, picked by chance."""
    found, square, row = [x, x * 2, s.a, s.b.tanh()], [*s.layers, s.a], [s.c, s.d]
    for _ in range(draw.randint(2, 12)):
        one, other = draw.choice(found), draw.choice(found)
        kind = draw.randrange(7)
        if kind == 0:
            new = one @ draw.choice(square) / 4
        elif kind == 1:
            new = F.layer_norm(one, (WIDTH,), draw.choice(row), draw.choice(row))
        elif kind == 2:
            new = torch.cat(one.chunk(2, 1)[::-1], 1) * other
        elif kind == 3:
            new = one + draw.choice(row)
        elif kind == 4:
            new = F.gelu(one) - other
        elif kind == 5:
            new = F.linear(one, draw.choice(square), draw.choice(row)).sigmoid()
        else:
            new = Product.apply(one, draw.choice(square)).tanh()  # type: ignore[no-untyped-call]
        found.append(new)
    return [found[-1], draw.choice(found), draw.choice(found)]


@pytest.mark.parametrize("first", range(0, 60, 12))
def test_random_graphs(first: int) -> None:
    for seed in range(first, first + 12):
        check_random_graph(seed)


def check_random_graph(seed: int) -> None:
    weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(8))
    stage = Stage(lambda s, x: draw_graph(s, x, random.Random(seed)), weights).double()
    x = inputs().double()
    results: list[list[Tensor | None]] = []
    for split in (False, True):
        stage.zero_grad()
        (entered,), entry = enter([x], [True])
        outs = [one for one in stage(entered) if one.requires_grad]
        edges, ones = [get_gradient_edge(one) for one in outs], [torch.ones_like(o) for o in outs]
        if split:
            found, pending = backward_input(edges, ones, entry)
            pending.backward_weight()
        else:
            found = full_backward(edges, ones, entry)
        results.append([*found, *(parameter.grad for parameter in stage.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
