"""What can be split, where, and what is said of what cannot."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dreamcomm.pipeline.split import (
    choose_cuts,
    make_parts,
    measure_costs,
    parameter_costs,
    unit_names,
)
from pipeline.split_chain import run, same
from pipeline.split_models import Block, Corners, NanoGpt, Unet, numbers, tokens


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == 2  # noqa: PT018
        if x.shape[0] > 3 or x.dtype != torch.float32:
            raise RuntimeError("too long")
        for _ in range(times):
            for layer in self.layers:
                x = layer(x)
        return x


def test_checks_of_forward_are_kept() -> None:
    model = Guarded()
    parts = make_parts(model)
    same(run(parts, (numbers(3, 2),), {}), model(numbers(3, 2)))
    with pytest.raises(ValueError, match=r"forward refuses x\.shape\[0\] > 3 or"):
        parts[0].run((numbers(4, 2),), {})
    with pytest.raises(ValueError, match=r"forward refuses x\.shape"):
        parts[0].run((numbers(3, 2).double(),), {})
    with pytest.raises(AssertionError, match=r"x\.dim\(\) == 2 and"):
        parts[0].run((numbers(3, 3),), {})
    # `times` decides how many blocks there are.
    with pytest.raises(ValueError, match="calls 4 blocks for these arguments, and called 2"):
        parts[0].run((numbers(3, 2), 2), {})


class Branch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.kind = kind
        self.hidden = [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.kind == "branch" and x.sum() > 0:
            return x
        if self.kind == "loop":
            return sum(row for row in x)
        if self.kind == "range":
            return x * len(range(x.shape[0]))
        if self.kind == "type" and isinstance(x, Tensor):
            return x
        if self.kind == "hidden":
            return self.hidden[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (
            "branch",
            r'test_split_choices.py:\d+, `if self.kind == "branch" and x.sum\(\) > 0:`: a branch',
        ),
        ("loop", "loops over a value of the batch"),
        ("range", "needs a value of the batch that is not known before a call"),
        ("type", "asks for the type of a value of the batch"),
        ("hidden", "calls a module that is not registered as a child"),
        ("autocast", "torch.autocast inside forward"),
    ],
)
def test_what_cannot_be_traced_is_said_with_its_line(kind: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"cannot split Branch: its forward.*{error}") as raised:
        make_parts(Branch(kind))
    assert "Give the stages as a list of modules" in str(raised.value)


def test_tracing_leaves_modules_and_torch_as_they_are() -> None:
    arange, model = torch.arange, Corners()
    names, table = set(vars(model)), model.table
    make_parts(model)
    with pytest.raises(ValueError, match="cannot split"):
        make_parts(Branch("loop"))
    assert torch.arange is arange
    assert set(vars(model)) == names
    assert model.table is table


def test_blocks_can_be_named() -> None:
    model = Unet()
    assert unit_names(model) == ["downs.0", "downs.1", "ups.0", "ups.1"]
    assert unit_names(model, blocks="ups") == ["ups.0", "ups.1"]
    parts = make_parts(model, [1], blocks="ups")
    same(run(parts, (numbers(1, 1, 8, 8),), {}), model(numbers(1, 1, 8, 8)))
    with pytest.raises(ValueError, match=r"blocks='up' names no child .* \['downs', 'ups'\]"):
        make_parts(model, blocks="up")
    with pytest.raises(ValueError, match="cannot split Block: found no list of blocks"):
        make_parts(Block())


def test_cuts_are_chosen_by_cost_or_given() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 40))
    assert choose_cuts(model, 2) == [4]
    assert choose_cuts(model, 2, costs=[1.0, 1, 1, 1, 1]) in ([2], [3])
    assert choose_cuts(model, 3, [1, 3]) == [1, 3]
    assert parameter_costs([nn.ReLU(), nn.Linear(2, 3)]) == pytest.approx([1e-3, 9 + 1e-3])
    for split in ([3, 1], [0, 1], [1, 5], [1, 1]):
        with pytest.raises(ValueError, match="increasing indices from 1 to 4, as there are 5 unit"):
            choose_cuts(model, 3, split)
    with pytest.raises(ValueError, match="expected 2 cuts for 3 stages"):
        choose_cuts(model, 3, [1])
    with pytest.raises(ValueError, match=r"cannot make 6 stages of 5 units \(0, 1, 2, 3, 4\)"):
        choose_cuts(model, 6)
    with pytest.raises(ValueError, match="expected a cost for each of 5 units, got 1"):
        choose_cuts(model, 2, costs=[1.0])


def test_measuring_costs_leaves_no_traces() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 900))
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    costs = measure_costs(model, numbers(64, 8), repeats=3)
    assert len(costs) == 4
    assert min(costs) > 0
    same(state, model.state_dict())
    assert torch.equal(random, torch.get_rng_state())
    assert all(one.grad is None for one in model.parameters())
    assert len(measure_costs(NanoGpt(), tokens(2), targets=tokens(2), repeats=1)) == 4
