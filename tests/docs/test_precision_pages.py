"""The code of docs/sync_batch_norm.md and docs/mixed_precision.md runs, and its table is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import dreamcomm
from dreamcomm.pipeline import Pipeline
from dreamcomm.zero import ZeroOptimizer
from helpers.pool import Pool

pytestmark = pytest.mark.beyond_gloo("documents what only dreamcomm has")

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)^ *```", (DOCS / page).read_text(), re.M | re.S)
    return [re.sub(rf"^{indent}", "", code, flags=re.M) for indent, code in found]


def run(code: str, **names: Any) -> dict[str, Any]:
    found = {"F": F, "torch": torch, "dreamcomm": dreamcomm, "Pipeline": Pipeline, **names}
    exec(compile(code, "page", "exec"), found)
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3), torch.randn(8, 3)


def layers() -> None:
    converted, counted, piped = blocks("sync_batch_norm.md")
    model = run(converted, model=net())["model"]
    model(data()[0]).sum().backward()
    run(counted, model=model)
    found = run(piped, model=net(), init_device_mesh=init_device_mesh, loss_fn=F.mse_loss)
    pipe, group = found["pipe"], found["mesh"]["data"].get_group()
    optimizer = ZeroOptimizer(pipe.parameters(), torch.optim.SGD, group, lr=0.1)
    x, y = data()
    pipe.step(x, target=y)
    optimizer.step()


def test_the_page_on_layers(pool: Pool) -> None:
    pool.run(layers, world=4)


def scaled() -> list[float]:
    in_ddp, in_pipelines = blocks("mixed_precision.md")
    x, y = data()
    model = dreamcomm.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.mse_loss(model(x), y)
    first = run(in_ddp, model=model, optimizer=optimizer, loss=loss)["scaler"]
    second = run(in_pipelines, model=net(), loss_fn=F.mse_loss, x=x, y=y)["scaler"]
    return [first.get_scale(), second.get_scale()]


def test_the_page_on_scaling(pool: Pool) -> None:
    assert pool.run(scaled) == [[2.0**16, 2.0**16]] * 2


# The table.

MASTERS = ("master weights, stage 1", "master weights, stage 2")


def table() -> dict[str, list[str]]:
    lines = (DOCS / "mixed_precision.md").read_text().split("\n\n")[1:]
    rows = next(one for one in lines if one.startswith("| row | stored")).split("\n")[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {cell[0]: cell[1:] for cell in cells}


class Seen(nn.Linear):
    """Notes the type that it computes in."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.computed = output.dtype
        return output


def types_of(row: str) -> tuple[list[str], float]:
    """Types that are stored, computed and stepped, and bytes a parameter on this rank."""
    layer = Seen(64, 64, bias=False)
    if row in ("16-bit model", *MASTERS):
        layer.to(torch.bfloat16)
    stored = layer.weight.dtype
    wrapped = dreamcomm.DistributedDataParallel(layer)
    if row == "16-bit hooks":
        wrapped.register_comm_hook(dreamcomm.hooks.State(), dreamcomm.hooks.bf16)
    if row in MASTERS:
        stage = int(row[-1])
        optimizer: Any = ZeroOptimizer(
            layer.parameters(), torch.optim.AdamW, stage=stage, master_dtype=torch.float32
        )
    else:
        optimizer = torch.optim.AdamW(layer.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=row == "autocast"):
        output = wrapped(torch.ones(2, 64, dtype=stored))
    output.float().sum().backward()
    optimizer.step()
    (of_one,) = optimizer.state.values()
    moment = of_one["exp_avg"]
    types = [str(one) for one in (stored, layer.computed, moment.dtype)]
    if row in MASTERS:
        return types, 0.0
    assert layer.weight.grad is not None
    total = layer.weight.nbytes + layer.weight.grad.nbytes + 2 * moment.nbytes
    return types, total / layer.weight.numel()


@pytest.mark.parametrize("row", ["plain", "autocast", "16-bit hooks", "16-bit model", *MASTERS])
def test_the_table(pool: Pool, row: str) -> None:
    stored, computed, _, _, stepped, size = table()[row]
    for types, counted in pool.run(types_of, row):
        for cell, found in zip((stored, computed, stepped), types, strict=True):
            assert cell.startswith(found.removeprefix("torch."))
        if row not in MASTERS:  # whose bytes a test of the plan compares
            assert counted == float(size.split(";")[0])
