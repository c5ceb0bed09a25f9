"""The code of docs/fully_shard.md runs, and does what the page says."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from dreamcomm import zero
from dreamcomm.zero import fully_shard
from helpers.disks import skip_in_memory
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("documents what only dreamcomm has")

PAGE = (Path(__file__).parents[2] / "docs" / "fully_shard.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
Names = dict[str, Any]


class Model(nn.Module):
    """What the page's code trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class LoRA(nn.Module):
    """A layer and adapters that are trained."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.up, self.down = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.down(self.up(x))
        return out


def init_weights(module: nn.Module) -> None:
    for one in module.parameters():
        nn.init.normal_(one)


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def sharded(module: Any) -> Any:
    for layer in module.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(module)


def whole(module: nn.Module) -> list[Tensor]:
    return [one.full_tensor().detach().clone() for one in module.parameters()]  # type: ignore[operator]


def names() -> Names:
    """What the page's code finds there: the model is not sharded yet."""
    torch.manual_seed(dist.get_rank() + 1)
    batches = [(torch.randn(4, 8), torch.randn(4, 3)) for _ in range(3)]
    return {
        **{one.__name__: one for one in (Model, LoRA, StateDictOptions, fully_shard)},
        "MixedPrecisionPolicy": zero.MixedPrecisionPolicy,
        **{one.__name__: one for one in (get_model_state_dict, get_state_dict, set_state_dict)},
        "torch": torch,
        "contextlib": contextlib,
        "zero": zero,
        "init_weights": init_weights,
        "model": seeded(Model),
        "rank": dist.get_rank(),
        "loss_of": F.mse_loss,
        "batches": batches,
        "micro_batches": batches,
        "inputs": batches[0][0],
        "targets": batches[0][1],
        "path": "whole.pt",
        "folder": "folder",
    }


def trains(found: Names) -> None:
    """A step after the page's code moves all that is trained."""
    model, (x, y) = found["model"], found["batches"][0]
    optimizer = found.get("optimizer")
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    before = whole(model)
    F.mse_loss(model(x).float(), y).backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, whole(model), strict=True)]
    assert moved == [one.requires_grad for one in model.parameters()]


def run(holds: str, found: Names) -> Names:
    """Runs the page's block that holds a text."""
    (block,) = (one for one in BLOCKS if holds in one)
    exec(compile(block, "fully_shard.md", "exec"), found)
    return found


def with_optimizer(found: Names) -> Names:
    sharded(found["model"])
    found["optimizer"] = torch.optim.AdamW(found["model"].parameters(), lr=1e-2)
    return found


# What each block is run on, and what is so afterwards.


def the_face() -> None:
    trains(run("FSDPModule", names()))


def a_rewrite() -> None:
    found = with_optimizer(names())
    expected = [torch.full_like(one, 3.0) for one in whole(found["model"])]
    if dist.get_rank() == 0:
        state = {key: torch.full_like(one, 3.0) for key, one in seeded(Model).state_dict().items()}
        torch.save(state, "whole.pt")
    run('torch.load("whole.pt")', found)
    assert all(map(torch.equal, whole(found["model"]), expected))
    trains(found)


def an_error() -> None:
    found = with_optimizer(names())
    if dist.get_rank() == 0:
        found["inputs"] = torch.randn(4, 9)
    trains(run("reset_iter_state()", found))


def an_accumulation() -> None:
    found = run("enumerate(micro_batches)", with_optimizer(names()))
    other = with_optimizer(names())
    for x, y in other["batches"]:
        (F.mse_loss(other["model"](x), y) / 3).backward()
    other["optimizer"].step()
    for a, b in zip(whole(found["model"]), whole(other["model"]), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5)
    trains(found)


def an_optimizer() -> None:
    found = run("fused=True", with_optimizer(names()))
    assert isinstance(found["optimizer"], zero.ZeroOptimizer)
    assert found["optimizer"].stage == 3


