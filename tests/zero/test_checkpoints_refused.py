"""States that a ZeroOptimizer refuses, and that nothing has changed then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.models import make
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool
from zero.checkpoints import OPTIMIZERS, bits, build, check_same, train, whole

pytestmark = pytest.mark.beyond_gloo("compares what only dreamcomm has")

State = dict[str, Any]


def other_shape(state: State) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(100, 12)  # as many rows as one of 2 ranks has


def other_number(state: State) -> None:
    state["param_groups"][0]["params"].pop()


def other_groups(state: State) -> None:
    state["param_groups"].append({"params": [], "lr": 1.0})


def part_missing(state: State) -> None:
    del state["state"][3]["exp_avg_sq"]


def part_empty(state: State) -> None:
    state["state"][3]["exp_avg_sq"] = {}


def no_tensor(state: State) -> None:
    state["state"][5]["exp_avg"] = 3.0


def unknown(state: State) -> None:
    state["state"][77] = state["state"][0]


def no_groups(state: State) -> None:
    del state["param_groups"]


def single_number(state: State) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(())


CASES: dict[str, tuple[Callable[[State], None], list[str]]] = {
    "shape": (
        other_shape,
        ["(200, 12)", "'exp_avg'", "'layers.0.weight'", "(100, 12)", "another model"],
    ),
    "number": (other_number, ["1 group with 6 parameters", "1 group with 5 parameters"]),
    "groups": (other_groups, ["1 group with 6", "2 groups with 6 and 0 parameters"]),
    "missing": (part_missing, ["'layers.2.bias'", "it lacks 'exp_avg_sq'"]),
    "empty": (part_empty, ["'layers.2.bias'", "it lacks 'exp_avg_sq'"]),
    "no tensor": (no_tensor, ["'layers.4.bias'", "expected a tensor", "got float"]),
    "unknown": (unknown, ["none of its groups: 77"]),
    "no groups": (no_groups, ["'param_groups'", "got keys ['state']"]),
    "single number": (single_number, ["(200,)", "'layers.0.bias'", "got ()"]),
}


def load_broken(case: str, how: str) -> list[str]:
    if how == "named 2":
        module = make("mlp")
        named = module.named_parameters()
        optimizer: Any = ZeroOptimizer(named, torch.optim.AdamW, stage=2, lr=1e-3)
    else:
        module, optimizer = build("mlp", "adamw", how)
    train(module, optimizer, range(2))
    before = bits(module, optimizer)
    state = copy.copy(optimizer.state_dict())
    state["state"] = {key: dict(kept) for key, kept in whole(state["state"]).items()}
    state["state"] = {int(key): kept for key, kept in state["state"].items()}
    state["param_groups"] = copy.deepcopy(state["param_groups"])
    state["param_groups"][0]["lr"] = 5.0
    for kept in state["state"].values():
        kept["exp_avg"] = kept["exp_avg"] + 1
    CASES[case][0](state)
    with pytest.raises(ValueError, match="nothing has changed") as refused:
        optimizer.load_state_dict(state)
    check_same(bits(module, optimizer), before)
    return [str(refused.value)]


@pytest.mark.parametrize("how", ["named 2", "wrapped 1"])
@pytest.mark.parametrize("case", CASES)
def test_a_state_of_another_model_changes_nothing(pool: Pool, case: str, how: str) -> None:
    for (text,) in pool.run(load_broken, case, how):
        for word in CASES[case][1]:
            assert word in text, text


def without_a_parameter() -> tuple[list[str], Any, Any]:
    module, optimizer = build("mlp", "adamw", "1")
    train(module, optimizer, range(2))
    state = optimizer.state_dict()
    del state["state"][0]
    with pytest.warns(UserWarning, match="nothing of 1 parameters") as warned:
        optimizer.load_state_dict(state)
    train(module, optimizer, range(2, 4))
    steps = {number: kept["step"] for number, kept in optimizer.state_dict()["state"].items()}
    return [str(one.message) for one in warned], steps[0], steps[1]


def test_a_parameter_without_state_begins_anew(pool: Pool) -> None:
    for texts, first, second in pool.run(without_a_parameter):
        assert len(texts) == 1
        assert (first, second) == (2, 4)


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "sgd without momentum": (torch.optim.SGD, {"lr": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    **OPTIMIZERS,
}


class Late(nn.Module):
    """A layer of it is used from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.late = nn.Linear(12, 5), nn.Linear(12, 5)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        out: torch.Tensor = self.first(x)
        return out + self.late(x) if self.steps > 3 else out


def used_late(name: str, loads: bool) -> list[torch.Tensor]:
    kind, options = CLASSES[name]
    module = Late()
    optimizer = ZeroOptimizer(module.parameters(), kind, **options)
    train(module, optimizer, range(3))
    if loads:
        state = optimizer.state_dict()
        del optimizer
        optimizer = ZeroOptimizer(module.parameters(), kind, **options)
        optimizer.load_state_dict(state)
    train(module, optimizer, range(3, 6))
    assert dist.get_world_size() == 2
    return [one.detach().clone() for one in module.parameters()]


@pytest.mark.parametrize("name", CLASSES)
def test_a_parameter_used_after_a_checkpoint_has_the_same_bits(pool: Pool, name: str) -> None:
    expected = pool.run(used_late, name, False)
    check_same(pool.run(used_late, name, True), expected)
