"""The texts in docs/errors.md about fully sharded modules are those of real errors."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dreamcomm.zero import ZeroOptimizer, fully_shard
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("documents what only dreamcomm has")

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
SECTION = PAGE[PAGE.index("\n## Fully sharded modules") : PAGE.index("\n## A wrong argument")]
TEXTS = [" ".join(text.split()) for text in re.findall(r"^```\n(.*?)^```", SECTION, re.M | re.S)]
OF_LOST_RANKS = ("reached its timeout", "has ended")  # tests/faults has these


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


X = torch.ones(4, 8)


def sharded() -> Any:
    torch.manual_seed(0)
    module: Any = Net()
    for layer in (module.layers[0], module.layers[2]):
        fully_shard(layer)
    return fully_shard(module)


def evaluate(module: nn.Module) -> None:
    with torch.no_grad():
        module(X)


def step(module: nn.Module) -> None:
    module(X).sum().backward()


def one_evaluates(module: Any, rank: int) -> None:
    if rank == 0:
        evaluate(module)
    else:
        step(module)


class Branches(nn.Module):
    """Rank 0 takes the left one, and rank 1 the right one."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, left), nn.Linear(8, right)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.right if dist.get_rank() else self.left)(x)
        return out


def takes_branches(left: int, right: int) -> None:
    module: Any = Branches(left, right)
    for one in (module.left, module.right):
        fully_shard(one, gather=True)
    step(fully_shard(module, gather=True))


def other_units(module: Any, rank: int) -> None:
    takes_branches(4, 4)


def other_sizes(module: Any, rank: int) -> None:
    takes_branches(4, 6)


def one_rewrites(module: Any, rank: int) -> None:
    if rank == 0:
        with module.rewrite():
            pass
    else:
        step(module)


def one_writes(module: Any, rank: int) -> None:
    loss = module(X).sum()
    if rank == 1:
        with torch.no_grad():
            module.layers[0].weight.mul_(2)
    loss.backward()


def other_heads(module: Any, rank: int) -> None:
    module.head = nn.Linear(8, 3 + rank)
    step(module)


def other_rates(module: Any, rank: int) -> None:
    optimizer = ZeroOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
    step(module)
    optimizer.step()
    step(module)


def no_file(module: Any, rank: int) -> None:
    with module.rewrite() as writes:
        if writes:
            torch.load("weights.pt")


def an_older_optimizer(module: Any, rank: int) -> None:
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step(fully_shard(plain))
    optimizer.step()


def other_data(module: Any, rank: int) -> None:
    module.head.weight.data = torch.zeros_like(module.head.weight)
    step(module)


def on_meta() -> Any:
    with torch.device("meta"):
        module: Any = Net()
    return fully_shard(module)


def no_values(module: Any, rank: int) -> None:
    step(on_meta())


def equal_rows(module: Any, rank: int) -> None:
    one = on_meta()
    one.to_empty(device="cpu")
    torch.manual_seed(0)
    for part in (one.layers[0], one.layers[2], one.head):
        part.reset_parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(one)


Case = Callable[[Any, int], None]
CASES: list[Case] = [
    one_evaluates,
    other_units,
    other_sizes,
    one_rewrites,
    one_writes,
    other_heads,
    other_rates,
    no_file,
    an_older_optimizer,
    other_data,
    no_values,
    equal_rows,
]


def error_of(case: Case) -> str:
    module = sharded()
    step(module)
    module.zero_grad()
    try:
        case(module, dist.get_rank())
    except (OSError, RuntimeError, UserWarning) as error:
        return str(error)
    return ""


def without_numbers(text: str) -> str:
    """Also without the lines of a program."""
    return re.sub(r"\d+", "#", re.sub(r"(?<=is at )\S+ in \w+", "a line", text))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_text_is_a_real_one(pool: Pool, case: Case) -> None:
    known = [text for text in TEXTS if not any(words in text for words in OF_LOST_RANKS)]
    assert len(known) == len(CASES)
    written = known[CASES.index(case)]
    found = pool.run(error_of, case, world=2)
    assert without_numbers(written) in map(without_numbers, found), found