def a_model_on_meta() -> None:
    found = run('torch.device("meta")', names())
    torch.manual_seed(0)
    reference = Model()
    torch.manual_seed(0)
    init_weights(reference)
    assert all(map(torch.equal, whole(found["model"]), reference.parameters()))
    trains(found)


def lora() -> None:
    found = run("LoRA(layer)", names())
    assert len(found["trained"]) == 4
    trains(found)


def averages() -> None:
    found = run("averages =", with_optimizer(names()))
    model, first = found["model"], whole(found["model"])
    trains(found)
    found["update"](decay=0.5)
    trained = whole(model)
    with found["averaged"](), torch.no_grad():
        for a, b, c in zip(whole(model), first, trained, strict=True):
            assert torch.allclose(a, (b + c) / 2)
        model(found["inputs"])
    assert all(map(torch.equal, whole(model), trained))


def generation() -> None:
    found = with_optimizer(names())
    found["tokens"], left = found["inputs"], list(range(2 + 3 * dist.get_rank()))
    found["is_done"] = lambda _: not left or left.pop() < 0
    found["next_tokens"] = lambda out: F.pad(out, (0, 5))
    trains(run("is_done", found))


def an_optimizer_in_backward() -> None:
    found = run("register_post_accumulate_grad_hook", with_optimizer(names()))
    x, y = found["batches"][0]
    F.mse_loss(found["model"](x), y).backward()
    other = with_optimizer(names())
    optimizer = torch.optim.SGD(other["model"].parameters(), lr=1e-2)
    F.mse_loss(other["model"](x), y).backward()
    optimizer.step()
    assert all(map(torch.equal, whole(found["model"]), whole(other["model"])))
    assert all(one.grad is None for one in found["model"].parameters())


def a_checkpoint() -> None:
    found = with_optimizer(names())
    trains(found)
    run("zero.save(state(), folder)", found)
    values = whole(found["model"])
    module = seeded(Model)
    optimizer = zero.ZeroOptimizer(module.parameters(), torch.optim.AdamW, stage=2, lr=1e-2)
    found["model"], found["optimizer"] = module, optimizer
    loaded = found["state"]()
    zero.load(loaded, "folder")
    set_state_dict(
        module, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert all(map(torch.equal, module.parameters(), values))


def in_files() -> None:
    os.makedirs("folder", exist_ok=True)
    found = run("offload_folder=folder", names())
    assert "files in" in found["model"].report()
    trains(found)
    assert os.listdir("folder") == []


def in_bfloat16() -> None:
    found = run("mp_policy=policy", names())
    assert {one.whole.dtype for one in found["model"]._unit.tree.records()} == {torch.bfloat16}
    trains(found)


def a_hybrid_mesh() -> None:
    found = names()
    found["layer"] = found["model"].layers[0]
    # The page has eight ranks.
    found["init_device_mesh"] = lambda kind, shape, **how: init_device_mesh(kind, (2, 1), **how)
    run('("replicas", "shards")', found)
    assert found["mesh"].ndim == 2
    zero.fully_shard(found["model"], mesh=found["mesh"])
    trains(found)


def one_file() -> None:
    found = with_optimizer(names())
    values = whole(found["model"])
    run("cpu_offload=True", found)
    assert all(map(torch.equal, whole(found["model"]), values))
    assert bool(found["whole"]) == (dist.get_rank() == 0)
    trains(found)


CASES: list[Callable[[], None]] = [
    the_face,
    a_rewrite,
    an_error,
    an_accumulation,
    an_optimizer,
    a_model_on_meta,
    lora,
    averages,
    generation,
    an_optimizer_in_backward,
    a_checkpoint,
    one_file,
    in_bfloat16,
    a_hybrid_mesh,
    in_files,
]


def within(folder: str, case: Callable[[], None]) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        case()
    finally:
        os.chdir(before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_code_runs(pool: Pool, tmp_path: Path, case: Callable[[], None]) -> None:
    if case is in_files:
        skip_in_memory(tmp_path)
    pool.run(within, str(tmp_path), case, world=2)


def test_each_block_has_a_case() -> None:
    assert len(BLOCKS) == len(CASES)
