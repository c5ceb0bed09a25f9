"""The tables and texts of docs/fully_shard.md are those of the library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from dreamcomm import zero
from dreamcomm.zero import fully_shard
from dreamcomm.zero.units.module.setters import markdown
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("documents what only dreamcomm has")

PAGE = (Path(__file__).parents[2] / "docs" / "fully_shard.md").read_text()


class Net(nn.Module):
    """What the page's texts are of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


def sharded() -> Any:
    torch.manual_seed(0)
    module: Any = Net()
    for layer in (module.layers[0], module.layers[2]):
        fully_shard(layer)
    return fully_shard(module)


def test_the_table_of_methods_is_the_librarys() -> None:
    assert markdown() in PAGE


def rows_of(heading: str, column: int) -> list[str]:
    """A column of the table that begins with this row, without backquotes."""
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0].split("\n")[2:]
    return [line.split(" | ")[column].strip("| `") for line in table]


def optimizer_of(*modules: nn.Module, **options: Any) -> None:
    parameters = [one for module in modules for one in module.parameters()]
    zero.ZeroOptimizer(parameters, torch.optim.SGD, lr=0.1, **options)


def step_of_an_older_optimizer() -> None:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module)(torch.ones(4, 8)).sum().backward()
    optimizer.step()


def wrapped_after_a_zero_optimizer() -> None:
    module = Net()
    optimizer = zero.ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    fully_shard(module)
    optimizer.zero_grad()


def an_optimizer_within_a_pass() -> None:
    module = fully_shard(Net())
    loss = module(torch.ones(4, 8)).sum()
    optimizer_of(module)
    loss.backward()


def forward_on_meta() -> None:
    with torch.device("meta"):
        module = Net()
    fully_shard(module)(torch.ones(4, 8))


def forward_of_a_list() -> None:
    module = Net()
    fully_shard([module.layers, module.head])
    module.layers(torch.ones(4, 8))


def with_integers() -> nn.Module:
    module = nn.Linear(2, 2)
    module.number = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
    return module


def a_child_after_its_root() -> None:
    module = Net()
    fully_shard(module)
    fully_shard(module.head)


def a_different_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


REFUSED: list[Callable[[], object]] = [
    lambda: fully_shard(fully_shard(Net())),
    a_child_after_its_root,
    forward_of_a_list,
    lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
    lambda: copy.deepcopy(fully_shard(Net())),
    lambda: fully_shard(nn.Embedding(4, 4, max_norm=1.0)),
    lambda: fully_shard(nn.Embedding(4, 4, sparse=True)),
    lambda: fully_shard(Net(), shard_placement_fn=a_different_dimension),
    lambda: fully_shard(Net(), reshard_after_forward=2),
    lambda: fully_shard(Net(), dp_mesh_dims="dp"),
    lambda: fully_shard(nn.LazyLinear(3)),
    lambda: fully_shard(with_integers()),
    forward_on_meta,
    step_of_an_older_optimizer,
    wrapped_after_a_zero_optimizer,
    an_optimizer_within_a_pass,
    lambda: optimizer_of(fully_shard(Net()), fully_shard(Net())),
    lambda: optimizer_of(fully_shard(Net()), master_dtype=torch.float32),
    lambda: optimizer_of(fully_shard(Net()), reduce=False),
]


def refused() -> list[str]:
    texts = []
    for act in REFUSED:
        try:
            act()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            texts.append(str(error))
        else:
            texts.append("")
    return texts


def test_the_table_of_what_is_refused_has_the_errors_texts(pool: Pool) -> None:
    texts = rows_of("| call | error |", 1)
    assert len(texts) == len(REFUSED)
    for found in pool.run(refused, world=2):
        for text, error in zip(texts, found, strict=True):
            assert text in error


def reported() -> str:
    module = sharded()
    F.mse_loss(module(torch.ones(4, 8)), torch.ones(4, 3)).backward()
    return str(module.report())


def test_the_report_is_one(pool: Pool) -> None:
    first, _ = pool.run(reported, world=2)
    assert f"```\n{first}\n```" in PAGE


def changed() -> dict[str, bool]:
    """Whether parameters are the same DTensors after a change and a step."""
    found = {}
    for name, change in CHANGES.items():
        module = sharded()
        before = [one for one in module.parameters() if one.requires_grad]
        change(module)
        x = torch.ones(4, 8, dtype=module.head.weight.dtype)
        module(x).sum().backward()
        now = [one for one in module.parameters() if one.grad is not None]
        assert all(isinstance(one, DTensor) for one in module.parameters())
        found[name] = set(map(id, now)) == set(map(id, before))
    return found


def initialized(module: nn.Module) -> None:
    zero.initialize(module.to_empty(device="cpu"))


def assigned(module: nn.Module) -> None:
    state = {key: one.clone() for key, one in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def with_a_new_head(module: nn.Module) -> None:
    module.head = nn.Linear(8, 3)


def with_a_tied_bias(module: Any) -> None:
    module.layers[2].bias = module.tied = module.layers[2].bias


def frozen(module: Any) -> None:
    module.head.weight.requires_grad_(False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "to": lambda module: module.to(torch.float64),
    "to_empty": initialized,
    "assigned": assigned,
    "new": with_a_new_head,
    "tied": with_a_tied_bias,
    "frozen": frozen,
}


def test_changes_have_the_results_of_the_table(pool: Pool) -> None:
    assert len(rows_of("| change | result |", 0)) == 5
    for found in pool.run(changed, world=2):
        same = {"to": True, "to_empty": True, "assigned": False, "new": False, "tied": True}
        assert found == {**same, "frozen": False}


def rows_of_forms() -> tuple[list[str], list[str]]:
    """What is registered, and what ``grad`` is."""
    module = sharded()
    weight = ["layers", "0", "weight"]
    kinds, gradients = [], []

    def look() -> None:
        for names in (weight, ["head", "weight"]):
            found: Any = module.get_parameter(".".join(names))
            kinds.append("sharded" if isinstance(found, DTensor) else "whole")

    look()
    loss = module(torch.ones(4, 8)).sum()
    look()
    loss.backward()
    look()
    gradients.append(str(module.head.weight.grad.placements[0]))
    module.zero_grad()
    with module.no_sync():
        module(torch.ones(4, 8)).sum().backward()
    gradients.append(str(module.head.weight.grad.placements[0]))
    return kinds, gradients


def test_the_tables_of_forms_are_so(pool: Pool) -> None:
    """A root's parameters stay whole between the passes."""
    for kinds, gradients in pool.run(rows_of_forms, world=2):
        assert kinds == ["sharded", "sharded", "sharded", "whole", "sharded", "sharded"]
        assert gradients == ["S(0)", "P(avg)"]
    assert rows_of("| `grad` | is |", 0) == ["Shard(0)", 'Partial("avg")', "None"]
